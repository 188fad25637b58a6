"""Tensors from files: weights and updates as people store them. Nothing in a file is ever executed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spear.errors import InvalidFile, MissingExtra
from spear.files.json_text import parsed
from spear.files.limits import checked_size, looks_like
from spear.files.npz_files import read_npz
from spear.files.torch_files import read_torch

KINDS = (".safetensors", ".npz", ".pt", ".pth")
KINDS_WORDS = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
_LARGEST_HEADER = 2**24  # bytes, of .safetensors: some 150,000 tensors


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU; those of a list by position: "0", "1", ...

    Refused: a file larger than 4 GB, or one that unpacks to 0.5 GB more than it takes on disk. The
    environment variable SPEAR_MAX_FILE_GB raises the first limit, and the second in proportion.

    Args:
        path: a .safetensors file; a .npz of numpy (arrays without names are a list); or a .pt or .pth
            of torch with a dict or list of tensors. A file that would run code is refused.
    """
    path = Path(path)
    readers = {
        ".safetensors": _safetensors,
        ".npz": read_npz,
        ".pt": read_torch,
        ".pth": read_torch,
    }
    if path.is_dir():
        raise InvalidFile(f"{path} is a folder: expected a file named {KINDS_WORDS}")
    if path.suffix not in readers:
        raise InvalidFile(
            f"{path}: expected a file named {KINDS_WORDS}, got {path.suffix or 'no suffix'}"
        )
    if not os.path.exists(path):
        link = ", it is a link to nowhere" if os.path.islink(path) else ""
        raise InvalidFile(f"{path} does not exist{link}: expected a {path.suffix} file")
    checked_size(path)
    tensors = readers[path.suffix](path)
    if not tensors:
        raise InvalidFile(f"{path}: expected tensors, got none")
    return {name: _plain(path, name, tensor) for name, tensor in tensors.items()}


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
        _check_header(path)
        return dict(load_file(path))
    except (SafetensorError, ValueError, LookupError, RuntimeError, TypeError) as error:
        words = str(error).partition("\n")[0][:200]
        raise InvalidFile(
            f"{path} is not a safetensors file, or a damaged one: {words}{looks_like(path)}"
        ) from error


def _check_header(path: Path) -> None:
    """ValueError unless it is short and names each tensor once; safetensors itself does not check."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, _LARGEST_HEADER):
            raise ValueError(f"its header claims {length:,} bytes")
        parsed(file.read(length))


def _plain(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor in a dtype that torch computes with: narrow and unusual ones are widened."""
    if tensor.is_complex() or tensor.dtype.itemsize * tensor.numel() != tensor.nbytes:
        raise InvalidFile(f"{path}: {name!r:.80} holds {tensor.dtype}, expected real numbers")
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8) != 0  # a byte may be anything
    if tensor.is_floating_point():
        return tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.double() if tensor.dtype is torch.uint64 else tensor.long()
    return tensor
