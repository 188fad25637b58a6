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
    rounding: float = (
        0.0  # of weights that were subtracted, over the learning rate, per unit of weight
    )
    rate: float = 0.0  # what its gradient is multiplied by in local training; 0 for a single step
    steps_told: bool = True  # or may local training have been a single step, for all that was told?


@dataclass(frozen=True, eq=False)
class Rounds:
    """What makes several rounds one view."""

    each: tuple[Round, ...]
    basis: Tensor = field(repr=False)  # (k, n), orthonormal rows: inputs are coordinates @ basis
    outside: Tensor = field(
        repr=False
    )  # (R m,) length of each row of the gradient outside the basis
    weight_lengths: Tensor = field(repr=False)  # (R m,) of whole rows of the weights
    batch_size: int | None  # samples in all rounds together; None where the spectrum shows no gap
    live_columns: Tensor = field(repr=False)  # (n,) bool: inputs with any gradient
    ignored_columns: bool  # is there an input with a gradient that every weight ignores?
    precision: torch.dtype  # the finest of all rounds' gradients
    weight_precision: torch.dtype
    grid: torch.dtype | None = None  # the half precision that some round's gradients fit, if any
    left_out: tuple[str, ...] = ()  # rounds that do not fit, each with why

    @property
    def trained(self) -> bool:
        """Did clients take several local steps in some round?"""
        return any(each.rate for each in self.each)

    @property
    def steps_told(self) -> bool:
        """Was it told of some round that clients took several local steps?"""
        return any(each.rate and each.steps_told for each in self.each)

    @property
    def rates(self) -> Tensor:
        """How far local training moved the weights of each row (R m,), per unit of its gradient."""
        rates = [torch.full((self.width,), each.rate / each.factor) for each in self.each]
        return torch.cat(rates).to(self.outside)

    @property
    def width(self) -> int:
        """Neurons of the layer."""
        rows = self.each[0].rows
        return int(rows.stop - rows.start)

    def live_neurons(self, live_rows: Tensor) -> int:
        """How many neurons have a live row (R m,) in some round."""
        return int(live_rows.view(len(self.each), self.width).any(0).sum())

    @property
    def neurons(self) -> Tensor:
        """(R m,): which neuron each row belongs to."""
        return torch.arange(len(self.each) * self.width, device=self.basis.device) % self.width

    def without(self, dropped: list[int], why: str) -> tuple[Rounds, Tensor]:
        """All but some of the rounds, by index, and the rows (k,) of the stacked layer they have."""
        chosen = [i for i in range(len(self.each)) if i not in dropped]
        everything = torch.arange(len(self.each) * self.width, device=self.basis.device)
        rows = torch.cat([everything[self.each[i].rows] for i in chosen])
        starts = range(0, len(chosen) * self.width, self.width)
        each = tuple(
            dataclasses.replace(self.each[i], rows=slice(start, start + self.width))
            for i, start in zip(chosen, starts, strict=True)
        )
        words = tuple(f"round {self.each[i].number} is left out: {why}" for i in dropped)
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
