"""Hidden neurons near their threshold, which the client's rounding may have put on the other side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spear.judge.losses import gradients_of, users_code

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
    with torch.enable_grad(), users_code():
        leaf = z.detach().requires_grad_()
        network(leaf)
    for hook in hooks:
        hook.remove()
    steps = []
    for values in seen:
        relative = (values / values.square().mean().sqrt()).flatten().detach()
        for k in (relative.abs() < near).nonzero().flatten().tolist()[:MOST_FLIPS]:
            value = values.flatten()[k]
            (slope,) = gradients_of(value, leaf, retain_graph=True)
            steps.append(-_OVERSHOOT * value.detach() * slope / slope.square().sum())
    return torch.cat(steps) if steps else z[:0]
