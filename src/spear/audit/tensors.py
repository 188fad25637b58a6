"""Tensors from files: weights and updates as people store them. Nothing in a file is ever executed."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear.errors import InvalidFile, MissingExtra

_KINDS = ".safetensors, .npz, .pt or .pth"
# Where checkpoints keep the tensors when they hold more than them.
_NESTED = ("state_dict", "model_state_dict", "model", "weights", "gradients", "grads", "update")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU; those of a list by position: "0", "1", ...

    Args:
        path: a .safetensors file; a .npz of numpy (arrays without names are a list); or a .pt or .pth
            of torch, a dict or list of tensors, read with `weights_only`: a file that would run code
            is refused.
    """
    path = Path(path)
    readers = {".safetensors": _safetensors, ".npz": _npz, ".pt": _torch, ".pth": _torch}
    if path.is_dir():
        raise InvalidFile(f"{path} is a folder: expected a file named {_KINDS}")
    if path.suffix not in readers:
        raise InvalidFile(
            f"{path}: expected a file named {_KINDS}, got {path.suffix or 'no suffix'}"
        )
    if not path.is_file():
        raise InvalidFile(f"{path} does not exist: expected a {path.suffix} file")
    tensors = readers[path.suffix](path)
    if not tensors:
        raise InvalidFile(f"{path}: expected tensors, got none")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def positional(tensors: Mapping[str, Tensor]) -> bool:
    """Do the tensors come without names, as a list does?"""
    return all(name.isdigit() for name in tensors)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtra("safetensors", "cli") from error
    try:
        return dict(load_file(path))
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidFile(f"{path} is no safetensors file, or a damaged one: {error}") from error


def _npz(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InvalidFile(
                    f"{path} holds one array, expected an archive as numpy.savez writes"
                )
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        if isinstance(error, PermissionError):
            raise
        raise InvalidFile(
            f"{path} is no .npz of numbers, or a damaged one: {error} (pickled objects are not read)"
        ) from error
    numbered = {name: re.fullmatch(r"arr_(\d+)", name) for name in arrays}
    if all(numbered.values()):  # numpy.savez(path, *arrays): a list
        order = sorted(arrays, key=lambda name: int(name[4:]))
        arrays = {str(i): arrays[name] for i, name in enumerate(order)}
    return {name: _from_numpy(path, name, array) for name, array in arrays.items()}


def _from_numpy(path: Path, name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InvalidFile(f"{path}: {name!r} holds {array.dtype}, expected numbers")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype == np.longdouble and native.dtype != np.float64:
        native = native.astype(np.float64)
    try:
        return torch.from_numpy(np.ascontiguousarray(native)).reshape(array.shape)
    except TypeError as error:
        raise InvalidFile(
            f"{path}: {name!r} holds {array.dtype}, which torch does not have"
        ) from error


def _torch(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of the pickle's protocol: it is refused, or read right
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidFile(
            f"{path} is no file of tensors, or it holds objects that could run code when loaded (a "
            "pickled model): store model.state_dict(), or a dict or list of tensors, with torch.save"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise InvalidFile(
            f"{path} is no file of torch.save, or a damaged one ({type(error).__name__}: {error})"
        ) from error
    found = _tensors_in(content)
    if found is None:
        raise InvalidFile(
            f"{path}: expected a dict or list of tensors, got a {type(content).__name__} without any"
        )
    return found


def _tensors_in(content: Any) -> dict[str, Tensor] | None:
    """The tensors of a dict, a list, or a checkpoint that holds one of them."""
    if isinstance(content, Mapping):
        tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
        if tensors:
            return tensors
        inner = [_tensors_in(content[name]) for name in _NESTED if name in content]
        return next((part for part in inner if part), None)
    if isinstance(content, Sequence) and content and all(isinstance(t, Tensor) for t in content):
        return {str(i): part for i, part in enumerate(content)}
    return None
