"""How clients trained, as far as Flower's messages tell it: the train config and their own metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spear.update import Protocol

# Where Flower apps put them: the official examples, FedProx, and what people write.
_KEYS = {
    "lr": ("lr", "learning-rate", "learning_rate"),
    "epochs": ("local-epochs", "local_epochs", "epochs"),
    "local_batch_size": ("local-batch-size", "local_batch_size", "batch-size", "batch_size"),
    "momentum": ("momentum",),
    "proximal": ("proximal-mu", "proximal_mu"),
}
_WHOLE = ("epochs", "local_batch_size")
_MAY_BE_ZERO = ("momentum", "proximal")
_UNTOLD = ("weight_decay", "momentum", "epochs", "local_batch_size", "lr")


def with_messages(
    protocol: Protocol,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    strategy: object = None,
) -> tuple[Protocol, list[str]]:
    """What the round's config and the client's metrics add to what was told; and where it came from."""
    if protocol.sends == "gradient":
        return protocol, []
    found: dict[str, Any] = {}
    notes = []
    places = (
        ("the reply's metrics", metrics),
        ("the train config", config),
        ("the strategy", {"lr": getattr(strategy, "client_learning_rate", None)}),
    )
    for name in _KEYS:
        for place, values in places:
            value = _read(name, values)
            if value is None:
                continue
            told = getattr(protocol, name)
            if not protocol.given(name):
                found[name] = value
                notes.append(f"{name} = {value:g}, read from {place}")
            elif told != value:
                notes.append(f"{place}: {name} = {value:g}; used was {name} = {told:g}, as given")
            break
    return dataclasses.replace(protocol, **found), notes


def of_client(protocol: Protocol, examples: float | None) -> Protocol:
    """For a client with so many examples.

    A batch that holds them all is no mini-batch. As many as the client reports are behind the update
    if it is known to have taken one step on all of them: a gradient may be that of a part, and so may
    a step of which nobody said that it was a whole epoch.
    """
    size = protocol.local_batch_size
    if size is not None and examples is not None and size >= examples:
        protocol = dataclasses.replace(protocol, local_batch_size=None)
    whole = protocol.sends != "gradient" and protocol.epochs == 1 and protocol.one_step
    if not whole or examples is None or examples != int(examples):
        return protocol
    return dataclasses.replace(protocol, samples=int(examples))


def untold(protocol: Protocol) -> list[str]:
    """Options that nothing was said about, and that would change how an update reads."""
    return [name for name in _UNTOLD if not protocol.given(name)]


def assumed(protocol: Protocol) -> list[str]:
    """What was assumed of it, in sentences."""
    if protocol.sends == "gradient" or protocol.lr is not None:
        return []
    return [
        "the learning rate is not known: inputs do not depend on it, but a proof of several local "
        "steps does (give lr=, or put it in the train config)"
    ]


def _read(name: str, values: Mapping[str, Any]) -> float | int | None:
    """A number under one of its names, if it is one that training can have."""
    for key in _KEYS[name]:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            continue
        if name not in _WHOLE:
            return float(value)
        if value == int(value):
            return int(value)
    return None
