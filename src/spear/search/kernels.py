"""Kernels of the rows in which a sample is off: exact directions, and how redundant their zeros are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Side
from spear.search.conjugate import Rows, kernels_of
from spear.search.deadline import NEVER, Deadline
from spear.tolerances import MARGIN, UNDECIDED, ZERO_DEVIATIONS

# A kernel of b-1 rows amplifies the update's noise by the condition of the submatrix: before rounding,
# entries up to this many zero levels may be zeros. Rounding throws out those that are not.
_MARGIN = 30.0
_MARGIN_NOISY = 2.0  # kernels of larger submatrices keep the noise down, and there is less room
_PASSES = 8  # of rounding; true directions settle in two to four
_OUTLIER = 7.0  # medians above which a row is no zero (4.7 standard deviations of Gaussian noise)
# A row that alone holds a direction has leverage 1, less a little noise; a sample's zero rows share the
# load (about b / zeros each).
_LEVERAGE_SLACK = 1e-3
_SINGLE_SLACK = 0.03  # a second singular value that single precision shows beyond doubt
_ROWS_SHOWN = 2  # zero rows a dimension that are enough to show how they hold a direction
_DRAWS = 8  # of noise: two of a thousand rows are parallel to 1e-3 in all of them once in 1e4 times
_LEAST_REST = 1e-6  # of a row beside the others: below, rounding decides
_INVERSE_STEPS = 4  # the smallest value settles in two, the second is then good to a few per cent
_AT_ONCE = 1 << 22  # entries of the largest tensor: 32 MB in float64
# A direction with less than this share of a unit vector adds no rank: rounding leaves directions
# good to 1e-5 or better, and independent ones of real batches stay above 1e-3.
INDEPENDENT = 1e-6
_MAX_INVERSE_GRAM = 1e12  # an inverse Gram matrix this large leaves a second direction free


def round_to_kernel(side: Side, candidate: Tensor) -> tuple[Tensor, Tensor] | None:
    """The exact direction near a candidate: the kernel of ALL its zero rows, not of b-1 of them.

    Overdetermined, so far more precise than the submatrix behind the candidate. Returns the unit
    direction (b,) and its zero rows (rows,), or None if the candidate has no such kernel.
    """
    values = (side.basis @ unit(candidate)).abs()
    found = _rounded(side, values <= zero_margin(side) * side.zero)
    if (
        found is None and side.row_factors is not None
    ):  # a faint sample is small where others are loud
        found = _rounded(side, values <= side.zero)
    return found


def _rounded(side: Side, zeros: Tensor) -> tuple[Tensor, Tensor] | None:
    """`round_to_kernel` from the rows (rows,) that may be zeros."""
    best, best_level = None, UNDECIDED * side.zero  # rounding is uneven: up to this much is seen
    for _ in range(_PASSES):
        kernel = _kernel(side, zeros)
        if kernel is None:
            return best
        q, values, level = kernel
        settled = values <= level
        if not torch.equal(settled, zeros):
            zeros = settled
            continue
        if level > best_level:
            return best
        best, best_level = (q, zeros), level
        if side.uneven:
            likely = _likely_zeros(side, q, zeros, values)
            if not torch.equal(likely, zeros):
                zeros = likely
                continue
        sharper = _without_outlier_rows(side, values, settled, level)
        if sharper is not None:
            best, best_level = sharper
            return best
        zeros = values <= _below_gap(values, level)  # rows above may be zeros of a sharper kernel
        if torch.equal(settled, zeros):
            return best
    return best


@dataclass(frozen=True, eq=False)
class Rounded:
    """A direction rounded to the kernel of all its zeros."""

    q: Tensor  # (b,) of unit length
    zeros: Tensor  # (rows,) bool
    white: Tensor  # (1, b), of unit length
    redundancy: int


def round_all(side: Side, candidates: Tensor, deadline: Deadline = NEVER) -> list[Rounded | None]:
    """Each of the white candidates (k, b), rounded; None where it is no direction.

    All at once. Where that is not enough (badly conditioned zeros, uneven rounding, noise, rounds),
    one by one.
    """
    results: list[Rounded | None] = [None] * len(candidates)
    one_by_one = list(range(len(candidates)))
    if not (side.uneven or side.noisy) and len(candidates):
        found = _round_together(side, candidates.T, deadline)
        one_by_one = found.unclear.nonzero().flatten().tolist()
        for j in (found.known & ~found.unclear).nonzero().flatten().tolist():
            white = unit(found.vectors[:, j] * side.scales)[None]
            results[j] = Rounded(found.vectors[:, j], found.zeros[:, j], white, 2)
    for j in one_by_one:
        deadline.check()
        rounded = round_to_kernel(side, candidates[j] / side.scales)
        if rounded is not None:
            q, zeros = rounded
            white = unit((q * side.scales)[None])
            results[j] = Rounded(q, zeros, white, redundancy(side, white[0], zeros))
    return results


@dataclass(eq=False)
class _Together:
    """Directions on their way to the kernels of all their zeros."""

    vectors: Tensor  # (b, k), of unit length
    zeros: Tensor  # (rows, k) bool
    level: Tensor  # (k,): entries below are zeros
    known: Tensor  # (k,) bool: is there a kernel with these zeros?
    unclear: Tensor  # (k,) bool: to be rounded one by one

    def keep(
        self, columns: Tensor, which: Tensor, vectors: Tensor, zeros: Tensor, level: Tensor
    ) -> None:
        """Take these in for some columns (k',), which (k',) of them: without asking the device."""
        self.vectors[:, columns] = torch.where(which, vectors, self.vectors[:, columns])
        self.zeros[:, columns] = torch.where(which, zeros, self.zeros[:, columns])
        self.level[columns] = torch.where(which, level, self.level[columns])
        self.known[columns] |= which


def _round_together(side: Side, white: Tensor, deadline: Deadline) -> _Together:
    """`round_to_kernel` of white candidates (b, k); what has no zeros to spare is unclear."""
    rows, white = Rows.of(side.white), white.clone()
    zeros = (side.basis @ unit(white / side.scales[:, None], 0)).abs() <= zero_margin(
        side
    ) * side.zero
    no = torch.zeros_like(white[0], dtype=torch.bool)
    highest = torch.full_like(white[0], UNDECIDED * side.zero)
    found = _Together(torch.zeros_like(white), zeros.clone(), highest, no, no.clone())
    open_ = (zeros.sum(0) >= len(white) - 1).nonzero().flatten()
    for _ in range(_PASSES):
        if not len(open_):
            break
        before = zeros[:, open_]
        kernel, settled = kernels_of(rows, before, white[:, open_], deadline)
        vectors = unit(kernel / side.scales[:, None], 0)
        values = (side.basis @ vectors).abs()
        median = values.masked_fill(~before, torch.nan).nanmedian(0).values
        level = (_OUTLIER * median).clamp_min(side.zero)
        now = values <= level
        same = settled & (now == before).all(0)
        found.unclear[open_] |= ~settled | (same & (level > side.zero))  # some may be no zeros
        good = same & (level <= found.level[open_])
        found.keep(open_, good, vectors, before, level)
        wider = values <= _below_gaps(values, level)  # rows above may be zeros of a sharper kernel
        following = torch.where(same, wider, now)
        zeros[:, open_], white[:, open_] = following, kernel
        goes_on = settled & (~same | (good & (wider != before).any(0)))
        open_ = open_[goes_on & (following.sum(0) >= len(white) - 1)]
    found.unclear[open_] |= ~found.known[open_]  # else there are zeros that come and go
    certain = (found.known & ~found.unclear).nonzero().flatten()
    kernels = unit(found.vectors[:, certain] * side.scales[:, None], 0)
    spare = _have_spare_zeros(side, kernels, found.zeros[:, certain], deadline)
    found.unclear[certain[~spare]] = True
    return found


def _below_gaps(values: Tensor, level: Tensor) -> Tensor:
    """For each column (rows, k), the value just below the largest jump from its level (k,) upwards."""
    steps = torch.cat([level[None], torch.maximum(values, level)]).sort(0).values
    return steps.gather(0, (steps[1:] / steps[:-1]).argmax(0, keepdim=True))


def _have_spare_zeros(side: Side, white: Tensor, zeros: Tensor, deadline: Deadline) -> Tensor:
    """Which white directions (b, k) can do without any two zero rows (rows, k), beyond doubt.

    As `redundancy`, but of a part of the rows (more of them hold a direction no worse), and seen in a
    few draws: of noise e in the rows A, their span leaves r = e - A A^+ e, with covariance 1 - P. A row
    that alone holds a direction has r_i = 0 in every draw; of two that hold one together, r_j is a
    multiple of r_i in every draw.
    """
    answers = [torch.zeros(0, dtype=torch.bool, device=zeros.device)]
    if not white.shape[1]:
        return answers[0]
    b, rows, generator = len(white), side.white.float(), torch.Generator().manual_seed(0)
    most = min(int(zeros.sum(0).max()), _ROWS_SHOWN * b)
    rank = 1 + torch.randperm(len(rows), generator=generator).to(zeros.device)
    noise = torch.randn(most, _DRAWS, generator=generator).to(rows)
    step = max(1, _AT_ONCE // (most * max(b, most)))
    parts = zip(torch.split(white.T.to(rows), step), torch.split(zeros.T, step), strict=True)
    for q, zero in parts:
        deadline.check()
        drawn, index = (zero * rank).topk(most, dim=1)  # (k, most): any of its zeros
        there = (drawn > 0)[:, :, None]
        A = rows[index] * there  # (k, most, b)
        L, failed = torch.linalg.cholesky_ex(A.mT @ A + q[:, :, None] * q[:, None])
        r = noise - A @ torch.cholesky_solve(A.mT @ noise, L)  # (k, most, draws)
        alone = r.square().mean(2).masked_fill(~there[:, :, 0], 1.0).amin(1)
        r = unit(r) * there
        together = (r @ r.mT).square_()
        together.diagonal(dim1=1, dim2=2).zero_()
        second = _smallest_value(L, q)
        answers.append(
            (failed == 0)
            & (alone > _LEVERAGE_SLACK)
            & (together.amax((1, 2)) < 1 - _LEVERAGE_SLACK)
            & (second > _SINGLE_SLACK)
            & (second * side.scales[-1] > MARGIN * side.free)
        )
    return torch.cat(answers)


def _smallest_value(L: Tensor, beside: Tensor) -> Tensor:
    """Smallest singular values (k,) of rows with Cholesky factors (k, b, b), beside vectors (k, b)."""
    x = torch.linspace(1, 2, L.shape[1], dtype=L.dtype, device=L.device).sin().expand_as(beside)
    size = torch.ones_like(x[:, :1])
    for _ in range(_INVERSE_STEPS):
        x = x - beside * (x * beside).sum(1, keepdim=True)
        x = torch.cholesky_solve(unit(x)[:, :, None], L)[:, :, 0]
        size = x.norm(dim=1)
    return size.rsqrt()


def _likely_zeros(side: Side, q: Tensor, zeros: Tensor, values: Tensor) -> Tensor:
    """The zeros (rows,) as regression sees them: over rounds, a few rows may fix a direction roughly.

    With the leverage P of every row on the zeros, noise moves another row by sqrt(P) deviations, and
    leaves sqrt(1 - P) in a zero row. A row of high leverage that is no zero turns the direction until
    it is one: it shows by what it leaves. The worst of these goes first, then rows in reach come in.
    """
    R = torch.linalg.qr(torch.cat([side.basis[zeros], q[None]]), mode="r").R
    P = torch.linalg.solve_triangular(R.T, side.basis.T, upper=False).square().sum(0)
    in_deviations = values / (side.zero / ZERO_DEVIATIONS)
    left = in_deviations / (1 - P).clamp_min(_LEAST_REST).sqrt()
    worst = int(left.masked_fill(~zeros, 0.0).argmax())
    if float(left[worst]) > UNDECIDED:
        dropped = zeros.clone()
        dropped[worst] = False
        return dropped
    likely: Tensor = zeros | (in_deviations <= ZERO_DEVIATIONS * P.sqrt())
    return likely


def _without_outlier_rows(
    side: Side, values: Tensor, zeros: Tensor, level: float
) -> tuple[tuple[Tensor, Tensor], float] | None:
    """The same direction without a row or two that are nearly, but not quite, zero.

    Such a row turns the kernel a little, at the cost of every zero: if the level falls by half without
    the largest values, they were no zeros.
    """
    if level <= side.zero:
        return None
    tight = zeros & (values <= max(side.zero, 2 * float(values[zeros].median())))
    kernel = _kernel(side, tight)
    if kernel is None or kernel[2] > level / 2:
        return None
    wide = _kernel(side, kernel[1] <= UNDECIDED * side.zero)  # zeros that the few rows fixed badly
    if wide is not None and wide[2] <= level / 2:
        kernel = wide
    q, values, level = kernel
    return (q, values <= level), level


def _kernel(side: Side, zeros: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """The unit vector that comes closest to vanishing on the rows, |basis q|, and its zero level."""
    b = side.basis.shape[1]
    if int(zeros.sum()) < b - 1:
        return None
    q, second = smallest_singular(side.basis[zeros])
    if b > 1 and second <= side.free:
        return None  # more than one direction vanishes there
    values = (side.basis @ q).abs()
    median = float(values[zeros].median()) if bool(zeros.any()) else 0.0
    return q, values, max(side.zero, _OUTLIER * median)


def smallest_singular(A: Tensor) -> tuple[Tensor, float]:
    """The right singular vector (b,) of the smallest singular value, and the second smallest value.

    By inverse iteration on the triangle of a QR decomposition: as exact as an SVD (the condition number
    is not squared) and ten times faster. The second value is approached from above.
    """
    rows, b = A.shape
    if rows < b or b == 1:
        _, s, Vt = torch.linalg.svd(A, full_matrices=True)
        return Vt[-1], float(s[b - 2]) if b > 1 else float("inf")
    R = torch.linalg.qr(A, mode="r").R
    # A singular triangle (a clean kernel) is nudged by one rounding, as LAPACK's own solvers do.
    nudge = torch.finfo(A.dtype).eps * float(R.abs().max())
    diagonal = R.diagonal()
    diagonal.copy_(torch.where(diagonal.abs() < nudge, nudge, diagonal))
    x = torch.linspace(1, 2, 2 * b, dtype=A.dtype, device=A.device).view(2, b).T.sin()  # (b, 2)
    for _ in range(_INVERSE_STEPS):
        x = torch.linalg.solve_triangular(R.T, x, upper=False)
        x = torch.linalg.qr(torch.linalg.solve_triangular(R, unit(x, 0), upper=True)).Q
    return x[:, 0], float((R @ x[:, 1]).norm())


def unit(vectors: Tensor, dim: int = -1) -> Tensor:
    """Vectors of length one along a dimension, however small they were."""
    lengths: Tensor = vectors.norm(dim=dim, keepdim=True)
    return vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny)


def sparsest_independent(vectors: Tensor, sparsity: Tensor) -> list[int]:
    """Stage one (Spielman et al.): go from sparse to dense, keep what raises the rank.

    Args:
        vectors: (b, c) unit columns.
        sparsity: (c,) larger is taken first.
    """
    b, vectors = len(vectors), vectors.cpu()  # one after the other: many questions to a device
    span, chosen = vectors.new_zeros(b, b), list[int]()
    for j in torch.argsort(sparsity, descending=True, stable=True).tolist():
        known = span[:, : len(chosen)]
        rest = vectors[:, j] - known @ (known.T @ vectors[:, j])
        rest = rest - known @ (known.T @ rest)  # twice is enough (Kahan)
        if float(rest.norm()) > INDEPENDENT:
            span[:, len(chosen)] = rest / rest.norm()
            chosen.append(j)
        if len(chosen) == b:
            break
    return chosen


def first_of_each(same: Tensor, limit: int | None = None) -> list[int]:
    """Indices, in order, of those that are not the same (k, k) bool as one that was taken before."""
    same, chosen = same.cpu(), list[int]()
    open_ = torch.ones(len(same), dtype=torch.bool)
    for i in range(len(same)):
        if len(chosen) == limit:
            break
        if bool(open_[i]):
            chosen.append(i)
            open_ &= ~same[i]
    return chosen


def scale(C: Tensor, bias_coordinates: Tensor) -> Tensor:
    """FixScale: rows of the inverse of unscaled directions, scaled so that c . (Q 1) = 1.

    The paper's s = Qbar^-1 L^-L dL/db multiplies the columns of Qbar, so it divides the rows of the
    inverse. A row without scale (s = 0) is no sample and comes back as NaN.
    """
    s = C @ bias_coordinates  # (b,)
    return C / torch.where(s == 0, torch.nan, s)[:, None]


def _below_gap(values: Tensor, level: float) -> float:
    """The value just below the largest jump from the zero level upwards."""
    above = values[values > level].sort().values
    steps = torch.cat([above.new_tensor([level]), above])
    if not len(above):
        return level
    return float(steps[int((steps[1:] / steps[:-1]).argmax())])


def zero_margin(side: Side) -> float:
    """How many zero levels an entry of an unrounded candidate may reach and still be zero."""
    return _MARGIN_NOISY if side.noisy else _MARGIN


def certain_zeros(side: Side, zeros: Tensor, white: Tensor) -> Tensor:
    """Zeros (k, rows) of white directions (k, b) as what they say of signs: a half where nothing.

    In rounds that a sample took no part in it has no gradient, whichever neurons it would switch on;
    and in rows of far louder samples it drowns.
    """
    if side.row_factors is not None:
        hidden = side.hidden(unit(white / side.scales).T, zeros.T)
        assert hidden is not None
        return torch.where(hidden.T, 0.5, zeros.to(side.basis)) if bool(hidden.any()) else zeros
    if side.round_of_row is None:
        return zeros
    sure = zeros.to(side.basis)
    for each in range(int(side.round_of_row.max()) + 1):
        rows = side.round_of_row == each
        absent = zeros[:, rows].all(1)
        sure[:, rows] = torch.where(absent[:, None], 0.5, sure[:, rows])
    return sure


def redundant(side: Side, directions: Tensor, zeros: Tensor) -> Tensor:
    """Directions that their zeros still determine if any one zero row is left out.

    A mix of samples is zero where all of them are, and in the few more rows it was solved for: without
    one of these it is free to turn. A sample's own zeros hold it many times over. On real batches this
    tells the two apart where sparsity does not, since neurons that are off for all samples make every
    mix look sparse. (The paper filters by sparsity alone and leaves the rest to lambda.)

    Args:
        directions: (k, b) in the white basis, of unit length.
        zeros: (k, rows) bool.
    """
    answers = [torch.zeros(0, dtype=torch.bool, device=zeros.device)]
    step = max(1, _AT_ONCE // side.white.numel())
    for q, pattern in zip(torch.split(directions, step), torch.split(zeros, step), strict=True):
        inverse = _inverse_gram(side, q, pattern)
        leverage = ((side.white @ inverse) * side.white).sum(-1)  # (k, rows)
        held = ((leverage < 1 - _LEVERAGE_SLACK) | ~pattern).all(1)
        answers.append(held & (inverse.abs().amax((1, 2)) < _MAX_INVERSE_GRAM))
    return torch.cat(answers)


def redundancy(side: Side, direction: Tensor, zeros: Tensor) -> int:
    """How many zero rows, whichever they are, a direction can do without: 0, 1, or 2 and more.

    After millions of samples one row beyond those solved for may be zero by accident; two are not.

    Without a row a, the direction x that it held has the size sqrt(P_aa (1 - P_aa)) / |x| in the other
    zero rows, where P projects onto the span of all of them. Over rounds, where the rows of a neuron
    differ by little, and beside far fainter samples, which a row or two of their own hold, that may be
    a small share of the row and still far above the noise.
    """
    A = side.white[zeros]  # (zeros, b)
    inverse = _inverse_gram(side, direction[None], zeros[None])[0]
    if float(inverse.abs().max()) >= _MAX_INVERSE_GRAM or _leaves_another(side, inverse, zeros):
        return 0
    lifted = A @ inverse
    rest = 1 - (lifted * A).sum(1)  # (zeros,): what remains of a row beside all the others
    # P_ij^2 <= (1 - rest_i)(1 - rest_j), so two rows with half of each left leave enough of each other.
    heavy = (rest < 0.5 + _LEVERAGE_SLACK).nonzero().flatten()
    held_by = lifted / side.scales  # (zeros, b): x of every row, as a unit of noise has it
    own, noise = rest[heavy], side.noise_of_rows
    length = held_by.square().sum(1)
    held = own > _LEVERAGE_SLACK
    if side.uneven:
        held |= own * (1 - own) > noise**2 * length[heavy]
    if not bool(held.all()):
        return 0
    P = lifted[heavy] @ A.T  # (heavy, zeros)
    both = own[:, None] * rest - P.square()  # what remains of two rows beside all the others
    root = (((own[:, None] - rest) / 2).square() + P.square()).sqrt()
    least = both / ((own[:, None] + rest) / 2 + root)  # of a mix v a_i + w a_j of the two rows
    v, w = P, own[:, None] - least
    mixed = v.square() * length[heavy, None] + w.square() * length
    mixed += 2 * v * w * (held_by[heavy] @ held_by.T)
    above = least * (1 - least) * (v.square() + w.square()) > noise**2 * mixed
    enough = both > _LEVERAGE_SLACK**2
    # Noise in a thousand rows may be more than a millionth of what two rows hold: it holds nothing.
    held = above | enough if side.uneven else above & enough
    held[torch.arange(len(heavy), device=held.device), heavy] = True  # no row is two
    return 2 if bool(held.all()) else 1


def _leaves_another(side: Side, inverse: Tensor, zeros: Tensor) -> bool:
    """Do all the zero rows vanish in a second direction, too, given their inverse Gram matrix (b, b)?

    As of two samples that are much alike, in the rows in which both are off: each of their mixes has
    hundreds of such zeros, any two of which it can do without.
    """
    if len(inverse) == 1:
        return False
    x = inverse[int(inverse.diagonal().argmax())]  # by inverse iteration
    for _ in range(_INVERSE_STEPS):
        x = unit(inverse @ unit(x))
    return bool(((side.basis[zeros] @ unit(x / side.scales)).abs() <= side.zero).all())


def _inverse_gram(side: Side, directions: Tensor, zeros: Tensor) -> Tensor:
    """Inverse Gram matrices of the zero rows (k, b, b), with the direction filling their kernel."""
    gram = (side.white.T * zeros[:, None].to(side.white)) @ side.white
    inverse: Tensor = torch.linalg.inv_ex(
        gram + directions[:, :, None] * directions[:, None, :]
    ).inverse
    return inverse
