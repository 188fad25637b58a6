"""Which side of its threshold every hidden neuron was on, step by step of a training that is repeated.

A preactivation that is zero to rounding may have had the other sign for the client. The output hardly
changes by that, but the gradient does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Turn:
    """A neuron of a sample that is put on its other side in one step."""

    step: int
    relu: int  # in the order of their calls
    sample: int
    neuron: int


@dataclass(eq=False)
class Sides:
    """What the ReLUs of a network share: the step, the turns, and what was near its threshold."""

    turns: frozenset[Turn] = frozenset()
    reach: Tensor | None = None  # (b,): nearer than this, relative to the layer, is near
    step: int = 0
    calls: int = 0
    near: list[tuple[float, Turn]] = field(default_factory=list)

    def begin(self, step: int) -> None:
        self.step, self.calls = step, 0

    def on(self, z: Tensor) -> Tensor:
        """Which neurons (b, ...) are on in the next call of a ReLU."""
        on = z > 0
        flat = on.flatten(1)
        for turn in self.turns:
            if (turn.step, turn.relu) == (self.step, self.calls):
                flat[turn.sample, turn.neuron] = ~flat[turn.sample, turn.neuron]
        if self.reach is not None:
            relative = (z.detach() / z.detach().square().mean().sqrt()).abs().flatten(1)
            relative = relative / self.reach[:, None]
            for i, j in (relative < 1).nonzero().tolist():
                self.near.append((float(relative[i, j]), Turn(self.step, self.calls, i, j)))
        self.calls += 1
        return flat.view_as(on)


class Sided(nn.Module):
    """A ReLU that asks which neurons are on."""

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.sides = sides

    def forward(self, z: Tensor) -> Tensor:
        return torch.where(self.sides.on(z), z, 0)


def with_sides(network: nn.Module, sides: Sides) -> nn.Module:
    """The network with every nn.ReLU in it replaced, in place."""
    if isinstance(network, nn.ReLU):
        return Sided(sides)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(module, name, Sided(sides))
    return network
