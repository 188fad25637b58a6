"""The pickle in a file of torch.save: which tensors there are, without a byte of them being read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spear.files.limits import checked_bytes
from spear.files.pickle_machine import Name, PickleMachine, Refused, text

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
}
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
# Kinds of tensors that are named, but not read: the attack needs the numbers, all of them.
_FOREIGN = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantised tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor without values (meta)",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_device_tensor_from_numpy": "a tensor of another device",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
    "_rebuild_wrapper_subclass": "a tensor of another class",
}
# Beside tensors: what checkpoints hold. None of it is made, but for dicts.
_PLAIN = (
    *("torch Size", "torch device", "torch.serialization _get_layout", "collections Counter"),
    *("_codecs encode", "builtins bytearray", "builtins set", "builtins complex"),
    *("__builtin__ bytearray", "__builtin__ set", "__builtin__ complex", "builtins frozenset"),
    *("torch per_tensor_affine", "torch per_tensor_symmetric", "torch per_channel_affine"),
    *("torch per_channel_symmetric", "torch per_channel_affine_float_qparams"),
    *("torch Tensor", "torch.nn.parameter Parameter"),
)


@dataclass(frozen=True)
class Storage:
    """Numbers that lie elsewhere in the file."""

    key: str
    dtype: torch.dtype
    count: int

    @property
    def bytes(self) -> int:
        return checked_bytes((self.count,), self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as its pickle describes it, checked to lie within its storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    negated: bool = False  # torch has not done it yet

    @property
    def bytes(self) -> int:
        return checked_bytes(self.shape, self.dtype.itemsize)


@dataclass(frozen=True)
class ForeignValue:
    """A tensor that is not read."""

    kind: str


class TensorsOnly(PickleMachine):
    """Builds dicts, lists, numbers, text and descriptions of tensors."""

    names: Mapping[str, str] = {
        "collections OrderedDict": "dict",
        "torch._utils _rebuild_tensor": "tensor",
        "torch._utils _rebuild_tensor_v2": "tensor",
        "torch._utils _rebuild_tensor_v3": "tensor",
        "torch._utils _rebuild_parameter": "parameter",
        "torch._utils _rebuild_parameter_with_state": "parameter",
        "torch._tensor _rebuild_from_type_v2": "typed",
        **{f"torch._utils {name}": name for name in _FOREIGN},
        **{
            f"{home} {s}": s for home in ("torch", "torch.cuda", "torch.storage") for s in _STORAGES
        },
        **{f"torch {name}": name for name in _DTYPES},
        **dict.fromkeys(_PLAIN, "plain"),
    }
    most_steps = 10**6  # a tensor takes 40
    expected = "tensors, numbers and text"

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[str, Storage] = {}

    def key(self, key: Any) -> Any:
        if type(key) in (int, float, bool) or key is None:
            return key
        return super().key(key)

    def made(self, called: str, arguments: Any) -> Any:
        match called, arguments:
            case "plain", _:
                return None
            case "dict", () | (list(),):  # the pairs of one that Python 2 wrote
                pairs = arguments[0] if arguments else []
                return {self.key(key): value for key, value in pairs}
            case "tensor", (
                Storage() as storage,
                offset,
                tuple() as shape,
                tuple() as stride,
                *more,
            ):
                dtypes = [_DTYPES.get(part.called) for part in more if isinstance(part, Name)]
                dtype = (dtypes and dtypes[0]) or storage.dtype  # of version 3
                negated = any(isinstance(part, dict) and part.get("neg") is True for part in more)
                return _stored(Stored(storage, dtype, offset, shape, stride, negated))
            case "parameter", (Stored() | ForeignValue() as tensor, *_):
                return tensor
            case "typed", (Name(inner), _, tuple() as own, *_) if inner != "typed":
                return self.made(inner, own)
        return _foreign(called) or super().made(called, arguments)

    def build(self, target: Any, state: Any) -> None:
        if not isinstance(target, dict | Stored):  # versions of modules; attributes of tensors
            super().build(target, state)

    def kept(self, identity: Any) -> Storage:
        match identity:
            case ("storage" | b"storage", Name(kind), key, _, int() as count, *view) if (
                kind in _STORAGES and isinstance(key, str | bytes) and view in ([], [None])
            ):
                storage = Storage(text(key), _STORAGES[kind], count)
                return self.storages.setdefault(storage.key, storage)
        raise Refused("expected tensors as torch.save writes them, got others")


def _foreign(called: str) -> ForeignValue | None:
    return ForeignValue(_FOREIGN[called]) if called in _FOREIGN else None


def _stored(tensor: Stored) -> Stored:
    """The tensor, if it lies within its storage; ValueError if it does not."""
    room, whole = tensor.storage.bytes, tensor.bytes
    checked_bytes(tensor.stride, 0)
    offset, places = tensor.offset, list(zip(tensor.shape, tensor.stride, strict=True))
    if type(offset) is not int or offset < 0:
        raise ValueError("the place of a tensor is none")
    last = offset + sum((n - 1) * step for n, step in places)
    if whole and (last + 1) * tensor.dtype.itemsize > room:
        raise ValueError("a tensor reaches beyond its numbers")
    return tensor
