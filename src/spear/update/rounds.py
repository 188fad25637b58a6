"""Several rounds of the same data as one view: what is kept of each, and of all together.

Round r sends G_r = D_r X from weights W_r. Stacked, R rounds are one layer of R m neurons with the
weights [W_1; ...; W_R], and everything that holds of one update holds of it. The inputs X lie in the
row space of the stacked gradients, so both are kept in coordinates of an orthonormal basis of that
space: memory grows with R m b, not with R m n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spear.errors import Declined


@dataclass(frozen=True, eq=False)
class Round:
    """What is kept of one round besides its rows of the stacked layer."""

    number: int  # as given, from 1
    rows: slice  # of the stacked layer
    factor: float  # that its rows of the gradients were multiplied by, so that noise is even
    behind: nn.Module | Declined = field(repr=False)  # the network from the layer's output on
    others: Mapping[str, Tensor] = field(repr=False)  # gradients of the other parameters
    precision: torch.dtype  # the coarser of weight and bias gradient
    samples: int | None  # if it was told
    grid: torch.dtype | None  # the half precision that its gradients fit, if there is one
    rounding: float = 0.0  # of weights that were subtracted, over the learning rate, per unit of weight


@dataclass(frozen=True, eq=False)
class Rounds:
    """What makes several rounds one view."""

    each: tuple[Round, ...]
    basis: Tensor = field(repr=False)  # (k, n), orthonormal rows: inputs are coordinates @ basis
    outside: Tensor = field(repr=False)  # (R m,) length of each row of the gradient outside the basis
    weight_lengths: Tensor = field(repr=False)  # (R m,) of whole rows of the weights
    live_columns: Tensor = field(repr=False)  # (n,) bool: inputs with any gradient
    ignored_columns: bool  # is there an input with a gradient that every weight ignores?
    precision: torch.dtype  # the finest of all rounds' gradients
    weight_precision: torch.dtype
    grid: torch.dtype | None = None  # the half precision that some round's gradients fit, if any
    left_out: tuple[str, ...] = ()  # rounds that do not fit, each with why

    @property
    def width(self) -> int:
        """Neurons of the layer."""
        return self.each[0].rows.stop - self.each[0].rows.start

    @property
    def neurons(self) -> Tensor:
        """(R m,): which neuron each row belongs to."""
        return torch.arange(len(self.each) * self.width, device=self.basis.device) % self.width

    def only(self, chosen: list[int], why: str) -> tuple[Rounds, Tensor]:
        """Some of the rounds, by index, and the rows (k,) of the stacked layer they have.

        The others are left out, for the reason given.
        """
        everything = torch.arange(len(self.each) * self.width, device=self.basis.device)
        rows = torch.cat([everything[self.each[i].rows] for i in chosen])
        starts = range(0, len(chosen) * self.width, self.width)
        each = tuple(
            dataclasses.replace(self.each[i], rows=slice(start, start + self.width))
            for i, start in zip(chosen, starts, strict=True)
        )
        dropped = [r.number for i, r in enumerate(self.each) if i not in chosen]
        words = tuple(f"round {number} is left out: {why}" for number in dropped)
        fewer = dataclasses.replace(
            self,
            each=each,
            outside=self.outside[rows],
            weight_lengths=self.weight_lengths[rows],
            left_out=(*self.left_out, *words),
        )
        return fewer, rows

    @property
    def negated(self) -> Rounds:
        """The same with the other sign of what every round sent."""
        each = tuple(
            dataclasses.replace(r, others={name: -g for name, g in r.others.items()})
            for r in self.each
        )
        return dataclasses.replace(self, each=each)

    def __len__(self) -> int:
        return len(self.each)
