"""What frameworks hand over, as tensors under the model's own names.

Updates come as dicts, lists, generators, (name, tensor) pairs, flat vectors and whole modules; of
tensors, NumPy arrays or plain numbers; and under names that wrappers put prefixes before.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spear.errors import InvalidUpdate
from spear.update.precision import at_work
from spear.update.protocol import Sends

AnyForm = Mapping[str, Any] | Iterable[Any] | nn.Module

NO_NUMBERS = "its tensors have shapes but no numbers; load them first"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CALLED: dict[Sends, str] = {
    "gradient": "gradient",
    "weights": "new value",
    "difference": "difference",
}
# Modules that hold the model proper and compute nothing themselves; as what they hold it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "AbstractGradSampleModule": "_module",  # Opacus
    "OptimizedModule": "_orig_mod",  # torch.compile
}
_WRAPPED = {*_WRAPPERS.values(), "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# What people's scripts put around parameter names.
_PREFIXES = ("model.", "grad.", "grads.", "gradient.")
_SUFFIXES = (".grad", "_grad", ".gradient")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of a state dict


@dataclass(frozen=True, eq=False)
class Entries:
    """The tensors that a model has, by name, and the orders in which lists of them come."""

    parameters: Mapping[str, Tensor]
    trainable: Sequence[str]
    state: Mapping[str, Any]  # with buffers, in the order of the state dict
    buffers: Sequence[str] = ()  # also those that are not in the state dict

    @classmethod
    def of(cls, model: nn.Module, state: Mapping[str, Tensor] | None = None) -> Entries:
        """Those of a model; `state` if it was made from a state dict, whose order may be another."""
        parameters = dict(model.named_parameters())
        return cls(
            {name: at_work(p) for name, p in parameters.items()},
            [name for name, p in parameters.items() if p.requires_grad],
            model.state_dict() if state is None else state,
            [name for name, _ in model.named_buffers(remove_duplicate=False)],
        )

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Entries:
        """Those of a state dict without a model; nobody knows which of them were trained."""
        parameters = {
            name: at_work(tensor)
            for name, tensor in state.items()
            if tensor.is_floating_point() and not name.endswith(_BUFFERS)
        }
        return cls(parameters, [], state)

    @property
    def orders(self) -> dict[str, list[str]]:
        """By what is listed: all parameters before a part of them, and before buffers."""
        orders = {"the parameters": list(self.parameters)}
        if 0 < len(self.trainable) < len(self.parameters):
            orders["the trainable ones"] = list(self.trainable)
        if list(self.state) != list(self.parameters):
            orders["the whole state dict"] = list(self.state)
        return orders

    def shape(self, name: str) -> torch.Size:
        own = self.parameters.get(name, self.state.get(name))
        return own.shape if isinstance(own, Tensor) else torch.Size([0])

    def size(self, names: Iterable[str]) -> int:
        return sum(math.prod(self.shape(name)) for name in names)


def by_name(own: Entries, given: AnyForm, sends: Sends, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of the parameters, checked, as far as they were given; not copied.

    Args:
        own: what the model has.
        given: a mapping, (name, tensor) pairs, an iterable in one of the model's orders, one flat
            vector, or a module.
        sends: what it is said to be: a module given for gradients has them in its `.grad`.
        notes: what had to be guessed is added to them.

    >>> own = Entries.of(nn.Linear(2, 1))
    >>> by_name(own, np.array([1.0, 2.0, 3.0]), "gradient", [])
    {'weight': tensor([[1., 2.]], dtype=torch.float64), 'bias': tensor([3.], dtype=torch.float64)}
    >>> by_name(own, {"module.bias": [3]}, "gradient", [])
    {'bias': tensor([3.])}
    """
    what = _CALLED[sends]
    named = opened(_named(own, _contents(own, given, notes), sends), notes, own.parameters)
    if sends == "gradient" and all(_holds_gradient(part) for part in named.values()):
        named = {name: part.grad for name, part in named.items()}
    names = matched_names(named, {*own.parameters, *own.state, *own.buffers})
    guessed = [(name, target) for name, target in names.items() if _bare(name) != _bare(target)]
    if guessed:
        notes.append(f"The update's {guessed[0][0]!r} was read as {guessed[0][1]!r}, and so on.")
    problems = _unknown(own, {name: named[name] for name in named if name not in names})
    # Buffers are of no use, and a parameter without a gradient is None.
    parts = {
        target: named[name]
        for name, target in names.items()
        if target in own.parameters and named[name] is not None
    }
    missing = [name for name in own.trainable if name not in parts]
    if sends == "weights" and missing and parts:  # clients may keep layers to themselves
        notes.append(f"The update has no {_some(missing)}: taken as not sent.")
    if not parts and not problems:
        why = ": call loss.backward() before reading p.grad" if sends == "gradient" else ""
        problems.append(f"the update has no {what} of any parameter{why}")
    found = _checked(own, parts, what, problems, notes)
    if problems:
        raise InvalidUpdate(problems)
    return _trained(own, found)


def _contents(own: Entries, given: Any, notes: list[str]) -> Any:
    """What a client sends beside numbers: (samples, weights), or a list that holds one flat vector."""
    if not isinstance(given, tuple | list) or len(given) in map(len, own.orders.values()):
        return given
    if _is_pair(given[0] if given else None):
        return given
    held = [item for item in given if not _is_number(item) and not _is_metrics(item)]
    if len(held) != 1:
        return given
    if len(given) > 1:
        notes.append("The update came with other values, such as a number of samples: left out.")
    return held[0]


def _is_number(item: object) -> bool:
    """Is it a number, a word, or nothing?"""
    tensor = as_tensor(item)
    single = tensor is not None and tensor.numel() == 1
    return single or item is None or isinstance(item, numbers.Real | str)


def _is_metrics(item: object) -> bool:
    return isinstance(item, Mapping) and not any(_is_array(value) for value in item.values())


def _holds_gradient(part: object) -> bool:
    """Is it a parameter whose gradient is what counts?"""
    return isinstance(part, nn.Parameter) and part.grad is not None


def state_of(given: object, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of a state dict that was given in place of a model, or of the one in a checkpoint."""
    if not isinstance(given, Mapping) or not given:
        raise InvalidUpdate(
            [f"expected a model (a torch.nn.Module) or its state dict, got {_kind(given)}"]
        )
    state = {name: as_tensor(value) for name, value in opened(given, notes).items()}
    wrong = [name for name, t in state.items() if t is None or not isinstance(name, str)]
    if wrong:
        raise InvalidUpdate(
            [f"expected a state dict of tensors or arrays by name, got {_some(wrong)} in it"]
        )
    return {name: tensor for name, tensor in state.items() if tensor is not None}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel, Opacus's module or torch.compile's."""
    for kind in type(model).__mro__:
        if kind.__name__ in _WRAPPERS:
            return unwrapped(getattr(model, _WRAPPERS[kind.__name__]))
    return model


def opened(
    given: Mapping[str, Any], notes: list[str], parameters: Mapping[str, Tensor] | None = None
) -> Mapping[str, Any]:
    """The state dict in a checkpoint such as {"state_dict": {...}, "epoch": 3}; others as they are.

    If several are in it, the one with parameters of the model counts, if they are given.
    """
    held = [
        name
        for name, value in given.items()
        if isinstance(value, Mapping) and any(_is_array(inner) for inner in value.values())
    ]
    if len(held) > 1 and parameters is not None:
        held = [name for name in held if parameters.keys() & given[name].keys()]
    if len(held) != 1 or str(held[0]).endswith("_extra_state"):
        return given
    notes.append(f"A checkpoint was given: its {held[0]!r} was read, and nothing else of it.")
    inner: Mapping[str, Any] = given[held[0]]
    return inner


def matched_names(names: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Which of the model's own names each of these stands for; those that fit none are left out.

    Wrappers and scripts put prefixes and suffixes around names; known ones are looked through. Any
    other prefix, of all the names or of the model's, is looked through if only so all of them fit.

    >>> matched_names(["module.fc.weight", "fc.bias.grad", "head.bias"], ["fc.weight", "fc.bias"])
    {'module.fc.weight': 'fc.weight', 'fc.bias.grad': 'fc.bias'}
    >>> matched_names(["client.fc.weight", "client.fc.bias"], ["fc.weight", "fc.bias"])
    {'client.fc.weight': 'fc.weight', 'client.fc.bias': 'fc.bias'}
    """
    known = set(own)
    often = Counter(map(_bare, known))
    bare = {_bare(name): name for name in known if often[_bare(name)] == 1}
    short = {name: _bare(name) for name in names if isinstance(name, str)}
    found = {name: name for name in short if name in known}
    taken = set(found)
    for name, one in short.items():
        if name not in found and one in bare and bare[one] not in taken:
            found[name] = bare[one]
            taken.add(bare[one])
    if len(found) == len(short):
        return found
    fits = [
        {name: bare[prefix + one] for name, one in short.items()}
        for prefix in sorted({prefix for name in bare for prefix in _prefixes(name)})
        if all(prefix + one in bare for one in short.values())
    ] + [
        {name: bare[one.removeprefix(prefix)] for name, one in short.items()}
        for prefix in _prefixes(next(iter(short.values())))
        if all(one.startswith(prefix) and one[len(prefix) :] in bare for one in short.values())
    ]
    return fits[0] if len(fits) == 1 else found


def as_tensor(value: object, dtype: torch.dtype | None = None) -> Tensor | None:
    """A tensor or array as a tensor, with its own memory if torch can; None if it is neither.

    Args:
        value: a tensor, or what gives a NumPy array; with a `dtype` also (nested) lists of numbers.
        dtype: of plain numbers, which have no precision of their own.
    """
    if isinstance(value, Tensor):
        return value
    array = _array(value)
    if array is None and dtype is not None and isinstance(value, numbers.Real | list | tuple):
        try:
            array = np.array(value)
        except (ValueError, TypeError, RuntimeError):  # ragged, or of tensors that have no array
            return None
        return torch.from_numpy(array).to(dtype) if array.dtype.kind in "fiu" else None
    if array is None or array.dtype.kind not in "fiubc":
        return None
    if array.dtype.char in "gG":  # long doubles, which torch has not
        array = array.astype(np.float64 if array.dtype.char == "g" else np.complex128)
    # Nor has it another byte order than the machine's, or memory that it may not write to.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def tensor_problem(name: str, tensor: object, shape: torch.Size | None = None) -> str:
    """Why a tensor cannot be part of an update; empty if it can."""
    if not isinstance(tensor, Tensor):
        return f"{name} is {_kind(tensor)}, expected a tensor or an array of numbers"
    if tensor.is_quantized:
        return f"{name} is quantised ({tensor.dtype}): call .dequantize() first"
    if tensor.dtype not in _DTYPES and not tensor.is_complex():
        kinds = "expected float64, float32, bfloat16 or float16"
        return f"{name} is {tensor.dtype}, {kinds}: convert it first"
    if tensor.device.type == "meta":
        return f"{name} is on the meta device: {NO_NUMBERS}"
    if shape is not None and tensor.shape != shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}"
    return ""


def _named(own: Entries, given: Any, sends: Sends) -> Mapping[str, Any]:
    """What was given, by the names it came with or those of the order it is in."""
    what = _CALLED[sends]
    if isinstance(given, nn.Module) and sends == "gradient":
        return {name: p.grad for name, p in given.named_parameters()}
    if callable(getattr(given, "state_dict", None)) and not isinstance(given, type):
        given = given.state_dict()
    if callable(getattr(given, "items", None)) and not isinstance(given, type):
        named = dict(given.items())
        if not named or list(named) != [f"arr_{i}" for i in range(len(named))]:
            return named
        given = named.values()  # np.savez calls the arrays of a list so
    array = as_tensor(given)
    if array is not None and array.ndim == 1:
        return _split(own, array.to_dense() if array.is_sparse else array)
    if (
        array is not None
        or not isinstance(given, Iterable)
        or isinstance(given, str | bytes | bytearray | set | frozenset)
        or (isinstance(given, np.ndarray) and given.ndim != 1)
    ):
        came = f"one tensor of shape {tuple(array.shape)}" if array is not None else _kind(given)
        raise InvalidUpdate(
            [
                f"expected {what}s as a dict by parameter name, a list in the order of "
                f"model.parameters(), (name, tensor) pairs or one flat vector; got {came}"
                + (": read the file first" if isinstance(given, str | PathLike) else "")
            ]
        )
    listed = list(given)
    if listed and all(isinstance(item, numbers.Real) for item in listed):
        dtype = next((p.dtype for p in own.parameters.values()), torch.float32)
        vector = as_tensor(listed, dtype)
        if vector is not None:
            return _split(own, vector)
    if listed and all(_is_pair(item) for item in listed):
        twice = [name for name, count in Counter(name for name, _ in listed).items() if count > 1]
        if twice:
            raise InvalidUpdate([f"the update has {_some(twice)} more than once: expected it once"])
        return dict(listed)
    return _in_order(own, listed, what)


def _in_order(own: Entries, listed: list[Any], what: str) -> dict[str, Any]:
    """A list by name: in the first of the model's orders whose shapes fit."""
    orders = [names for names in own.orders.values() if len(names) == len(listed)]
    if not orders:
        counts = [f"{len(names)} {what}s for {of}" for of, names in own.orders.items()]
        raise InvalidUpdate(
            [
                f"expected {' or '.join(counts)}, got {len(listed)}: give a dict by parameter name "
                "if some are left out"
            ]
        )
    shaped = (
        names
        for names in orders
        if all(
            getattr(item, "shape", own.shape(name)) == own.shape(name)
            for name, item in zip(names, listed, strict=True)
        )
    )
    return dict(zip(next(shaped, orders[0]), listed, strict=True))


def _split(own: Entries, vector: Tensor) -> dict[str, Tensor]:
    """A flat vector by name: in the first of the model's orders that has so many numbers."""
    for names in own.orders.values():
        if own.size(names) == len(vector):
            parts = torch.split(vector, [own.size([name]) for name in names])
            return {n: part.reshape(own.shape(n)) for n, part in zip(names, parts, strict=True)}
    sizes = [f"{own.size(names):,} for {of}" for of, names in own.orders.items()]
    raise InvalidUpdate(
        [f"expected a flat vector of {' or '.join(sizes)}, got {len(vector):,} numbers"]
    )


def _checked(
    own: Entries, parts: Mapping[str, Any], what: str, problems: list[str], notes: list[str]
) -> dict[str, Tensor]:
    """Each part as a dense tensor where its parameter is; what is wrong is added to the problems."""
    found = {}
    for name, part in parts.items():
        like, words = own.parameters[name], f"the {what} of {name!r}"
        tensor = as_tensor(part, like.dtype)
        problem = tensor_problem(words, part if tensor is None else tensor, like.shape)
        if problem or tensor is None:
            problems.append(problem)
        elif not tensor.is_complex():
            found[name] = tensor.detach().to_dense().to(like.device)
        elif like.is_complex():
            notes.append(f"{words} is complex: it is not compared")
        else:
            problems.append(f"{words} is complex ({tensor.dtype}), but the parameter is real")
    return found


def _trained(own: Entries, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without frozen parameters that stayed as they were: they are not zero because of the data."""
    trainable = set(own.trainable or found)
    moved = {
        name: part
        for name, part in found.items()
        if name in trainable
        or (bool(part.any()) and not torch.equal(part, own.parameters[name].detach().to(part)))
    }
    return moved or found


def _unknown(own: Entries, left: Mapping[str, Any]) -> list[str]:
    """What to say about names that the model has not."""
    if not left:
        return []
    name, value = next(iter(left.items()))
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    kind = "" if as_tensor(value) is not None else f" ({_kind(value)})"
    has = _some(list(own.parameters))
    return [f"the model has no parameter {name!r}{kind}{more}: expected its own names, {has}"]


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """The NumPy array that something is or gives, as arrays of JAX, TensorFlow and Flower do."""
    if isinstance(value, type | nn.Module):
        return None
    if hasattr(value, "__array__"):
        return np.asarray(value)
    given = value.numpy() if callable(getattr(value, "numpy", None)) else None
    return given if isinstance(given, np.ndarray) else None


def _is_array(value: object) -> bool:
    tensor = as_tensor(value)
    return tensor is not None and tensor.ndim > 0


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)


def _bare(name: str) -> str:
    """A name without what wrappers and scripts put around it."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPED)
    while True:
        shorter = name
        for prefix in _PREFIXES:
            shorter = shorter.removeprefix(prefix)
        for suffix in _SUFFIXES:
            shorter = shorter.removesuffix(suffix)
        if shorter == name:
            return name
        name = shorter


def _prefixes(name: str) -> list[str]:
    """'a.' and 'a.b.' of 'a.b.weight'."""
    return [name[: i + 1] for i, letter in enumerate(name) if letter == "."]


def _some(names: Sequence[str]) -> str:
    """The first few names, in words."""
    return ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "")


def _kind(value: object) -> str:
    """What something is, in words."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    name = type(value).__name__
    empty = "empty " if isinstance(value, Sized) and not len(value) else ""
    return f"{'an' if (empty or name)[0].lower() in 'aeiou' else 'a'} {empty}{name}"
