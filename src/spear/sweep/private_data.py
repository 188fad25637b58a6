"""The data that a sweep draws private batches from: the user's own, a known dataset, or photos."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear import data as readers
from spear.data import Column, ImageData, TabularData
from spear.errors import InvalidFile, InvalidOption
from spear.files import load_object, read_tensors
from spear.report import ImageFormat, columns_fit

_INPUTS, _LABELS = ("inputs", "x", "X", "data", "images"), ("labels", "y", "Y", "targets")
_FILES = (".npz", ".safetensors", ".pt", ".pth")
_KNOWN: Mapping[str, Callable[[Path], ImageData | TabularData]] = {
    "cifar10": readers.cifar10,
    "mnist": readers.mnist,
    "tiny_imagenet": readers.tiny_imagenet,
    "adult": readers.adult,
}
_DRAWN = 2000  # samples of a known dataset: enough for any batch, and for a little training
_PHOTOS, _PIXELS = 800, 32
_PHOTO_MEAN, _PHOTO_STD = 0.5, 0.25
_MOST_CLASSES = 10**6
_SLACK = 0.5  # pixels may leave [0, 1] by this much before mean and std must be wrong


@dataclass(frozen=True, eq=False)
class PrivateData:
    """Samples with labels, and what they look like.

    Args:
        name: for messages and reports.
        inputs: (N, ...) as the model takes them.
        labels: (N,) classes as int64, or (N, ...) numbers as floats.
        image_format: how a sample becomes a picture in [0, 1]; None if samples are not pictures.
        names: (N,) names of the samples; numbered unless given.
        columns: what the inputs are called, if samples are rows of a table.
    """

    name: str
    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    image_format: ImageFormat | None = None
    names: tuple[str, ...] | None = field(default=None, repr=False)
    columns: tuple[Column, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or not self.inputs.is_floating_point():
            raise InvalidOption(
                f"{self.name}: expected inputs (samples, ...) of floats, got "
                f"{tuple(self.inputs.shape)} of {self.inputs.dtype}"
            )
        if len(self.labels) != len(self.inputs):
            raise InvalidOption(
                f"{self.name}: expected a label for each of {len(self.inputs)} inputs, got "
                f"{len(self.labels)}"
            )
        if not bool(torch.isfinite(self.inputs).all()):
            raise InvalidOption(f"{self.name}: expected finite inputs, got NaN or infinity")
        if self.classes is not None and self.classes > _MOST_CLASSES:
            raise InvalidOption(
                f"{self.name}: expected labels counted from 0, up to {_MOST_CLASSES:,}, got "
                f"{self.classes - 1:,}"
            )
        if self.image_format is not None:
            self._check(self.image_format)
        if self.columns:
            columns_fit(self.columns, self.inputs.flatten(1))

    def _check(self, image_format: ImageFormat) -> None:
        pixels = image_format.pictures(self.inputs.flatten(1))
        low, high = float(pixels.min()), float(pixels.max())
        if low < -_SLACK or high > 1 + _SLACK:
            raise InvalidOption(
                f"{self.name}: expected pixels in [0, 1] after multiplying with std and adding mean, "
                f"got {low:.2g} to {high:.2g}: give the client's own mean and std"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def classes(self) -> int | None:
        """How many classes there are; None if labels are numbers."""
        return None if self.labels.is_floating_point() else int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """Identifies the content: other samples or labels give another digest."""
        found = hashlib.sha256()
        for tensor in (self.inputs, self.labels):
            found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        return found.hexdigest()[:12]

    @property
    def commonest(self) -> float | None:
        """The share of the largest class: the accuracy of always guessing it."""
        if self.labels.is_floating_point():
            return None
        return float(self.labels.bincount().max()) / len(self.labels)

    def name_of(self, index: int) -> str:
        return self.names[index] if self.names else f"row {index}"

    @staticmethod
    def of(
        name: str,
        inputs: Any,
        labels: Any,
        *,
        image_format: ImageFormat | None = None,
        scale: bool = True,
    ) -> PrivateData:
        """From arrays or tensors. Bytes become floats in [0, 1]; pictures are recognised by shape.

        Args:
            name: for messages and reports.
            inputs: (N, ...).
            labels: (N,) whole numbers are classes, others are numbers to predict.
            image_format: how samples become pictures; inputs of shape (N, 1 or 3, H, W) get one from
                their range unless given.
            scale: whether the format may be guessed like that.
        """
        try:
            x = torch.as_tensor(inputs).detach().cpu()
            y = torch.as_tensor(labels).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidOption(
                f"{name}: expected arrays of numbers, got something else: {error}"
            ) from error
        x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        if x.ndim < 2 or not len(x):
            raise InvalidOption(f"{name}: expected inputs (samples, ...), got {tuple(x.shape)}")
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and not y.is_floating_point() else y
        if y.is_floating_point():
            y = y.float()[:, None] if y.ndim == 1 else y.float()
        elif y.ndim != 1 or (len(y) and int(y.min()) < 0):
            raise InvalidOption(
                f"{name}: expected labels (samples,) counted from 0, or floats to predict, got "
                f"{tuple(y.shape)} from {int(y.min()) if y.numel() else 'nothing'}"
            )
        else:
            y = y.long()
        if image_format is None and scale and x.ndim == 4 and x.shape[1] in (1, 3):
            image_format = _by_range(x)
        return PrivateData(name, x, y, image_format)


def _by_range(x: Tensor) -> ImageFormat:
    """A format for pictures; outside [0, 1], their darkest and brightest values become 0 and 1."""
    low, high = float(x.min()), float(x.max())
    shape = (x.shape[1], x.shape[2], x.shape[3])
    within = low >= 0 and high <= 1
    return ImageFormat(shape) if within else ImageFormat(shape, (low,), (max(high - low, 1e-12),))


def load_data(
    spec: str | None,
    image_format: ImageFormat | None,
    root: Path | None,
    columns: tuple[Column, ...] = (),
) -> PrivateData:
    """The data by its name: a file, a known dataset, package.module:function, or None for photos.

    Args:
        spec: the name.
        image_format: how its samples are shown as pictures.
        root: folder of the known datasets; SPEAR_DATA unless given.
        columns: what its inputs are called, if they are rows of a table; ADULT's are known.
    """
    found = _by_name(spec, image_format, root)
    return dataclasses.replace(found, columns=columns) if columns else found


def _by_name(spec: str | None, image_format: ImageFormat | None, root: Path | None) -> PrivateData:
    if image_format is not None and (spec is None or spec in _KNOWN):
        raise InvalidOption(f"{spec or 'the photos'} has its own shape, mean and std: give none")
    if spec is None:
        return _photos()
    if spec in _KNOWN:
        return _known(spec, root or Path(os.environ.get("SPEAR_DATA") or "."))
    if Path(spec).suffix in _FILES:
        return _file(Path(spec), image_format)
    if ":" not in spec:
        raise InvalidOption(
            f"expected data as {', '.join(_FILES)}, one of {', '.join(_KNOWN)}, or "
            f"package.module:function, got {spec!r}"
        )
    source = load_object(spec)
    try:
        given = source() if callable(source) else source
        inputs, labels = given
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise InvalidOption(
            f"expected {spec} to return (inputs, labels), but {type(error).__name__}: {error}"
        ) from error
    return PrivateData.of(spec, inputs, labels, image_format=image_format)


def _photos() -> PrivateData:
    """Crops of ten photos, each labelled by its photo, which a network can learn."""
    from spear.data import PHOTOS, photo_crops

    pixels, names = photo_crops(_PHOTOS, _PIXELS)
    labels = torch.tensor([PHOTOS.index(name.rsplit(" ", 1)[0]) for name in names])
    inputs = ((pixels - _PHOTO_MEAN) / _PHOTO_STD).flatten(1)
    shown = ImageFormat((3, _PIXELS, _PIXELS), (_PHOTO_MEAN,), (_PHOTO_STD,))
    words = f"{len(names)} crops of {len(PHOTOS)} photos, labelled by photo"
    return PrivateData(words, inputs, labels, shown, tuple(names))


def _known(name: str, root: Path) -> PrivateData:
    source = _KNOWN[name](root)
    count = len(source)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:_DRAWN].tolist()
    x, y = source.batch(order)
    image_format = None
    if isinstance(source, ImageData):
        image_format = ImageFormat(source.shape, source.mean, source.std)
    names = tuple(f"{name} {i}" for i in order)
    words = f"{len(order):,} of {count:,} samples of {source.name}"
    columns = source.columns if isinstance(source, TabularData) else ()
    return PrivateData(words, x.float(), y.long(), image_format, names, columns)


def _file(path: Path, image_format: ImageFormat | None) -> PrivateData:
    tensors = read_tensors(path)
    found = [
        next((tensors[name] for name in names if name in tensors), None)
        for names in (_INPUTS, _LABELS)
    ]
    if set(tensors) == {"0", "1"}:  # a list: inputs, labels
        found = [tensors["0"], tensors["1"]]
    if found[0] is None or found[1] is None:
        has = ", ".join(f"{name!r} {tuple(t.shape)}" for name, t in list(tensors.items())[:6])
        raise InvalidFile(f"{path}: expected arrays 'inputs' and 'labels', got {has}")
    return PrivateData.of(path.name, found[0], found[1], image_format=image_format)
