"""What Flower's messages carry: a model's arrays, and how clients trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, RecordDict
from torch import Tensor, nn

from spear.errors import InvalidUpdate
from spear.update import Protocol

Arrays = Mapping[str, Array]

_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile
_MASKED_RECORD = "secaggplus_configs"  # where Flower's SecAgg+ puts its masked vectors


class Masked(InvalidUpdate):
    """Secure aggregation left nothing to attack in a reply."""


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's tensors."""

    shapes: Mapping[str, tuple[int, ...]]  # as in its state dict
    parameters: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module) -> Layout:
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return Layout(shapes, tuple(name for name, _ in model.named_parameters()))

    def named(self, arrays: Arrays) -> dict[str, Tensor]:
        """The arrays under the model's names; everything that does not fit is reported at once.

        `ArrayRecord(net.state_dict())` brings its names along. A list of NumPy arrays has positions:
        those of the state dict, or of the parameters alone.
        """
        own = self._named(arrays)
        problems = [
            f"{name!r} has shape {tuple(arrays[sent].shape)}, the model's has {self.shapes[name]}"
            for name, sent in own.items()
            if tuple(arrays[sent].shape) != self.shapes[name]
        ]
        if problems:
            raise InvalidUpdate(problems)
        return {name: _tensor(name, arrays[sent]) for name, sent in own.items()}

    def _named(self, arrays: Arrays) -> dict[str, str]:
        """The sent name for each of the model's names that was sent."""
        if not arrays:
            raise InvalidUpdate(["expected the arrays of a model, got an empty record"])
        if all(name.isdigit() for name in arrays):
            for names in (tuple(self.shapes), self.parameters):
                if len(names) == len(arrays):
                    return dict(zip(names, sorted(arrays, key=int), strict=True))
            words = (
                f"expected {len(self.shapes)} arrays, one for each of {_some(self.shapes)}, got a "
                f"list of {len(arrays)}: give the model that the clients train as model="
            )
            raise InvalidUpdate([words])
        own = {self._own(name): name for name in arrays}
        unknown = [name for name in own if name not in self.shapes]
        if unknown:
            words = (
                f"the model has no {unknown[0]!r} (it has {_some(self.shapes)}), but that is what was "
                "sent: give the model that the clients train as model="
            )
            raise InvalidUpdate([words])
        return own

    def _own(self, name: str) -> str:
        bare = name
        for prefix in _WRAPPERS:
            bare = bare.removeprefix(prefix)
        return bare if name not in self.shapes and bare in self.shapes else name


def sent_arrays(content: RecordDict, layout: Layout | None) -> Arrays:
    """The model's arrays in a message: references copied, data not.

    Clients and strategies may take a record apart to save memory.
    """
    records = [dict(record) for record in content.array_records.values()]
    if not any(records):
        if _MASKED_RECORD in content.config_records:
            raise Masked(["the reply is masked by SecAgg+, it holds no readable arrays"])
        raise InvalidUpdate([f"the message carries no arrays, only {_some(content) or 'nothing'}"])
    fitting = [record for record in records if layout is not None and _fits(record, layout)]
    return (fitting or [record for record in records if record])[0]


def tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays of an unknown model, under the names they were sent with."""
    return {name: _tensor(name, array) for name, array in arrays.items()}


def _fits(arrays: Arrays, layout: Layout) -> bool:
    try:
        own = layout._named(arrays)
    except InvalidUpdate:
        return False
    return all(tuple(arrays[sent].shape) == layout.shapes[name] for name, sent in own.items())


def _tensor(name: str, array: Array) -> Tensor:
    try:
        values = array.numpy()  # decoded from bytes: a copy that nobody else has
        if tuple(values.shape) != tuple(array.shape):
            raise ValueError(f"it says {tuple(array.shape)} and holds {values.shape}")
        return torch.from_numpy(values)
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise InvalidUpdate([f"the array {name!r} cannot be read: {error}"]) from error


def _some(names: Iterable[str]) -> str:
    listed = [repr(str(name)) for name in names]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")


# Where Flower apps put them: in the official examples, FedProx, and common usage.
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
    """What the round's config and the client's metrics add to what was told; and where from."""
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
    """The protocol for a client with this many examples.

    A batch that holds them all is no mini-batch. The reported number counts as the number of samples if
    the client is known to have taken one step on all of them: a gradient may be that of a part, and so
    may a step that nobody called a whole epoch.
    """
    size = protocol.local_batch_size
    if size is not None and examples is not None and size >= examples:
        protocol = dataclasses.replace(protocol, local_batch_size=None)
    whole = protocol.sends != "gradient" and protocol.epochs == 1 and protocol.one_step
    if not whole or examples is None or examples != int(examples):
        return protocol
    return dataclasses.replace(protocol, samples=int(examples))


def untold(protocol: Protocol) -> list[str]:
    """Options nobody mentioned that would change how an update reads."""
    return [name for name in _UNTOLD if not protocol.given(name)]


def assumed(protocol: Protocol) -> list[str]:
    """What was assumed about it, in sentences."""
    if protocol.sends == "gradient" or protocol.lr is not None:
        return []
    return [
        "the learning rate is not known: inputs do not depend on it, but proving several local "
        "steps does (give lr=, or put it in the train config)"
    ]


def _read(name: str, values: Mapping[str, Any]) -> float | int | None:
    """A number under one of its names, if training can have it."""
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
