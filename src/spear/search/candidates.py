"""A pool of candidate directions: filtered by sparsity, rounded, without duplicates or mixes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from spear.factors import Side
from spear.search.deadline import Deadline
from spear.search.directions import Directions
from spear.search.kernels import (
    Rounded,
    first_of_each,
    redundancy,
    redundant,
    round_all,
    round_to_kernel,
    unit,
    zero_margin,
)
from spear.search.parallel import COLUMNS, piece_length
from spear.search.watch import Watch

_RESERVE = 4  # directions kept in reserve, per sample
# Directions closer than this (1 - |cos|) are the same: float32 kernels of one agree to 1e-4.
_SAME_DIRECTION = 1e-4


class CandidatePool:
    """Collects directions of one side: filters by sparsity, rounds, drops duplicates.

    Directions that depend on one or two rows are mostly mixes of samples. The sparsest few are kept in
    reserve, because in a layer hardly wider than the batch a sample may have no zeros to spare.
    """

    def __init__(self, side: Side, threshold: float, watch: Watch | None = None) -> None:
        self.side = side
        self.threshold = threshold
        self.watch = watch or Watch()
        self._overdetermined = _DistinctDirections(side)
        self._reserve = _DistinctDirections(side, limit=_RESERVE * side.white.shape[1])

    def __len__(self) -> int:
        return len(self._overdetermined)

    @property
    def complete(self) -> bool:
        """Are there b independent overdetermined directions?"""
        return _rank(self._overdetermined.white) == self.side.white.shape[1]

    @property
    def sufficient(self) -> bool:
        """Are there b independent directions, counting the reserve?"""
        white = torch.cat([self._overdetermined.white, self._reserve.white])
        return _rank(white) == self.side.white.shape[1]

    @property
    def zero_counts(self) -> Tensor | None:
        """1 + how many overdetermined directions vanish in each row; None while there are none."""
        if not len(self):
            return None
        return 1.0 + torch.stack([found.zeros for found in self._overdetermined.found]).sum(0)

    def add(self, candidates: Tensor) -> bool:
        """Take in candidates (k, b), in the white basis; is there a new overdetermined one?"""
        before = self._overdetermined.redundancies
        for part in torch.split(candidates, 256):  # the next part skips what this one finds
            if self.watch.expired:
                break
            self._add(unit(part.to(self.side.white)))
        return self._overdetermined.redundancies != before

    def _add(self, candidates: Tensor) -> None:
        candidates = candidates[~self._overdetermined.holds_for_sure(candidates)]
        candidates, zeros = self._sparse(candidates)
        promising = redundant(self.side, candidates, zeros)
        sparsest = zeros.sum(1).argsort(
            descending=True, stable=True
        )  # before what is nearly the same
        self._take(candidates[sparsest[promising[sparsest]]])
        short = len(self._overdetermined) < self.side.white.shape[1]
        if short and not self._reserve.full_of_better:
            self._take(candidates[sparsest[~promising[sparsest]][:_RESERVE]])

    def rounded(self, candidates: Tensor) -> Directions:
        """New directions among white candidates (k, b), rounded, each once; the pool is unchanged."""
        new = _DistinctDirections(self.side)
        candidates = unit(candidates)
        candidates = candidates[~self._overdetermined.holds(candidates)]
        candidates = candidates[_representatives(candidates)]
        rows, b = self.side.white.shape
        work = rows * b**2 * len(candidates)
        step = piece_length(len(candidates), work, COLUMNS)
        pieces = [(some,) for some in torch.split(candidates, step)] if len(candidates) else []
        shared = self.side, self.watch.deadline
        done = self.watch.map(_round, shared, pieces, multiplications=work)
        rounded = [found for found in itertools.chain.from_iterable(done) if found is not None]
        new.add(self._overdetermined.lacking(rounded))
        return _directions(self.side, [new])

    def keep(self, directions: Directions, accepted: Tensor) -> bool:
        """Take in rounded directions, those accepted (c,) as samples; is there a new one?"""
        before = len(self._overdetermined)
        white = unit((directions.vectors * self.side.scales[:, None]).T)  # (c, b)
        counts, taken = directions.redundancy.tolist(), accepted.tolist()
        rounded = [
            Rounded(directions.vectors[:, j], directions.zeros[:, j], white[j : j + 1], count)
            for j, count in enumerate(counts)
        ]
        self._overdetermined.add([found for found, yes in zip(rounded, taken, strict=True) if yes])
        self._reserve.add([found for found, yes in zip(rounded, taken, strict=True) if not yes])
        return len(self._overdetermined) > before

    def possible_mixes(self, fewest: int) -> Tensor:
        """Overdetermined directions (k,) with fewer zeros than this that another one has not.

        A mix of samples is zero where all of them are, and where they cancel by accident. So nearly all
        of its zeros are those of any sample in it. That may hold of two samples that are alike, too.
        """
        if not len(self):
            return torch.zeros(0, dtype=torch.bool, device=self.side.white.device)
        zeros = torch.stack([found.zeros for found in self._overdetermined.found]).to(
            self.side.white
        )  # (k, rows)
        count, shared = zeros.sum(1), zeros @ zeros.T
        own = count[:, None] - shared  # (k, k): zeros of i that j has not
        larger = count[:, None] < count
        return ((own < fewest) & larger).any(1)

    def forget(self, which: Tensor) -> None:
        """Drop some of the overdetermined directions (k,) bool."""
        self._overdetermined.forget(which)

    def add_spanning(self, white: Tensor) -> bool:
        """Put directions (k, b) in reserve that are no samples but span some; does that make b?"""
        self._reserve = _DistinctDirections(self.side)
        for q in unit(white):
            vector = unit(q / self.side.scales)
            zeros = (self.side.basis @ vector).abs() <= zero_margin(self.side) * self.side.zero
            self._reserve.add([Rounded(vector, zeros, q[None], 0)])
        return len(white) > 0 and self.sufficient

    def overdetermined(self, spare: int = 0) -> tuple[Tensor, Tensor]:
        """White directions (k, b) with this many zero rows to spare, and their zeros (k, rows)."""
        known = self._overdetermined.found
        keep = [j for j, found in enumerate(known) if found.redundancy >= spare]
        nothing = self.side.white.new_zeros(0, len(self.side.white), dtype=torch.bool)
        return self._overdetermined.white[keep], torch.cat(
            [nothing, *(known[j].zeros[None] for j in keep)]
        )

    def snapshot(self, reserve: bool = True) -> Directions:
        """The overdetermined directions, and the reserve as long as b are not at hand."""
        alone = not reserve or self.complete
        known = [self._overdetermined] if alone else [self._overdetermined, self._reserve]
        return _directions(self.side, known)

    def _sparse(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates that pass the sparsity filter before rounding, and their zeros."""
        q = unit(candidates / self.side.scales)
        values = (q @ self.side.basis.T).abs()  # (k, rows)
        zeros = values <= zero_margin(self.side) * self.side.zero
        keep = zeros.sum(1) + self.side.empty_rows >= self.threshold * self.side.size
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
        """Keep a rounded direction where it belongs, if it is sparse; returns it white, (1, b)."""
        white = unit((q * self.side.scales)[None])
        if int(zeros.sum()) + self.side.empty_rows >= self.threshold * self.side.size:
            holds = redundancy(self.side, white[0], zeros)
            pool = self._overdetermined if holds == 2 else self._reserve
            pool.add([Rounded(q, zeros, white, holds)])
        return white


def _round(side: Side, deadline: Deadline, candidates: Tensor) -> list[Rounded | None]:
    return round_all(side, candidates, deadline)


def _representatives(vectors: Tensor) -> list[int]:
    """Indices of unit vectors (k, b), none along an earlier one."""
    return first_of_each(_near(vectors, vectors))


class _DistinctDirections:
    """Rounded directions, each once; with a limit, only the most redundant and sparsest.

    Of directions that are nearly the same the more redundant one is kept: a sample may be all but
    parallel to a mix of itself and a little of another, which has fewer zeros and none to spare.
    """

    def __init__(self, side: Side, limit: int | None = None) -> None:
        self.limit = limit
        self.found: list[Rounded] = []
        self.white = side.white.new_zeros(0, side.white.shape[1])

    def __len__(self) -> int:
        return len(self.found)

    @property
    def full_of_better(self) -> bool:
        """Is there no room for a direction that depends on a single row?"""
        full = self.limit is not None and len(self) >= self.limit
        return full and min(found.redundancy for found in self.found) > 0

    @property
    def redundancies(self) -> list[int]:
        return [found.redundancy for found in self.found]

    def holds(self, candidates: Tensor) -> Tensor:
        return _parallel(candidates, self.white)

    def holds_for_sure(self, candidates: Tensor) -> Tensor:
        """Those (k,) along a direction with zeros to spare; any other may be a mix that is near one."""
        return _parallel(candidates, self.white[[count == 2 for count in self.redundancies]])

    def lacking(self, rounded: list[Rounded]) -> list[Rounded]:
        """Those of the directions that are not known, each once."""
        if not rounded:
            return rounded
        white = torch.cat([found.white for found in rounded])
        known = self.holds(white).tolist()
        return [rounded[j] for j in _representatives(white) if not known[j]]

    def add(self, rounded: list[Rounded]) -> None:
        better = [found for found in rounded if found.redundancy == 2]
        weaker = [j for j, found in enumerate(self.found) if found.redundancy < 2]
        if better and weaker:
            near = _near(self.white[weaker], torch.cat([found.white for found in better])).tolist()
            for j, same in zip(weaker, near, strict=True):
                if any(same):
                    self.found[j] = better[same.index(True)]
        self.found += self.lacking(rounded)
        if self.limit is not None and len(self) > self.limit:
            zeros = torch.stack([found.zeros for found in self.found]).sum(1).tolist()
            worth = [(found.redundancy, zeros[j], -j) for j, found in enumerate(self.found)]
            best = sorted(range(len(self)), key=worth.__getitem__, reverse=True)[: self.limit]
            self.found = [self.found[j] for j in sorted(best)]
        self._stack()

    def forget(self, which: Tensor) -> None:
        """Drop some of the directions (k,) bool."""
        self.found = [f for f, gone in zip(self.found, which.tolist(), strict=True) if not gone]
        self._stack()

    def _stack(self) -> None:
        self.white = torch.cat([self.white[:0], *(found.white for found in self.found)])


def _directions(side: Side, known: list[_DistinctDirections]) -> Directions:
    rows, b = side.white.shape
    found = [each for part in known for each in part.found]
    return Directions(
        side,
        torch.stack([each.q for each in found], 1) if found else side.white.new_zeros(b, 0),
        torch.stack([each.zeros for each in found], 1)
        if found
        else side.white.new_zeros(rows, 0, dtype=torch.bool),
        torch.tensor(
            [each.redundancy for each in found], dtype=torch.int64, device=side.white.device
        ),
    )


def _rank(vectors: Tensor) -> int:
    return int(torch.linalg.matrix_rank(vectors)) if len(vectors) else 0


def _parallel(vectors: Tensor, known: Tensor) -> Tensor:
    """Which unit vectors (k, b) point along a known one (c, b), either way."""
    if not len(known):
        return torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    return _near(vectors, known).any(1)


def _near(vectors: Tensor, others: Tensor) -> Tensor:
    """Which unit vectors (k, b) point along which others (c, b), either way: (k, c) bool."""
    return (vectors @ others.T).abs() > 1 - _SAME_DIRECTION
