"""Flower's arrays as tensors under the names of the model they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import Array, RecordDict
from torch import Tensor, nn

from spear.errors import InvalidUpdate

Arrays = Mapping[str, Array]

_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile
_MASKED_RECORD = "secaggplus_configs"  # where Flower's SecAgg+ puts its masked vectors


class Masked(InvalidUpdate):
    """Secure aggregation left nothing to attack in one reply."""


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
        """The arrays under the model's names; all that does not fit is told at once.

        `ArrayRecord(net.state_dict())` brings its names along. A list of NumPy arrays has positions
        for names: those of the state dict, or of the parameters alone.
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
        """The sent name for each of the model's names that is there."""
        if not arrays:
            raise InvalidUpdate(["expected the arrays of a model, got an empty record"])
        if all(name.isdigit() for name in arrays):
            for names in (tuple(self.shapes), self.parameters):
                if len(names) == len(arrays):
                    return dict(zip(names, sorted(arrays, key=int), strict=True))
            raise InvalidUpdate(
                [
                    f"expected {len(self.shapes)} arrays, one for each of {_some(self.shapes)}, got a "
                    f"list of {len(arrays)}: give the model that the clients train as model="
                ]
            )
        own = {self._own(name): name for name in arrays}
        unknown = [name for name in own if name not in self.shapes]
        if unknown:
            raise InvalidUpdate(
                [
                    f"the model has no {unknown[0]!r} (it has {_some(self.shapes)}), but that is what "
                    "was sent: give the model that the clients train as model="
                ]
            )
        return own

    def _own(self, name: str) -> str:
        bare = name
        for prefix in _WRAPPERS:
            bare = bare.removeprefix(prefix)
        return bare if name not in self.shapes and bare in self.shapes else name


def sent_arrays(content: RecordDict, layout: Layout | None) -> Arrays:
    """The arrays of a message that are the model's: a copy of the references, not of the data.

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
    """Arrays of a model that is not known, under the names they were sent with."""
    return {name: _tensor(name, array) for name, array in arrays.items()}


def _fits(arrays: Arrays, layout: Layout) -> bool:
    try:
        own = layout._named(arrays)
    except InvalidUpdate:
        return False
    return all(tuple(arrays[sent].shape) == layout.shapes[name] for name, sent in own.items())


def _tensor(name: str, array: Array) -> Tensor:
    try:
        values = array.numpy()  # decoded from bytes: a copy, nobody else has it
        if tuple(values.shape) != tuple(array.shape):
            raise ValueError(f"it says {tuple(array.shape)}, and holds {values.shape}")
        return torch.from_numpy(values)
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise InvalidUpdate([f"the array {name!r} cannot be read: {error}"]) from error


def _some(names: Iterable[str]) -> str:
    listed = [repr(str(name)) for name in names]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
