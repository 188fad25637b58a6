"""Batches of real images, what the server sees of them, and how well an attack did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear import data
from spear.data import ImageData
from spear.errors import InvalidOption
from spear.experiments.common.experiment import Case
from spear.federated import fedsgd, mlp
from spear.inversion import Inversion, Outcome, invert
from spear.metrics import (
    EXACT_DB,
    FEATURES,
    HEADS,
    Assignment,
    ImageScore,
    Lpips,
    NotMeasured,
    score_images,
)
from spear.search import Finder, Progress
from spear.trials import Measured
from spear.update import LayerUpdate, observe

DEPTH = 6  # linear layers of the paper's network
# Datasets by the names that settings use.
DATASETS: dict[str, Callable[[Path], ImageData]] = {
    "mnist": data.mnist,
    "cifar10": data.cifar10,
    "cifar10_raw": lambda root: _raw(data.cifar10(root)),
    "tiny_imagenet": data.tiny_imagenet,
    "imagenet224": lambda root: data.imagenet(root, 224, rescaled=True),
    "imagenet256": lambda root: data.imagenet(root, 256, rescaled=True),
    "imagenet720": lambda root: data.imagenet(root, 720, rescaled=True),
}
NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar10_raw": "CIFAR-10 with pixels in [0, 1]",
    "tiny_imagenet": "TinyImageNet",
    "imagenet224": "ImageNet 224 × 224",
    "imagenet256": "ImageNet 256 × 256",
    "imagenet720": "ImageNet 720 × 720",
}


def _raw(source: ImageData) -> ImageData:
    """The same images as inputs in [0, 1], neither centred nor scaled."""
    channels = source.shape[0]
    return replace(source, mean=(0.0,) * channels, std=(1.0,) * channels)


@cache
def images(root: Path, name: str) -> ImageData:
    """A dataset, opened once a process."""
    if name not in DATASETS:
        raise InvalidOption(f"expected a dataset of {', '.join(DATASETS)}, got {name!r}")
    return DATASETS[name](root)


@cache
def lpips(root: Path) -> Lpips | NotMeasured:
    """LPIPS with the weights beside the datasets, or why there is none."""
    if any((root / "weights" / name).exists() for name in (FEATURES, HEADS)):
        return Lpips.load(root / "weights")  # an error where they are half there
    return Lpips.find(root / "weights")


@dataclass(frozen=True, eq=False)
class Batch:
    """A private batch, and the model it is computed with."""

    images: ImageData
    inputs: Tensor = field(repr=False)  # (b, n)
    labels: Tensor = field(repr=False)  # (b,)
    model: nn.Module
    seed: int

    @staticmethod
    def draw(
        case: Case,
        name: str,
        b: int,
        *,
        width: int = 200,
        depth: int = DEPTH,
        among: Tensor | None = None,
        model: nn.Module | None = None,
    ) -> Batch:
        """By the case's seed: images, from all or from `among` (k,), and a network's weights."""
        source = images(case.data, name)
        pool = torch.arange(len(source)) if among is None else among
        if len(pool) < b:
            raise InvalidOption(
                f"expected at least {b} images of {NAMES[name]} to draw from, got {len(pool)}"
            )
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(case.seed))
        x, y = source.batch(pool[order[:b]].tolist())
        if model is None:
            model = mlp(x.shape[1], source.classes, width=width, depth=depth, seed=case.seed)
        return Batch(source, x, y, model, case.seed)

    def view(self) -> LayerUpdate:
        """The first layer in a FedSGD update."""
        return observe(self.model, fedsgd(self.model, self.inputs, self.labels))

    def pixels(self, inputs: Tensor) -> Tensor:
        """Inputs (k, n) as images (k, C, H, W) in [0, 1], float64, not clipped."""
        return self.images.to_pixels(inputs).view(-1, *self.images.shape)


@dataclass(frozen=True, eq=False)
class Attacked:
    """An inversion and how long it took."""

    result: Inversion
    seconds: float

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage; the objective that a rival ends at is none."""
        stats = self.result.stats.items()
        return {k: v for k, v in stats if isinstance(v, float) and k != "loss"}

    @property
    def counts(self) -> dict[str, int]:
        return {k: int(v) for k, v in self.result.stats.items() if not isinstance(v, float)}


def attack(
    case: Case,
    view: LayerUpdate,
    model: nn.Module | None,
    finder: str | Finder = "cascade",
) -> Attacked:
    """Invert within the setting `max_seconds`; the case's seed is the search's."""
    began = time.monotonic()
    result = invert(
        view,
        model=model,
        finder=finder,
        generator=torch.Generator().manual_seed(case.seed),
        max_seconds=case["max_seconds"],
        on_progress=lambda step: case.report(*progress_words(step)),
    )
    return Attacked(result, time.monotonic() - began)


def progress_words(step: Progress) -> tuple[str, float | None]:
    """How far a search is, in words and as a share."""
    if step.expected and step.done:
        return f"{step.stage}: {step.done:,} submatrices", step.done / (step.done + step.expected)
    if step.batch_size and step.found:
        return f"{step.stage}: {step.found} of {step.batch_size}", step.found / step.batch_size
    return step.stage, None


def judge(
    case: Case, batch: Batch, attacked: Attacked, *, perceptual: bool = False
) -> tuple[ImageScore, dict[str, Any]]:
    """Pair by pair against the truth, and the same as a row's metrics; `perceptual` adds LPIPS."""
    found, truth = batch.pixels(attacked.result.inputs), batch.pixels(batch.inputs)
    score = score_images(found, truth, lpips=lpips(case.data) if perceptual else None)
    return score, {**verdicts(attacked.result, score, batch), **quality(score), **attacked.counts}


def judge_activations(
    batch: Batch, attacked: Attacked, truth: Tensor
) -> tuple[ImageScore, dict[str, Any]]:
    """Inputs of a hidden layer against the true ones (b, n): the largest of these is the peak."""
    peak = float(truth.abs().max())
    found, true = (z.double()[:, None, None] / peak for z in (attacked.result.inputs, truth))
    score = score_images(found, true)  # as images of one line
    return score, {**verdicts(attacked.result, score, batch), **quality(score), **attacked.counts}


def quality(score: ImageScore) -> dict[str, Any]:
    """Means over the samples that came back, and how many did not."""
    means = {
        name: None if values is None or not len(values) else float(values.double().mean())
        for name, values in (
            ("psnr", score.psnr),
            ("ssim", score.ssim),
            ("mse", score.mse),
            ("mae", score.mae),
            ("lpips", score.lpips),
        )
    }
    worst = float(score.psnr.min()) if len(score.psnr) else None
    return {**means, "worst": worst, "missing": score.pairs.missing}


def verdicts(result: Inversion, score: ImageScore, batch: Batch) -> dict[str, Any]:
    """What the attack claims, and whether that is so."""
    return claims(result, score.pairs, score.psnr >= EXACT_DB, score.exact, batch.labels)


def claims(
    result: Inversion, pairs: Assignment, right: Tensor, exact: bool, truth: Tensor
) -> dict[str, Any]:
    """The same, whatever "right" (p,) means for the data; `truth` (b,) are the labels."""
    certified = result.certified[pairs.found]
    labels = None if result.labels is None else result.labels[pairs.found]
    return {
        "exact": exact,
        "false_exact": result.outcome is Outcome.EXACT and not exact,
        "proof": result.proof.name,
        "batch_size": result.batch_size,
        "recovered": int(right.sum()),
        "certified": int(result.certified.sum()),
        "certified_wrong": int((certified & ~right).sum()),
        "refused": int((~certified & right).sum()),
        "labels_right": None if labels is None else int((labels == truth[pairs.truth]).sum()),
        "match": result.match,
        "reason": result.reason,
    }


def inverted(
    case: Case, batch: Batch, finder: str | Finder = "cascade", *, perceptual: bool = False
) -> Measured:
    """The usual trial: a FedSGD update, inverted with the model at hand, and judged."""
    attacked = attack(case, batch.view(), batch.model, finder)
    _, metrics = judge(case, batch, attacked, perceptual=perceptual)
    return Measured(attacked.result.outcome.name, metrics, attacked.seconds, attacked.stages)
