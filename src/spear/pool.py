"""A pool of candidate directions: filtered by sparsity, rounded, none twice, mixes set aside."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.directions import (
    Directions,
    Watch,
    firmness,
    looseness,
    redundant,
    round_to_kernel,
    unit,
)
from spear.factors import Side
from spear.spread import large, piece_length

_RESERVE = 4  # directions kept in reserve, per sample
# Directions closer than this (1 - |cos|) are one: float32 kernels of one direction agree to 1e-4.
_SAME = 1e-4


class Pool:
    """Collects directions of one side: filters by sparsity, rounds, drops duplicates.

    Directions that hang on one or two rows are mostly mixes of samples. The sparsest few are kept in
    reserve, since in a layer hardly wider than the batch a sample may have no zeros to spare.
    """

    def __init__(self, side: Side, threshold: float, watch: Watch | None = None) -> None:
        self.side = side
        self.threshold = threshold
        self.watch = watch or Watch()
        self._firm = _Known(side)
        self._reserve = _Known(side, limit=_RESERVE * side.white.shape[1])

    def __len__(self) -> int:
        return len(self._firm)

    @property
    def complete(self) -> bool:
        """Are there b independent firm directions?"""
        return _rank(self._firm.white) == self.side.white.shape[1]

    @property
    def sufficient(self) -> bool:
        """Are there b independent directions, counting the reserve?"""
        white = torch.cat([self._firm.white, self._reserve.white])
        return _rank(white) == self.side.white.shape[1]

    @property
    def zero_counts(self) -> Tensor | None:
        """1 + the number of firm directions that vanish in each row; None as long as there is none."""
        if not len(self):
            return None
        return 1.0 + torch.stack(self._firm.zeros).sum(0)

    def add(self, candidates: Tensor) -> bool:
        """Take in candidates (k, b), given in the white basis; is there a new firm direction?"""
        before = len(self._firm)
        for part in torch.split(candidates, 256):  # what one part finds, the next need not look at
            if self.watch.expired:
                break
            self._add(unit(part.to(self.side.white)))
        return len(self._firm) > before

    def _add(self, candidates: Tensor) -> None:
        candidates = candidates[~self._firm.holds(candidates)]
        candidates, zeros = self._sparse(candidates)
        promising = redundant(self.side, candidates, zeros)
        self._take(candidates[promising])
        if len(self._firm) < self.side.white.shape[1] and not self._reserve.full_of_firmer:
            sparsest = zeros[~promising].sum(1).argsort(descending=True)[:_RESERVE]
            self._take(candidates[~promising][sparsest])

    def rounded(self, candidates: Tensor) -> Directions:
        """New directions among candidates (k, b), white, rounded, none twice; the pool is unchanged."""
        new = _Known(self.side)
        candidates = unit(candidates)
        candidates = candidates[~self._firm.holds(candidates)]
        ahead, index = self._ahead(candidates), torch.arange(len(candidates))
        while len(candidates) and not self.watch.expired:
            same, i = candidates[:1], int(index[0])
            found = ahead[i] if i in ahead else _round(self.side, same)[0]
            if found is not None:
                if not bool(self._firm.holds(found.white).any()):
                    new.add(found.q, found.zeros, found.white, found.firmness)
                same = torch.cat([same, found.white])
            other = ~_parallel(candidates, same)
            candidates, index = candidates[other], index[other.cpu()]
        return _directions(self.side, [new])

    def _ahead(self, candidates: Tensor) -> dict[int, _Rounded | None]:
        """What workers make of those candidates (k, b) that are likely to be asked for, by index.

        One after the other, a candidate is left out once it is found by another. They cannot wait for
        that, so a few are rounded in vain.
        """
        rows, b = self.side.white.shape
        work = (rows / 2) ** 2 * b * len(candidates)
        if not large(work) or not self.watch.spread.helped or not len(candidates):
            return {}
        chosen = _representatives(candidates)
        step = piece_length(len(chosen), work)
        pieces = [(some,) for some in torch.split(candidates[chosen], step)]
        done = self.watch.map(_round, (self.side,), pieces)
        return dict(zip(chosen, itertools.chain.from_iterable(done), strict=False))

    def keep(self, directions: Directions, firm: Tensor) -> bool:
        """Take in rounded directions, those vouched for (c,) as firm; is there a new firm one?"""
        before = len(self._firm)
        white = unit((directions.vectors * self.side.scales[:, None]).T)  # (c, b)
        for j, vouched in enumerate(firm.tolist()):
            (self._firm if vouched else self._reserve).add(
                directions.vectors[:, j],
                directions.zeros[:, j],
                white[j : j + 1],
                int(directions.firmness[j]),
            )
        return len(self._firm) > before

    def span(self, white: Tensor) -> bool:
        """Put directions (k, b) in reserve that are no samples, but span some; does that make b?"""
        self._reserve = _Known(self.side)
        for q in unit(white):
            vector = unit(q / self.side.scales)
            zeros = (self.side.basis @ vector).abs() <= looseness(self.side) * self.side.zero
            self._reserve.add(vector, zeros, q[None], 0)
        return len(white) > 0 and self.sufficient

    def firm(self, spare: int = 0) -> tuple[Tensor, Tensor]:
        """Firm directions (k, b), white, with so many zero rows to spare, and their zeros (k, rows)."""
        keep = [j for j, f in enumerate(self._firm.firmness) if f >= spare]
        nothing = self.side.white.new_zeros(0, len(self.side.white), dtype=torch.bool)
        return self._firm.white[keep], torch.cat(
            [nothing, *(self._firm.zeros[j][None] for j in keep)]
        )

    def snapshot(self, reserve: bool = True) -> Directions:
        """The firm directions, and those in reserve as long as b firm ones are not at hand."""
        firm_alone = not reserve or self.complete
        return _directions(self.side, [self._firm] if firm_alone else [self._firm, self._reserve])

    def _sparse(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates that pass the sparsity filter before rounding, and their zeros."""
        q = unit(candidates / self.side.scales)
        values = (q @ self.side.basis.T).abs()  # (k, rows)
        zeros = values <= looseness(self.side) * self.side.zero
        keep = zeros.sum(1) + self.side.silent >= self.threshold * self.side.size
        return candidates[keep], zeros[keep]

    def _take(self, candidates: Tensor) -> None:
        """Round one after the other, dropping those that turn out to be the same."""
        while len(candidates) and not self.watch.expired:
            same = candidates[:1]
            rounded = round_to_kernel(self.side, same[0] / self.side.scales)
            if rounded is not None:
                same = torch.cat([same, self._keep(*rounded)])
            candidates = candidates[~_parallel(candidates, same)]

    def _keep(self, q: Tensor, zeros: Tensor) -> Tensor:
        """Keep a rounded direction where it belongs, if it is sparse; returns it as (1, b), white."""
        white = unit((q * self.side.scales)[None])
        if int(zeros.sum()) + self.side.silent >= self.threshold * self.side.size:
            holds = firmness(self.side, white[0], zeros)
            (self._firm if holds == 2 else self._reserve).add(q, zeros, white, holds)
        return white


@dataclass(frozen=True, eq=False)
class _Rounded:
    """A direction rounded to the kernel of all its zeros."""

    q: Tensor  # (b,)
    zeros: Tensor  # (rows,) bool
    white: Tensor  # (1, b), of unit length
    firmness: int


def _round(side: Side, candidates: Tensor) -> list[_Rounded | None]:
    """Each of the candidates (k, b), white, rounded; None where it is no direction."""
    results: list[_Rounded | None] = []
    for candidate in candidates:
        found = round_to_kernel(side, candidate / side.scales)
        if found is None:
            results.append(None)
            continue
        q, zeros = found
        white = unit((q * side.scales)[None])
        results.append(_Rounded(q, zeros, white, firmness(side, white[0], zeros)))
    return results


def _representatives(vectors: Tensor) -> list[int]:
    """Unit vectors (k, b) by index, none along an earlier one."""
    chosen: list[int] = []
    open_ = torch.ones(len(vectors), dtype=torch.bool, device=vectors.device)
    while bool(open_.any()):
        chosen.append(int(open_.int().argmax()))
        open_ &= ~_parallel(vectors, vectors[chosen[-1:]])
        open_[chosen[-1]] = False
    return chosen


class _Known:
    """Rounded directions, none twice; with a limit, only the firmest and sparsest."""

    def __init__(self, side: Side, limit: int | None = None) -> None:
        self.limit = limit
        self.vectors: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.firmness: list[int] = []
        self.white = side.white.new_zeros(0, side.white.shape[1])

    def __len__(self) -> int:
        return len(self.vectors)

    def _worth(self, j: int) -> tuple[int, int]:
        return self.firmness[j], int(self.zeros[j].sum())

    @property
    def full_of_firmer(self) -> bool:
        """Is there no room for a direction that hangs on a single row?"""
        return self.limit is not None and len(self) >= self.limit and min(self.firmness) > 0

    def holds(self, candidates: Tensor) -> Tensor:
        return _parallel(candidates, self.white)

    def add(self, q: Tensor, zeros: Tensor, white: Tensor, firmness: int) -> None:
        if bool(self.holds(white).any()):
            return
        self.vectors.append(q)
        self.zeros.append(zeros)
        self.firmness.append(firmness)
        self.white = torch.cat([self.white, white])
        if self.limit is not None and len(self) > self.limit:
            worst = min(range(len(self)), key=self._worth)
            del self.vectors[worst], self.zeros[worst], self.firmness[worst]
            self.white = torch.cat([self.white[:worst], self.white[worst + 1 :]])


def _directions(side: Side, known: list[_Known]) -> Directions:
    rows, b = side.white.shape
    nothing = side.white.new_zeros(rows, 0, dtype=torch.bool)
    return Directions(
        side,
        torch.cat([side.white.new_zeros(b, 0), *(q[:, None] for k in known for q in k.vectors)], 1),
        torch.cat([nothing, *(z[:, None] for k in known for z in k.zeros)], 1),
        torch.tensor(
            [f for k in known for f in k.firmness], dtype=torch.int64, device=side.white.device
        ),
    )


def _rank(vectors: Tensor) -> int:
    return int(torch.linalg.matrix_rank(vectors)) if len(vectors) else 0


def _parallel(vectors: Tensor, known: Tensor) -> Tensor:
    """Which unit vectors (k, b) point along one of the known ones (c, b), either way."""
    if not len(known):
        return torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    return ((vectors @ known.T).abs() > 1 - _SAME).any(1)
