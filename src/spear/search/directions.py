"""Candidate directions, columns of Q up to scale, and the protocol that all finders follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spear.factors import Factors, Side
from spear.search.kernels import redundancy, unit
from spear.search.watch import Watch


@dataclass(frozen=True, eq=False)
class Directions:
    """A pool of c candidate directions on one side of the update.

    Column j of `vectors` spans the kernel of the rows `zeros[:, j]` of the side's basis, to the
    update's noise level.
    """

    side: Side
    vectors: Tensor  # (b, c) of unit length
    zeros: Tensor  # (rows, c) bool
    redundancy: Tensor  # (c,) how many zero rows, any of them, it can spare: 0, 1, or 2 and more

    def __len__(self) -> int:
        return self.vectors.shape[1]

    def pick(self, chosen: list[int]) -> Directions:
        return Directions(
            self.side, self.vectors[:, chosen], self.zeros[:, chosen], self.redundancy[chosen]
        )

    def replaced(self, j: int, vector: Tensor, zeros: Tensor) -> Directions:
        """The same with another direction in place of the j-th."""
        vectors, all_zeros = self.vectors.clone(), self.zeros.clone()
        vectors[:, j], all_zeros[:, j] = vector, zeros
        count = self.redundancy.clone()
        count[j] = redundancy(self.side, unit(vector * self.side.scales), zeros)
        return Directions(self.side, vectors, all_zeros, count)

    @property
    def sparsity(self) -> Tensor:
        """Share of zeros in each direction, counting silent rows as the paper does.

        Rows in which it would not show do not count: of mixes of the faintest samples these are most.
        """
        hidden = self.side.hidden(self.vectors, self.zeros)
        zeros = self.zeros if hidden is None else self.zeros & ~hidden
        return (zeros.sum(0) + self.side.empty_rows) / self.side.size  # (c,)


class Finder(Protocol):
    """Looks for directions. `invert` selects and judges after each pool it yields.

    A finder ends when its budget is spent or the watch has expired. Its pools grow; a pool on the other
    side of the update starts anew.
    """

    def search(
        self, factors: Factors, *, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]: ...

    def satisfied(self, factors: Factors, match: float) -> bool:
        """Is a sparsity match this high worth stopping at?"""
        ...
