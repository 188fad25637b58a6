"""From guesses to exact directions where many rows only seem to be off.

Iteratively reweighted least squares: a row counts by how small its entry is, and by how likely its sign
says off. Rows that only seem off lose their weight one by one, where the kernel of the lowest rows
(`refine_to_kernel`) fails with the first of them. What is nearly zero then is trimmed: the row that
fits worst is left out, until the others vanish together. That is needed after local training, which
switches neurons on between its ends, and in narrow layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spear.factors import Side
from spear.search.deadline import Deadline
from spear.search.dual import BalancedProblem, SignRegression
from spear.search.kernels import first_of_each, unit, zero_margin
from spear.search.parallel import cut
from spear.search.starts import ACTIVE, SHARP_RIDGE, distinct
from spear.search.watch import Watch

# Entries up to this, in units of a typical one, count as zeros. From coarse to fine in 24 steps, which
# reach a quarter more samples than 12, and as many as 40. These and the next: two batches each.
_COARSE, _FINE, _STEPS = 0.3, 1e-3, 24
_NEARLY_ZERO = [_COARSE * (_FINE / _COARSE) ** (i / (_STEPS - 1)) for i in range(_STEPS)]
_TRIMMED = 0.1  # entries up to this are trimmed: with 0.2, rows that are on win
_SIGN_SOFTNESS = 0.3  # of a typical preactivation: 0.6 reaches a third fewer samples
_ROWS = 2  # that may be zeros, relative to b: 1.5 reaches a third fewer, 3 no more
_PER_SAMPLE, _FEWEST = 8, 128  # guesses that are sharpened
_APART = 0.5  # how far copies of a guess are turned; in one batch 0.3 and 0.8 hit less often
_LEAST_REST = 1e-3  # of a row, beside its leverage
_AS_BAD, _AT_A_TIME = 0.5, 16  # of the worst row; of the rows that may still go, in one step
_SAME = 1e-4  # 1 - |cos| of guesses that came to one end
_DEFINITE = 1e-9  # of the squared rows: keeps Cholesky definite
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


def sharpen(  # noqa: PLR0917
    side: Side,
    residual: BalancedProblem,
    q: Tensor,
    score: Tensor,
    generator: torch.Generator,
    watch: Watch,
) -> Tensor:
    """White directions (k', b) with zeros to spare, from guesses q (r, k) and scores (rows, k), low
    where off.

    What is left beside the samples found is known as well as these could be read, so that a guess may
    be off in all b dimensions: if there are few guesses, copies are turned a little, each its own way.
    """
    b = side.white.shape[1]
    most = max(_FEWEST, _PER_SAMPLE * residual.missing)
    q = unit(residual.q_basis @ q, 0)
    found = distinct(q, -torch.arange(q.shape[1], device=q.device), most)
    q, score = q[:, found], score[:, found]
    if q.shape[1]:
        copies = max(1, _FEWEST // q.shape[1])
        drawn = torch.randn(
            b,
            q.shape[1] * (copies - 1),
            generator=generator,
            dtype=q.dtype,
            device=generator.device,
        )
        turned = unit(q.repeat(1, copies - 1) + _APART * unit(drawn.to(q.device), 0), 0)
        q, score = torch.cat([q, turned], 1), score.repeat(1, copies)
    signs = SignRegression(residual, residual.H.dtype, ridge=SHARP_RIDGE)
    step = max(1, _AT_ONCE // (_ROWS * b**2))
    pieces = cut(step, q, score)
    work = 2 * _ROWS * b**3 * q.shape[1] * len(_NEARLY_ZERO)
    shared = side, residual.c_basis, signs, watch.deadline
    done = watch.map(_sharpen, shared, pieces, multiplications=work)
    return torch.cat([side.white.new_zeros(0, b), *done])


def _sharpen(  # noqa: PLR0917
    side: Side,
    c_basis: Tensor,
    signs: SignRegression,
    deadline: Deadline,
    q: Tensor,
    score: Tensor,
) -> Tensor:
    rows, b = side.white.shape
    U = unit(side.white) * b**0.5  # rows of one size
    for step, nearly in enumerate(_NEARLY_ZERO):
        deadline.check()
        entries = _entries(U, q)
        if step:
            score = signs.read(c_basis.T @ q, (4 * entries.abs()).clamp_max(ACTIVE))
        weight = torch.sigmoid(-score / _SIGN_SOFTNESS) / (entries.square() + nearly**2)
        weight, index = weight.topk(min(rows, _ROWS * b), dim=0)
        A = U[index.T] * weight.T.sqrt()[:, :, None]  # (k, rows used, b)
        q = smallest_eigenvectors(A.mT @ A, q)
    different = first_of_each((q.T @ q).abs() > 1 - _SAME)
    q, score = q[:, different], score[:, different]
    zeros = (_entries(U, q).abs() <= _TRIMMED) & (score < _SIGN_SOFTNESS)
    return _trim(side, U, q, zeros, deadline)


def _trim(side: Side, U: Tensor, q: Tensor, kept: Tensor, deadline: Deadline) -> Tensor:
    """Directions (k', b) that rows with some to spare annihilate, of those kept (rows, k) for q (b, k).

    As in a regression, what a row leaves counts relative to what its leverage lets it leave. Any b - 1
    rows vanish somewhere, and whoever may leave out many finds a few more by accident: there must be
    more to spare than were left out. Rows that fit nearly as badly as the worst go with it.
    """
    b = U.shape[1]
    q, kept = q[:, kept.sum(0) > b], kept[:, kept.sum(0) > b]
    if not q.shape[1]:
        return q.T
    index = kept.byte().topk(int(kept.sum(0).max()), dim=0).indices.T  # (k, rows used)
    A, basis, kept = U[index], side.basis[index], kept.T.gather(1, index)
    fewest = (b + kept.sum(1)) / 2
    while True:
        deadline.check()
        gram = A.mT @ (A * kept[:, :, None])
        q = smallest_eigenvectors(gram, q)
        left = (A @ q.T[:, :, None]).squeeze(2).abs() * kept
        values = (basis @ unit(q / side.scales[:, None], 0).T[:, :, None]).squeeze(2).abs() * kept
        vanishes = values.amax(1) <= zero_margin(side) * side.zero
        enough = kept.sum(1) > fewest
        open_ = ~vanishes & enough
        if not bool(open_.any()):
            return q[:, vanishes & enough].T
        q = q[:, enough]
        A, basis, kept, left, fewest = (t[enough] for t in (A, basis, kept, left, fewest))
        gram = gram[enough] + b * q.T[:, :, None] * q.T[:, None]
        L = torch.linalg.cholesky_ex(gram).L
        leverage = torch.linalg.solve_triangular(L, A.mT, upper=False).square().sum(1)
        left = left / (1 - leverage).clamp_min(_LEAST_REST).sqrt()
        bad = left >= _AS_BAD * left.amax(1, keepdim=True)
        few = (
            left.argsort(1, descending=True).argsort(1)
            < ((kept.sum(1) - fewest) / _AT_A_TIME).ceil()[:, None]
        )
        kept &= ~(bad & few & open_[enough, None])


def smallest_eigenvectors(gram: Tensor, guess: Tensor) -> Tensor:
    """Eigenvectors (b, k) of the smallest eigenvalues of (k, b, b), by inverse iteration."""
    b = gram.shape[1]
    gram = gram / gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    gram.diagonal(dim1=1, dim2=2).add_(_DEFINITE * b)
    L, x = torch.linalg.cholesky_ex(gram).L, guess.T[:, :, None]
    for _ in range(2):
        x = unit(torch.cholesky_solve(x, L), 1)
    return x[:, :, 0].T


def _entries(U: Tensor, q: Tensor) -> Tensor:
    """d = U q (rows, k), of root mean square 1."""
    entries = U @ q
    return entries / entries.square().mean(0).sqrt()
