"""Where only outputs follow the layer: a row of a sample's gradient is zero, or one value nearly known.

With weights W (classes, rows) between the layer and the outputs, a sample's gradient at the layer is

    d = e where z > 0, else 0,   e = W^T delta,   z = H c,   d = U q,

with delta, the gradient at the outputs, in as many dimensions as there are classes. Before training,
cross-entropy makes it nearly 1 / classes - (1 at the label): the outputs say nothing yet. So each label
gives e to a few per cent, and a row has two levels, 0 and e. That says far more than that many rows are
zero: whether it is on shows twice, in the size of d and in the sign of z, and a mix of samples has more
than two levels.

A sample is found by message passing, as in next_layer.py, and each start keeps an e of its own:

1. rows     given noisy z and d, how likely is a row on, and what are z and d then? In closed form.
2. spans    given noisy z and d in all rows, the nearest ones in the spans of H and U.
3. level    given d where the row is on, the nearest e in the span of W^T, near the label's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors
from spear.search.deadline import Deadline
from spear.search.directions import Directions
from spear.search.dual import BalancedProblem, DualProblem, balance, solve_definite
from spear.search.kernels import unit
from spear.search.next_layer import (
    COLUMNS,
    FIRST_VARIANCE,
    SURE_ODDS,
    Messages,
    Span,
    answer,
    average,
    density,
    log_mills,
    mixes_of_rows,
    span_of,
)
from spear.search.parallel import cut
from spear.search.starts import distinct
from spear.search.watch import Watch
from spear.tolerances import EXACT_ERROR, UNDECIDED

# Measured by how many of 256 starts end near a sample, one batch of 256 of 1000 (MNIST in [0, 1]).
_KEPT = 0.4  # of the last messages: 0.2 hits with a tenth fewer
_LEAST = 1e-4  # variance of a message, in units of a typical row that is on; 1e-3 hits as often
# Variance of a row's level around e: at first, by how much it falls in a step, and at last. From 0.002
# to 0.03 at first, half as many more starts hit.
_LEVEL_FIRST, _LEVEL_FALLS, _LEVEL_LAST = 0.03, 0.87, 1e-5
_OUTPUTS_VARY = 0.05  # deviation of e between samples of a label, before training: 0.03 on MNIST
# The c of what was found are read from signs, so that gradients of what is missing are not quite
# orthogonal to them: 0.13 to 0.19 of their length is outside. From 0.1 to 0.4 hits are much the same.
_OUTSIDE = 0.2
_LEAST_ROWS = 8  # per class: with few more rows than classes, any d has its e


@dataclass(frozen=True, eq=False)
class TwoLevels:
    """What the weights behind the layer say of gradients d = U q."""

    U: Tensor  # (rows, b)
    anywhere: Tensor  # (rows, b): gradients of samples are about as long along each column
    weight: Tensor  # (classes, rows), with rows of a typical size of one

    @staticmethod
    def of(factors: Factors, whole: DualProblem) -> TwoLevels | None:
        """None if it is not known that only outputs follow, and by which weights."""
        view = factors.view
        plain = view.rounds is None and not view.dropout and factors.protocol.one_step
        if not plain or view.trained or factors.relu == "before" or not view.next_is_output:
            return None
        if view.next_weight is None or len(view.next_weight) * _LEAST_ROWS > len(whole.U):
            return None
        weight = view.next_weight.to(whole.U)
        if factors.row_factors is not None:
            weight = weight * factors.row_factors
        weight = weight[:, factors.live_rows]
        size = weight.square().mean().sqrt()
        return TwoLevels(whole.U, whole.U @ balance(whole).q_basis, weight / size)

    def levels(self, count: int) -> Tensor:
        """e (rows, count) of each label in turn, before training."""
        classes = len(self.weight)
        one = torch.eye(classes, dtype=self.weight.dtype, device=self.weight.device)
        delta = one - 1 / classes if classes > 1 else one  # of either sign: so is q
        label = torch.arange(count, device=one.device) % classes
        return self.weight.T @ delta[:, label]

    def fits(self, found: Directions) -> Tensor:
        """Which directions (c,) have a delta: d = W^T delta where they are on, whatever the loss.

        A mix of samples has none, because its rows have more than two levels.
        """
        side = found.side
        d = (side.basis @ unit(found.vectors, 0)).T  # (c, rows)
        on = ~found.zeros.T
        A = self.weight.T * on[:, :, None]  # (c, rows, classes)
        delta = solve_definite(A.mT @ A, A.mT @ d[:, :, None])
        left = ((d - (A @ delta)[:, :, 0]) * on).square().mean(1).sqrt()
        return left <= (EXACT_ERROR * d.square().mean(1).sqrt()).clamp_min(UNDECIDED * side.zero)

    def gradients(self, problem: BalancedProblem) -> Span:
        """Where d is expected: nearly in what the found samples leave, and as long anywhere in it."""
        missing = self.U @ problem.q_basis
        vectors = [missing / missing.norm(), _OUTSIDE * self.anywhere / self.anywhere.norm()]
        return span_of(torch.cat(vectors, 1), 0.5)


@dataclass(frozen=True, eq=False)
class _Passing:
    """What all starts share, in float32."""

    z: Span
    d: Span
    e: Span  # of what e is beside its label's
    steps: int
    deadline: Deadline


def search_two_levels(  # noqa: PLR0917
    problem: BalancedProblem,
    known: TwoLevels,
    starts: int,
    steps: int,
    generator: torch.Generator,
    watch: Watch,
) -> tuple[Tensor, Tensor]:
    """Directions (r, k) with two levels, all different, and how likely each row is on (rows, k)."""
    z = span_of(problem.H[0], 1.0).single
    varies = span_of(known.weight.T, _OUTPUTS_VARY**2).single
    shared = _Passing(z, known.gradients(problem).single, varies, steps, watch.deadline)
    first, levels = mixes_of_rows(problem, starts, generator), known.levels(starts)
    pieces = cut(COLUMNS, first.float(), levels.float())
    work = 4 * (z.axes.numel() + known.U.numel()) * starts * steps
    results = watch.map(_pass_messages, (shared,), pieces, multiplications=work)
    at, d, misfit = (torch.cat(part, -1) for part in zip(*results, strict=True))
    q = problem.c_basis.T @ (known.U.T @ d.to(known.U))  # (r, k)
    q = q / q.norm(dim=0)
    found = distinct(q, -misfit, 2 * problem.missing + 8)
    return q[:, found], (d.abs() + at)[:, found].to(q)


def _pass_messages(shared: _Passing, first: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z and d (rows, k) from starts, and how much of d is beside two levels (k,)."""
    one = torch.ones_like(first[:1])
    z, d = Messages(first, FIRST_VARIANCE * one), Messages(level / 2, one / 4)
    e, z_mean, d_mean, on = level, first, level / 2, first
    for step in range(shared.steps):
        shared.deadline.check()
        kept = _KEPT if step else 0.0
        spread = max(_LEVEL_FIRST * _LEVEL_FALLS**step, _LEVEL_LAST)
        z_said, d_said, on = rows_given(z, d, e, spread)
        z, z_mean = answer(shared.z, z, z_said, kept=kept, least=_LEAST)
        d, d_mean = answer(shared.d, d, d_said, kept=kept, least=_LEAST)
        seen = e + on * (d.values - e)  # a row that is off shows nothing
        e = level + shared.e.estimate(seen - level, 1 / d.variance)[0]
    return z_mean, d_mean, (d_mean - on * e).norm(dim=0) / d_mean.norm(dim=0)


def rows_given(
    z: Messages, d: Messages, e: Tensor, spread: float
) -> tuple[Messages, Messages, Tensor]:
    """Posterior means of z and d, row by row, their variances averaged over rows, and the chance of on.

    On: z > 0, and d is e (rows, k) up to a variance `spread`. Off: z < 0, and d is zero.
    """
    deviation = z.variance.sqrt()
    a = z.values / deviation
    log_on, log_off = log_mills(a), log_mills(-a)
    near_e = d.variance + spread
    far = (d.values - e).square() / near_e - d.values.square() / d.variance
    odds = log_on - log_off - (far + torch.log(near_e / d.variance)) / 2
    on = torch.sigmoid(odds.clamp(-SURE_ODDS, SURE_ODDS))
    t_on, t_off = density(log_on), density(log_off)  # of normals cut at zero, where they are cut
    z_on, z_off = z.values + t_on * deviation, z.values - t_off * deviation
    v_on, v_off = (1 - t_on * (t_on + a)).clamp_min(0), (1 - t_off * (t_off - a)).clamp_min(0)
    z_mean = on * z_on + (1 - on) * z_off
    square = on * (v_on * z.variance + z_on.square())
    square += (1 - on) * (v_off * z.variance + z_off.square())
    share = spread / near_e
    d_on = e + share * (d.values - e)
    d_mean = on * d_on
    d_var = on * (share * d.variance + d_on.square()) - d_mean.square()
    z_said = Messages(z_mean, average(square - z_mean.square()))
    return z_said, Messages(d_mean, average(d_var)), on
