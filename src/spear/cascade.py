"""The default finder: both halves of a sample searched together, then rounded, read, taken away.

A round of the cascade, in the dimensions of what is still missing (patterns.py):

1. seek    many starts at once: shrink U q towards sparsity, with a threshold in each row that the
           signs of H c raise or lower; read the signs from the pattern of U q. A few GEMMs a step.
2. settle  for each distinct result: the kernel of the rows that are surely off, until it is exact.
3. round   the kernel of ALL its zero rows, at the update's noise level (directions.py).
4. read    c of every sample found, from its pattern alone.
5. deflate the missing samples live in the space that the found ones leave: a smaller problem with as
           many rows, hence easier. The first round finds most samples, the next ones the rest.

Where the paper needs 2^b submatrices, a start succeeds with a probability of 0.3 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.directions import Directions, Watch, looseness, unit
from spear.errors import InvalidOption
from spear.factors import UNDECIDED, Factors, Side
from spear.patterns import (
    AGREES,
    Balanced,
    Halves,
    Signs,
    agreement,
    balance,
    both_halves,
    trusted,
    without,
)
from spear.pool import Pool
from spear.sampling import Draw, SamplingFinder, kernels

# Threshold of the shrinkage in units of a typical entry, and how much the signs move it. From 0.2 to
# 0.3 and 0.3 to 0.8 the hits per start are much the same (docs/algorithm.md).
_SHRINK = 0.25
_TRUST = 0.5
_SMALL = 0.15  # |entry| of a typical 1 that counts as nearly zero when results are ranked
_SAME = 0.9  # |cos| above which two results are one
_ACTIVE = 1.0  # entries above this show a row that is on, however much above
# Rows a kernel is first solved from: a quarter more than needed make it well conditioned.
_SURPLUS = 1.25
_PASSES = 6
_BLOCKS = 512  # b x b inverses at a time when sampling
# Up to this size (b^2 rows) it is worth trying to swap in directions that were not vouched for.
_SWAPPED = 1 << 21
_CLUSTERS = 16  # guesses at a shared pattern
_EXCESS = 3  # rows beyond the rank, which no accident explains
_FEW = 4  # missing samples up to which single rows are tried first
_SHARP_RIDGE = 0.1  # an exact pattern needs less of a prior than a guess
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True)
class CascadeFinder:
    """The joint search for zeros and signs.

    Args:
        starts: per missing sample and round; at least 128 altogether.
        steps: of the search in a round; twice as many once rounds find nothing.
        patience: rounds without a new direction before it hands over to the paper's sampling, of rows
            that are likely off for the missing samples.
        max_samples: submatrices that may then be sampled; 0 gives up instead.
    """

    starts: int = 8
    steps: int = 80
    patience: int = 6
    max_samples: int = 200_000

    def __post_init__(self) -> None:
        for name in ("starts", "steps", "patience"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.max_samples < 0:
            raise InvalidOption(f"expected max_samples >= 0, got {self.max_samples}")

    def satisfied(self, factors: Factors, match: float) -> bool:
        return SamplingFinder().satisfied(factors, match)

    def search(
        self, factors: Factors, *, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        if factors.noisy or factors.view.relu == "before":
            yield from SamplingFinder().search(factors, generator=generator, watch=watch)
            return
        side, whole, b = factors.outputs, both_halves(factors), factors.b
        pool = Pool(side, threshold=b / side.size, watch=watch)
        missing, idle = whole, 0
        while missing.missing and not watch.expired:
            residual = balance(missing)
            if idle < self.patience:
                grown = self._round(pool, residual, idle, generator, watch)
            elif idle == self.patience and _span_cluster(pool, whole, watch):
                yield pool.snapshot()
                return
            elif watch.count("submatrices", 0) < min(self.max_samples, _all_of(side)):
                grown = _sample(pool, residual, generator, watch)
            else:
                watch.remark(_stuck(residual, b, watch))
                if b * b * len(side.white) <= _SWAPPED:
                    yield pool.snapshot()
                return
            watch.report("search", found=b - residual.missing, batch_size=b)
            idle = 0 if grown else idle + 1
            if grown:
                yield pool.snapshot(reserve=False)
                with watch.stage("read"):
                    missing = without(whole, *trusted(whole, *pool.firm()))

    def _round(
        self, pool: Pool, residual: Balanced, idle: int, generator: torch.Generator, watch: Watch
    ) -> bool:
        """One round of the cascade; is there a new direction? More starts where there was none."""
        watch.count("rounds")
        by_rows = (idle + (residual.missing <= _FEW)) % 2 == 1
        with watch.stage("seek"):
            if by_rows:
                guesses = peel(residual)
            else:
                starts = max(128, self.starts * residual.missing) << min(idle // 2, 3)
                guesses = seek(residual, starts, self.steps << min(idle // 2, 1), generator)
                watch.count("starts", starts)
        with watch.stage("settle"):
            candidates = settle(pool.side, residual, *guesses)
        with watch.stage("round"):
            found = pool.rounded(candidates)
        with watch.stage("vouch"):
            return pool.keep(found, vouched(residual, found, by_rows))


def _all_of(side: Side) -> int:
    """Enough draws to see every submatrix of a small layer."""
    rows, b = side.white.shape
    return 20 * math.comb(rows, b - 1)


def vouched(residual: Balanced, found: Directions, doubtful: bool) -> Tensor:
    """Which directions (c,) are samples: they have spare zeros and, where in doubt, fitting signs.

    With few samples missing, signs that fit in every row are enough: near-duplicates of an image
    differ in a row or two, and leave each other no zeros to spare.
    """
    firm = found.firmness > 0
    ask = firm & (doubtful | (found.firmness < 2)) | (residual.missing <= _FEW)
    white = found.vectors[:, ask] * found.side.scales[:, None]
    fits = agreement(residual, unit((residual.c_basis.T @ white).T), found.zeros[:, ask].T)
    firm[ask] = (firm[ask] & (fits >= AGREES)) | (fits == 1)
    return firm


def _sample(pool: Pool, residual: Balanced, generator: torch.Generator, watch: Watch) -> bool:
    """The paper's sampling, of rows that are likely off for a sample that is missing."""
    with watch.stage("sample"):
        draw = Draw(_BLOCKS, weights=residual.weights)
        b = pool.side.white.shape[1]
        candidates, count = kernels(pool.side, b - 1, generator, draw)
        watch.count("submatrices", count)
        return pool.add(candidates)


def _stuck(residual: Balanced, b: int, watch: Watch) -> str:
    return (
        f"the cascade found {b - residual.missing} of {b} samples and got stuck on the last "
        f"{residual.missing}: {watch.count('starts', 0):,} starts and "
        f"{watch.count('submatrices', 0):,} submatrices gave no other direction"
    )


def _span_cluster(pool: Pool, whole: Halves, watch: Watch) -> bool:
    """Are the missing samples nearly the same? Then what they span completes the pool."""
    q, c = trusted(whole, *pool.firm(spare=1))
    span = cluster(pool.side, balance(without(whole, q, c)))
    if not len(span) or not pool.span(evenly(q, span, whole.h)):
        return False
    watch.remark(
        f"{len(span)} samples have the same zeros, as near-duplicates do, and mix freely: only what "
        "they span together is known"
    )
    return True


def evenly(q: Tensor, span: Tensor, h: Tensor) -> Tensor:
    """A rotation of the span (r, b) beside the found q (k, b) that weighs its members alike.

    All members then come out as nearly the same picture, the cluster's mean.
    """
    c = torch.linalg.inv(torch.cat([q, span]).T)[len(q) :]  # (r, b), dual to the span
    weight = unit(c @ h)
    turn = weight - torch.full_like(weight, len(span) ** -0.5)
    if float(turn.norm()) < torch.finfo(turn.dtype).eps:
        return span
    turned: Tensor = span - 2 * torch.outer(unit(turn), unit(turn) @ span)  # Householder
    return turned


def cluster(side: Side, residual: Balanced) -> Tensor:
    """Directions (r, b), white, that span the missing samples; none where they share no pattern.

    Samples with one pattern, say near-duplicates of an image, mix freely: no zeros tell them apart.
    But the rows in which they are off leave exactly their span free, and with it the inputs of all
    the other samples are known.
    """
    b = side.white.shape[1]
    needed = b - residual.missing
    _, guesses = peel(residual)
    for z in guesses[:, :_CLUSTERS].T:
        for share in (0.9, 0.7, 0.5):
            off = z.argsort()[: int(share * float((z < 0).sum()))]
            if len(off) < needed + _EXCESS:
                break
            _, s, Vt = torch.linalg.svd(side.basis[off], full_matrices=True)
            if int((s > UNDECIDED * side.zero).sum()) == needed:
                span: Tensor = torch.linalg.qr((Vt[needed:] * side.scales).T).Q.T
                return span
    return side.white.new_zeros(0, b)


def seek(
    halves: Balanced, starts: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Directions (r, k) near sparse ones, the best first, and how likely each row is on (rows, k).

    q <- normalise(U^T shrink(U q, threshold)), with a threshold that is lower in rows where z says on.
    """
    U = halves.U.float()
    back = (halves.U * halves.weights[:, None]).float().T.contiguous()
    signs = Signs(halves, torch.float32)
    q = _starts(U, starts, generator)
    z = torch.zeros_like(U[:, :0])
    for _ in range(steps):
        values = U @ q  # (rows, k)
        size = values.abs()
        z = signs.read(q, size.clamp_max(_ACTIVE))
        shrunk = (size - (_SHRINK - _TRUST * z).clamp_min_(0)).clamp_min_(0)
        q = unit(back @ shrunk.mul_(values.sign()), 0)
    size = (U @ q).abs()
    nearly_zero = halves.weights.float() @ (size < _SMALL).float()
    found = distinct(q, nearly_zero, 2 * halves.missing + 8)
    return q[:, found].double(), (size + z)[:, found].double()


def peel(halves: Balanced) -> tuple[Tensor, Tensor]:
    """Guesses from single rows: in row k of what is left only a few samples are active.

    Where it is one, the row is that sample: c = u_k / (u_k . h). Where one dominates, the signs of
    H c are mostly its own. With few samples missing, and in uncentred batches, such rows abound.
    """
    c = halves.U / (halves.U @ halves.h)[:, None]  # (rows, r)
    z = halves.H @ c.T  # (rows, k): column k is the guess from row k
    z = z / z.square().mean(0).sqrt()
    found = distinct(unit(c).T, -(z.abs() < _SMALL).double().sum(0), len(c))
    return unit(c).T[:, found], z[:, found]


def _starts(U: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Sums and differences of two rows (r, count): each row mixes the c of half the samples, c ~ q."""
    pick = torch.randint(len(U), (2, count), generator=generator, device=generator.device)
    flip = torch.randint(2, (count, 1), generator=generator, device=generator.device) * 2 - 1
    first, second = unit(U)[pick.to(U.device)]
    return unit(first + second * flip.to(U)).T.contiguous()


def distinct(q: Tensor, score: Tensor, limit: int) -> Tensor:
    """Indices of at most `limit` columns, by falling score, no two of which are nearly parallel."""
    finite = q.isfinite().all(0) & (q.norm(dim=0) > 0.5)
    order = score.argsort(descending=True)
    order = order[finite[order]]
    ranked = q[:, order]
    open_ = torch.ones(len(order), dtype=torch.bool, device=q.device)
    chosen: list[int] = []
    while len(chosen) < limit and bool(open_.any()):
        i = int(open_.int().argmax())
        chosen.append(i)
        open_ &= (ranked.T @ ranked[:, i]).abs() < _SAME
        open_[i] = False
    return order[chosen]


def settle(side: Side, residual: Balanced, q: Tensor, score: Tensor) -> Tensor:
    """Exact directions (k', b), white, from guesses of q (r, k) and a score (rows, k): low is off.

    The kernel of the lowest rows is the direction, if they are all zeros and leave no second
    direction free; if not, its own zeros, and the signs they imply, say more than the guess did.
    """
    rows, b = side.white.shape
    if not q.shape[1]:
        return side.white.new_zeros(0, b)
    step = max(1, _AT_ONCE // (rows * b))
    signs = Signs(residual, residual.H.dtype, ridge=_SHARP_RIDGE)
    parts = [
        _settle(side, residual, signs, unit(residual.q_basis @ q_i, 0), score_i)
        for q_i, score_i in zip(torch.split(q, step, 1), torch.split(score, step, 1), strict=True)
    ]
    return torch.cat(parts)


def _settle(side: Side, residual: Balanced, signs: Signs, q: Tensor, score: Tensor) -> Tensor:
    rows, b = side.white.shape
    U = unit(side.white) * b**0.5  # rows of one size
    # What noise makes of a row at worst, in units of its size.
    noise = side.zero * math.sqrt(rows) / float(side.scales[-1])
    extra = torch.full((q.shape[1],), min(rows, math.ceil(_SURPLUS * b) + 2), device=q.device)
    kept = torch.zeros_like(score, dtype=torch.bool)  # zeros so far, which leave a direction free
    done = torch.zeros_like(extra, dtype=torch.bool)
    for _ in range(_PASSES):
        i = (~done).nonzero().flatten()  # those still open
        if not len(i):
            break
        used = (kept[:, i].sum(0) + extra[i]).clamp_max(rows)
        kernel, second = _kernels(U, score[:, i].masked_fill(kept[:, i], -torch.inf), used, q[:, i])
        values = (side.basis @ unit(kernel / side.scales[:, None], 0)).abs()
        zeros = values <= looseness(side) * side.zero  # (rows, open)
        clean, free = zeros.sum(0) >= used, second <= UNDECIDED * noise
        done[i] = clean & ~free
        # Rows that leave a second sample free are kept, and a few more tell the two apart. Where a
        # few are too many, fewer; where there is nothing to keep yet, the kernel is the better guess.
        fallback = ~clean & kept[:, i].any(0)
        kept[:, i] |= zeros & clean & free
        extra[i] = torch.where(clean & free, 2 + b // 8, extra[i])
        extra[i] = torch.where(fallback, (extra[i] // 3).clamp_min(2), extra[i])
        q[:, i] = torch.where(fallback, q[:, i], kernel)
        size = (U @ q[:, i]).abs()
        size = size / size.square().mean(0).sqrt()
        z = signs.read(residual.c_basis.T @ q[:, i], (4 * size).clamp_max(_ACTIVE))
        score[:, i] = torch.where(kept[:, i].any(0), z, 2 * size.clamp_max(_ACTIVE) + z)
    return q[:, done].T


def _kernels(U: Tensor, score: Tensor, used: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """For each column of scores, the vector (b,) that the `used` lowest rows annihilate best.

    Where these leave several, the one nearest the guess. Also the second smallest singular value, in
    units of the root mean square one. By inverse iteration on Gram matrices: rounding comes later.
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
    return x[:, :, 0].T, second.sqrt()
