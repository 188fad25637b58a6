"""Hidden neurons near their threshold, which the client's rounding may have put on the other side."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_OVERSHOOT = 1.5  # how far beyond its threshold a neuron is moved, in units of its distance
MOST_FLIPS = 8  # neurons that are tried, one after the other


def smallest_steps(network: nn.Module, z: Tensor, near: float) -> Tensor:
    """Steps of z (k, m), each across the threshold of one hidden neuron close to it."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for module in network.modules()
        if isinstance(module, nn.ReLU)
    ]
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        network(leaf)
    for hook in hooks:
        hook.remove()
    steps = []
    for values in seen:
        relative = (values / values.square().mean().sqrt()).flatten().detach()
        for k in (relative.abs() < near).nonzero().flatten().tolist()[:MOST_FLIPS]:
            value = values.flatten()[k]
            (slope,) = torch.autograd.grad(value, leaf, retain_graph=True)
            steps.append(-_OVERSHOOT * value.detach() * slope / slope.square().sum())
    return torch.cat(steps) if steps else z[:0]


@dataclass(frozen=True)
class Flip:
    """A neuron of one sample that is put on its other side in one step."""

    step: int
    relu: int  # in the order of their calls
    sample: int
    neuron: int


@dataclass(eq=False)
class ReluStates:
    """What the ReLUs of a network share: the step, the flips, and which neurons were near."""

    flips: frozenset[Flip] = frozenset()
    reach: Tensor | None = None  # (b,): nearer than this, relative to the layer, is near
    step: int = 0
    calls: int = 0
    near: list[tuple[float, Flip]] = field(default_factory=list)

    def begin(self, step: int) -> None:
        self.step, self.calls = step, 0

    def on(self, z: Tensor) -> Tensor:
        """Which neurons (b, ...) are on in the next call of a ReLU."""
        on = z > 0
        flat = on.flatten(1)
        for flip in self.flips:
            if (flip.step, flip.relu) == (self.step, self.calls):
                flat[flip.sample, flip.neuron] = ~flat[flip.sample, flip.neuron]
        if self.reach is not None:
            relative = (z.detach() / z.detach().square().mean().sqrt()).abs().flatten(1)
            relative = relative / self.reach[:, None]
            for i, j in (relative < 1).nonzero().tolist():
                self.near.append((float(relative[i, j]), Flip(self.step, self.calls, i, j)))
        self.calls += 1
        return flat.view_as(on)


class FlippableRelu(nn.Module):
    """A ReLU that asks which neurons are on."""

    def __init__(self, states: ReluStates) -> None:
        super().__init__()
        self.states = states

    def forward(self, z: Tensor) -> Tensor:
        return torch.where(self.states.on(z), z, 0)


def with_relu_states(network: nn.Module, states: ReluStates) -> nn.Module:
    """The network with every nn.ReLU in it replaced, in place."""
    if isinstance(network, nn.ReLU):
        return FlippableRelu(states)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(module, name, FlippableRelu(states))
    return network
