"""What the messages of a federation carry: a model's arrays, and how clients trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spear.errors import InvalidUpdate
from spear.update import Protocol

Array = Any  # a NumPy array, a tensor, or what has a shape and numpy(), as Flower's arrays
Arrays = Mapping[str, Array]
Places = Sequence[tuple[str, Mapping[str, Any]]]  # what may say how a client trained, and its name

_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile


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

    def finite(self, arrays: Arrays) -> dict[str, Tensor]:
        """The same; parameters that are not numbers are reported as well."""
        values = self.named(arrays)
        broken = [
            name
            for name in self.parameters
            if name in values and not bool(values[name].isfinite().all())
        ]
        if broken:
            more = {1: "", 2: ", and so has 1 more array"}.get(
                len(broken), f", and so have {len(broken) - 1} more arrays"
            )
            words = (
                f"{broken[0]!r} has NaN or infinite entries{more}: the client's training diverged, or "
                "its noise or half precision overflowed"
            )
            raise InvalidUpdate([words])
        return values

    def _named(self, arrays: Arrays) -> dict[str, str]:
        """The sent name for each of the model's names that was sent."""
        if not arrays:
            raise InvalidUpdate(["expected the arrays of a model, got an empty record"])
        if all(name.isdigit() for name in arrays):
            for names in (tuple(self.shapes), self.parameters):
                if len(names) == len(arrays):
                    return dict(zip(names, sorted(arrays, key=int), strict=True))
            words = (
                f"expected {len(self.shapes)} arrays, one for each of {some(self.shapes)}, got a "
                f"list of {len(arrays)}: give the model that the clients train as model="
            )
            raise InvalidUpdate([words])
        own = {self._own(name): name for name in arrays}
        unknown = [name for name in own if name not in self.shapes]
        if unknown:
            words = (
                f"the model has no {unknown[0]!r} (it has {some(self.shapes)}), but that is what was "
                "sent: give the model that the clients train as model="
            )
            raise InvalidUpdate([words])
        return own

    def fits(self, arrays: Arrays) -> bool:
        """Are these arrays of the model, or of a part of it?"""
        try:
            own = self._named(arrays)
        except InvalidUpdate:
            return False
        return all(tuple(arrays[sent].shape) == self.shapes[name] for name, sent in own.items())

    def _own(self, name: str) -> str:
        bare = name
        for prefix in _WRAPPERS:
            bare = bare.removeprefix(prefix)
        return bare if name not in self.shapes and bare in self.shapes else name


def tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays of an unknown model, under the names they were sent with."""
    return {name: _tensor(name, array) for name, array in arrays.items()}


def _tensor(name: str, array: Array) -> Tensor:
    try:
        if isinstance(array, Tensor):
            return array.detach().cpu()
        values = array if isinstance(array, np.ndarray) else array.numpy()
        if tuple(values.shape) != tuple(array.shape):
            raise ValueError(f"it says {tuple(array.shape)} and holds {values.shape}")
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise InvalidUpdate([f"the array {name!r} cannot be read: {error}"]) from error


def some(names: Iterable[str]) -> str:
    """The first few names, for a message."""
    listed = [repr(str(name)) for name in names]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")


# What apps call them: in Flower's official examples, FedProx, and common usage.
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


def with_messages(protocol: Protocol, places: Places) -> tuple[Protocol, list[str]]:
    """What messages add to what was told, the first place that knows counts; and where from."""
    if protocol.sends == "gradient":
        return protocol, []
    found: dict[str, Any] = {}
    notes = []
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
