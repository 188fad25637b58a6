"""What leaves the clients under a protocol: trials, sweeps and rehearsals all use this."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.federated import defences
from spear.federated.client import Loss, clipped_gradient, train_locally, trained_parameters
from spear.update import LayerUpdate, Protocol, observe

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Sent:
    """What the server gets: the mean over the clients, of gradients or of weights."""

    protocol: Protocol
    update: dict[str, Tensor] = field(
        repr=False
    )  # gradients (FedSGD), or the differences of weights (FedAvg)
    buffers: dict[str, Tensor] = field(repr=False)  # of the first client, after training

    def after(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights that came back (FedAvg)."""
        own = {name: model.get_parameter(name).detach() + d for name, d in self.update.items()}
        return {**model.state_dict(), **self.buffers, **own}

    def view(self, model: nn.Module, layer: str | None = None) -> LayerUpdate:
        """The attackable layer, or the one named, as the server sees it."""
        fields = {field.name: getattr(self.protocol, field.name) for field in fields_of(Protocol)}
        if not isinstance(
            self.protocol.lr, tuple
        ):  # a list of rates depends on the number of steps
            fields["samples"] = None  # which a server need not know
        told = Protocol(**fields)
        if told.sends == "gradient":
            return observe(model, self.update, protocol=told, layer=layer)
        if told.sends == "difference":
            return observe(model, difference=self.update, protocol=told, layer=layer)
        return observe(model, after=self.after(model), protocol=told, layer=layer)

    def apply(self, model: nn.Module, lr: float) -> None:
        """The server's step: update the model in place."""
        rate = -lr if self.protocol.sends == "gradient" else 1.0
        with torch.no_grad():
            for name, change in self.update.items():
                model.get_parameter(name).add_(change, alpha=rate)
        for name, buffer in model.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])


def send(
    model: nn.Module,
    batches: Sequence[Batch],
    protocol: Protocol,
    *,
    loss: Loss,
    generator: torch.Generator,
) -> Sent:
    """What the server gets from clients with these batches, each adding its own noise.

    Args:
        model: what the clients were sent; it is not changed.
        batches: inputs and targets of each client.
        protocol: everything the clients do, with noise as sigma (see `resolved`).
        loss: a mean over the batch, or a sum if the protocol says so.
        generator: for noise and shuffling.
    """
    if protocol.noise_multiplier is not None or protocol.epsilon is not None:
        raise InvalidOption("expected the noise as sigma: see spear.federated.resolved")
    clients = [_client(model, batch, protocol, loss, generator) for batch in batches]
    update = defences.secure_aggregation([update for update, _ in clients])
    return Sent(protocol, update, clients[0][1])


def play_rounds(
    model: nn.Module,
    cohorts: Iterable[Sequence[Batch]],
    protocol: Protocol,
    *,
    server_lr: float,
    others: Sequence[Batch] = (),
    loss: Loss = nn.functional.cross_entropy,
    generator: torch.Generator,
) -> Iterator[tuple[nn.Module, Sent]]:
    """What the server gets in each round, beside the weights it sent out; then the model moves on.

    Args:
        model: of the first round; it is not changed.
        cohorts: the clients of each round, seen only as their mean.
        protocol: as in `send`.
        server_lr: learning rate between rounds of gradients.
        others: clients seen apart. They take part in every round and move the model, too.
        loss: as in `send`.
        generator: for noise and shuffling.

    Yields:
        the model of the round, which changes when the next round is asked for, and what was sent.

    >>> net, generator = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.Generator()
    >>> batch = (torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1]))
    >>> played = play_rounds(net, [[batch]] * 3, Protocol(), server_lr=0.1, generator=generator)
    >>> [sent.view(model).layer for model, sent in played]
    ['0', '0', '0']
    """
    model = copy.deepcopy(model)
    for batches in cohorts:
        sent = send(model, batches, protocol, loss=loss, generator=generator)
        yield model, sent
        apart = [send(model, [one], protocol, loss=loss, generator=generator) for one in others]
        weighed = [*[sent.update] * len(batches), *(other.update for other in apart)]
        moved = defences.secure_aggregation(weighed) if others else sent.update
        replace(sent, update=moved).apply(model, server_lr)


def _client(
    model: nn.Module, batch: Batch, protocol: Protocol, loss: Loss, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One client's update and its buffers: clipped, then noised, then compressed."""
    inputs, targets = batch
    before = trained_parameters(model)
    buffers: dict[str, Tensor] = {}
    if protocol.sends == "gradient":
        copied = copy.deepcopy(model)  # batch norm keeps count of what it sees
        update = clipped_gradient(copied, inputs, targets, protocol, loss)
    else:
        local = train_locally(model, inputs, targets, protocol, loss=loss, generator=generator)
        after, saved = trained_parameters(local), local.state_dict()
        update = {name: (after[name] - p).detach() for name, p in before.items()}
        buffers = {name: value for name, value in local.named_buffers() if name in saved}
    if protocol.clip is not None and protocol.clips == "global":
        update = defences.clip(update, protocol.clip)
    if protocol.sigma:
        update = defences.add_noise(update, protocol.sigma, generator)
    if protocol.pruned:
        update = defences.prune(update, protocol.pruned)
    return _rounded(update, before, protocol), buffers


def _rounded(
    update: dict[str, Tensor], before: Mapping[str, Tensor], protocol: Protocol
) -> dict[str, Tensor]:
    """The update in the precision it is sent in; if weights are sent, they are what is rounded."""
    if protocol.bits is not None:
        return defences.quantise(update, protocol.bits)
    if protocol.precision not in ("float16", "bfloat16"):
        return update
    dtype = getattr(torch, protocol.precision)
    if protocol.sends != "weights":
        return defences.half(update, dtype)
    sent = defences.half({name: p.detach() + update[name] for name, p in before.items()}, dtype)
    return {name: sent[name] - p.detach() for name, p in before.items()}


def split(inputs: Tensor, targets: Tensor, protocol: Protocol) -> list[Batch]:
    """Divide the samples among the clients."""
    b = protocol.samples or len(inputs)
    return [(inputs[i : i + b], targets[i : i + b]) for i in range(0, len(inputs), b)]
