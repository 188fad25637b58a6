"""What leaves the clients under a protocol: trials, sweeps and rehearsals all use this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.federated import defences
from spear.federated.client import fedavg, fedsgd
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
        own = {name: p.detach() + self.update[name] for name, p in _trained(model)}
        return {**model.state_dict(), **self.buffers, **own}

    def view(self, model: nn.Module) -> LayerUpdate:
        """The attackable layer as the server sees it."""
        fields = {field.name: getattr(self.protocol, field.name) for field in fields_of(Protocol)}
        told = Protocol(**{**fields, "samples": None})  # which a server need not know
        if told.sends == "gradient":
            return observe(model, self.update, protocol=told)
        if told.sends == "difference":
            return observe(model, difference=self.update, protocol=told)
        return observe(model, after=self.after(model), protocol=told)

    def apply(self, model: nn.Module, lr: float) -> None:
        """The server's step: the model moves on, in place."""
        rate = -lr if self.protocol.sends == "gradient" else 1.0
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.add_(self.update[name], alpha=rate)
        for name, buffer in model.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])


def send(
    model: nn.Module,
    batches: Sequence[Batch],
    protocol: Protocol,
    *,
    loss: Any,
    generator: torch.Generator,
) -> Sent:
    """What clients with these batches send, each with noise of its own, and the server gets of it.

    Args:
        model: what the clients were sent; it stays as it is.
        batches: inputs and targets of each client.
        protocol: what they do, its noise as sigma (see `resolved`).
        loss: a mean over the batch.
        generator: of noise and shuffling.
    """
    if protocol.noise_multiplier is not None or protocol.epsilon is not None:
        raise InvalidOption("expected the noise as sigma: see spear.federated.resolved")
    clients = [_client(model, batch, protocol, loss, generator) for batch in batches]
    update = defences.secure_aggregation([update for update, _ in clients])
    return Sent(protocol, update, clients[0][1])


def _client(
    model: nn.Module,
    batch: Batch,
    protocol: Protocol,
    loss: Any,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One client's update and its buffers: first clipped, then noised, then made smaller."""
    inputs, targets = batch
    buffers: dict[str, Tensor] = {}
    if protocol.sends != "gradient":
        assert protocol.epochs is not None
        after = fedavg(
            model,
            inputs,
            targets,
            lr=protocol.rate,
            epochs=protocol.epochs,
            batch_size=protocol.local_batch_size,
            loss=loss,
            generator=generator,
        )
        update = {name: after[name] - p.detach() for name, p in _trained(model)}
        buffers = {name: after[name] for name, _ in model.named_buffers() if name in after}
        if protocol.clip is not None:
            update = defences.clip(update, protocol.clip)
    elif protocol.clip is not None:
        from spear.federated.dpsgd import dpsgd

        private = dpsgd(
            model,
            inputs,
            targets,
            max_grad_norm=protocol.clip,
            sigma=protocol.sigma,
            loss=loss,
            generator=generator,
        )
        return _compressed(dict(private.gradients), protocol), buffers
    else:
        update = fedsgd(model, inputs, targets, loss)
    if protocol.sigma:
        update = defences.add_noise(update, protocol.sigma, generator)
    return _compressed(update, protocol), buffers


def _compressed(update: dict[str, Tensor], protocol: Protocol) -> dict[str, Tensor]:
    """Pruned and rounded, as far as the protocol says."""
    if protocol.pruned:
        update = defences.prune(update, protocol.pruned)
    if protocol.bits is not None:
        return defences.quantise(update, protocol.bits)
    if protocol.precision in ("float16", "bfloat16"):
        return defences.half(update, getattr(torch, protocol.precision))
    return update


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def split(inputs: Tensor, targets: Tensor, protocol: Protocol) -> list[Batch]:
    """The samples of all clients, each with its own."""
    b = protocol.samples or len(inputs)
    return [(inputs[i : i + b], targets[i : i + b]) for i in range(0, len(inputs), b)]
