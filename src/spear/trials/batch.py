"""What every trial is made of: a private batch, the attack on it, and the comparison with the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spear.data import Column
from spear.federated import fedsgd, play_rounds
from spear.inversion import Inversion, Outcome, invert
from spear.metrics import EXACT_DB, Assignment, ImageScore, Lpips, NotMeasured, score_images
from spear.report import Finding, ImageFormat, Truth
from spear.search import Finder, Progress
from spear.trials.trial import Measured
from spear.update import LayerUpdate, Protocol, observe


@dataclass(frozen=True, eq=False)
class Batch:
    """Private samples, and the model whose update gives them away."""

    inputs: Tensor = field(repr=False)  # (b, ...)
    labels: Tensor = field(repr=False)  # (b, ...) classes, or numbers to predict
    model: nn.Module
    image_format: ImageFormat | None = None  # None where samples are not pictures
    names: Sequence[str] = field(default=(), repr=False)  # (b,), or none
    columns: tuple[Column, ...] = field(default=(), repr=False)  # of a table, or none

    def view(self) -> LayerUpdate:
        """The attackable layer in a FedSGD update, as the server sees it."""
        return observe(self.model, fedsgd(self.model, self.inputs, self.labels))

    def views(self, rounds: int, lr: float) -> Iterator[LayerUpdate]:
        """The same in each of several rounds; in between, the server takes a step of SGD with it."""
        played = play_rounds(
            self.model,
            [[(self.inputs, self.labels)]] * rounds,
            Protocol(),
            server_lr=lr,
            generator=torch.Generator(),  # nothing is drawn
        )
        return (sent.view(model) for model, sent in played)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Inputs (k, n) as images (k, C, H, W) in [0, 1], float64, not clipped."""
        assert self.image_format is not None
        return self.image_format.pictures(inputs)


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack gave, and how long it took."""

    view: LayerUpdate
    result: Inversion
    seconds: float

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage. (The final `loss` of a rival attack is a float too, but not a stage.)"""
        stats = self.result.stats.items()
        return {k: v for k, v in stats if isinstance(v, float) and k != "loss"}

    @property
    def counts(self) -> dict[str, int]:
        """Submatrices, starts, rounds and the like."""
        return {k: int(v) for k, v in self.result.stats.items() if not isinstance(v, float)}

    def measured(
        self, metrics: Mapping[str, Any], pictures: Mapping[str, bytes] | None = None
    ) -> Measured:
        """What a row keeps of it."""
        outcome = self.result.outcome.name
        return Measured(outcome, metrics, self.seconds, self.stages, pictures or {})


def attack(
    view: LayerUpdate,
    model: nn.Module | None,
    *,
    generator: torch.Generator,
    finder: str | Finder = "cascade",
    loss: Any = None,
    max_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Attacked:
    """Invert an update, and time it."""
    began = time.monotonic()
    result = invert(
        view,
        model=model,
        loss=loss,
        finder=finder,
        generator=generator,
        max_seconds=max_seconds,
        on_progress=on_progress,
    )
    return Attacked(view, result, time.monotonic() - began)


@dataclass(frozen=True, eq=False)
class Compared:
    """What came back, beside the layer's true inputs."""

    batch: Batch
    attacked: Attacked
    truth: Tensor = field(repr=False)  # (b, n): what the attacked layer was given
    score: ImageScore
    pictures: bool  # are these inputs pictures that can be shown?

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What a row keeps: no samples, only how well they were recovered and what was claimed."""
        result, score = self.attacked.result, self.score
        claimed = claims(
            result, score.pairs, score.psnr >= EXACT_DB, score.exact, self.batch.labels
        )
        return {**claimed, **quality(score), **self.attacked.counts}

    def measured(
        self, more: Mapping[str, Any] | None = None, pictures: Mapping[str, bytes] | None = None
    ) -> Measured:
        """What a row keeps of it, with `more` metrics."""
        return self.attacked.measured({**self.metrics, **(more or {})}, pictures)

    def finding(self, name: str, notes: Sequence[str] = ()) -> Finding:
        """The result as a finding, with originals beside recoveries."""
        result, pairs, labels = self.attacked.result, self.score.pairs, self.batch.labels
        index, decibels = [-1] * len(result.inputs), [float("nan")] * len(result.inputs)
        psnr = self.score.psnr.tolist()
        for i, j, decibel in zip(pairs.found.tolist(), pairs.truth.tolist(), psnr, strict=True):
            index[i], decibels[i] = j, decibel
        names = self.batch.names or [f"original {i}" for i in range(1, len(labels) + 1)]
        classes = labels if labels.ndim == 1 and not labels.is_floating_point() else None
        return Finding.of(
            result,
            name,
            image_format=self.batch.image_format if self.pictures else None,
            truth=Truth(tuple(names), self.truth, classes, tuple(index), tuple(decibels)),
            notes=tuple(notes),
            columns=self.batch.columns if self.attacked.view.reads_data else (),
        )


def compare(
    batch: Batch,
    attacked: Attacked,
    truth: Tensor | None = None,
    *,
    unit: Tensor | float | None = None,
    lpips: Lpips | NotMeasured | None = None,
) -> Compared:
    """Pair what came back with the truth, and measure each pair.

    Args:
        batch: the truth.
        attacked: what came back.
        truth: (b, n) inputs of the attacked layer; those of the batch unless given.
        unit: the size of an error of 1, for inputs that are not pictures: one number, or one per input.
        lpips: measures how alike pictures look, if wanted.
    """
    true = batch.inputs.flatten(1) if truth is None else truth
    if unit is None:
        found, wanted = batch.pixels(attacked.result.inputs), batch.pixels(true)
    else:  # as images of one line
        found, wanted = ((z.double() / unit)[:, None, None] for z in (attacked.result.inputs, true))
    score = score_images(found, wanted, lpips=lpips)
    return Compared(batch, attacked, true, score, unit is None)


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


def claims(
    result: Inversion, pairs: Assignment, right: Tensor, exact: bool, labels: Tensor
) -> dict[str, Any]:
    """What the attack claims, and whether that is true.

    Args:
        result: of the attack.
        pairs: (p) recovered samples with true ones.
        right: (p,) bool, whatever that means for the data.
        exact: is every sample right?
        labels: (b,) the true ones.
    """
    wrong = torch.ones(len(result.inputs), dtype=torch.bool)  # unless paired with a true one
    wrong[pairs.found] = ~right
    found = None if result.labels is None else result.labels[pairs.found]
    return {
        "exact": exact,
        "false_exact": result.outcome is Outcome.EXACT and not exact,
        "proof": result.proof.name,
        "batch_size": result.batch_size,
        "recovered": int(right.sum()),
        "certified": int(result.certified.sum()),
        "certified_wrong": int((result.certified & wrong).sum()),
        "refused": int((~result.certified & ~wrong).sum()),
        "labels_right": (
            int((found == labels[pairs.truth]).sum())
            if found is not None and labels.ndim == 1
            else None
        ),
        "match": result.match,
        "reason": result.reason,
    }
