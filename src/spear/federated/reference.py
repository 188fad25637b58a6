"""What could be recovered knowing every output gradient: the yardstick for noisy results."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spear.federated.client import Loss, fedsgd
from spear.update import LayerUpdate


def output_gradient(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    layer: str,
    loss: Loss = nn.functional.cross_entropy,
) -> Tensor:
    """The true dL/dZ (m, b) of a linear layer, for a batch that the layer sees row by row.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    >>> D = output_gradient(net, x, y, layer="0")
    >>> torch.allclose(D @ x, fedsgd(net, x, y)["0.weight"], atol=1e-6)
    True
    """
    seen: list[Tensor] = []
    module = model.get_submodule(layer)
    handle = module.register_forward_hook(lambda *args: seen.append(args[2]))
    try:
        value = loss(model(inputs), targets)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(value, seen[0])
    return gradient.detach().T


def clipping_factors(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    max_grad_norm: float,
    loss: Loss = nn.functional.cross_entropy,
) -> Tensor:
    """The factors (b,) by which clipping at `max_grad_norm` scales each sample's gradient."""
    norms = []
    for x, y in zip(inputs, targets, strict=True):
        gradients = fedsgd(model, x[None], y[None], loss)
        norms.append(torch.stack([g.norm() for g in gradients.values()]).norm())
    return (max_grad_norm / torch.stack(norms)).clamp_max(1.0)


def least_squares(view: LayerUpdate, output_gradient: Tensor) -> Tensor:
    """Inputs (b, n) from an update and the true dL/dZ (m, b) behind it: the best that noise allows.

    An attack has to find dL/dZ first. What it loses against this is its own doing; what this loses
    against the truth is the noise's.
    """
    D = output_gradient.to(view.weight_grad.device, torch.float64)
    inverse = torch.linalg.pinv(D)  # (b, m)
    columns = torch.split(view.weight_grad.detach(), 1 << 14, dim=1)
    return torch.cat([inverse @ block.double() for block in columns], 1)
