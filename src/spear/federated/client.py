"""What a client computes on its private batch and sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def fedsgd(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> dict[str, Tensor]:
    """One FedSGD update: the gradient of the loss on the whole batch, by parameter name."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss(model(inputs), targets), parameters)
    return dict(zip(names, gradients, strict=True))
