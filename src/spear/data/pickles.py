"""Pickled batches, read without running anything: numbers, text, lists, dicts and arrays only."""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spear.data.places import AGAIN, contents, web_page
from spear.errors import DamagedData

_LARGEST = 2**27  # bytes of a file; CIFAR's have 31 MB, 45 MB with their bytes written as text
_STEPS = 10**6  # a batch of 10,000 takes up to 90,000
_DTYPES = ("u1", "i4", "i8")
# The only names a file may mention. None is imported: they stand for what is done here instead.
_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy.core.numeric _frombuffer": "buffer",  # as protocol 5 writes arrays
    "numpy._core.numeric _frombuffer": "buffer",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",  # how old protocols write bytes
}
_MARK = object()


def unpickle(path: Path) -> dict[str, Any]:
    """The dict in a pickled file, its keys as text, its arrays as `PickledArray`."""
    raw = contents(path, _LARGEST)
    try:
        content = _ArraysOnly(len(raw)).load(raw)
    except _Refused as error:
        raise DamagedData(f"{path}: {error}: {AGAIN}") from error
    except (ValueError, IndexError, KeyError) as error:  # what pickletools and an empty stack raise
        raise DamagedData(
            f"{path}: expected a pickled batch, got a file that is incomplete or none"
            f"{web_page(raw)}: {AGAIN}"
        ) from error
    if not isinstance(content, dict):
        raise DamagedData(f"{path}: expected a pickled dict, got another thing: {AGAIN}")
    return content


class _Refused(Exception):
    """The file wants more than arrays."""


@dataclass(eq=False)
class PickledArray:
    """An array as its pickle describes it."""

    values: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint8))

    def fill(self, state: Any) -> None:
        """Take the state that numpy writes: version, shape, dtype, Fortran order, bytes."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("the state of an array is not numpy's")
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise _Refused("expected an array of whole numbers")
        if not isinstance(shape, tuple) or len(shape) > 4:
            raise _Refused("expected an array of at most four dimensions")
        if not all(type(n) is int and 0 <= n <= _LARGEST for n in shape):
            raise _Refused("expected the shape of an array to be whole numbers")
        if math.prod(shape) * np.dtype(dtype.code).itemsize != len(raw):
            raise _Refused(f"expected an array of shape {shape}, got {len(raw):,} bytes")
        flat = np.frombuffer(raw, f"<{dtype.code}")
        self.values = flat.reshape(shape, order="F" if fortran else "C")


@dataclass(frozen=True)
class _Dtype:
    code: str


class _ArraysOnly:
    """A pickle machine that knows no import, no call and no class: it can build nothing but data.

    The standard `Unpickler` with a strict `find_class` runs no code either, but a file of a few bytes
    can make it allocate gigabytes (a high memo index) or overflow the stack (the hash of a deep tuple).
    """

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.to_encode = 2 * size  # bytes: every text once, and short ones again
        self.steps = self._steps()

    def load(self, raw: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if opcode.name == "STOP":
                return self.stack.pop()
            if count == _STEPS:
                raise _Refused(f"expected a batch of images, got over {_STEPS:,} steps to build it")
            if opcode.name not in self.steps:
                raise _Refused(f"the file asks for {opcode.name}: expected nothing but arrays")
            self.steps[opcode.name](argument)
        raise ValueError("no end")

    def _steps(self) -> dict[str, Callable[[Any], None]]:
        push = self.stack.append
        integers = "INT BININT BININT1 BININT2 LONG LONG1"
        texts = "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
        raw = "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
        return {
            **dict.fromkeys(f"{integers} {texts} {raw}".split(), push),
            # Python 2 wrote bytes so; pickletools hands them over as text.
            **dict.fromkeys(
                ("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda s: push(s.encode("latin1"))
            ),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda i: push(self.memo[i])),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "NONE": push,
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "MARK": lambda _: push(_MARK),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE1": lambda _: push(tuple(self._taken(1))),
            "TUPLE2": lambda _: push(tuple(self._taken(2))),
            "TUPLE3": lambda _: push(tuple(self._taken(3))),
            "TUPLE": lambda _: push(tuple(self._since_mark())),
            "EMPTY_LIST": lambda _: push([]),
            "LIST": lambda _: push(self._since_mark()),
            "APPEND": lambda _: self._extend(self._taken(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "EMPTY_DICT": lambda _: push({}),
            "DICT": lambda _: self._new_dict(self._since_mark()),
            "SETITEM": lambda _: self._set(self._taken(2)),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            "GLOBAL": self._name,
            "STACK_GLOBAL": lambda _: self._name(" ".join(map(str, self._taken(2)))),
            "REDUCE": lambda _: push(self._made(*self._taken(2))),
            "BUILD": lambda _: self._build(self.stack.pop()),
        }

    def _remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _taken(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("empty stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("no list")
        self.stack[-1].extend(items)

    def _new_dict(self, items: list[Any]) -> None:
        self.stack.append({})
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes):  # others may take for ever to hash
                raise _Refused("expected keys that are text")
            self.stack[-1][_text(key)] = value

    def _name(self, name: str) -> None:
        if name not in _NAMES:
            shown = name.replace(" ", ".")[:80]
            raise _Refused(f"the file wants to load {shown}: expected nothing but arrays")
        self.stack.append(_Name(_NAMES[name]))

    def _made(self, name: Any, arguments: Any) -> Any:
        """What a call of one of the known names would give."""
        called = name.called if isinstance(name, _Name) else None
        match called, arguments:
            case "array", (_Name("ndarray"), *_):
                return PickledArray()
            case "buffer", (bytes() | bytearray() as raw, dtype, shape, order):
                array = PickledArray()
                array.fill((1, shape, dtype, order == "F", bytes(raw)))
                return array
            case "dtype", (str() | bytes() as code, *_) if _text(code) in _DTYPES:
                return _Dtype(_text(code))
            case "encode", (str() as text, "latin1") if len(text) <= self.to_encode:
                self.to_encode -= len(text)
                return text.encode("latin1")
        raise _Refused("the file wants to make something else: expected nothing but arrays")

    def _build(self, state: Any) -> None:
        match self.stack[-1]:
            case PickledArray() as array:
                array.fill(state)
            case _Dtype() if isinstance(state, tuple) and state[1] in ("|", b"|", "<", b"<"):
                pass  # the byte order is the one assumed
            case _:
                raise _Refused("the file wants to change something: expected nothing but arrays")


@dataclass(frozen=True)
class _Name:
    called: str


def _text(text: str | bytes) -> str:
    return text.decode("latin1") if isinstance(text, bytes) else text
