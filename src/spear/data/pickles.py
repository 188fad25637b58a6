"""Pickled batches, read without running anything: numbers, text, lists, dicts and arrays only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spear.data.places import AGAIN, contents, web_page
from spear.errors import DamagedData
from spear.stored.machine import Name, PickleMachine, Refused, text

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


def unpickle(path: Path) -> dict[str, Any]:
    """The dict in a pickled file, its keys as text, its arrays as `PickledArray`."""
    raw = contents(path, _LARGEST)
    try:
        content = _ArraysOnly(len(raw)).load(raw)
    except Refused as error:
        raise DamagedData(f"{path}: {error}: {AGAIN}") from error
    except (ValueError, IndexError, KeyError) as error:  # what pickletools and an empty stack raise
        raise DamagedData(
            f"{path}: expected a pickled batch, got a file that is incomplete or none"
            f"{web_page(raw)}: {AGAIN}"
        ) from error
    if not isinstance(content, dict):
        raise DamagedData(f"{path}: expected a pickled dict, got another thing: {AGAIN}")
    return content


@dataclass(eq=False)
class PickledArray:
    """An array as its pickle describes it."""

    values: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint8))

    def fill(self, state: Any) -> None:
        """Take the state that numpy writes: version, shape, dtype, Fortran order, bytes."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise Refused("the state of an array is not numpy's")
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise Refused("expected an array of whole numbers")
        if not isinstance(shape, tuple) or len(shape) > 4:
            raise Refused("expected an array of at most four dimensions")
        if not all(type(n) is int and 0 <= n <= _LARGEST for n in shape):
            raise Refused("expected the shape of an array to be whole numbers")
        if math.prod(shape) * np.dtype(dtype.code).itemsize != len(raw):
            raise Refused(f"expected an array of shape {shape}, got {len(raw):,} bytes")
        flat = np.frombuffer(raw, f"<{dtype.code}")
        self.values = flat.reshape(shape, order="F" if fortran else "C")


@dataclass(frozen=True)
class _Dtype:
    code: str


class _ArraysOnly(PickleMachine):
    """A machine that can build nothing but data and the arrays in it."""

    names = _NAMES
    most_steps = _STEPS
    expected = "nothing but arrays"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.to_encode = 2 * size  # bytes: every text once, and short ones again

    def made(self, called: str, arguments: Any) -> Any:
        match called, arguments:
            case "array", (Name("ndarray"), *_):
                return PickledArray()
            case "buffer", (bytes() | bytearray() as raw, dtype, shape, order):
                array = PickledArray()
                array.fill((1, shape, dtype, order == "F", bytes(raw)))
                return array
            case "dtype", (str() | bytes() as code, *_) if text(code) in _DTYPES:
                return _Dtype(text(code))
            case "encode", (str() as words, "latin1") if len(words) <= self.to_encode:
                self.to_encode -= len(words)
                return words.encode("latin1")
        return super().made(called, arguments)

    def build(self, target: Any, state: Any) -> None:
        match target:
            case PickledArray() as array:
                array.fill(state)
            case _Dtype() if isinstance(state, tuple) and state[1] in ("|", b"|", "<", b"<"):
                pass  # the byte order is the one assumed
            case _:
                super().build(target, state)
