"""Archives of numpy.savez: each array's header is checked against what its entry really holds."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from spear.errors import InvalidFile
from spear.files.archives import archive
from spear.files.limits import checked_bytes

_HEADER = 10_000  # characters; numpy's own limit


def read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of an archive by name; those without names are a list: "0", "1", ..."""
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise InvalidFile(f"{path} holds one array, expected an archive of numpy.savez")
    with archive(path, ".npz of numbers") as opened:
        tensors = {
            entry.filename.removesuffix(".npy"): _array(path, opened, entry)
            for entry in opened.infolist()
        }
    if all(re.fullmatch(r"arr_\d{1,6}", name, re.ASCII) for name in tensors):  # a list
        order = sorted(tensors, key=lambda name: int(name[4:]))
        return {str(i): tensors[name] for i, name in enumerate(order)}
    return tensors


def _array(path: Path, opened: ZipFile, entry: ZipInfo) -> Tensor:
    name = entry.filename.removesuffix(".npy")
    if name == entry.filename:
        raise InvalidFile(f"{path}: expected arrays (.npy) in it, got {name!r:.80}")
    with opened.open(entry) as file:
        shape, dtype = _header(file)
        if dtype.kind not in "fiub":
            raise InvalidFile(
                f"{path}: {name!r:.80} holds {str(dtype)[:40]}, expected numbers (pickled objects are "
                "not read)"
            )
        whole, room = checked_bytes(shape, dtype.itemsize), entry.file_size - file.tell()
        if whole != room:
            raise ValueError(f"{name!r:.80} claims {whole:,} bytes but has {room:,}")
    with opened.open(entry) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 2 having written it
        return _tensor(path, name, np.lib.format.read_array(file, allow_pickle=False))


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype; ValueError if the header is invalid."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"an array is of format {version}, expected 1.0 or 2.0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 2 having written it
            shape, _, dtype = readers[version](file, max_header_size=_HEADER)
    except Exception as error:  # Python's own parser reads it, which may raise anything
        raise ValueError(f"the header of an array is none ({type(error).__name__})") from error
    return shape, dtype


def _tensor(path: Path, name: str, array: np.ndarray[Any, Any]) -> Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype == np.longdouble and native.dtype != np.float64:
        native = native.astype(np.float64)
    if native.dtype.kind == "b":
        native = native.view(np.uint8) != 0  # a byte may be anything
    try:
        return torch.from_numpy(np.ascontiguousarray(native)).reshape(array.shape)
    except TypeError as error:
        raise InvalidFile(
            f"{path}: {name!r:.80} holds {array.dtype}, which torch does not have"
        ) from error
