"""MNIST's idx files: a header with the shape, then one byte a number, gzipped or not."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spear.data.places import AGAIN, contents, web_page
from spear.errors import DamagedData


def read_idx(path: Path, most: int, item: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """An array (N, *item) of bytes, with N at most `most`."""
    largest = 8 + 4 * len(item) + most * math.prod(item)  # what the file may unpack to, in bytes
    raw = contents(path, 2 * largest)
    if raw[:2] == b"\x1f\x8b":  # browsers unpack .gz files and leave their name
        raw = _unpacked(path, raw, largest)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DamagedData(f"{path} is not an idx file of bytes{web_page(raw)}: {AGAIN}")
    start = 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    if len(shape) != 1 + len(item) or shape[1:] != item or not 0 < shape[0] <= most:
        wanted = " x ".join(map(str, (f"1 to {most:,}", *item)))
        other = " x ".join(map(str, shape))
        raise DamagedData(
            f"{path}: expected {wanted} bytes, got {other}; it is another file: {AGAIN}"
        )
    count, came = math.prod(shape), max(0, len(raw) - start)
    if came != count:
        wrong = "is incomplete" if came < count else "has too many"
        raise DamagedData(f"{path}: expected {count:,} bytes, got {came:,}; it {wrong}: {AGAIN}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def _unpacked(path: Path, raw: bytes, largest: int) -> bytes:
    """Unpack no more than such a file can hold, whatever a hostile one would become."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            unpacked = file.read(largest + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedData(
            f"{path} cannot be unpacked ({error}); it is incomplete: {AGAIN}"
        ) from error
    if len(unpacked) > largest:
        raise DamagedData(f"{path} unpacks to more than {largest:,} bytes, a wrong file: {AGAIN}")
    return unpacked
