"""The sign half: a sample's ReLU pattern is a linear function of its input.

In the whitened coordinates of dL/dW = U S V^T a sample is a pair (q, c): its column of dL/dZ is d =
U q, its input x = c U^T dL/dW, and c_i . q_j = 1 if i = j, else 0. Two facts tie the halves
together. The bias gradient fixes every scale: c . h = 1 with h = U^T dL/db. And the preactivation
is linear in c: z = W x + bias = H c with H = W (U^T dL/dW)^T + bias h^T, so that

    d is zero where z is negative:   supp(U q) = {H c > 0}.

The paper looks for q by its sparsity alone and uses the signs only at the end, to choose. Here each
half helps to find the other: q shows which rows are off, the rows that are off give c, and c says
how far each row is from its threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spear.factors import Factors
from spear.search.deadline import Deadline
from spear.search.kernels import sparsest_independent, unit
from spear.search.parallel import COLUMNS, cut, piece_length
from spear.search.watch import Watch

# Ridge on c in balanced coordinates, per row: weighs the pattern against c ~ q, which holds to a cosine
# of 0.8 to 0.95 on real batches. Anything from 1 to 3 works (docs/algorithm.md).
RIDGE = 1.5
_SWEEPS = 3  # of balancing; more change the weights by a few per cent
_LEAST_WEIGHT = 1e-3  # that a row keeps: nothing is excluded on an estimate
# Share of rows whose sign agrees with the zeros: 0.97 and more for samples, up to 0.93 for mixes of
# samples with spare zeros.
SIGN_AGREEMENT = 0.95
# With dropout, where only rows that are on count; and after many local steps, in which signs change: of
# samples 0.84 and more agree, of directions with no zeros to spare up to 0.9 (CIFAR-10, 30 of 200).
_SIGN_AGREEMENT_DROPOUT = 0.88
_SIGN_AGREEMENT_TRAINED = 0.8
# How likely a row that is on was so only between the ends of local training, relative to at an end: 4
# to 13 % of the rows of CIFAR-10 and TinyImageNet at lr 0.1.
_ON_BETWEEN = 0.1
_POSSIBLE_MIXES = 16  # directions with the fewest zeros, among which a mix is sought
_MOST_DROPPED = 4  # mixes that are sought one by one


@dataclass(frozen=True, eq=False)
class DualProblem:
    """Both halves of the r samples still to be found, in dual coordinates."""

    U: Tensor  # (rows, r): d = U q
    H: Tensor  # (ends, rows, r): z = H c, before local training and after it, the larger of both
    h: Tensor  # (r,): c . h = 1
    least_agreement: float  # share of rows whose sign must agree with a sample's zeros
    q_basis: Tensor  # (b, r): q of the whole problem = q_basis @ q
    c_basis: Tensor  # (b, r): c of the whole problem = c_basis @ c; c_basis^T q_basis = 1
    over_rounds: bool = field(default=False, kw_only=True)  # then signs pin c far more closely
    # (b, b): to coordinates in which c ~ q, if blocks of several rounds give better ones than `balance`
    coordinates: Tensor | None = field(default=None, kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)  # of rows that are on, zero all the same

    @property
    def missing(self) -> int:
        return self.U.shape[1]

    @cached_property
    def prior(self) -> Prior:
        """Where c is expected, whatever the samples."""
        width = _PRIOR_WIDTH_ROUNDS if self.over_rounds else _PRIOR_WIDTH
        return Prior(balance(self).change, width)


@dataclass(frozen=True, eq=False)
class BalancedProblem(DualProblem):
    """The halves in coordinates in which q ~ c and rows of U have one size, and each row's weight."""

    weights: Tensor  # (rows,): the chance that a row is off for a sample
    change: Tensor  # (r, r): q here = change @ q before, up to scale


def dual_problem(factors: Factors, coordinates: Tensor | None = None) -> DualProblem:
    """The whole problem, in the live rows; with coordinates (b, b) in which c ~ q, if there are any."""
    live = factors.live_rows
    h = factors.bias_coordinates * factors.singular_values
    ends, bias = factors.before_and_after
    H = ends * factors.singular_values + bias * h
    one = torch.eye(factors.b, dtype=h.dtype, device=h.device)
    rounds = factors.view.rounds
    several = not factors.protocol.one_step if rounds is None else rounds.trained
    least_agreement = SIGN_AGREEMENT
    if several or factors.view.dropout:
        least_agreement = _SIGN_AGREEMENT_TRAINED if several else _SIGN_AGREEMENT_DROPOUT
    return DualProblem(
        factors.left[live],
        H[:, live],
        h,
        least_agreement,
        one,
        one,
        over_rounds=factors.view.rounds is not None,
        coordinates=coordinates,
        dropout=factors.view.dropout,
    )


def chance_off(problem: DualProblem) -> Tensor:
    """How likely each row is zero for a sample (rows,), before any sample is known.

    c = h / |h|^2 is the batch's mean sample (its preactivations correlate with the true mean to
    0.98 and more on uncentred images); what is orthogonal to h spreads the samples around it. An
    offset no larger than the mean of r centred samples would show is shrunk to nothing (James and
    Stein). Dropout adds its share of the rows that are on.
    """
    length = problem.h.norm()
    if not float(length):  # no bias, so that the mean is not known
        return torch.full_like(problem.U[:, 0], (1 + problem.dropout) / 2)
    H = problem.H.mean(0)
    mean = H @ (problem.h / length.square())
    spread = (H - torch.outer(mean, problem.h)).norm(dim=1) / length
    offset = mean / torch.maximum(spread, 1e-9 * mean.abs().max())
    excess = problem.missing * offset.var() if len(offset) > 1 else 0 * length
    shrink = (1 - 2 / excess).nan_to_num(0.0).clamp_min(0)
    chance: Tensor = torch.special.ndtr(-offset * shrink)
    return chance + (1 - chance) * problem.dropout


def balance(problem: DualProblem) -> BalancedProblem:
    """Coordinates for the search: rows of one size, weighted by the chance that they are off.

    A row in which every sample is active says nothing about zeros, yet carries most of the energy
    of uncentred batches. With rows of one size, whitened under these weights (Tyler's scatter), the
    columns of dL/dZ become nearly orthogonal, so that c ~ q.
    """
    r = problem.missing
    weights = chance_off(problem).clamp_min(_LEAST_WEIGHT)
    U, change = problem.U, torch.eye(r, dtype=problem.U.dtype, device=problem.U.device)
    for _ in range(_SWEEPS):
        triangle = torch.linalg.qr(weights.sqrt()[:, None] * unit(U), mode="r").R
        change = triangle @ change
        U = torch.linalg.solve_triangular(change, problem.U, upper=True, left=False)
    H = problem.H @ change.T
    size = H.square().mean().sqrt()
    q_basis = torch.linalg.solve_triangular(change, problem.q_basis, upper=True, left=False)
    return BalancedProblem(
        least_agreement=problem.least_agreement,
        U=unit(U) * r**0.5,
        H=H / size,
        h=change @ problem.h / size,
        q_basis=size * q_basis,
        c_basis=problem.c_basis @ change.T / size,
        weights=weights,
        change=change,
        over_rounds=problem.over_rounds,
        dropout=problem.dropout,
    )


class SignRegression:
    """Preactivations from a guessed pattern: ridge regression on H, towards c ~ q.

    Local training moves the signs. Halfway is nearest to all its steps, so c is fitted there; a neuron
    that is on at either end has a gradient.
    """

    def __init__(self, problem: BalancedProblem, dtype: torch.dtype, ridge: float = RIDGE) -> None:
        halfway = problem.H.mean(0)
        gram = halfway.T @ halfway
        gram.diagonal().add_(ridge * len(halfway))
        self.H, self.halfway = problem.H.to(dtype), halfway.to(dtype)
        self.regress = solve_definite(gram, halfway.T).to(dtype)  # (r, rows)

    def read(self, q: Tensor, activity: Tensor) -> Tensor:
        """z (rows, k) of root mean square 1, for q (r, k) and the activity of each row (rows, k).

        The activity can be anything that is larger where a row is on.
        """
        tiny = torch.finfo(q.dtype).tiny
        pattern = activity - activity.mean(0)
        along = self.halfway @ q
        share = (along * pattern).sum(0) / along.square().sum(0).clamp_min(tiny)
        c = share * q + self.regress @ (pattern - share * along)  # (r, k)
        z: Tensor = (self.H @ c).amax(0)
        z /= (z.norm(dim=0) / len(z) ** 0.5).clamp_min(tiny)
        return z


def read_samples(
    problem: DualProblem,
    q: Tensor,
    off: Tensor,
    watch: Watch | None = None,
    *,
    only: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """c of samples with known zeros, from their patterns alone; b - k others may be unknown.

    c is the direction that separates rows that are on from rows that are off: logistic regression
    on the rows of H, towards c ~ q, with c orthogonal to the q of all the others found.

    Args:
        problem: the whole one.
        q: (k, b) exact directions.
        off: (k, rows) their zeros: bool, or how likely each is one.
        watch: with the workers, if there are any.
        only: read these, beside the others; all unless given.

    Returns:
        c (k, b) with c_i . q_i = 1, and the share of rows (k,) whose sign agrees with the pattern.
    """
    if not len(q):
        return q, q.new_zeros(0)
    wanted = slice(None) if only is None else only
    prior = Prior.of(problem, q)
    known = unit(prior.change @ q.T, 0)  # (b, k)
    basis, triangle = torch.linalg.qr(known, mode="complete")
    k = known.shape[1]
    dual = torch.linalg.solve_triangular(triangle[:k], basis[:, :k].T, upper=True)  # (k, b)
    spans = Spans(basis[:, k:], unit(dual)[wanted])
    return fit_signs(problem, prior, spans, q[wanted], off[wanted], watch)


def consistent_samples(
    whole: DualProblem,
    q: Tensor,
    off: Tensor,
    least_agreement: float | None = None,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Both halves (k, b) of those directions whose pattern some input explains.

    A mix of samples has zeros too, but no c whose signs agree with them.
    """
    b, least_agreement = whole.missing, least_agreement or whole.least_agreement
    if len(q) > b:
        chosen = sparsest_independent(q.T, off.sum(1).double())
        q, off = q[chosen], off[chosen]
    c, share = read_samples(whole, q, off, watch)
    for _ in range(_MOST_DROPPED):
        if bool((share >= least_agreement).all()):
            return q, c
        # One mix spoils the reading of all it holds: it is the one without which these fit.
        misfits = (share < least_agreement).nonzero().flatten().tolist()
        best, cured = None, 0
        for i in off.sum(1).argsort()[:_POSSIBLE_MIXES].tolist():
            others = [j for j in range(len(q)) if j != i]
            spoilt = [j - (j > i) for j in misfits if j != i]
            anew = read_samples(whole, q[others], off[others], watch, only=spoilt)[1]
            fits = int((anew >= least_agreement).sum())
            best, cured = (others, fits) if fits > cured else (best, cured)
        if best is None:
            break
        q, off = q[best], off[best]
        c, share = read_samples(whole, q, off, watch)
    sound = share >= least_agreement
    if not bool(sound.all()):
        q = q[sound]
        c, _ = read_samples(whole, q, off[sound], watch)
    return q, c


def agreement(problem: DualProblem, q: Tensor, off: Tensor, watch: Watch | None = None) -> Tensor:
    """The share of rows (k,) whose sign some c explains, each direction on its own.

    0.97 and more for samples. A mix of samples has zeros too, but no c whose signs agree with them, as
    long as there are many more rows than twice the dimensions of c.

    Args:
        problem: what was missing when they were found.
        q: (k, r) directions in its coordinates.
        off: (k, rows) their zeros: bool, or how likely each is one.
        watch: with the workers, if there are any.
    """
    anywhere = torch.eye(problem.missing, dtype=q.dtype, device=q.device)
    spans = Spans(anywhere, torch.zeros_like(q))
    return fit_signs(problem, Prior.of(problem, q), spans, q, off, watch)[1]


def deflate(problem: DualProblem, q: Tensor, c: Tensor) -> DualProblem:
    """What is left to find once k samples are known: b - k dimensions, both halves.

    Every missing q_j lies in {q : c_i . q = 0}, every missing c_j in {c : q_i . c = 0}. The q_i are
    exact, and so is the second; the c_i are read from patterns, so the first is nearly exact.

    Args:
        problem: the whole one.
        q: (k, b) exact directions of the samples found.
        c: (k, b) their other halves.
    """
    k = len(q)
    if k == 0:
        return problem
    c_basis = torch.linalg.qr(q.T, mode="complete").Q[:, k:]  # (b, b-k)
    q_basis = torch.linalg.qr(c.T, mode="complete").Q[:, k:]
    q_basis = q_basis @ torch.linalg.inv(c_basis.T @ q_basis)  # dual to c_basis
    U, H, h = problem.U @ q_basis, problem.H @ c_basis, c_basis.T @ problem.h
    return DualProblem(
        U,
        H,
        h,
        problem.least_agreement,
        q_basis,
        c_basis,
        over_rounds=problem.over_rounds,
        dropout=problem.dropout,
    )


_PRIOR_WIDTH = 1.0  # how far c may be from q when read from a pattern, relative to |q|
# Softness of the signs, from coarse to fine, in units of a typical preactivation.
_SOFTNESS = (0.3, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02)
# Rows of many rounds leave c hardly any room. At b = 200, m = 100, 20 rounds and 20 missing samples,
# what is left after them holds the missing q to a cosine of 0.99 instead of 0.81.
_SHARPER = (0.01, 0.01, 0.01, 0.005, 0.005, 0.005, 0.002, 0.002, 0.002)
_PRIOR_WIDTH_ROUNDS = 4.0
_NEAR = 16.0  # softnesses from zero beyond which a sign is certain: e^-16 is left
_MOST_REPEATS = 24  # of the sharpest, each of which takes away half of what is louder, or more
_NO_CONTRAST = 1e-6  # of a sign: rows that differ by less are rounding
_LEAST_SHARE = 1e-6  # of the expected length: below, c has turned away
_HALVINGS = 20  # of a Newton step that overshoots
_STEPS, _FLAT = 40, 0.1  # of conjugate gradients in a Newton step, and how far the slope falls
_NO_CURVATURE = (
    1e-9  # of the most: certain signs, and products of these would be subnormal, and slow
)
_LOOKED_AT = 5  # steps between two looks at it
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True, eq=False)
class Prior:
    """Where c is expected before its signs are read: near q."""

    change: Tensor  # (b, b): to coordinates in which c ~ q
    width: float  # how far c may be from q there, relative to |q|

    @staticmethod
    def of(problem: DualProblem, q: Tensor) -> Prior:
        """The best at hand for directions q (k, b)."""
        if problem.coordinates is None:
            return problem.prior
        known = unit(problem.coordinates @ q.T, 0)
        return Prior(problem.coordinates, error_of_duals(known) * len(known) ** 0.5)


def error_of_duals(q: Tensor) -> float:
    """How far c_i . q_j is from zero if c is dual to the known q (b, k), and j is not among them.

    Each j is left out in turn. With K = (q^T q)^-1, the others' c_i then have c_i . q_j = -K_ij / K_jj.
    """
    b, k = q.shape
    if k < 2:
        return math.sqrt(1 / b)  # that of a random direction
    K = torch.linalg.pinv(q.T @ q, hermitian=True)
    off = (K / K.diagonal()).fill_diagonal_(0)
    return math.sqrt(float(off.square().sum()) / (k * (k - 1)))


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the c of samples may lie, in the coordinates of a prior: orthogonal to all others' q."""

    common: Tensor  # (b, p), orthonormal: what all share
    own: Tensor  # (k, b): one more direction for each, orthogonal to these; zero if there is none


def fit_signs(  # noqa: PLR0917
    problem: DualProblem,
    prior: Prior,
    spans: Spans,
    q: Tensor,
    off: Tensor,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """c (k, b) within the spans, and the share of signs that agree (k,).

    Args:
        problem: whose signs these are.
        prior: where c is expected.
        spans: where it may lie.
        q: (k, b) their directions; c . q = 1.
        off: (k, rows) their zeros: bool, or how likely each is one.
        watch: with the workers, if there are any.
    """
    watch = watch or Watch()
    H = problem.H.flatten(0, 1) @ prior.change.T  # (ends * rows, b)
    shared = SharedTerms(
        H,
        H @ spans.common,
        prior,
        spans.common,
        len(problem.H),
        problem.over_rounds,
        problem.dropout,
    )
    work = 2 * len(q) * shared.features.numel() * _STEPS * len(shared.softness)
    step = max(1, min(_AT_ONCE // len(H), piece_length(len(q), work, COLUMNS)))
    pieces = cut(step, q, off, spans.own, dim=0) if len(q) else []
    results = watch.map(
        _fit_signs, (shared, watch.deadline), pieces, multiplications=work, complete=True
    )
    cs, shares = zip((q[:0], q.new_zeros(0)), *results, strict=True)
    return torch.cat(cs), torch.cat(shares)


@dataclass(frozen=True, eq=False)
class SharedTerms:
    """What the samples to be separated share, in the coordinates of the prior."""

    H: Tensor  # (rows, b): z = H c, one end of local training after the other
    features: Tensor  # (rows, p) = H common
    prior: Prior
    common: Tensor  # (b, p)
    ends: int
    over_rounds: bool
    dropout: float  # how likely a row is zero although its neuron is on

    @property
    def softness(self) -> tuple[float, ...]:
        return _SOFTNESS + _SHARPER * self.over_rounds


def _fit_signs(
    shared: SharedTerms, deadline: Deadline, q: Tensor, off: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    """`fit_signs` for as many samples as fit at once."""
    problem = _LogisticFits.of(shared, own, q, off)
    x = problem.solve(shared.softness, deadline)
    c = (x[:-1].T @ shared.common.T + x[-1][:, None] * own) @ shared.prior.change
    sign = 1 - 2 * off.to(q)  # (k, rows)
    certain = sign.clamp_min(0) if shared.dropout else sign.abs()  # a zero may be on and dropped
    right = (problem.margins(x) > 0).T.view(len(q), shared.ends, -1)
    fits = torch.where(sign > 0, right.any(1), right.all(1)).to(q)
    return c / (c * q).sum(1, keepdim=True), (certain * fits).sum(1) / certain.sum(1)


@dataclass(frozen=True, eq=False)
class _LogisticFits:
    """k logistic regressions at once, one a column: margins(x) > 0 where the sign is right.

    The prior is a sphere around what is expected. Newton steps are solved by conjugate gradients, so
    that all samples share the products with the features.

    With dropout of rate p, a zero whose sign says on was dropped, and counts with the probability that
    it is off all the same: 1 / (1 + p exp(-z)) for a margin z. After local training a row that is on
    may be so at either end, or only between them: each end counts by how likely that explains it.
    """

    features: Tensor  # (rows, p)
    own: Tensor  # (rows, k): the feature that each has for itself
    single: tuple[Tensor, Tensor]  # both in single precision
    sign: Tensor  # (rows, k): 1 on, -1 off, by the size of a typical preactivation
    expected: Tensor  # (p + 1, k)
    strength: float  # of the prior
    dropped: Tensor | None = None  # (rows, k): how likely a row is zero although it is on
    on: Tensor | None = None  # (ends, rows, k): rows that are on, where there are two ends

    @staticmethod
    def of(shared: SharedTerms, own: Tensor, q: Tensor, off: Tensor) -> _LogisticFits:
        """The regressions for c = common @ x[:-1] + own * x[-1], pulled towards c ~ q."""
        off = off.T.to(shared.H).repeat(shared.ends, 1)
        sign = 1 - 2 * off  # (rows, k): -1 off, 1 on, in between where uncertain
        guess = unit(shared.prior.change @ q.T, 0)  # (b, k): c ~ q, up to sign
        typical = (shared.H @ guess).square().mean(0).sqrt()
        expected = torch.cat([shared.common.T @ guess, (own.T * guess).sum(0, keepdim=True)])
        ends, own_feature = shared.ends, shared.H @ own.T
        # Its sign is that of the part within the spans: what the others take of q may have another.
        along = shared.features @ expected[:-1] + own_feature * expected[-1]  # (rows, k)
        contrast = sign - sign.mean(0)
        alike = contrast.abs().amax(0) < _NO_CONTRAST  # on in all rows, as a single sample is
        expected *= torch.sign((along * torch.where(alike, sign, contrast)).sum(0))
        return _LogisticFits(
            shared.features,
            own_feature,
            (shared.features.float(), own_feature.float()),
            sign / typical,
            expected,
            q.shape[1] / shared.prior.width**2,
            shared.dropout * off if shared.dropout else None,
            (sign > 0).view(ends, -1, len(q)) if ends > 1 else None,
        )

    def margins(self, x: Tensor) -> Tensor:
        """How far each row (rows, k) is on the right side, for x (p + 1, k)."""
        return (self.features @ x[:-1]).addcmul_(self.own, x[-1]).mul_(self.sign)

    def back(self, weight: Tensor) -> Tensor:
        """The transpose of `margins`: (p + 1, k) from weights of rows (rows, k)."""
        weight = weight * self.sign
        return torch.cat([self.features.T @ weight, (self.own * weight).sum(0, keepdim=True)])

    def solve(self, schedule: tuple[float, ...], deadline: Deadline) -> Tensor:
        """x (p + 1, k), by Newton's method from soft signs to sharp ones.

        Softness is in units of the preactivations as they are. Those of a faint sample come out of the
        prior drowned in louder ones that are still missing: signs take these away, by a factor of one
        over the softness at a time, so the last softness is repeated as long as that goes on.
        """
        x = self.expected
        z = self.margins(x)
        full = x.square().sum(0)
        size, falling = _size(z), True
        for step, softness in enumerate((*schedule, *schedule[-1:] * _MOST_REPEATS)):
            if step >= len(schedule) and not falling:
                break
            deadline.check()
            x, z = self._newton(x, z, softness * size)
            # As if c were as long as expected: preactivations also fall if all of it does.
            share = ((self.expected * x).sum(0) / full).clamp_min(_LEAST_SHARE)
            before, size = size, torch.minimum(size, _size(z) / share)
            falling = bool((size < before / 2).any())
        return x

    def _newton(self, x: Tensor, z: Tensor, softness: Tensor) -> tuple[Tensor, Tensor]:
        """One step of Newton's method, as long as it is of use."""
        weight = self._weight(z, softness)
        wrong = torch.sigmoid(-z / softness)
        slope = self.strength * (x - self.expected)
        step = self._conjugate_gradients(
            slope - self.back(weight * wrong / softness),
            weight * wrong * (1 - wrong) / softness**2,
        )
        along = self.margins(step)
        # The quadratic part along the step, so that trying a length costs no product.
        linear, square = (slope * step).sum(0), self.strength * step.square().sum(0)
        length, before = torch.ones_like(linear), _softplus(z, weight, softness)
        worse = torch.zeros_like(linear, dtype=torch.bool)
        for _ in range(_HALVINGS):
            after = _softplus(z - length * along, weight, softness)
            worse = after - length * linear + length.square() / 2 * square > before
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        length = torch.where(worse, 0.0, length)
        return x - length * step, z - length * along

    def _conjugate_gradients(self, slope: Tensor, curvature: Tensor) -> Tensor:
        """The Newton step (p + 1, k) for a slope and the curvature of rows (rows, k), nearly.

        In single precision: the next step takes away what this one leaves.
        """
        features, own = self.single
        tiny = torch.finfo(features.dtype).tiny
        length = slope.norm(dim=0).clamp_min(tiny)
        curvature = curvature * self.sign.square()
        loudest = curvature.amax(0).clamp_min(tiny)
        curvature = (curvature / loudest).to(features)
        curvature = curvature * (curvature > _NO_CURVATURE)
        ridge = (self.strength / loudest).to(features)
        r = (slope / length).to(features)
        x, p, size = torch.zeros_like(r), r, r.square().sum(0)
        enough = _FLAT**2 * size
        for step in range(1, _STEPS + 1):
            along = (features @ p[:-1]).addcmul_(own, p[-1]).mul_(curvature)
            t = torch.cat([features.T @ along, (own * along).sum(0, keepdim=True)])
            t.addcmul_(p, ridge)
            far = size / (p * t).sum(0).clamp_min(tiny)
            x.addcmul_(p, far)
            r = r.addcmul(t, far, value=-1)
            before, size = size, r.square().sum(0)
            if step % _LOOKED_AT == 0 and bool((size <= enough).all()):
                break
            p = r.addcmul(p, size / before.clamp_min(tiny))
        newton: Tensor = x.to(slope) * (length / loudest)
        return newton

    def _weight(self, z: Tensor, softness: Tensor) -> Tensor:
        """What each row counts (rows, k)."""
        weight = torch.ones_like(z[:1, :1])
        if self.dropped is not None:
            weight = 1 / (1 + self.dropped * torch.exp((-z / softness).clamp_max(_NEAR)))
        if self.on is not None:
            likely = torch.sigmoid((z / softness).view(self.on.shape))
            at_either = likely / (likely.sum(0, keepdim=True) + _ON_BETWEEN)
            weight = weight * torch.where(self.on, at_either, 1.0).view(z.shape)
        return weight


def _size(z: Tensor) -> Tensor:
    """Root mean square (k,) of preactivations (rows, k)."""
    return z.square().mean(0).sqrt()


def _softplus(z: Tensor, weight: Tensor, softness: Tensor) -> Tensor:
    loss: Tensor = (weight * torch.nn.functional.softplus(-z / softness)).sum(0)
    return loss


def solve_definite(definite: Tensor, right: Tensor) -> Tensor:
    """Positive definite systems, by Cholesky: batched LU hangs in some builds of MKL."""
    solution: Tensor = torch.cholesky_solve(right, torch.linalg.cholesky_ex(definite).L)
    return solution
