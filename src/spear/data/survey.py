"""Which datasets and weights a folder holds, what is wrong with them, and where to get the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torch import Tensor

from spear.data.adult import FILES, adult
from spear.data.folders import photo_sizes, tiny_imagenet
from spear.data.images import ImageData, cifar10, mnist
from spear.data.known import ADULT, CIFAR10, IMAGENET, MNIST, TINY_IMAGENET
from spear.data.places import AGAIN, Dataset, Source, existing
from spear.errors import DamagedData, InvalidFile, MissingData
from spear.files import read_tensors

_SIZES = (224, 256, 720)  # pixels of the shorter side that experiments ask for
_TRIED = 64  # pictures of TinyImageNet that are decoded as a test


class State(Enum):
    """Whether a dataset was found."""

    FOUND = "found"
    DAMAGED = "damaged"
    MISSING = "missing"


@dataclass(frozen=True)
class Found:
    """A dataset or weights: whether they are there, where, and what to do if not."""

    name: str
    state: State
    where: Path | None
    detail: str  # what is there, or what is wrong
    source: Source
    used_by: str


@dataclass(frozen=True)
class _Weights:
    """Trained weights in `weights/`: for each file, how many tensors and numbers it holds."""

    name: str
    files: dict[str, tuple[int, int]]
    source: Source
    used_by: str

    def describe(self, folder: Path) -> str:
        numbers = 0
        for file, (tensors, wanted) in self.files.items():
            stored = _tensors(folder / file, 4 * wanted)
            came = sum(tensor.numel() for tensor in stored)
            if (len(stored), came) != (tensors, wanted):
                raise DamagedData(
                    f"{folder / file}: expected {wanted:,} numbers in {tensors} tensors, got {came:,} "
                    f"in {len(stored)}: {AGAIN}"
                )
            numbers += came
        return f"{numbers:,} weights in {' and '.join(self.files)}"


_TAKE_FEATURES = (
    "torch.save({{k: v for k, v in torch.hub.load_state_dict_from_url("
    "'https://download.pytorch.org/models/{0}.pth').items() if k.startswith('features.')}}, "
    "'weights/{1}')"
)
WEIGHTS = (
    _Weights(
        "AlexNet and LPIPS heads",
        {"alexnet_features.pth": (10, 2_469_696), "lpips_alex_heads.pth": (5, 1_152)},
        Source(
            "https://pytorch.org/vision and https://github.com/richzhang/PerceptualSimilarity",
            "curl -L --create-dirs -o weights/lpips_alex_heads.pth https://github.com/richzhang/"
            "PerceptualSimilarity/raw/master/lpips/weights/v0.1/alex.pth && python -c "
            f'"import torch; {_TAKE_FEATURES.format("alexnet-owt-7be5be79", "alexnet_features.pth")}"',
        ),
        "LPIPS in every table of images",
    ),
    _Weights(
        "VGG16 features",
        {"vgg16_features.pth": (26, 14_714_688)},
        Source(
            "https://pytorch.org/vision",
            "mkdir -p weights && python -c "
            f'"import torch; {_TAKE_FEATURES.format("vgg16-397923af", "vgg16_features.pth")}"',
        ),
        "images from VGG16's features",
    ),
)


def survey(root: Path) -> tuple[Found, ...]:
    """Which datasets are in this folder, and where to get the others. Nothing is downloaded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     found = survey(Path(empty))
    >>> found[0].name, found[0].state, found[0].source.page
    ('CIFAR-10', <State.MISSING: 'missing'>, 'https://www.cs.toronto.edu/~kriz/cifar.html')
    """
    root = existing(root)
    described: dict[Dataset, Callable[[Path], str]] = {
        CIFAR10: lambda r: _splits(r, cifar10, {"test": "test", "train": "training"}),
        MNIST: lambda r: _splits(r, mnist, {"test": "test", "train": "training"}),
        TINY_IMAGENET: lambda r: _splits(r, _tried, {"val": "validation", "train": "training"}),
        IMAGENET: _photos,
        ADULT: _records,
    }
    datasets = [_judged(dataset, root, describe) for dataset, describe in described.items()]
    return (*datasets, *(_judged_weights(weights, root / "weights") for weights in WEIGHTS))


def catalogue() -> tuple[Found, ...]:
    """All datasets and weights that SPEAR knows, each marked as missing."""
    known = (*(CIFAR10, MNIST, TINY_IMAGENET, IMAGENET, ADULT), *WEIGHTS)
    return tuple(
        Found(item.name, State.MISSING, None, "", item.source, item.used_by) for item in known
    )


def _judged(dataset: Dataset, root: Path, describe: Callable[[Path], str]) -> Found:
    where = None
    try:
        where = dataset.find(root)
        state, detail = State.FOUND, describe(root)
    except MissingData:
        state, detail = State.MISSING, f"expected {dataset.expected}"
    except DamagedData as error:
        state, detail = State.DAMAGED, str(error)
    return Found(dataset.name, state, where, detail, dataset.source, dataset.used_by)


def _judged_weights(weights: _Weights, folder: Path) -> Found:
    absent = [name for name in weights.files if not os.path.lexists(folder / name)]
    state, where, detail = State.FOUND, folder, ""
    if len(absent) == len(weights.files):
        detail = f"expected {' and '.join(f'weights/{name}' for name in absent)}"
        return Found(weights.name, State.MISSING, None, detail, weights.source, weights.used_by)
    try:
        if absent:
            raise DamagedData(f"{folder}: expected {', '.join(absent)} as well; {AGAIN}")
        detail = weights.describe(folder)
    except DamagedData as error:
        state, detail = State.DAMAGED, str(error)
    return Found(weights.name, state, where, detail, weights.source, weights.used_by)


def _splits(root: Path, reader: Callable[[Path, str], ImageData], names: dict[str, str]) -> str:
    """Such as "10,000 test images of 32 x 32, no training set"."""
    parts, absent = [], []
    for split, name in names.items():
        try:
            found = reader(root, split)
        except MissingData:
            absent.append(name)
            continue
        height, width = found.shape[1:]
        parts.append(f"{len(found):,} {name} images of {height} x {width}")
    return ", ".join([*parts, *(f"no {name} set" for name in absent)])


def _records(root: Path) -> str:
    training = f"{FILES['train'][1]:,} training records"  # with fewer, reading fails
    try:
        return f"{training}, {len(adult(root, 'test')):,} test records"
    except MissingData:
        adult(root)
        return f"{training}, no test set"


def _tried(root: Path, split: str) -> ImageData:
    """TinyImageNet, with some of its pictures decoded."""
    images = tiny_imagenet(root, split)
    images.read(range(0, len(images), max(1, len(images) // _TRIED)))
    return images


def _photos(root: Path) -> str:
    shorter = [side for _, _, side in photo_sizes(root)]
    counts = [f"{sum(side >= size for side in shorter):,} of {size} pixels" for size in _SIZES]
    return f"{len(shorter):,} photos; shorter side at least: {', '.join(counts)}"


def _tensors(path: Path, expected_bytes: int) -> list[Tensor]:
    """The tensors of a file of weights; a file far larger than expected is refused."""
    largest = 2 * expected_bytes + 2**16
    try:
        size = os.stat(path).st_size
        if size > largest:
            raise DamagedData(f"{path}: expected at most {largest:,} bytes, got {size:,}: {AGAIN}")
        return list(read_tensors(path).values())
    except (InvalidFile, OSError) as error:
        raise DamagedData(
            f"{path}: expected weights by name ({error}); it may be incomplete, {AGAIN}"
        ) from error
