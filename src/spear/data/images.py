"""Readers for CIFAR-10 and MNIST, stored on disk as arrays."""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spear.data.known import CIFAR10, MNIST
from spear.data.places import AGAIN, contents, web_page
from spear.errors import DamagedData, InvalidOption
from spear.files import check_pickle

_LARGEST = 2**27  # bytes per file; CIFAR's have 31 MB, or 45 MB with bytes written as text
_DTYPES = ("u1", "i4", "i8")


class _Dtype:
    """Stands in for numpy's dtype."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: Any) -> None:
        if self.code not in _DTYPES or _text(state[1]) not in ("|", "<"):
            raise pickle.UnpicklingError("an array is not of whole numbers")


class _Array:
    """Stands in for numpy's array, which would trust whatever state a file gives it."""

    values: NDArray[Any] = np.empty(0, np.uint8)

    def __init__(
        self, raw: Any = b"", dtype: Any = None, shape: Any = None, order: str = "C"
    ) -> None:
        if isinstance(dtype, _Dtype):  # pickle protocol 5 gives everything at once
            self.__setstate__((1, shape, dtype, order == "F", raw))

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or dtype.code not in _DTYPES:
            raise pickle.UnpicklingError("an array is not of whole numbers")
        if len(shape) > 4 or not all(type(n) is int and 0 <= n <= _LARGEST for n in shape):
            raise pickle.UnpicklingError("an array has an impossible shape")
        flat = np.frombuffer(bytes(raw), f"<{dtype.code}")
        self.values = flat.reshape(shape, order="F" if fortran else "C")


class _Bytes(bytes):
    """Stands in for _codecs.encode, which old pickle protocols use to write bytes."""

    def __new__(cls, words: str, coding: str) -> _Bytes:
        if coding != "latin1":
            raise pickle.UnpicklingError(f"text is encoded as {coding!r:.20}")
        return super().__new__(cls, words, coding)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change an object's state")


class _ArraysOnly(pickle.Unpickler):
    """Lets a file build arrays, out of our own classes, and nothing else.

    Each of these classes has a __setstate__: otherwise a file could change the class itself.
    """

    stand_ins: ClassVar[dict[str, type]] = {
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy.core.numeric._frombuffer": _Array,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
        "_codecs.encode": _Bytes,
    }

    def find_class(self, module: str, name: str) -> type:
        known = self.stand_ins.get(f"{module.replace('._core', '.core')}.{name}")
        if known is None:
            raise pickle.UnpicklingError(f"it tries to load {module[:40]}.{name[:40]}")
        return known


def unpickle(path: Path) -> dict[str, Any]:
    """The dict in a pickled file, its keys as text, its arrays as arrays."""
    raw = contents(path, _LARGEST)
    try:
        check_pickle(io.BytesIO(raw))
        content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise DamagedData(f"{path}: expected nothing but arrays, but {error}: {AGAIN}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DamagedData(
            f"{path}: expected a pickled batch, got a file that is incomplete or of another kind "
            f"({str(error)[:80]}){web_page(raw)}: {AGAIN}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(k, str | bytes) for k in content):
        raise DamagedData(f"{path}: expected a pickled dict, got something else: {AGAIN}")
    return {
        _text(key): value.values if isinstance(value, _Array) else value
        for key, value in content.items()
    }


def _text(words: Any) -> str:
    """Text as str; Python 2 wrote it as bytes."""
    return words.decode("latin1") if isinstance(words, bytes) else str(words)


def read_idx(path: Path, most: int, item: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """An array (N, *item) of bytes, with N at most `most`."""
    largest = 8 + 4 * len(item) + most * math.prod(item)  # what the file may unpack to, in bytes
    raw = contents(path, 2 * largest)
    if (
        raw[:2] == b"\x1f\x8b"
    ):  # gzip, whatever its name: browsers unpack .gz files but keep the suffix
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
    """Unpack at most as much as such a file can hold: a hostile one may unpack to far more."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            unpacked = file.read(largest + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedData(
            f"{path} cannot be unpacked ({error}); it is incomplete: {AGAIN}"
        ) from error
    if len(unpacked) > largest:
        raise DamagedData(
            f"{path} unpacks to more than {largest:,} bytes, so it is another file: {AGAIN}"
        )
    return unpacked


_CIFAR_FILES = {"test": ["test_batch"], "train": [f"data_batch_{i}" for i in range(1, 6)]}
_MNIST_FILES = {"test": ("t10k", 10_000), "train": ("train", 60_000)}
# The first labels tell MNIST from other datasets in its format, such as Fashion-MNIST.
_MNIST_STARTS = {"test": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9], "train": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]}


@dataclass(frozen=True, eq=False)
class ImageData:
    """A set of images with labels, read when asked for."""

    name: str
    shape: tuple[int, int, int]  # channels, height, width
    classes: int
    labels: Tensor  # (N,) int64
    mean: tuple[float, ...]  # per channel, the usual normalisation
    std: tuple[float, ...]
    read: Callable[[Sequence[int]], Tensor] = field(repr=False)  # -> (k, C, H, W) in [0, 1]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], *, normalise: bool = True) -> tuple[Tensor, Tensor]:
        """Inputs (k, n) as a fully connected network takes them, and labels (k,)."""
        images = self.read(indices).flatten(1)
        if normalise:
            images = (images - self._flat(self.mean)) / self._flat(self.std)
        return images, self.labels[list(indices)]

    def to_pixels(self, inputs: Tensor, *, normalised: bool = True) -> Tensor:
        """Inputs (k, n) back to [0, 1] in float64, not clipped."""
        pixels = inputs.double()
        if normalised:
            pixels = pixels * self._flat(self.std).double() + self._flat(self.mean).double()
        return pixels

    def _flat(self, per_channel: tuple[float, ...]) -> Tensor:
        _, height, width = self.shape
        return torch.tensor(per_channel).repeat_interleave(height * width)


def cifar10(root: Path, split: str = "test") -> ImageData:
    """CIFAR-10 in its pickled form, `cifar-10-batches-py`: the "test" or the "train" images.

    Looked for under `root`, in `cifar10` there, and in `root` itself. Nothing in the pickles
    is executed; a file that asks for more than arrays is refused.
    """
    check_split(split, _CIFAR_FILES)
    folder = CIFAR10.find(root)
    batches = [_cifar_batch(p) for p in CIFAR10.split(root, folder, _CIFAR_FILES[split], split)]
    pixels = torch.cat([data for data, _ in batches])  # (N, 3072)

    def read(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)].view(-1, 3, 32, 32).float() / 255

    return ImageData(
        "CIFAR-10",
        (3, 32, 32),
        10,
        torch.cat([labels for _, labels in batches]),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        read,
    )


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Pixels (N, 3072) and labels (N,) of one file."""
    content = unpickle(path)
    if "data" not in content or "labels" not in content:
        hint = ", it is CIFAR-100's" if "fine_labels" in content else ""
        keys = ", ".join(sorted(content)[:5]) or "nothing"
        raise DamagedData(f"{path}: expected data and labels, got {keys[:100]}{hint}: {AGAIN}")
    data, labels = content["data"], content["labels"]
    data = data if isinstance(data, np.ndarray) else np.empty(0)
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    count = len(labels) if isinstance(labels, list) else 0
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape != (count, 3072):
        raise DamagedData(
            f"{path}: expected N x 3072 pixels with N labels, got {data.shape} and {count} labels: "
            f"{AGAIN}"
        )
    if not 0 < count <= 10_000:
        raise DamagedData(f"{path}: expected 1 to 10,000 images, got {count:,}: {AGAIN}")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DamagedData(f"{path}: expected labels from 0 to 9, got others: {AGAIN}")
    return torch.from_numpy(data.copy()), torch.tensor(labels)


def mnist(root: Path, split: str = "test") -> ImageData:
    """MNIST's idx files, gzipped or not, as in `MNIST/raw`: the "test" or the "train" images.

    Looked for in `MNIST/raw`, `mnist` and the like under `root`, and in `root` itself.
    """
    check_split(split, _MNIST_FILES)
    folder = MNIST.find(root)
    prefix, most = _MNIST_FILES[split]
    names = [_spelt(folder, f"{prefix}-{rest}") for rest in ("images-idx3", "labels-idx1")]
    image_file, label_file = MNIST.split(root, folder, names, split)
    pixels = torch.from_numpy(read_idx(image_file, most, (28, 28)))
    labels = torch.from_numpy(read_idx(label_file, most)).long()
    if len(pixels) != len(labels):
        raise DamagedData(
            f"{folder}: expected as many labels as images, got {len(pixels):,} images in "
            f"{image_file.name} and {len(labels):,} labels in {label_file.name}: {AGAIN}"
        )
    if int(labels.max()) > 9:
        raise DamagedData(
            f"{label_file}: expected labels from 0 to 9, got {int(labels.max())}: {AGAIN}"
        )
    if len(labels) == most and labels[:10].tolist() != _MNIST_STARTS[split]:
        raise DamagedData(
            f"{label_file}: expected MNIST's {split} labels, got those of another dataset: {AGAIN}"
        )

    def read(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)][:, None].float() / 255

    return ImageData("MNIST", (1, 28, 28), 10, labels, (0.1307,), (0.3081,), read)


def _spelt(folder: Path, name: str) -> str:
    """How the file is spelt in this folder; the usual name if it is missing."""
    usual = f"{name}-ubyte"  # t10k-images-idx3-ubyte
    dotted = usual.replace("-idx", ".idx")
    names = [usual, f"{usual}.gz", dotted, f"{dotted}.gz"]
    # Kaggle's copy has a folder of the usual name beside the file.
    there = [n for n in names if (folder / n).is_file()]
    there += [n for n in names if os.path.lexists(folder / n)]
    return there[0] if there else usual


def check_split(split: str, known: Iterable[str]) -> None:
    """Raise if the dataset does not have this split."""
    if split not in known:
        raise InvalidOption(f"expected split to be one of {sorted(known)}, got {split!r}")
