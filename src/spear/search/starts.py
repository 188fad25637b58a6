"""Guesses at missing samples: a search from many starts, and single rows.

A guess is a direction q and a score for every row: the lower, the more certainly the row is off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.search.dual import BalancedProblem, SignRegression
from spear.search.kernels import unit
from spear.search.parallel import worth_distributing
from spear.search.watch import Watch

# Threshold of the shrinkage in units of a typical entry, and how much the signs move it. Hits per start
# hardly change from 0.2 to 0.3 and from 0.3 to 0.8 (docs/engine.md).
_SHRINK = 0.25
_SIGN_WEIGHT = 0.5
_NEARLY_ZERO = 0.15  # |entry|, relative to a typical one, that counts as nearly zero in the ranking
_SAME_COSINE = 0.9  # |cos| above which two results are the same
_COLUMNS = 128  # starts at a time if there are many, so that their data stays in the cache
ACTIVE = 1.0  # entries above this show a row that is on, however far above


def search_from_starts(
    problem: BalancedProblem,
    starts: int,
    steps: int,
    generator: torch.Generator,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Directions (r, k) near sparse ones, the best first, and how likely each row is on (rows, k)."""
    U = problem.U.float()
    back = (problem.U * problem.weights[:, None]).float().T.contiguous()
    signs = SignRegression(problem, torch.float32)
    search = _Search(U, back, signs, problem.weights.float(), steps)
    q = _starts(U, starts, generator)
    work = 4 * U.numel() * starts * steps
    width = _COLUMNS if worth_distributing(work) else starts
    pieces = [(some.contiguous(),) for some in torch.split(q, width, 1)]
    results = (watch or Watch()).map(_descend, (search,), pieces, multiplications=work)
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


def _descend(search: _Search, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From starts (r, k) to nearly sparse directions, scores of their rows, and scores of their own.

    q <- normalise(U^T shrink(U q, threshold)), with a lower threshold in rows where z says on.
    """
    U = search.U
    z = torch.zeros_like(U[:, :1])
    for _ in range(search.steps):
        values = U @ q  # (rows, k)
        size = values.abs()
        z = search.signs.read(q, size.clamp_max(ACTIVE))
        shrunk = (size - (_SHRINK - _SIGN_WEIGHT * z).clamp_min_(0)).clamp_min_(0)
        q = unit(search.back @ shrunk.mul_(values.sign()), 0)
    size = (U @ q).abs()
    return q, size + z, search.weights @ (size < _NEARLY_ZERO).float()


def guess_from_rows(problem: BalancedProblem) -> tuple[Tensor, Tensor]:
    """Guesses from single rows: few samples are active in row k of what is left.

    If only one is, the row is that sample: c = u_k / (u_k . h). If one dominates, the signs of H c are
    mostly its own. Such rows abound with few samples missing, and in uncentred batches.
    """
    c = problem.U / (problem.U @ problem.h)[:, None]  # (rows, r)
    z = problem.H @ c.T  # (rows, k): column k is the guess from row k
    z = z / z.square().mean(0).sqrt()
    found = distinct(unit(c).T, -(z.abs() < _NEARLY_ZERO).double().sum(0), len(c))
    return unit(c).T[:, found], z[:, found]


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
    open_ = torch.ones(len(order), dtype=torch.bool, device=q.device)
    chosen: list[int] = []
    while len(chosen) < limit and bool(open_.any()):
        i = int(open_.int().argmax())
        chosen.append(i)
        open_ &= (ranked.T @ ranked[:, i]).abs() < _SAME_COSINE
        open_[i] = False
    return order[chosen]
