"""What a client computes on its private batch: gradients, clipped if wanted, and local training."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.judge import Criterion, Outputs
from spear.update import Protocol

Loss = Callable[[Any, Tensor], Tensor]


def fedsgd(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss = nn.functional.cross_entropy,
) -> dict[str, Tensor]:
    """One FedSGD update: the gradient of the loss on the whole batch, by parameter name.

    Parameters that the loss does not depend on are left out.
    """
    named = trained_parameters(model)
    value = loss(model(inputs), targets)
    gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, gradients, strict=True) if g is not None}


def fitting_loss(model: nn.Module, inputs: Tensor, loss: Loss) -> Loss:
    """The loss with targets in the shape and precision it takes, on batches of any size.

    Args:
        model: may return any structure of tensors, and squeeze them.
        inputs: some of the data (k, ...).
        loss: `loss(outputs, targets)`.

    Returns:
        the loss for targets that are classes (k,) as int64, or numbers as floats.

    >>> net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    >>> loss = fitting_loss(net, x, nn.BCEWithLogitsLoss())
    >>> torch.equal(loss(net(x), y), nn.BCEWithLogitsLoss()(net(x), y.float()))
    True
    """
    probe = copy.deepcopy(model)  # batch norm keeps count of what it sees
    few = inputs[:5].repeat(5, *[1] * (inputs.ndim - 1))
    with torch.no_grad():
        two = probe(few[:2])
        count = Outputs(two, whole=False).a_few
        several = probe(few[:count])
    for whole in (True, False):  # it may take the main tensor only
        outputs = Outputs(two, whole=whole)
        with contextlib.suppress(Exception):  # the user's loss may raise anything
            criterion = Criterion(loss, outputs, None, outputs.matrix(several, count))
            return functools.partial(_on_rows, criterion)
    return loss  # which says itself what is wrong


def _on_rows(criterion: Criterion, outputs: Any, targets: Tensor) -> Tensor:
    return criterion(criterion.outputs.matrix(outputs, len(targets)), targets)


def clipped_gradient(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    protocol: Protocol,
    loss: Loss = nn.functional.cross_entropy,
) -> dict[str, Tensor]:
    """The gradient of a batch, with each sample's own clipped first if the protocol says so.

    Per layer, the bound C is split evenly among the parameters, as Opacus does.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    >>> clipped = clipped_gradient(net, x, y, Protocol(clip=0.01))
    >>> math.hypot(*(float(g.norm()) for g in clipped.values())) <= 0.01
    True
    """
    if protocol.clip is None or protocol.clips == "global":
        return fedsgd(model, inputs, targets, loss)
    total: dict[str, Tensor] = {}
    for x, y in zip(inputs, targets, strict=True):
        own = fedsgd(model, x[None], y[None], loss)
        norms = torch.stack([g.norm() for g in own.values()])
        if protocol.clips == "per-sample":
            factors = (protocol.clip / norms.norm()).clamp_max(1.0).expand(len(own))
        else:
            factors = (protocol.clip / math.sqrt(len(own)) / norms).clamp_max(1.0)
        for (name, g), factor in zip(own.items(), factors, strict=True):
            # A norm of 0 clips nothing.
            total[name] = total.get(name, 0) + factor.nan_to_num(1.0) * g
    parts = len(inputs) if protocol.reduction == "mean" else 1
    return {name: g / parts for name, g in total.items()}


def train_locally(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    protocol: Protocol,
    *,
    loss: Loss = nn.functional.cross_entropy,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """A copy of the model after a client's local training under the protocol.

    Args:
        model: what the server sent.
        inputs: the client's data, (b, ...).
        targets: (b, ...).
        protocol: steps or epochs (one unless given), mini-batches, learning rates, optimiser, momentum,
            weight decay, FedProx, clipping of samples.
        loss: `loss(outputs, targets)`.
        generator: for the shuffling.
    """
    local = copy.deepcopy(model)
    named = trained_parameters(local)
    start = {name: p.detach().clone() for name, p in named.items()}
    optimiser = _optimiser(protocol, list(named.values()))
    size = protocol.local_batch_size or len(inputs)
    steps = protocol.local_steps or (protocol.epochs or 1) * math.ceil(len(inputs) / size)
    order = islice(_minibatches(len(inputs), size, generator), steps)
    for rate, chosen in zip(protocol.rates(steps), order, strict=True):
        gradient = clipped_gradient(local, inputs[chosen], targets[chosen], protocol, loss)
        for name, p in named.items():
            p.grad = gradient.get(name)
        protocol.local_step(named, optimiser, start, rate)
    return local


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

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> sent_back = fedavg(net, torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]), lr=0.1, epochs=2)
    >>> sorted(sent_back) == sorted(net.state_dict())
    True
    """
    protocol = Protocol(
        sends="weights",
        lr=lr,
        epochs=epochs,
        local_batch_size=batch_size,
        momentum=momentum,
        weight_decay=weight_decay,
    )
    local = train_locally(model, inputs, targets, protocol, loss=loss, generator=generator)
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
    """A copy of the model after `steps` steps of SGD on the data, epoch by epoch.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(64, 4)
    >>> y = (x[:, 0] > 0).long()
    >>> later = train(net, x, y, steps=200, lr=0.1, momentum=0.9)
    >>> bool((later(x).argmax(1) == y).float().mean() > 0.9)
    True
    """
    if steps == 0:
        return copy.deepcopy(model)
    protocol = Protocol(
        sends="weights", lr=lr, local_steps=steps, local_batch_size=batch_size, momentum=momentum
    )
    return train_locally(model, inputs, targets, protocol, loss=loss, generator=generator)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _optimiser(protocol: Protocol, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser by its name in torch.optim, with torch's defaults for what was not given."""
    if protocol.is_sgd:
        return protocol.optimiser(parameters)
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and name not in ("Optimizer", "LBFGS")  # LBFGS needs a closure
    }
    if protocol.optimizer.lower() not in known:
        raise InvalidOption(
            f"expected {{optimizer}} to be one of torch.optim, got {protocol.optimizer!r}",
            arguments=("optimizer",),
        )
    optimiser = known[protocol.optimizer.lower()](parameters, lr=protocol.rate)
    assert isinstance(optimiser, torch.optim.Optimizer)
    for group in optimiser.param_groups:
        told = protocol.given("momentum", "weight_decay")
        group |= {name: getattr(protocol, name) for name in told if name in group}
    return optimiser


def _minibatches(count: int, size: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """The indices for one step after another, endlessly; epochs of several steps are shuffled."""
    while True:
        if size >= count:
            yield torch.arange(count)
            continue
        order = torch.randperm(count, generator=generator)
        yield from order.tensor_split([size * i for i in range(1, math.ceil(count / size))])
