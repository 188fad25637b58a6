"""What clients do to an update before they send it; each defence maps an update to a new one.

An update is a dict of tensors by parameter name: gradients, or FedAvg's weight differences. The update
passed in is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from spear.errors import InvalidOption, InvalidUpdate

Update = Mapping[str, Tensor]
Reduction = Literal["mean", "sum"]


def prune(update: Update, share: float) -> dict[str, Tensor]:
    """The update with the smallest `share` of each tensor's entries set to zero.

    >>> prune({"w": torch.tensor([3.0, -1.0, 0.5, -4.0])}, 0.5)
    {'w': tensor([ 3.,  0.,  0., -4.])}
    """
    if not 0 <= share < 1:
        raise InvalidOption(f"expected a share 0 <= share < 1 to prune, got {share}")
    return {name: _pruned(tensor, share) for name, tensor in update.items()}


def _pruned(tensor: Tensor, share: float) -> Tensor:
    flat = tensor.detach().flatten().clone()
    count = int(share * flat.numel())
    flat[flat.abs().topk(count, largest=False).indices] = 0
    return flat.view_as(tensor)


def quantise(update: Update, bits: int) -> dict[str, Tensor]:
    """The update on a uniform grid of 2^bits - 1 values per tensor, zero and the extremes among them.

    >>> quantise({"w": torch.tensor([1.0, 0.4, -0.6])}, bits=2)
    {'w': tensor([ 1.,  0., -1.])}
    """
    if not isinstance(bits, int) or not 2 <= bits <= 16:
        raise InvalidOption(f"expected 2 to 16 bits, got {bits!r}")
    return {name: _quantised(tensor, bits) for name, tensor in update.items()}


def _quantised(tensor: Tensor, bits: int) -> Tensor:
    largest = tensor.detach().abs().max() if tensor.numel() else tensor.new_zeros(())
    if float(largest) == 0:
        return tensor.detach().clone()
    step = largest / (2 ** (bits - 1) - 1)
    quantised: Tensor = (tensor.detach() / step).round() * step
    return quantised


def half(update: Update, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The update after a trip through half precision (float16 or bfloat16).

    >>> half({"w": torch.tensor([1.0, 1.0001])})
    {'w': tensor([1., 1.])}
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise InvalidOption(f"expected torch.float16 or torch.bfloat16, got {dtype}")
    return {name: tensor.detach().to(dtype).to(tensor.dtype) for name, tensor in update.items()}


def add_noise(
    update: Update, sigma: float, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The update with Gaussian noise of standard deviation sigma on every entry.

    For noise with a privacy budget see `spear.integrations.opacus`. Without a generator, one seeded
    with 0 is used.

    >>> noisy = add_noise({"w": torch.zeros(10_000)}, 0.1)
    >>> round(float(noisy["w"].std()), 2)
    0.1
    """
    if not 0 <= sigma < math.inf:
        raise InvalidOption(f"expected sigma >= 0, got {sigma}")
    generator = generator or torch.Generator().manual_seed(0)
    device = generator.device

    def noise(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype)
        return drawn.to(like.device)

    return {name: tensor.detach() + sigma * noise(tensor) for name, tensor in update.items()}


def clip(update: Update, max_norm: float) -> dict[str, Tensor]:
    """The update, scaled down to the norm `max_norm` (over all tensors together) if it exceeds it.

    >>> clip({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    if not 0 < max_norm < math.inf:
        raise InvalidOption(f"expected max_norm > 0, got {max_norm}")
    norm = math.hypot(*(float(tensor.detach().norm()) for tensor in update.values()))
    factor = min(1.0, max_norm / norm) if norm else 1.0
    return {name: tensor.detach() * factor for name, tensor in update.items()}


def secure_aggregation(
    updates: Iterable[Update], reduction: Reduction = "mean"
) -> dict[str, Tensor]:
    """What secure aggregation shows the server: only the sum or mean of the clients' updates.

    To SPEAR this is one update on a larger batch, that of all clients together.

    >>> secure_aggregation([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
    {'w': tensor([2.])}
    """
    if reduction not in get_args(Reduction):
        raise InvalidOption(f"expected reduction 'mean' or 'sum', got {reduction!r}")
    clients = list(updates)
    if not clients:
        raise InvalidUpdate(["expected the updates of at least one client, got none"])
    shapes = [{name: tuple(tensor.shape) for name, tensor in update.items()} for update in clients]
    different = [str(i) for i, shape in enumerate(shapes) if shape != shapes[0]]
    if different:
        raise InvalidUpdate(
            [
                f"expected updates of one model, but those of clients {', '.join(different)} have "
                "other names or shapes than the first"
            ]
        )
    scale = 1 / len(clients) if reduction == "mean" else 1.0
    return {
        name: torch.stack([update[name].detach() for update in clients]).sum(0) * scale
        for name in clients[0]
    }
