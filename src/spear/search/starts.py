"""Guesses at missing samples, from many starts and from single rows, and the way to exact directions.

A guess is a direction q and a score for every row: the lower, the more certainly the row is off. The
exact direction is the kernel of rows that are certainly off. Where some of these are on after all,
sharpening.py takes longer and gets there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Side
from spear.search.conjugate import Rows, kernels_of, least_squares
from spear.search.deadline import Deadline
from spear.search.dual import RIDGE, BalancedProblem, SignRegression
from spear.search.kernels import first_of_each, unit, zero_margin
from spear.search.parallel import COLUMNS, cut, piece_length, worth_distributing
from spear.search.watch import Watch
from spear.tolerances import UNDECIDED

# Threshold of the shrinkage in units of a typical entry, and how much the signs move it. Hits per start
# hardly change from 0.2 to 0.3 and from 0.3 to 0.8 (docs/engine.md).
_SHRINK = 0.25
_SIGN_WEIGHT = 0.5
_NEARLY_ZERO = 0.15  # |entry|, relative to a typical one, that counts as nearly zero in the ranking
_SAME_COSINE = 0.9  # |cos| above which two results are the same
_COLUMNS = 128  # starts at a time if there are many, so that their data stays in the cache
# A step goes on in the direction of the last by this much. In 40 steps 89 % of the starts come near a
# sample (256 of 2000), where 8 % do without, and four times as many in a narrow layer (60 of 200).
_MOMENTUM = 0.8
_LOOKED_AT = 8  # steps between two looks at the clock and at the starts
_AT_REST = 0.1  # change in a step below which a start has all but come to rest
_MOST = 0.95  # share of the starts at rest: the last ones hardly ever arrive
ACTIVE = 1.0  # entries above this show a row that is on, however far above


def search_from_starts(
    problem: BalancedProblem,
    starts: int,
    steps: int,
    generator: torch.Generator,
    watch: Watch | None = None,
    *,
    ridge: float = RIDGE,
) -> tuple[Tensor, Tensor]:
    """Directions (r, k) near sparse ones, the best first, and how likely each row is on (rows, k).

    `ridge` holds c near q: less of it suits batches in which the two are far apart.
    """
    watch = watch or Watch()
    U = problem.U.float()
    back = (problem.U * problem.weights[:, None]).float().T.contiguous()
    signs = SignRegression(problem, torch.float32, ridge)
    search = _Search(U, back, signs, problem.weights.float(), steps, watch.deadline)
    q = _starts(U, starts, generator)
    work = 4 * U.numel() * starts * steps
    width = _COLUMNS if worth_distributing(work) else starts
    pieces = cut(width, q)
    results = watch.map(_descend, (search,), pieces, multiplications=work)
    q, score, nearly_zero = (torch.cat(part, -1) for part in zip(*results, strict=True))
    found = distinct(q, nearly_zero, 2 * problem.missing + 8)
    return q[:, found].double(), score[:, found].double()


@dataclass(frozen=True, eq=False)
class _Search:
    """What all starts share, in float32."""

    U: Tensor  # (rows, r)
    back: Tensor  # (r, rows) = U^T, weighed
    signs: SignRegression
    weights: Tensor  # (rows,)
    steps: int
    deadline: Deadline


def _descend(search: _Search, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From starts (r, k) to nearly sparse directions, scores of their rows, and scores of their own.

    q <- normalise(U^T shrink(U q, threshold)), with a lower threshold in rows where z says on.
    """
    U = search.U
    z, before = torch.zeros_like(U[:, :1]), q
    for step in range(1, search.steps + 1):
        ahead = unit(q + _MOMENTUM * (q - before), 0)
        values = U @ ahead  # (rows, k)
        size = values.abs()
        z = search.signs.read(ahead, size.clamp_max(ACTIVE))
        shrunk = (size - (_SHRINK - _SIGN_WEIGHT * z).clamp_min_(0)).clamp_min_(0)
        before, q = q, unit(search.back @ shrunk.mul_(values.sign()), 0)
        if step % _LOOKED_AT == 0:
            search.deadline.check()
            if float(((q - before).norm(dim=0) < _AT_REST).double().mean()) >= _MOST:
                break
    size = (U @ q).abs()
    return q, size + z, search.weights @ (size < _NEARLY_ZERO).float()


def guess_from_rows(problem: BalancedProblem) -> tuple[Tensor, Tensor]:
    """Guesses from single rows: few samples are active in row k of what is left.

    If only one is, the row is that sample: c = u_k / (u_k . h). If one dominates, the signs of H c are
    mostly its own. Such rows abound with few samples missing, and in uncentred batches. Without a bias
    either sign may be right.
    """
    biased = bool(problem.h.any())
    c = problem.U / (problem.U @ problem.h)[:, None] if biased else problem.U  # (rows, r)
    z = (problem.H @ c.T).amax(0)  # (rows, k): column k is the guess from row k
    z = z / z.square().mean(0).sqrt()
    found = distinct(unit(c).T, -(z.abs() < _NEARLY_ZERO).double().sum(0), len(c))
    q, z = unit(c).T[:, found], z[:, found]
    return (q, z) if biased else (torch.cat([q, q], 1), torch.cat([z, -z], 1))


def guess_from_signs(
    problem: BalancedProblem, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Guesses at preactivations alone: any z = H c, the loudest first, then `count` at random.

    What the found samples leave of H holds the missing ones only, exactly, because c . q = 0 rests on
    exact q. What they leave of U does not: their c along samples far fainter than they are shows in no
    sign. So the faint ones of a batch are guessed here: with one far louder than the rest any z is that
    sample's, up to its sign, and among a few a random mix is near each of them now and then.
    """
    r = problem.missing
    P, s, Vt = torch.linalg.svd(problem.H.mean(0), full_matrices=False)  # (rows, r), (r,), (r, r)
    one = torch.eye(r, dtype=P.dtype, device=P.device)
    drawn = torch.randn(r, count, generator=generator, dtype=P.dtype, device=generator.device)
    mixed = unit(torch.cat([one, -one, drawn.to(P.device)], 1), 0)
    c = Vt.T @ (mixed / s.clamp_min(torch.finfo(s.dtype).tiny)[:, None])
    return unit(c, 0), P @ mixed * len(P) ** 0.5


def _starts(U: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Sums and differences of two rows (r, count): each mixes the c of half the samples, and c ~ q."""
    pick = torch.randint(len(U), (2, count), generator=generator, device=generator.device)
    flip = torch.randint(2, (count, 1), generator=generator, device=generator.device) * 2 - 1
    first, second = unit(U)[pick.to(U.device)]
    return unit(first + second * flip.to(U)).T.contiguous()


def distinct(q: Tensor, score: Tensor, limit: int) -> Tensor:
    """Indices of at most `limit` columns by falling score, no two of them nearly parallel."""
    finite = q.isfinite().all(0) & (q.norm(dim=0) > 0.5)
    order = score.argsort(descending=True)
    order = order[finite[order]]
    ranked = q[:, order]
    chosen = first_of_each((ranked.T @ ranked).abs() >= _SAME_COSINE, limit)
    return order[torch.tensor(chosen, dtype=torch.int64, device=order.device)]


_SURPLUS = 1.25  # rows to solve a kernel from, relative to b: more make it well conditioned
_SURE_SHARE = 0.7  # of the rows whose sign says off, over several rounds
_PASSES = 6
SHARP_RIDGE = 0.1  # an exact pattern needs less prior than a guess
_QUICK_SHARE = 0.25  # of all rows, half of those that are off: well conditioned in a wide layer
_QUICK_PASSES = 3
_QUICK_STEPS = 60  # of conjugate gradients, in all passes
_QUICKLY = 1e-5  # how far the slope falls there
_VANISHES = 1e-3  # of a typical entry, in single precision
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


def kernels_near(
    side: Side, residual: BalancedProblem, q: Tensor, score: Tensor, watch: Watch | None = None
) -> Tensor:
    """`refine_to_kernel` of all guesses at once: quick, where hardly a row only seems to be off."""
    watch = watch or Watch()
    rows, b = side.white.shape
    work = 2 * rows * b * q.shape[1] * _QUICK_STEPS
    signs = SignRegression(residual, torch.float32, ridge=SHARP_RIDGE)
    step = piece_length(q.shape[1], work, COLUMNS)
    q = unit(residual.q_basis @ q, 0)
    pieces = cut(step, q, score)
    shared = unit(side.white), residual.c_basis.float(), signs, watch.deadline
    done = watch.map(_kernels_near, shared, pieces, multiplications=work)
    return torch.cat([side.white.new_zeros(0, b), *done])


def _kernels_near(  # noqa: PLR0917
    U: Tensor,
    c_basis: Tensor,
    signs: SignRegression,
    deadline: Deadline,
    q: Tensor,
    score: Tensor,
) -> Tensor:
    """Kernels (k', b) of the lowest rows of each guess, as far as these all vanish."""
    rows, b = U.shape
    few = min(rows, max(math.ceil(_SURPLUS * b) + 2, int(_QUICK_SHARE * rows)))
    shared, guess, score = Rows.of(U), q.float(), score.float()
    found = [q.T[:0]]
    for _ in range(_QUICK_PASSES):
        deadline.check()
        lowest = score.topk(few, dim=0, largest=False).indices
        kept = torch.zeros_like(score).scatter_(0, lowest, 1.0)
        left = -kept * (shared.single @ guess)
        guess = unit(guess + least_squares(shared.single, kept, left, guess, _QUICKLY).change, 0)
        size = (shared.single @ guess).abs()
        size /= size.square().mean(0).sqrt()
        level = (size * kept).amax(0)
        clean = (level <= _VANISHES).nonzero().flatten()
        if len(clean):
            zeros = (size <= level)[:, clean]  # all that vanish as these do hold it better
            kernel, settled = kernels_of(shared, zeros, guess[:, clean].to(q), deadline)
            found.append(kernel[:, settled].T)
        if len(clean) == guess.shape[1]:
            break
        others = (level > _VANISHES).nonzero().flatten()
        guess, size = guess[:, others], size[:, others]
        z = signs.read(c_basis.T @ guess, (4 * size).clamp_max(ACTIVE))
        score = 2 * size.clamp_max(ACTIVE) + z
    return torch.cat(found)


def refine_to_kernel(  # noqa: PLR0917
    side: Side,
    residual: BalancedProblem,
    q: Tensor,
    score: Tensor,
    watch: Watch | None = None,
    ranked: bool = False,
) -> Tensor:
    """Exact directions (k', b), white, from guesses q (r, k) and scores (rows, k), low where off.

    The kernel of the lowest rows is the direction, if they are all zeros and leave no second direction
    free. If not, its own zeros and the signs they imply say more than the guess did. If guesses are
    ranked, the best first, those after a piece that gave none are left out.
    """
    watch = watch or Watch()
    rows, b = side.white.shape
    if not q.shape[1]:
        return side.white.new_zeros(0, b)
    work = _SURPLUS * b**3 * q.shape[1] * _PASSES
    step = max(1, min(_AT_ONCE // (rows * b), piece_length(q.shape[1], work)))
    signs = SignRegression(residual, residual.H.dtype, ridge=SHARP_RIDGE)
    pieces = cut(step, unit(residual.q_basis @ q, 0), score)
    shared = side, residual.c_basis, signs, watch.deadline
    found = []
    for part in watch.map(_refine, shared, pieces, multiplications=work):
        found.append(part)
        if ranked and not len(part):
            break
    return torch.cat(found)


def _refine(  # noqa: PLR0917
    side: Side,
    c_basis: Tensor,
    signs: SignRegression,
    deadline: Deadline,
    q: Tensor,
    score: Tensor,
) -> Tensor:
    score = score.clone()  # others start from it, too
    rows, b = side.white.shape
    U = unit(side.white) * b**0.5  # rows of one size
    noise = side.zero * math.sqrt(rows)  # of a row, in units of its size and of a direction's
    few = min(rows, math.ceil(_SURPLUS * b) + 2)
    extra = torch.full((q.shape[1],), few, device=q.device)
    if side.round_of_row is not None:  # the lowest rows are those of few neurons, over and over
        extra = ((score < 0).sum(0) * _SURE_SHARE).long().clamp_min(few)
    kept = torch.zeros_like(score, dtype=torch.bool)  # zeros so far that leave a direction free
    done = torch.zeros_like(extra, dtype=torch.bool)
    # Is the second direction no noise? Beside a sample near the noise none exceeds what noise makes of
    # that sample, and rows are added as long as there are any; then what it makes of this one counts.
    apart = done.clone()
    for _ in range(_PASSES):
        deadline.check()
        i = (~done).nonzero().flatten()  # those still open
        if not len(i):
            break
        used = (kept[:, i].sum(0) + extra[i]).clamp_max(rows)
        kernel, other, second = _kernels(
            U, score[:, i].masked_fill(kept[:, i], -torch.inf), used, q[:, i]
        )
        along = (other / side.scales[:, None]).norm(dim=0)
        values = (side.basis @ unit(kernel / side.scales[:, None], 0)).abs()
        zeros = values <= zero_margin(side) * side.zero  # (rows, open)
        clean, free = zeros.sum(0) >= used, second <= UNDECIDED * noise / side.scales[-1]
        done[i] = clean & ~free
        apart[i] = torch.where(clean, second > UNDECIDED * noise * along, apart[i])
        # Rows that leave a second sample free are kept, and a few more tell the two apart; if a few are
        # too many, fewer. If there is nothing to keep yet, the kernel is the better guess.
        fallback = ~clean & kept[:, i].any(0)
        kept[:, i] |= zeros & clean & free
        extra[i] = torch.where(clean & free, 2 + b // 8, extra[i])
        extra[i] = torch.where(fallback, (extra[i] // 3).clamp_min(2), extra[i])
        extra[i] = torch.where(clean | fallback, extra[i], few)
        q[:, i] = torch.where(fallback, q[:, i], kernel)
        size = (U @ q[:, i]).abs()
        size = size / size.square().mean(0).sqrt()
        z = signs.read(c_basis.T @ q[:, i], (4 * size).clamp_max(ACTIVE))
        score[:, i] = torch.where(kept[:, i].any(0), z, 2 * size.clamp_max(ACTIVE) + z)
    return q[:, done | apart].T


def _kernels(
    U: Tensor, score: Tensor, used: Tensor, guess: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each column of scores, the vector (b,) that the `used` lowest rows annihilate best.

    If these leave several, the one nearest the guess. Also the second best (b,), and its singular
    value relative to the root mean square. By inverse iteration on Gram matrices: rounding comes later.
    """
    b = U.shape[1]
    rows = score.topk(int(used.max()), dim=0, largest=False).indices.T  # (k, t)
    A = U[rows] * (torch.arange(rows.shape[1], device=U.device) < used[:, None])[:, :, None]
    gram = A.mT @ A
    typical = gram.diagonal(dim1=1, dim2=2).mean(1)  # (k,)
    gram.diagonal(dim1=1, dim2=2).add_(1e-14 * typical[:, None])
    L = torch.linalg.cholesky_ex(gram).L
    other = torch.linspace(1, 2, b, dtype=U.dtype, device=U.device).sin().expand(len(A), b)
    x = torch.stack([guess.T, other], 2)  # (k, b, 2)
    for _ in range(3):
        x = torch.cholesky_solve(x, L)
        q = unit(x[:, :, :1], 1)
        y = x[:, :, 1:] - q * (q * x[:, :, 1:]).sum(1, keepdim=True)
        x = torch.cat([q, unit(y, 1)], 2)
    second = (A @ x[:, :, 1:]).square().sum((1, 2)) / typical
    return x[:, :, 0].T, x[:, :, 1].T, second.sqrt()
