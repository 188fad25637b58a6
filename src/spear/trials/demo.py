"""The demo: real photos, one FedSGD gradient, and what comes back out of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear.data import photo_crops
from spear.errors import InvalidOption
from spear.federated import fedsgd, mlp
from spear.inversion import FINDERS, Inversion, invert
from spear.metrics import Score, score
from spear.report import Finding, ImageFormat, Report, compare, pictures
from spear.search import Progress
from spear.update import LayerUpdate, observe

_CLASSES = 10
_MEAN, _STD = 0.5, 0.25

_WIDEST, _DEEPEST = 10_000, 100  # a slip beyond it would fill the memory


@dataclass(frozen=True)
class DemoSettings:
    """What `spear demo` can be asked for."""

    samples: int = 20
    width: int = 400
    depth: int = 6
    pixels: int = 64
    seed: int = 0
    finder: str = "cascade"
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"expected {{{name}}} >= {least}, got {getattr(self, name)}"
            for name, least in (("samples", 1), ("width", 1), ("depth", 2), ("pixels", 8))
            if getattr(self, name) < least
        ]
        problems += [
            f"expected {{{name}}} <= {most:,}, got {getattr(self, name):,}"
            for name, most in (("width", _WIDEST), ("depth", _DEEPEST))
            if getattr(self, name) > most
        ]
        if self.finder not in FINDERS:
            problems.append(
                f"expected {{finder}} to be one of {sorted(FINDERS)}, got {self.finder!r}"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            problems.append(f"expected {{max_seconds}} > 0, got {self.max_seconds}")
        if problems:
            names = [field.name for field in dataclasses.fields(self)]
            raise InvalidOption("; ".join(problems), arguments=names)


@dataclass(frozen=True, eq=False)
class DemoRun:
    """One run: what was private, what came back, and how well."""

    settings: DemoSettings
    names: list[str] = field(repr=False)  # (b,) the photo of each original
    originals: Tensor = field(repr=False)  # (b, 3, p, p) in [0, 1]
    labels: Tensor = field(repr=False)  # (b,)
    result: Inversion
    recovered: Tensor = field(repr=False)  # (k, 3, p, p) in [0, 1], float64, not clipped
    score: Score
    seconds: float
    view: LayerUpdate

    def picture(self) -> bytes:
        """Originals above recoveries, as PNG; a sample that is not certified is left grey."""
        shown = torch.full_like(self.originals, 0.85, dtype=torch.float64)
        for i, j in enumerate(self.score.truth.tolist()):
            if bool(self.result.certified[i]):
                shown[j] = self.recovered[i]
        caption = f"what its gradient gave away ({self.seconds:.1f} s on this machine's CPU)"
        return pictures.side_by_side(self.originals, shown, caption)

    def page(self) -> str:
        """A self-contained HTML page."""
        return self.report().page()

    def report(self) -> Report:
        """The run as a report, to save, to redact or to show."""
        shown = self.settings
        image_format = ImageFormat((3, shown.pixels, shown.pixels), (_MEAN,), (_STD,))
        inputs = ((self.originals - _MEAN) / _STD).flatten(1)
        truth = compare(
            self.result.inputs, inputs, self.labels, names=self.names, image_format=image_format
        )
        notes = (
            "The attack saw the model and one FedSGD gradient, nothing else: not the photos, not the "
            "labels, not the batch size.",
            "The photos are disjoint crops of those in the scikit-image package.",
        )
        finding = Finding.of(
            self.result,
            "One client's gradient",
            image_format=image_format,
            truth=truth,
            notes=notes,
        )
        certified = int(self.result.certified.sum())
        return Report.new(
            "demo",
            "What one gradient gave away",
            f"{certified} of {len(self.originals)} photos were recovered and certified in "
            f"{self.seconds:.1f} s.",
            [finding],
            settings={"command": _command(shown), **dataclasses.asdict(shown)},
            seconds=self.seconds,
        )

    def samples(self) -> list[dict[str, object]]:
        """One row per recovered sample, in the order of the originals."""
        rows: list[dict[str, object]] = []
        found = self.result.labels
        for i in sorted(range(len(self.recovered)), key=lambda i: int(self.score.truth[i])):
            j = int(self.score.truth[i])
            rows.append(
                {
                    "name": self.names[j],
                    "original": self.originals[j],
                    "recovered": self.recovered[i],
                    "psnr": float(self.score.psnr[i]),
                    "certified": bool(self.result.certified[i]),
                    "label": int(self.labels[j]),
                    "found_label": None if found is None or found[i] < 0 else int(found[i]),
                }
            )
        return rows


def run_demo(
    settings: DemoSettings, on_progress: Callable[[Progress], None] | None = None
) -> DemoRun:
    """Compute one gradient on private photos, forget the photos, invert, and compare."""
    originals, names = photo_crops(settings.samples, settings.pixels, settings.seed)
    inputs = ((originals - _MEAN) / _STD).flatten(1)  # (b, n)
    generator = torch.Generator().manual_seed(settings.seed)
    labels = torch.randint(_CLASSES, (len(inputs),), generator=generator)
    model = mlp(
        inputs.shape[1], _CLASSES, width=settings.width, depth=settings.depth, seed=settings.seed
    )
    gradients = fedsgd(model, inputs, labels)  # all that leaves the client

    began = time.monotonic()
    view = observe(model, gradients)
    result = invert(
        view,
        model=model,
        finder=settings.finder,
        generator=generator,
        max_seconds=settings.max_seconds,
        on_progress=on_progress,
    )
    seconds = time.monotonic() - began

    recovered = result.inputs.double().view(-1, *originals.shape[1:]) * _STD + _MEAN
    truth = inputs.double().view_as(originals) * _STD + _MEAN
    return DemoRun(
        settings,
        names,
        originals,
        labels,
        result,
        recovered,
        score(recovered.flatten(1), truth.flatten(1)),
        seconds,
        view,
    )


def _command(settings: DemoSettings) -> str:
    """The command line that runs it again."""
    named = dataclasses.asdict(settings).items()
    options = (f"--{name.replace('_', '-')} {value}" for name, value in named if value is not None)
    return " ".join(["spear demo", *options])
