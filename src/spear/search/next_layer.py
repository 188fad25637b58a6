"""What the next layer's gradient says of a sample: its activation relu(z) lies in a span that is known.

The next layer's gradient is a sum of (gradient of its outputs) times (activation), so the activations
of the b samples span its row space, V (rows, b). With z = H c of the attacked layer a sample obeys

    y = relu(z),   z in the span of H,   y in the span of V:

rows equations for 2 b unknowns, whichever neurons are off. This needs no zeros to spare, and tells
samples from mixes in layers too narrow for the search from starts (starts.py).

A sample is found by message passing (vector AMP: Rangan, Schniter, Fletcher 2019). Two estimates take
turns, each telling the other only what it did not hear from it (the Onsager term):

1. rows    given noisy z and y, how likely is a row on, and what are z and y then? In closed form.
2. spans   given noisy z and y in all rows, the nearest ones in the spans, with a prior on their size.

Starts whose signs settle are made exact: for a pattern P, c is the kernel of (1 - V V^T) P H, and the
pattern is read anew. The direction q is then the kernel of U in the rows that are off, as always.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors, Side, leading_part
from spear.search.conjugate import least_squares
from spear.search.deadline import Deadline
from spear.search.dual import BalancedProblem, DualProblem, solve_definite
from spear.search.kernels import first_of_each, unit
from spear.search.parallel import cut
from spear.search.sharpening import smallest_eigenvectors
from spear.search.watch import Watch
from spear.tolerances import EXACT_ERROR, MARGIN

_KEPT = 0.2  # of the last messages: 0.5 takes twice the steps, none of them lets some starts swing
# Variances of messages, in units of a typical one: of a start, and the least in the coarse and the fine
# search. (What messages claim of themselves is too little: they never heard of other samples.)
FIRST_VARIANCE, _COARSE, _FINE = 0.3, 1e-4, 1e-6
_LEAST_PRECISION = 1e-3
_FAR = 8.0  # erfc is below 1e-28 there, and float32 still has it
SURE_ODDS = 40.0  # logarithm: more would give denormal numbers, which are slow
_STILL = 1e-2  # of its length: a start that moves farther in a step has not settled
_NEAR = 0.1  # share of relu(z) outside the span V, for guesses: up to 0.05 for samples
_SETTLED = 1e-3  # the same after the fine search: up to 3e-4 for samples, 1e-2 for most others
_SAME_SIGNS = 0.98  # share of equal signs above which two are the same
_SURE = 1e-3  # of a typical preactivation: nearer to zero, a sign is not used
_AT_ONCE = 1 << 22  # entries of the largest tensor: 32 MB in float64
_READ_AT_ONCE = 256  # samples whose inputs are read together
# Of the slope, in single precision: c is then right to a cosine of 1 - 1e-12 (256 of 1000 raw pixels,
# 256 of 2000), and what it leaves of relu(z) beside V says whether it is.
_SINGLE = 1e-6
COLUMNS = 64  # starts at a time, so that their data stays in the cache


@dataclass(frozen=True, eq=False)
class NextLayer:
    """The next layer's gradient, A S B^T: activations are y = B S w, gradients at its outputs A r.

    As in the attacked layer w and r are dual: w_i . r_j = 1 if i = j, else 0.
    """

    span: Tensor  # (rows, b): B, orthonormal
    sizes: Tensor  # (b,): S
    back: Tensor | None  # (rows, b): W^T A, so that d = W^T A r where a row is on; if W is known
    missing: Tensor  # (b, r): w of samples that are missing lie in its span

    @staticmethod
    def of(factors: Factors) -> NextLayer | None:
        """None if the next layer's gradient is not known or does not show b samples."""
        view, b = factors.view, factors.b
        gradient = view.next_gradient
        plain = view.rounds is None and not view.dropout and factors.protocol.one_step
        if gradient is None or not plain or view.trained or factors.relu == "before":
            return None
        factors.check_time()
        live = factors.live_rows
        A, s, Bt = leading_part(gradient[:, live], b)
        if len(s) <= b or MARGIN * float(s[b]) >= EXACT_ERROR * float(s[b - 1]):
            return None
        weight = view.next_weight
        back = None if weight is None else weight.to(A)[:, live].T @ A[:, :b]
        if back is not None and factors.row_factors is not None:
            back = back * factors.row_factors[live, None]
        one = torch.eye(b, dtype=s.dtype, device=s.device)
        return NextLayer(Bt[:b].T.contiguous(), s[:b], back, one)

    def without(self, d: Tensor, deadline: Deadline) -> NextLayer:
        """The same beside samples that were found, with gradients d (rows, k) of any scale.

        Where a row is on, d = W^T A r: about half of the rows for b unknowns. What does not fit is no
        sample, and nothing follows from it.
        """
        if self.back is None or not d.shape[1]:
            return self
        found = []
        for some in torch.split(unit(d, 0), max(1, _AT_ONCE // self.back.numel()), 1):
            deadline.check()
            on = (some.abs() > _SURE * _SURE).T[:, :, None]  # (k, rows, 1)
            A = self.back * on
            r = solve_definite(A.mT @ A, A.mT @ some.T[:, :, None])  # (k, b, 1)
            fits = (A @ r - some.T[:, :, None]).norm(dim=(1, 2)) < EXACT_ERROR
            found.append(unit(r[fits, :, 0]))
        r = torch.cat(found) @ self.missing  # (k, r)
        rest = torch.linalg.svd(r, full_matrices=True).Vh[len(r) :].T
        return dataclasses.replace(self, missing=self.missing @ rest)

    def read(self, whole: DualProblem, off: Tensor, deadline: Deadline) -> tuple[Tensor, Tensor]:
        """c (k, b) of samples with known zeros (k, rows), up to scale, and which of them fit (k,).

        The activation is z = H c where a row is on, else zero, and lies in the span V: as many
        equations as rows for b unknowns, whichever samples are missing. Signs say far less of c.
        """
        axes, change = torch.linalg.qr(whole.H[0])  # (rows, b), (b, b): z = axes (change c)
        on = (~off).T.to(axes)  # (rows, k)
        guess = unit(axes.T @ (2 * on - 1), 0)
        c = guess.clone()
        single = axes.float(), self.span.float()
        for some in torch.split(torch.arange(len(off), device=off.device), _READ_AT_ONCE):
            deadline.check()
            left = on[:, some] * (axes @ guess[:, some])
            left.addmm_(self.span, self.span.T @ left, alpha=-1)
            weight, fixed = on[:, some].float(), guess[:, some].float()
            solved = least_squares(single[0], weight, -left, fixed, _SINGLE, span=single[1])
            c[:, some] += solved.change
            badly = some[~solved.settled]
            c[:, badly] = self._read_one_by_one(axes, on[:, badly], guess[:, badly], deadline)
        c = unit(c, 0)
        z = axes @ c  # (rows, k)
        agree = ((z.T < 0) == off).double().mean(1) >= whole.least_agreement
        fits = agree & (outside(self, z) < EXACT_ERROR)
        return unit(torch.linalg.solve_triangular(change, c, upper=True).T), fits

    def _read_one_by_one(
        self, axes: Tensor, on: Tensor, guess: Tensor, deadline: Deadline
    ) -> Tensor:
        """The kernels (b, k) of (1 - V V^T) P axes for patterns (rows, k), by a factorisation each."""
        c = [guess[:, :0]]
        size = max(1, _AT_ONCE // axes.numel())
        for pattern, near in zip(
            torch.split(on, size, 1), torch.split(guess, size, 1), strict=True
        ):
            deadline.check()
            A = axes * pattern.T[:, :, None]  # (k, rows, b)
            inside = self.span.T @ A
            nearest = smallest_eigenvectors(A.mT @ A - inside.mT @ inside, near)
            c.append(nearest * torch.sign((nearest * near).sum(0)))
        return torch.cat(c, 1)


@dataclass(frozen=True, eq=False)
class Span:
    """Gaussian vectors (rows,) in a span: axes * deviations * normal."""

    axes: Tensor  # (rows, r), orthonormal
    variances: Tensor  # (r, 1)

    def estimate(self, message: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (rows, k) given messages with a precision (1, k), and its variance (1, k)."""
        share = self.variances / (self.variances + 1 / precision)  # (r, k)
        mean = self.axes @ (share * (self.axes.T @ message))
        return mean, (share / precision).sum(0, keepdim=True) / len(self.axes)

    @property
    def single(self) -> Span:
        """The same in float32."""
        return Span(self.axes.float().contiguous(), self.variances.float())


@dataclass(frozen=True, eq=False)
class Messages:
    """Preactivations or activations, seen through noise."""

    values: Tensor  # (rows, k)
    variance: Tensor  # (1, k)


@dataclass(frozen=True, eq=False)
class _Passing:
    """What all starts share."""

    z: Span
    y: Span
    first: float  # variance of what it starts from
    least: float  # variance of a message
    steps: int
    deadline: Deadline


def spans(problem: BalancedProblem, following: NextLayer) -> tuple[Span, Span]:
    """Where z and y are expected, in units of a typical z.

    In balanced coordinates c ~ q, so c has no direction of its own. Activations have the second moments
    that the next layer's gradient has if the gradients of its outputs are as good as orthogonal. That a
    sample has c . h = 1 is not used: scales are free, and no start has to get its own right.
    """
    activations = following.span @ (following.sizes[:, None] * following.missing)
    return span_of(problem.H[0], 1.0), span_of(activations, 0.5)


def span_of(vectors: Tensor, square: float) -> Span:
    """Normal mixes of vectors (rows, r), with entries of this mean square."""
    axes, s, _ = torch.linalg.svd(vectors, full_matrices=False)
    return Span(axes, (s.square() * (square * len(axes) / s.square().sum()))[:, None])


def search_by_messages(  # noqa: PLR0917
    problem: BalancedProblem,
    following: NextLayer,
    starts: int,
    steps: int,
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    """Preactivations z (rows, k) of root mean square 1 whose relu(z) lies in the span V, all different.

    All starts pass messages in float32. Those that settle go on, once each, until they are exact.
    """
    z, y = spans(problem, following)
    first = mixes_of_rows(problem, starts, generator).float()
    coarse = _Passing(z.single, y.single, FIRST_VARIANCE, _COARSE, steps, watch.deadline)
    pieces = cut(COLUMNS, first)
    work = 4 * z.axes.numel() * starts * steps
    parts = zip(*watch.map(_pass_messages, (coarse,), pieces, multiplications=work), strict=True)
    guess, moved = (torch.cat(part, -1).double() for part in parts)
    guess = _distinct(guess[:, moved < _STILL], following, _NEAR)
    fine = _Passing(z, y, _COARSE, _FINE, steps, watch.deadline)
    exact, _ = _pass_messages(fine, guess)
    return _distinct(exact, following, _SETTLED)


def mixes_of_rows(problem: BalancedProblem, count: int, generator: torch.Generator) -> Tensor:
    """z (rows, count) of sums and differences of two rows, each a mix of half the samples."""
    U = unit(problem.U)
    pick = torch.randint(len(U), (2, count), generator=generator, device=generator.device)
    flip = torch.randint(2, (count, 1), generator=generator, device=generator.device) * 2 - 1
    one, other = U[pick.to(U.device)]
    z: Tensor = problem.H[0] @ (one + other * flip.to(U)).T
    return z / z.square().mean(0).sqrt()


def _pass_messages(shared: _Passing, first: Tensor) -> tuple[Tensor, Tensor]:
    """z (rows, k) from starts, and how far the last step moved them (k,), relative to their length."""
    one = torch.ones_like(first[:1])
    z = Messages(first, shared.first * one)
    y = Messages(torch.zeros_like(first), one / _LEAST_PRECISION)
    estimate = before = first
    for step in range(shared.steps):
        shared.deadline.check()
        kept = _KEPT if step else 0.0
        z_said, y_said = rows_given(z, y)
        before = estimate
        z, estimate = answer(shared.z, z, z_said, kept=kept, least=shared.least)
        y, _ = answer(shared.y, y, y_said, kept=kept, least=shared.least)
    return estimate, (estimate - before).norm(dim=0) / estimate.norm(dim=0)


def rows_given(z: Messages, y: Messages) -> tuple[Messages, Messages]:
    """Posterior means of z and y = relu(z), row by row, and their variances, averaged over rows.

    On: z > 0 was seen twice, as z and as y. Off: z < 0 was seen once, and y is noise around zero.
    """
    g_off, g_on = 1 / z.variance, 1 / z.variance + 1 / y.variance  # (1, k): precisions
    both = (z.values * g_off + y.values / y.variance) / g_on
    a_off, a_on = -z.values * g_off.sqrt(), both * g_on.sqrt()  # in deviations from zero
    log_off, log_on = log_mills(a_off), log_mills(a_on)
    odds = log_on - log_off - torch.log(g_on / g_off) / 2
    on = torch.sigmoid(odds.clamp(-SURE_ODDS, SURE_ODDS))
    t_off, t_on = density(log_off), density(log_on)  # of normals cut at zero, where they are cut
    z_off, z_on = z.values - t_off / g_off.sqrt(), both + t_on / g_on.sqrt()
    v_off = (1 - t_off * (t_off + a_off)).clamp_min(0) / g_off
    v_on = (1 - t_on * (t_on + a_on)).clamp_min(0) / g_on
    square = on * (v_on + z_on.square())
    y_mean = on * z_on
    z_mean = y_mean + (1 - on) * z_off
    z_var = square + (1 - on) * (v_off + z_off.square()) - z_mean.square()
    y_var = square - y_mean.square()
    return Messages(z_mean, average(z_var)), Messages(y_mean, average(y_var))


def average(variance: Tensor) -> Tensor:
    """The mean over rows (1, k), above zero."""
    return variance.mean(0, keepdim=True).clamp_min(torch.finfo(variance.dtype).tiny)


def log_mills(a: Tensor) -> Tensor:
    """log(2 Phi(a) exp(a^2 / 2)): how likely a normal of mean a is positive, relative to its density.

    (torch.special.erfcx does the same, thirty times slower.) Below -_FAR sqrt(2) it falls as 1 / |a|.
    """
    x = a * -math.sqrt(0.5)
    tail = torch.erfc(x.clamp(-_FAR, _FAR)) * (_FAR / x.clamp_min(_FAR))
    return torch.log(tail) + x.clamp_max(_FAR).square()


def density(log_mills: Tensor) -> Tensor:
    """Density over distribution of a standard normal."""
    return math.sqrt(2 / math.pi) * torch.exp(-log_mills.clamp_max(SURE_ODDS))


def answer(
    span: Span, heard: Messages, said: Messages, *, kept: float, least: float
) -> tuple[Messages, Tensor]:
    """The span's message to the rows, which made of what they heard what they said; its estimate.

    What the rows had from the span is taken out of what they said, and the other way round.
    """
    precision = (1 / said.variance - 1 / heard.variance).clamp_min(_LEAST_PRECISION)
    new = said.values + (said.values - heard.values) / (precision * heard.variance)
    estimate, variance = span.estimate(new, precision)
    answer = (1 / variance - precision).clamp_min(_LEAST_PRECISION)
    values = estimate + (estimate - new) * precision / answer
    values = kept * heard.values + (1 - kept) * values
    variance = kept * heard.variance + (1 - kept) / answer
    return Messages(values, variance.clamp_min(least)), estimate


def outside(following: NextLayer, z: Tensor) -> Tensor:
    """The share (k,) of relu(z) (rows, k) that is outside the span of all activations."""
    y = z.clamp_min(0)
    share: Tensor = (y - following.span @ (following.span.T @ y)).norm(dim=0) / y.norm(dim=0)
    return share


def _distinct(z: Tensor, following: NextLayer, near: float) -> Tensor:
    """Those z (rows, k') that fit the span, the best first, no two with the same signs."""
    rest = outside(following, z)
    z = z[:, rest.argsort()[: int((rest < near).sum())]]
    signs = z.sign()
    chosen = first_of_each(signs.T @ signs > (2 * _SAME_SIGNS - 1) * len(z))
    z = z[:, chosen]
    return z / z.square().mean(0).sqrt()


def directions_off(side: Side, z: Tensor, deadline: Deadline) -> Tensor:
    """White directions (k', b) that vanish in all rows where z (rows, k) is negative, if enough are."""
    b = side.white.shape[1]
    off = z < -_SURE
    off = off[:, off.sum(0) >= b - 1]
    found = [side.white.new_zeros(0, b)]
    for pattern in torch.split(off, max(1, _AT_ONCE // side.white.numel()), 1):
        deadline.check()
        A = side.white * pattern.T[:, :, None]  # (k, rows, b)
        guess = side.white.T @ (~pattern).to(side.white)
        found.append(smallest_eigenvectors(A.mT @ A, unit(guess, 0)).T)
    return torch.cat(found)
