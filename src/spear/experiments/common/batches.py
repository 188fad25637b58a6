"""Batches of real images by a case's settings, and the usual trial with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear import data, trials
from spear.data import ImageData
from spear.errors import InvalidOption
from spear.experiments.common.experiment import Case
from spear.federated import mlp
from spear.metrics import FEATURES, HEADS, Lpips, NotMeasured
from spear.report import ImageFormat
from spear.search import Finder
from spear.trials import Attacked, Batch, Compared, compare, progress_words
from spear.update import LayerUpdate

DEPTH = 6  # linear layers of the paper's network


def _raw(read: Callable[[Path], ImageData]) -> Callable[[Path], ImageData]:
    """The same images as inputs in [0, 1], neither centred nor scaled."""

    def pixels(root: Path) -> ImageData:
        source = read(root)
        channels = source.shape[0]
        return replace(source, mean=(0.0,) * channels, std=(1.0,) * channels)

    return pixels


# Datasets by their names in settings: the name to show, and the reader.
_SOURCES: dict[str, tuple[str, Callable[[Path], ImageData]]] = {
    "mnist": ("MNIST", data.mnist),
    "mnist_raw": ("MNIST with pixels in [0, 1]", _raw(data.mnist)),
    "cifar10": ("CIFAR-10", data.cifar10),
    "cifar10_raw": ("CIFAR-10 with pixels in [0, 1]", _raw(data.cifar10)),
    "tiny_imagenet": ("TinyImageNet", data.tiny_imagenet),
    "tiny_imagenet_raw": ("TinyImageNet with pixels in [0, 1]", _raw(data.tiny_imagenet)),
    "imagenet": ("ImageNet 720", data.imagenet),
    "imagenet_raw": ("ImageNet 720 with pixels in [0, 1]", _raw(data.imagenet)),
    "imagenet224": ("ImageNet 224 × 224", lambda root: data.imagenet(root, 224, rescaled=True)),
    "imagenet256": ("ImageNet 256 × 256", lambda root: data.imagenet(root, 256, rescaled=True)),
    "imagenet720": ("ImageNet 720 × 720", lambda root: data.imagenet(root, 720, rescaled=True)),
}
NAMES = {name: words for name, (words, _) in _SOURCES.items()}


@cache
def images(root: Path, name: str) -> ImageData:
    """A dataset, opened once per process."""
    if name not in _SOURCES:
        raise InvalidOption(f"expected one of the datasets {', '.join(_SOURCES)}, got {name!r}")
    return _SOURCES[name][1](root)


@cache
def lpips(root: Path) -> Lpips | NotMeasured:
    """LPIPS with the weights beside the datasets, or why it is not available."""
    if any((root / "weights" / name).exists() for name in (FEATURES, HEADS)):
        return Lpips.load(root / "weights")  # raises if only some are there
    return Lpips.find(root / "weights")


def private_batch(
    case: Case,
    *,
    data: str | None = None,
    among: Tensor | None = None,
    model: nn.Module | None = None,
) -> Batch:
    """Images and a network's weights, drawn by the case's seed.

    Args:
        case: with the settings `data`, `b` and `m`, and `depth` if it is not the paper's.
        data: instead of the setting.
        among: (k,) images to draw from; all unless given.
        model: instead of the paper's network.
    """
    name, b = data or case["data"], case["b"]
    source = images(case.data, name)
    pool = torch.arange(len(source)) if among is None else among
    if len(pool) < b:
        raise InvalidOption(
            f"expected at least {b} images of {NAMES[name]} to draw from, got {len(pool)}"
        )
    order = torch.randperm(len(pool), generator=case.generator())
    x, y = source.batch(pool[order[:b]].tolist())
    if model is None:
        depth = case.settings.get("depth", DEPTH)
        model = mlp(x.shape[1], source.classes, width=case["m"], depth=depth, seed=case.seed)
    # In float32, as they were applied to the inputs.
    mean, std = (tuple(torch.tensor(part).tolist()) for part in (source.mean, source.std))
    return Batch(x, y, model, ImageFormat(source.shape, mean, std))


def attack(
    case: Case, view: LayerUpdate, model: nn.Module | None, finder: str | Finder = "cascade"
) -> Attacked:
    """Invert within the setting `max_seconds`, with the case's seed for the search.

    A finder that the user chose for the run takes the place of ours.
    """
    return trials.attack(
        view,
        model,
        finder=case.chosen(finder),
        generator=case.generator(),
        max_seconds=case["max_seconds"],
        on_progress=lambda step: case.report(*progress_words(step)),
    )


def inverted(
    case: Case, batch: Batch, finder: str | Finder = "cascade", **options: Any
) -> Compared:
    """The usual trial: a FedSGD update, inverted with the model at hand, beside the truth."""
    return compare(batch, attack(case, batch.view(), batch.model, finder), **options)


def compare_activations(batch: Batch, attacked: Attacked, truth: Tensor) -> Compared:
    """Inputs of a hidden layer beside the true ones (b, n): the largest of these is the peak."""
    return compare(batch, attacked, truth, unit=float(truth.abs().max()))
