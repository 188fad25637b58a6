"""Readers for CIFAR-10, MNIST, TinyImageNet and ImageNet as they lie on disk."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spear.errors import DataError, MissingExtra


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


def cifar10(root: Path) -> ImageData:
    """CIFAR-10's test set in its pickled form, `cifar-10-batches-py/test_batch`."""
    path = _file(root, "cifar-10-batches-py/test_batch", "CIFAR-10 (python version)")
    content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    data, labels = np.asarray(content[b"data"]), content[b"labels"]
    if data.ndim != 2 or data.shape[1] != 3072 or len(labels) != len(data):
        raise DataError(f"{path}: expected N x 3072 pixels with N labels, got {data.shape}")
    pixels = torch.from_numpy(data.copy())

    def read(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)].view(-1, 3, 32, 32).float() / 255

    return ImageData(
        "CIFAR-10",
        (3, 32, 32),
        10,
        torch.tensor(labels),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        read,
    )


def mnist(root: Path) -> ImageData:
    """MNIST's test set as idx files, gzipped or not, in `MNIST/raw`."""
    pixels = torch.from_numpy(_idx(_file(root, "MNIST/raw/t10k-images-idx3-ubyte", "MNIST")))
    labels = torch.from_numpy(_idx(_file(root, "MNIST/raw/t10k-labels-idx1-ubyte", "MNIST")))
    if pixels.ndim != 3 or len(pixels) != len(labels):
        raise DataError(f"MNIST in {root}: {tuple(pixels.shape)} images, {len(labels)} labels")

    def read(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)][:, None].float() / 255

    return ImageData("MNIST", (1, 28, 28), 10, labels.long(), (0.1307,), (0.3081,), read)


def tiny_imagenet(root: Path) -> ImageData:
    """TinyImageNet's validation set: `tiny-imagenet-200/val/images` and its annotations."""
    folder = _file(root, "tiny-imagenet-200/val/images", "TinyImageNet")
    base = folder.parent.parent
    wnids = (base / "wnids.txt").read_text().split()
    index = {wnid: i for i, wnid in enumerate(wnids)}
    rows = [
        line.split("\t") for line in (base / "val/val_annotations.txt").read_text().splitlines()
    ]
    names, labels = [row[0] for row in rows], [index[row[1]] for row in rows]

    def read(indices: Sequence[int]) -> Tensor:
        try:
            from PIL import Image
        except ImportError as error:
            raise MissingExtra("Pillow", "cli") from error
        arrays = [np.array(Image.open(folder / names[i]).convert("RGB")) for i in indices]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255

    return ImageData(
        "TinyImageNet",
        (3, 64, 64),
        200,
        torch.tensor(labels),
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        read,
    )


def imagenet(root: Path, pixels: int = 720) -> ImageData:
    """ImageNet validation photos in one folder a class, `imagenet/val/<class index>`.

    Photos with a shorter side than asked for are left out, the others cut to their middle.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Pillow", "cli") from error
    folder = _file(root, "imagenet/val", "ImageNet")
    paths = []
    for path in sorted(folder.glob("*/*")):
        with Image.open(path) as photo:  # reads the size only
            if min(photo.size) >= pixels:
                paths.append(path)

    def read(indices: Sequence[int]) -> Tensor:
        arrays = []
        for i in indices:
            with Image.open(paths[i]) as photo:
                left, top = (photo.width - pixels) // 2, (photo.height - pixels) // 2
                box = (left, top, left + pixels, top + pixels)
                arrays.append(np.array(photo.convert("RGB").crop(box)))
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255

    return ImageData(
        "ImageNet",
        (3, pixels, pixels),
        1000,
        torch.tensor([int(path.parent.name) for path in paths]),
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
        read,
    )


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts, lists, numbers and numpy arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> object:
        core = module.replace("numpy._core", "numpy.core")
        if core == "numpy.core.multiarray" and name == "_reconstruct":
            return _reconstruct()
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how old protocols write bytes
            return _latin1
        raise DataError(f"the file wants to load {module}.{name}: expected nothing but arrays")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise DataError(f"the file wants the codec {encoding!r}: expected latin1")
    return text.encode("latin1")


def _reconstruct() -> object:
    from numpy._core import multiarray

    return multiarray._reconstruct


def _file(root: Path, relative: str, what: str) -> Path:
    for path in (Path(root) / relative, Path(root) / f"{relative}.gz"):
        if path.exists():
            return path
    raise DataError(f"{what} is not in {root}: expected {relative}")


def _idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an idx file of bytes")
    dims = raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims))
    body = np.frombuffer(raw, np.uint8, offset=4 + 4 * dims)
    if body.size != int(np.prod(shape)):
        raise DataError(f"{path}: expected {shape} bytes, got {body.size}; the file is incomplete")
    return body.reshape(shape).copy()
