"""Readers for CIFAR-10 and MNIST, which lie on disk as arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spear.data.idx import read_idx
from spear.data.known import CIFAR10, MNIST
from spear.data.pickles import PickledArray, unpickle
from spear.data.places import AGAIN
from spear.errors import DamagedData, InvalidOption

_CIFAR_FILES = {"test": ["test_batch"], "train": [f"data_batch_{i}" for i in range(1, 6)]}
_MNIST_FILES = {"test": ("t10k", 10_000), "train": ("train", 60_000)}
# By these the whole sets are told from others of their format, such as Fashion-MNIST.
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

    Looked for under `root`, in `cifar10` there, and in `root` itself. The files are read without
    running what a pickle may contain; one that wants more than arrays is refused.
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
    data = data.values if isinstance(data, PickledArray) else np.empty(0)
    labels = labels.values.tolist() if isinstance(labels, PickledArray) else labels
    count = len(labels) if isinstance(labels, list) else 0
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape != (count, 3072):
        raise DamagedData(
            f"{path}: expected N x 3072 pixels with N labels, got {data.shape} and {count} labels: "
            f"{AGAIN}"
        )
    if not 0 < count <= 10_000:
        raise DamagedData(f"{path}: expected 1 to 10,000 images, got {count:,}: {AGAIN}")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DamagedData(f"{path}: expected labels of 0 to 9, got others: {AGAIN}")
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
            f"{label_file}: expected labels of 0 to 9, got {int(labels.max())}: {AGAIN}"
        )
    if len(labels) == most and labels[:10].tolist() != _MNIST_STARTS[split]:
        raise DamagedData(
            f"{label_file}: expected MNIST's {split} labels, got those of another dataset: {AGAIN}"
        )

    def read(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)][:, None].float() / 255

    return ImageData("MNIST", (1, 28, 28), 10, labels, (0.1307,), (0.3081,), read)


def _spelt(folder: Path, name: str) -> str:
    """The name that the file has there; the usual one if it is not there."""
    usual = f"{name}-ubyte"  # t10k-images-idx3-ubyte
    dotted = usual.replace("-idx", ".idx")
    names = [usual, f"{usual}.gz", dotted, f"{dotted}.gz"]
    # Kaggle's copy has a folder of the usual name beside the file.
    there = [n for n in names if (folder / n).is_file()]
    there += [n for n in names if os.path.lexists(folder / n)]
    return there[0] if there else usual


def check_split(split: str, known: Iterable[str]) -> None:
    """Refuse the name of a part that a dataset does not have."""
    if split not in known:
        raise InvalidOption(f"expected split to be one of {sorted(known)}, got {split!r}")
