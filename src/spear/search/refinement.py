"""From a guess to the exact direction: the kernel of rows that are certainly off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spear.factors import Side
from spear.search.dual import BalancedProblem, SignRegression
from spear.search.kernels import unit, zero_margin
from spear.search.parallel import piece_length
from spear.search.starts import ACTIVE
from spear.search.watch import Watch
from spear.tolerances import UNDECIDED

_SURPLUS = 1.25  # rows to solve a kernel from, relative to b: more make it well conditioned
_PASSES = 6
_SHARP_RIDGE = 0.1  # an exact pattern needs less prior than a guess
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


def refine_to_kernel(
    side: Side, residual: BalancedProblem, q: Tensor, score: Tensor, watch: Watch | None = None
) -> Tensor:
    """Exact directions (k', b), white, from guesses q (r, k) and scores (rows, k), low where off.

    The kernel of the lowest rows is the direction, if they are all zeros and leave no second direction
    free. If not, its own zeros and the signs they imply say more than the guess did.
    """
    rows, b = side.white.shape
    if not q.shape[1]:
        return side.white.new_zeros(0, b)
    work = _SURPLUS * b**3 * q.shape[1] * _PASSES
    step = max(1, min(_AT_ONCE // (rows * b), piece_length(q.shape[1], work)))
    signs = SignRegression(residual, residual.H.dtype, ridge=_SHARP_RIDGE)
    pieces = [
        (unit(residual.q_basis @ q_i, 0), score_i.contiguous())
        for q_i, score_i in zip(torch.split(q, step, 1), torch.split(score, step, 1), strict=True)
    ]
    shared = side, residual.c_basis, signs
    parts = (watch or Watch()).map(_refine, shared, pieces, multiplications=work)
    return torch.cat(list(parts))


def _refine(side: Side, c_basis: Tensor, signs: SignRegression, q: Tensor, score: Tensor) -> Tensor:
    rows, b = side.white.shape
    U = unit(side.white) * b**0.5  # rows of one size
    # The most that noise makes of a row, in units of its size.
    noise = side.zero * math.sqrt(rows) / float(side.scales[-1])
    extra = torch.full((q.shape[1],), min(rows, math.ceil(_SURPLUS * b) + 2), device=q.device)
    kept = torch.zeros_like(score, dtype=torch.bool)  # zeros so far that leave a direction free
    done = torch.zeros_like(extra, dtype=torch.bool)
    for _ in range(_PASSES):
        i = (~done).nonzero().flatten()  # those still open
        if not len(i):
            break
        used = (kept[:, i].sum(0) + extra[i]).clamp_max(rows)
        kernel, second = _kernels(U, score[:, i].masked_fill(kept[:, i], -torch.inf), used, q[:, i])
        values = (side.basis @ unit(kernel / side.scales[:, None], 0)).abs()
        zeros = values <= zero_margin(side) * side.zero  # (rows, open)
        clean, free = zeros.sum(0) >= used, second <= UNDECIDED * noise
        done[i] = clean & ~free
        # Rows that leave a second sample free are kept, and a few more tell the two apart; if a few are
        # too many, fewer. If there is nothing to keep yet, the kernel is the better guess.
        fallback = ~clean & kept[:, i].any(0)
        kept[:, i] |= zeros & clean & free
        extra[i] = torch.where(clean & free, 2 + b // 8, extra[i])
        extra[i] = torch.where(fallback, (extra[i] // 3).clamp_min(2), extra[i])
        q[:, i] = torch.where(fallback, q[:, i], kernel)
        size = (U @ q[:, i]).abs()
        size = size / size.square().mean(0).sqrt()
        z = signs.read(c_basis.T @ q[:, i], (4 * size).clamp_max(ACTIVE))
        score[:, i] = torch.where(kept[:, i].any(0), z, 2 * size.clamp_max(ACTIVE) + z)
    return q[:, done].T


def _kernels(U: Tensor, score: Tensor, used: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """For each column of scores, the vector (b,) that the `used` lowest rows annihilate best.

    If these leave several, the one nearest the guess. Also the second smallest singular value, relative
    to the root mean square. By inverse iteration on Gram matrices: rounding comes later.
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
