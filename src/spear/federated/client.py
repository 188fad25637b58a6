"""What a client computes on its private batch and sends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


def fedsgd(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss = nn.functional.cross_entropy,
) -> dict[str, Tensor]:
    """One FedSGD update: the gradient of the loss on the whole batch, by parameter name."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss(model(inputs), targets), parameters)
    return dict(zip(names, gradients, strict=True))


def fedavg(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = nn.functional.cross_entropy,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """One FedAvg update: the state dict a client sends back after training on its own batch.

    Args:
        model: what the server sent; it stays as it is.
        inputs: the client's data, (b, ...).
        targets: (b, ...).
        lr: learning rate of plain SGD, with `momentum` and `weight_decay` as torch.optim.SGD has them.
        epochs: passes over the data.
        batch_size: samples a step; all of them unless given. Epochs are shuffled then.
        loss: `loss(outputs, targets)`.
        generator: of the shuffling.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> sent_back = fedavg(net, torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]), lr=0.1, epochs=2)
    >>> sorted(sent_back) == sorted(net.state_dict())
    True
    """
    if lr <= 0 or epochs < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(
            f"expected lr > 0, epochs and batch_size >= 1, got {lr}, {epochs}, {batch_size}"
        )
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(
        local.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
    )
    for _ in range(epochs):
        for chosen in _minibatches(len(inputs), batch_size, generator):
            _step(local, optimiser, inputs[chosen], targets[chosen], loss)
    return {name: value.detach().clone() for name, value in local.state_dict().items()}


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    steps: int,
    lr: float = 0.01,
    batch_size: int = 32,
    momentum: float = 0.0,
    loss: Loss = nn.functional.cross_entropy,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """The model after so many steps of SGD on the data, epoch by epoch; the one given stays.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(64, 4)
    >>> y = (x[:, 0] > 0).long()
    >>> later = train(net, x, y, steps=200, lr=0.1, momentum=0.9)
    >>> bool((later(x).argmax(1) == y).float().mean() > 0.9)
    True
    """
    if steps < 0 or lr <= 0 or batch_size < 1:
        raise ValueError(
            f"expected steps >= 0, lr > 0, batch_size >= 1, got {steps}, {lr}, {batch_size}"
        )
    trained = copy.deepcopy(model)
    optimiser = torch.optim.SGD(trained.parameters(), lr=lr, momentum=momentum)
    done = 0
    while done < steps:
        for chosen in _minibatches(len(inputs), batch_size, generator):
            if done == steps:
                break
            _step(trained, optimiser, inputs[chosen], targets[chosen], loss)
            done += 1
    return trained


def _step(
    model: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, loss: Loss
) -> None:
    optimiser.zero_grad()
    value = loss(model(inputs), targets)
    value.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def _minibatches(
    count: int, size: int | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """The indices of one epoch, shuffled if it has several steps."""
    if size is None or size >= count:
        yield torch.arange(count)
        return
    order = torch.randperm(count, generator=generator)
    yield from order.tensor_split([size * i for i in range(1, math.ceil(count / size))])
