"""How large a file may be, and how much larger it may get when unpacked."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from spear.errors import InvalidFile, InvalidOption

LIMIT_VARIABLE = "SPEAR_MAX_FILE_GB"
_DEFAULT_GB = 4.0  # VGG16 takes 0.6
_UNPACKED = 1 / 8  # share of the limit by which unpacked content may exceed the file's size
_LARGEST_SIZE = 2**40  # of one dimension, even if another is 0
# The first bytes of files that are often passed by mistake.
_BEGINNINGS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x1f\x8b": "a gzip file, to be unpacked first",
    b"\x89HDF": "an HDF5 file (Keras): store the weights as .npz",
    b"\x93NUMPY": "one array of numpy.save: expected an archive of numpy.savez",
    b"%PDF": "a PDF",
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive, as .npz and .pt are",
    b"<": "a web page",
}


def largest() -> int:
    """The largest file allowed, in bytes; SPEAR_MAX_FILE_GB sets it."""
    text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < 2**20:
        raise InvalidOption(
            f"{LIMIT_VARIABLE}: expected gigabytes such as {_DEFAULT_GB:g}, got {text!r:.80}"
        )
    return int(gigabytes * 2**30)


def most_unpacked(size: int) -> int:
    """Bytes that a file of this size may unpack to."""
    return size + int(largest() * _UNPACKED)


def checked_size(path: Path) -> int:
    """The size of a regular file; anything else, or too large a file, is refused unopened."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise InvalidFile(f"{path}: expected a file, got a pipe or a device")
    if status.st_size > largest():
        raise InvalidFile(
            f"{path}: expected at most {largest() / 2**30:g} GB, got {status.st_size / 2**30:.1f} GB: "
            f"if that is right, set {LIMIT_VARIABLE}"
        )
    if not status.st_size:
        raise InvalidFile(f"{path} is empty: copy or write it again")
    return status.st_size


def check_unpacked(path: Path, unpacked: int) -> None:
    """Refuse a file that says it unpacks to far more than it takes on disk."""
    size = path.stat().st_size
    if unpacked > most_unpacked(size):
        raise InvalidFile(
            f"{path}: expected at most {most_unpacked(size) / 2**30:.1f} GB when unpacked, got "
            f"{unpacked / 2**30:.1f} GB from a file of {size:,} bytes: if that is right, set "
            f"{LIMIT_VARIABLE}"
        )


def checked_bytes(shape: Sequence[object], item: int) -> int:
    """Bytes of an array of this shape; ValueError for a shape that no array can have.

    >>> checked_bytes((2, 3), 4)
    24
    """
    sizes = [n for n in shape if type(n) is int and 0 <= n <= _LARGEST_SIZE]
    if len(sizes) != len(shape) or len(shape) > 16 or math.prod(n or 1 for n in sizes) >= 2**48:
        raise ValueError(f"no array has the shape {str(tuple(shape))[:80]}")
    return math.prod(sizes) * item


def looks_like(path: Path) -> str:
    """A remark on what a file seems to be instead; empty if unknown."""
    with path.open("rb") as file:
        head = file.read(64).lstrip()
    if head[8:10] == b'{"' and path.suffix != ".safetensors":
        return "; it looks like a .safetensors file"
    found = [words for start, words in _BEGINNINGS.items() if head.startswith(start)]
    return f"; it looks like {found[0]}" if found else ""
