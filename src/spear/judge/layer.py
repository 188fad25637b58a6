"""What the attacked layer alone shows: signs, zeros, the bias gradient, how exact inputs can be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from spear import theory
from spear.factors import Factors, leading_part
from spear.judge.selection import Selection, at_scales, silent_in
from spear.search import smallest_eigenvalues, unit
from spear.tolerances import (
    DEVIATIONS_TO_SPARE,
    EXACT_ERROR,
    MARGIN,
    MAX_USEFUL_ERROR,
    PATTERN_CHANCE,
    SPARE_BIAS_ROWS,
    SPARE_ROWS,
    UNDECIDED,
)
from spear.update import LayerUpdate, Round

_MOST_PAIRED = 40  # samples up to which pairs of traces are tried: 780 small least squares
_SAMPLED_INPUTS = 512  # of a sample, to measure a rounding
_GRID_DISTANCE = 0.2  # mean distance from the grid, in steps: 1/4 anywhere, 0 on the grid
_BOUNDED_FROM = 256  # samples beyond which b factorisations take longer than all the rest
_EIGENVALUE_MARGIN = (
    0.6  # inverse iteration comes from above: 1.3 times the true one at most (256 of 2000)
)
SINGLE_PRECISION_FROM = 64  # samples from which shares are computed in single precision
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True, eq=False)
class Part:
    """One round of an update: its rows, and which of the samples took part."""

    rows: slice
    samples: Tensor  # (k,) indices of the samples with a gradient in these rows
    factor: float  # that the rows were multiplied by
    others: Mapping[str, Tensor]  # gradients of the other parameters
    eps: float  # of what was sent
    rounding: float  # of weights that were subtracted, over the learning rate
    round: Round | None = None


@dataclass(frozen=True, eq=False)
class Recovered:
    """The samples of a selection and what follows from them, each computed once."""

    factors: Factors
    selection: Selection
    replayed: bool = False
    """Did a replay explain every sample's gradient, with more than one output to vary?"""
    confirmed: Tensor | None = None
    """(rows, b): zeros that local training confirms, instead of the signs before it."""

    @property
    def b(self) -> int:
        return self.selection.b

    @property
    def view(self) -> LayerUpdate:
        return self.factors.view

    @cached_property
    def X(self) -> Tensor:
        """Inputs (b, n) in float64."""
        return self.factors.combine(self.selection.C / self.factors.singular_values)

    @cached_property
    def Z(self) -> Tensor:
        """Preactivations (b, m)."""
        C = self.selection.C
        Z: Tensor = C @ self.factors.preactivation.T + self.factors.bias
        return Z

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The rounds, each with the samples that took part in it: one, unless views were combined."""
        view, b = self.view, self.b
        everyone = torch.arange(b, device=self.selection.C.device)
        if view.rounds is None:
            return (Part(slice(None), everyone, 1.0, view.others, self.factors.eps, 0.0),)
        return tuple(self._part(each) for each in view.rounds.each)

    def _part(self, each: Round) -> Part:
        silent = silent_in(self.selection.directions.zeros, self.factors.live_rows, each.rows)
        eps = torch.finfo(each.precision).eps
        present = (~silent).nonzero().flatten()
        return Part(each.rows, present, each.factor, each.others, eps, each.rounding, each)

    @cached_property
    def value_range(self) -> float:
        """From lowest to highest value of a sample, the median: a wrong sample may have any range."""
        return float((self.X.amax(1) - self.X.amin(1)).median())

    @cached_property
    def sizes(self) -> Tensor:
        """Root mean square of each sample's inputs (b,)."""
        size: Tensor = self.selection.C.norm(dim=1) / math.sqrt(self.factors.n)
        return size

    @cached_property
    def distances(self) -> Tensor:
        """Distances between samples (b, b), per input."""
        return torch.cdist(self.X, self.X) / math.sqrt(self.X.shape[1])

    @cached_property
    def confirmed_zero_rows(self) -> Tensor:
        """Live rows (rows, b) in which each sample is off: zero, and its preactivation says so.

        With dropout, zeros whose preactivation says on are those of dropped neurons, or of a mix of
        samples that cancel. A mix is no label's gradient: once the replay explains every direction, and
        more zeros hold it than it was solved for, its zeros are its own.
        """
        if self.confirmed is not None:
            return self.confirmed
        zeros = self.selection.directions.zeros
        confirmed = zeros & (self.Z[:, self.factors.live_rows].T < 0)
        if self.view.dropout and self.replayed:
            return torch.where(self.selection.directions.redundancy > 0, zeros, confirmed)
        return confirmed

    @cached_property
    def kept(self) -> Tensor:
        """Neurons (b, m) with a gradient: of those that are on, all that dropout kept."""
        kept = torch.zeros_like(self.Z, dtype=torch.bool)
        kept[:, self.factors.live_rows] = ~self.selection.directions.zeros.T
        return kept

    @cached_property
    def mixing_errors(self) -> Tensor:
        """How much of sample j the noise leaves in sample i, (b, b): see `mixing_errors`."""
        return mixing_errors(self)

    @cached_property
    def error(self) -> Tensor:
        """Standard deviation of the error of an input, per sample (b,): see `predicted_error`."""
        return predicted_error(self)

    @cached_property
    def shape_error(self) -> Tensor:
        """The same but for the scale, relative to its size (b,): see `error_of_shape`."""
        return error_of_shape(self)

    @cached_property
    def precise(self) -> Tensor:
        """Per sample (b,): is its predicted error small enough to be called exact?"""
        claim = EXACT_ERROR / DEVIATIONS_TO_SPARE
        precise: Tensor = self.error <= claim * self.sizes.clamp_min(self.value_range)
        return precise


def patterns_are_significant(found: Recovered) -> bool:
    """Are there enough rows that the patterns of all samples cannot fit by luck?

    Over several rounds zeros say it as well: two that a direction did not need come by luck with the
    square of the chance of one.
    """
    selection = found.selection
    if chance_of_pattern(found) ** selection.b <= PATTERN_CHANCE:
        return True
    if found.view.rounds is None or not bool((selection.directions.redundancy >= 2).all()):
        return False
    side = selection.directions.side
    values = (side.basis @ selection.directions.vectors).abs()  # (rows, b)
    level = torch.where(selection.directions.zeros, values, 0.0).amax(0).clamp_min(side.zero)
    by_luck = 2 * level / values.square().mean(0).sqrt()
    return bool((by_luck.square() * selection.b <= PATTERN_CHANCE).all())


def chance_of_pattern(found: Recovered) -> float:
    """How likely the pattern of one sample fits by luck."""
    return theory.pattern_by_chance(rows_that_tell(found), found.b)


def rows_that_tell(found: Recovered) -> int:
    """Rows of a sample whose sign could contradict it.

    The signs of one neuron in several rounds are mostly the same, so neurons count, not rows. With
    dropout only rows that are on say something, and a faint sample's sign says nothing in rows in which
    it would not show: the sample with the fewest decides.
    """
    directions, rounds = found.selection.directions, found.view.rounds
    rows = directions.side.basis.shape[0]
    hidden = directions.side.hidden(directions.vectors, directions.zeros)
    if hidden is not None:
        rows = int((~hidden).sum(0).min())
    if rounds is not None:
        rows = rounds.live_neurons(found.factors.live_rows)
    if found.view.dropout:
        on = (~found.selection.directions.zeros).sum(0)  # (b,)
        rows = min(rows, int(on.min()) // (1 if rounds is None else len(rounds)))
    return rows


def signs_hold(found: Recovered, *, replayed: bool = False) -> Tensor:
    """Per sample: no sign contradicts its zeros.

    Where part of a batch is wrong, a sample may fit by luck, if there are few neurons for so many
    samples. A replay of the whole batch that agrees shows that none is wrong.
    """
    factors, selection = found.factors, found.selection
    sound: Tensor = (selection.contradictions == 0) & selection.C.isfinite().all(1)
    if not (replayed or bool(sound.all())) and chance_of_pattern(found) > PATTERN_CHANCE:
        return torch.zeros_like(sound)
    if factors.relu == "both":
        sound &= _other_side(found)
    return sound


# The error of an input.


def predicted_error(found: Recovered, scale_error: Tensor | None = None) -> Tensor:
    """Standard deviation of an input's error, per sample (b,), from the update's noise.

    x_i = c_i R is off in three ways: by the noise of dL/dW, which enters with |row of D^+|; by the
    noise of the directions, so that x_i holds a share of every other sample (`mixing_errors`); and
    by the noise of dL/db, which gives the scale, unless something else gave it with a
    relative `scale_error` (b,). The result is rounded to the update's precision.
    """
    factors, selection, X = found.factors, found.selection, found.X
    rows = (selection.C / factors.singular_values).norm(dim=1)  # |row of D^+|
    direct = factors.input_noise(selection.C)
    if scale_error is None:
        noise = _bias_noise(factors) if selection.bias_noise is None else selection.bias_noise
        scale_error = rows * noise
    in_scale = found.sizes * scale_error
    if selection.directions.side.name == "outputs":
        # The scale follows the shares, so what they leave is the difference of two samples.
        mixed = (found.mixing_errors * found.distances).square().nansum(1)
    else:
        mixing = (selection.Q.norm(dim=0) * selection.C.norm(dim=1)).square().sum()
        mixed = direct.square() * float(mixing) / factors.n
    error = (direct.square() + mixed + in_scale.square()).sqrt()
    coarse = found.sizes * _input_rounding(factors, X, direct)
    final: Tensor = (_after_rounding(factors, X, error).square() + coarse.square()).sqrt()
    return final


def _after_rounding(factors: Factors, X: Tensor, error: Tensor) -> Tensor:
    """The error (b,) of inputs once rounded to the grid of the client's own inputs.

    An error e below half a step u vanishes. Beyond, it is a whole number of steps, with mean square
    u^2 (P(|e| > u/2) + 3 P(|e| > 3u/2) + 5 P(|e| > 5u/2) + ...).
    """
    dtype = factors.view.input_precision
    some = X[:, :: max(1, X.shape[1] // _SAMPLED_INPUTS)]
    step = torch.finfo(dtype).eps * torch.exp2(some.abs().clamp_min(1e-300).log2().floor())
    # Below a quarter of a step, rounding just adds u^2 / 12.
    ratio = (step / error.clamp_min(1e-300)[:, None]).clamp_min(0.25)
    k = torch.arange(1, 17).to(X)
    beyond = torch.special.erfc((k - 0.5) * ratio[..., None] / math.sqrt(2))
    square = ((2 * k - 1) * beyond).sum(-1) * ratio.square()  # in units of the error's
    share: Tensor = square.mean(1).sqrt().clamp_min(torch.finfo(X.dtype).eps)
    return error * share


def _input_rounding(factors: Factors, X: Tensor, direct: Tensor) -> float:
    """The relative error that the client's own rounding left in its inputs.

    A client that computes in half precision (autocast) rounds its inputs before the layer sees
    them, and its gradients, whatever their dtype, are those of the rounded inputs. If the inputs
    are visible enough to show that they are not on that grid, only the gradients were rounded.
    """
    grid = factors.view.grid
    if grid is None:
        return 0.0
    eps = torch.finfo(grid).eps
    seen = X[(direct < 0.1 * eps * X.abs().median())]  # (k, n): with noise well below a step
    seen = seen[seen.abs() > X.abs().median()]
    step = eps * torch.exp2(seen.abs().log2().floor())
    between = ((seen - seen.to(grid).to(seen)).abs() / step).mean()  # 1/4 between grid points
    if float(between) > _GRID_DISTANCE:
        return 0.0
    return eps / math.sqrt(12)


def mixing_errors(found: Recovered) -> Tensor:
    """How much of sample j the noise leaves in sample i, (b, b): a standard deviation.

    q_j is the kernel of the rows A_j of the basis in which sample j is off: zero AND with a
    negative preactivation, because zeros by cancellation do not fix a direction. With noise sigma
    in every entry, q_j is off by A_j^+ e, |e| ~ sigma |q_j|, so that c_i . q_j, which should be
    zero, is off by

        sigma |q_j| sqrt(c_i (A_j^T A_j)^-1 c_i),   c_i orthogonal to q_j.

    If the rows leave a second direction free this is unbounded: the sample may be a mix.
    """
    factors, selection = found.factors, found.selection
    side, s = selection.directions.side, factors.singular_values
    # The columns are orthonormal, so single precision is enough where b^4 multiplications matter.
    dtype = torch.float32 if selection.b > SINGLE_PRECISION_FROM else torch.float64
    basis, off = side.white.to(dtype), found.confirmed_zero_rows.T.to(dtype)  # (rows, b), (b, rows)
    own = unit(selection.Q * s[:, None], 0).T.to(dtype)  # (b, b): unit rows, however small Q is
    c = selection.C / s  # in white coordinates
    sizes, lengths = c.norm(dim=1), selection.Q.norm(dim=0)
    white_c = unit(c).T.to(dtype)
    if selection.b > _BOUNDED_FROM:
        length = _longest(basis, off.T, own.T, white_c) * sizes[:, None]
        bound: Tensor = factors.noise * lengths * length
        return bound.fill_diagonal_(0.0)
    out = torch.full_like(selection.C, torch.inf)
    step = max(1, _AT_ONCE // max(1, basis.numel() + selection.b**2))
    for block in torch.split(torch.arange(selection.b, device=out.device), step):
        factors.check_time()
        most = int(off[block].sum(1).max())
        counted, rows = off[block].topk(most, dim=1)  # (k, rows that are off)
        A = basis[rows] * counted[:, :, None]
        gram = A.mT @ A + own[block, :, None] * own[block, None, :]  # (k, b, b)
        factor, failed = torch.linalg.cholesky_ex(gram)
        rhs = white_c.expand(len(block), -1, -1)
        solved = torch.linalg.solve_triangular(factor, rhs, upper=False)
        length = solved.norm(dim=1).double() * sizes  # (k, b): of c_i for q_j
        length[failed > 0] = torch.inf
        out[:, block] = (factors.noise * lengths[block, None] * length).T.nan_to_num(torch.inf)
    out.fill_diagonal_(0.0)
    return out


def _longest(basis: Tensor, off: Tensor, own: Tensor, c: Tensor) -> Tensor:
    """At most sqrt(c_i (A_j^T A_j)^-1 c_i), (b, b), without a factorisation for each j.

    Eigenvalues t of A_j^T A_j lie between a, its smallest, and 1, and there 1 / t <= (a + 1 - t) / a.
    In wide layers that is 1.6 times the true value, and infinite where a second direction is free.

    Args:
        basis: (rows, b), orthonormal columns.
        off: (rows, b) zero or one.
        own: (b, b) unit columns q_j.
        c: (b, b) unit columns c_i.
    """
    least = _EIGENVALUE_MARGIN * smallest_eigenvalues(basis, off, own)  # (b,)
    sizes = (basis @ c).square().T @ off  # (b, b): c_i A_j^T A_j c_i
    free = ~(least > torch.finfo(basis.dtype).eps * len(basis))  # NaN, too
    length = ((least + 1 - sizes) / least).clamp_min(0).sqrt().double()
    return length.masked_fill(free, torch.inf)


def _bias_noise(factors: Factors) -> float:
    """Standard deviation of the noise in an entry of dL/db, from its part outside the span of L."""
    spare = int((factors.live_rows & factors.bias_rows).sum()) - factors.b
    if spare < SPARE_BIAS_ROWS:
        return factors.noise
    return float(factors.bias_outside.norm()) / math.sqrt(spare)


# The bias gradient.


def bias_in_span(factors: Factors) -> bool:
    """dL/db = dL/dZ 1 lies in the span of L, up to the noise of its own entries."""
    g = factors.bias_grad
    return float(factors.bias_outside.norm()) <= bias_level(factors, g)


def bias_level(factors: Factors, g: Tensor) -> float:
    """How long a part of dL/db (m,) noise and rounding can put outside the span of L."""
    eps = torch.finfo(factors.view.bias_precision).eps
    return MARGIN * eps * float(g.norm()) + factors.zero * math.sqrt(len(g))


def mark_unscaled(factors: Factors, selection: Selection) -> Selection:
    """The selection, with scales that hold even where some samples spoil the bias gradient.

    Inputs that depend on each other linearly (a darker copy, a sum of two) leave fewer traces in dL/dW
    than columns in dL/db = sum of all d, which then leaves the span of L and spoils every scale. But in
    rows where the traces of those samples vanish, dL/db is the sum of the others alone. This looks for
    up to two traces that explain it; their own scale stays unknown (`unscaled`).
    """
    if bias_in_span(factors) or selection.directions.side.name != "outputs":
        return selection
    unscaled = factors.L @ selection.directions.vectors  # (m, b)
    g = factors.bias_grad
    off = torch.ones_like(unscaled, dtype=torch.bool)
    off[factors.live_rows] = selection.directions.zeros
    b = selection.b
    for size in (1, 2):
        for traces in combinations(range(b), size) if b <= _MOST_PAIRED or size == 1 else ():
            factors.check_time()
            rows = off[:, traces].all(1) & factors.live_rows
            rest = [i for i in range(b) if i not in traces]
            if int(rows.sum()) < len(rest) + SPARE_BIAS_ROWS or not rest:
                continue
            A = unscaled[rows][:, rest]
            t = torch.linalg.lstsq(A, g[rows, None]).solution[:, 0]
            left = g[rows] - A @ t
            if float(left.norm()) > bias_level(factors, g[rows]):
                continue
            scales = selection.Q.norm(dim=0)
            scales = scales * (selection.Q * selection.directions.vectors).sum(0).sign()
            scales[rest] = t
            unscaled = torch.zeros(b, dtype=torch.bool, device=t.device)
            unscaled[list(traces)] = True
            noise = float(left.norm()) / math.sqrt(int(rows.sum()) - len(rest))
            rescaled = at_scales(factors, selection, scales)
            return dataclasses.replace(rescaled, unscaled=unscaled, bias_noise=noise)
    return selection


def recognisable(error: Tensor, inputs: Tensor) -> Tensor:
    """Which of what came back (b, n) says more about a sample than noise would, (b,) bool?

    Samples that drown say nothing of how far samples are apart: the spread is that of the most precise
    ones, of as many as shows most of them.
    """
    order = error.argsort()
    X, squares = inputs.double()[order], error.double()[order].square()
    own = [_own_spread(X[: k + 1], squares[: k + 1]) for k in range(len(X))]
    level = MAX_USEFUL_ERROR * torch.stack(own)  # (b,): of the k most precise
    shown = squares.sqrt()[None] < level[:, None]  # (b, b)
    shown &= torch.ones_like(shown).tril()
    known = torch.zeros_like(shown[0])
    known[order] = shown[shown.sum(1).argmax()]
    return known


def _own_spread(X: Tensor, squares: Tensor) -> Tensor:
    """How far samples are apart, without their errors, whose squares (k,) are sorted."""
    spread = (X - X.mean(0)).square().mean() if len(X) > 1 else X.var()
    # What came back holds both the samples and the error.
    own: Tensor = (spread - squares[(len(X) - 1) // 2]).clamp_min(0).sqrt()
    return own


def error_of_shape(found: Recovered) -> Tensor:
    """Standard deviation of an input's error but for its scale, relative to its size (b,).

    A share of another sample counts as far as that one is not parallel to this.
    """
    direct = found.factors.input_noise(found.selection.C)
    if found.selection.directions.side.name != "outputs":
        return predicted_error(found, torch.zeros_like(direct)) / found.sizes
    lengths = found.X.norm(dim=1)
    cos = (found.X @ found.X.T) / lengths[:, None] / lengths
    beside = (1 - cos.square()).clamp_min(0).sqrt() * found.sizes  # (b, b): of j, beside i
    mixed = (found.mixing_errors * beside).square().nansum(1)
    error: Tensor = (direct.square() + mixed).sqrt() / found.sizes
    return error


def scale_range(factors: Factors, selection: Selection) -> tuple[Tensor, Tensor]:
    """Per sample (b,): the factors t > 0 at which every sign of t W x + bias fits the zeros."""
    D = (factors.L @ selection.Q).abs()  # (m, b)
    level = factors.zero * selection.Q.norm(dim=0)
    Z = factors.preactivation @ selection.C.T  # (m, b) = W x
    slack = factors.weight_lengths * factors.preactivation_error(selection.C)
    bias = factors.bias[:, None]
    off, on = D <= level, D > UNDECIDED * level
    if factors.view.dropout:
        off = torch.zeros_like(off)
    if selection.frozen is not None:
        off = off & ~selection.frozen[:, None]
    # Where off, t Z + bias <= slack; where on, t Z + bias >= -slack.
    threshold = torch.where(off, slack - bias, -slack - bias) / Z  # (m, b)
    bounds_above = (off & (Z > 0)) | (on & (Z < 0))
    bounds_below = (off & (Z < 0)) | (on & (Z > 0))
    highest = torch.where(bounds_above, threshold, torch.inf).amin(0)
    lowest = torch.where(bounds_below, threshold, 0.0).amax(0).clamp_min(0)
    return lowest, highest


def fits_at_another_scale(factors: Factors, selection: Selection) -> bool:
    """Do signs contradict zeros, and would a scale of its own settle it for every such sample?

    A right direction at a wrong scale t breaks the signs of neurons whose threshold -bias / (W x)
    lies between t and 1. Noise breaks signs too, and so do wrong directions, which may fit
    somewhere by luck. So only directions that their own zeros prove count.
    """
    broken = selection.contradictions > 0
    proved = selection.directions.redundancy > 0
    if factors.noisy or selection.directions.side.name != "outputs" or not bool(broken.any()):
        return False
    lowest, highest = scale_range(factors, selection)
    return bool((proved & (lowest <= highest) & (highest > 0))[broken].all())


# The next layer.


def outside_next_layer(found: Recovered) -> Tensor:
    """Samples (b,) that the next layer's gradient does not contain, where it can tell.

    Its rows are sums of the samples' activations relu(z), whatever the factors. An activation outside
    their span belongs to no sample: to an input at a wrong scale, say, because weight and bias gradient
    were clipped apart.
    """
    factors, selection = found.factors, found.selection
    nothing = torch.zeros(selection.b, dtype=torch.bool, device=selection.C.device)
    gradient = factors.view.next_gradient
    if gradient is None or selection.directions.side.name != "outputs":
        return nothing
    factors.check_time()
    b, eps = selection.b, factors.eps
    _, s, span = leading_part(gradient, b)
    # Noise beside the faintest sample may turn the span.
    turned = float(s[b] / s[b - 1]) if len(s) > b else 1.0
    level = MARGIN * (turned + eps * float(s[0] / s[b - 1]) if len(s) > b else 1.0)
    if level > EXACT_ERROR:
        return nothing  # fewer or more samples show there, so it says nothing
    span = span[:b]  # (b, m)
    active = found.Z.clamp_min(0)  # (b, m)
    if factors.view.dropout:
        active = active * found.kept
    rest = active - (active @ span.T) @ span
    outside: Tensor = rest.norm(dim=1) > EXACT_ERROR * active.norm(dim=1)
    return outside


def _other_side(found: Recovered) -> Tensor:
    """Between two ReLUs: are inputs non-negative AND does the output gradient fit the signs?"""
    factors, selection = found.factors, found.selection
    s = factors.singular_values
    lengths = (selection.C / s).norm(dim=1)
    X = factors.inputs.white @ selection.C.T  # (columns, b)
    slack = (
        UNDECIDED * factors.zero * lengths * (1 + selection.b)
    )  # directions mix b samples' noise
    nonnegative: Tensor = (X >= -slack).all(0)
    if selection.directions.side.name == "outputs":
        return nonnegative
    D = (factors.L @ selection.Q).abs()  # (m, b)
    level = factors.zero * selection.Q.norm(dim=0) * (1 + selection.b)
    Z = found.Z.T
    off = (D <= level) & (not factors.view.dropout)
    wrong = (off & (Z > 0)) | ((D > UNDECIDED * level) & (Z <= 0))
    fits: Tensor = ~wrong.any(0)
    return fits


def spare_rows(factors: Factors, zeros: Tensor) -> Tensor:
    """Zero rows (rows,) of a direction that would be zero even if it had not been solved for them."""
    side = factors.outputs
    spare = torch.zeros_like(zeros)
    factors.check_time()
    U, s, _ = torch.linalg.svd(side.basis[zeros], full_matrices=False)
    rank = int((s > UNDECIDED * side.zero).sum())
    if int(zeros.sum()) >= rank + SPARE_ROWS:
        # A row that fixes a direction alone has leverage one; noise lowers it a little.
        spare[zeros] = U[:, :rank].square().sum(1) < 1 - EXACT_ERROR
    return spare
