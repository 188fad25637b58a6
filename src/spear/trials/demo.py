"""The demo: real photos, one FedSGD gradient, and what comes back out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear.data import photo_crops
from spear.errors import InvalidOption
from spear.federated import mlp
from spear.inversion import FINDERS, Inversion
from spear.report import ImageFormat, Report, pictures
from spear.search import Progress
from spear.trials.batch import Batch, Compared, attack, compare

_CLASSES = 10
_MEAN, _STD = 0.5, 0.25

_WIDEST, _DEEPEST = 10_000, 100  # a typing error beyond this would fill the memory


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
    compared: Compared

    @property
    def result(self) -> Inversion:
        return self.compared.attacked.result

    @property
    def seconds(self) -> float:
        return self.compared.attacked.seconds

    @property
    def originals(self) -> Tensor:
        """(b, 3, p, p) in [0, 1], float64."""
        return self.compared.batch.pixels(self.compared.truth)

    @property
    def recovered(self) -> Tensor:
        """(k, 3, p, p) in [0, 1], float64, not clipped."""
        return self.compared.batch.pixels(self.result.inputs)

    def picture(self) -> bytes:
        """Originals above recoveries, as PNG; a sample that is not certified is left grey."""
        shown, recovered = torch.full_like(self.originals, 0.85), self.recovered
        pairs = self.compared.score.pairs
        for i, j in zip(pairs.found.tolist(), pairs.truth.tolist(), strict=True):
            if bool(self.result.certified[i]):
                shown[j] = recovered[i]
        caption = f"what its gradient gave away ({self.seconds:.1f} s on this machine's CPU)"
        return pictures.side_by_side(self.originals, shown, caption)

    def page(self) -> str:
        """A self-contained HTML page."""
        return self.report().page()

    def report(self) -> Report:
        """The run as a report, to save, to redact or to show."""
        notes = (
            "The attack saw the model and one FedSGD gradient, nothing else: not the photos, not the "
            "labels, not the batch size.",
            "The photos are disjoint crops of those in the scikit-image package.",
        )
        certified = int(self.result.certified.sum())
        return Report.new(
            "demo",
            "What one gradient gave away",
            f"{certified} of {len(self.names)} photos were recovered and certified in "
            f"{self.seconds:.1f} s.",
            [self.compared.finding("One client's gradient", notes)],
            settings={"command": _command(self.settings), **dataclasses.asdict(self.settings)},
            seconds=self.seconds,
        )

    def samples(self) -> list[dict[str, object]]:
        """One row per recovered sample, in the order of the originals."""
        score, found, rows = self.compared.score, self.result.labels, []
        pairs = zip(score.pairs.found.tolist(), score.pairs.truth.tolist(), strict=True)
        for (i, j), psnr in zip(pairs, score.psnr.tolist(), strict=True):
            rows.append(
                {
                    "index": j,
                    "name": self.names[j],
                    "psnr": psnr,
                    "certified": bool(self.result.certified[i]),
                    "label": int(self.compared.batch.labels[j]),
                    "found_label": None if found is None or found[i] < 0 else int(found[i]),
                }
            )
        return sorted(rows, key=lambda row: row["index"])


def run_demo(
    settings: DemoSettings, on_progress: Callable[[Progress], None] | None = None
) -> DemoRun:
    """Compute one gradient on private photos, invert it, and compare."""
    originals, names = photo_crops(settings.samples, settings.pixels, settings.seed)
    image_format = ImageFormat((3, settings.pixels, settings.pixels), (_MEAN,), (_STD,))
    inputs = ((originals - _MEAN) / _STD).flatten(1)  # (b, n)
    generator = torch.Generator().manual_seed(settings.seed)
    labels = torch.randint(_CLASSES, (len(inputs),), generator=generator)
    model = mlp(
        inputs.shape[1], _CLASSES, width=settings.width, depth=settings.depth, seed=settings.seed
    )
    batch = Batch(inputs, labels, model, image_format, names)
    attacked = attack(
        batch.view(),  # all that leaves the client
        model,
        finder=settings.finder,
        generator=generator,
        max_seconds=settings.max_seconds,
        on_progress=on_progress,
    )
    return DemoRun(settings, names, compare(batch, attacked))


def _command(settings: DemoSettings) -> str:
    """The command line that runs it again."""
    named = dataclasses.asdict(settings).items()
    options = (f"--{name.replace('_', '-')} {value}" for name, value in named if value is not None)
    return " ".join(["spear demo", *options])
