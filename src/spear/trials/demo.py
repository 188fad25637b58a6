"""The demo: real photos, FedSGD gradients of one round or several, and what comes back out of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear.data import photo_crops
from spear.errors import InvalidOption
from spear.factors import combine
from spear.federated import mlp
from spear.inversion import FINDERS, Inversion
from spear.report import ImageFormat, Report, pictures, seconds
from spear.search import Progress
from spear.trials.batch import Batch, Compared, attack, compare
from spear.update import LayerUpdate

_CLASSES = 10
_MEAN, _STD = 0.5, 0.25

_RATE = 0.1  # of the training between rounds
# Cosine of two photos, about mid grey. A hundred that were drawn regardless had sixty pairs above 0.95,
# and the search over 20 rounds of width 50 got stuck at 93; at 0.8 all came back, with three seeds.
_MOST_ALIKE = 0.8

_WIDEST, _DEEPEST = 10_000, 100  # a typing error beyond this would fill the memory
_MOST_ROUNDS, _MOST_ROWS = 1_000, 100_000  # the same; rows are those of all rounds
_FEW, _COLUMNS, _MORE_COLUMNS = 40, 10, 25  # of the picture, with a few photos and with more


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
    rounds: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"expected {{{name}}} >= {least}, got {getattr(self, name)}"
            for name, least in (
                ("samples", 1),
                ("width", 1),
                ("depth", 2),
                ("pixels", 8),
                ("rounds", 1),
            )
            if getattr(self, name) < least
        ]
        problems += [
            f"expected {{{name}}} <= {most:,}, got {getattr(self, name):,}"
            for name, most in (("width", _WIDEST), ("depth", _DEEPEST), ("rounds", _MOST_ROUNDS))
            if getattr(self, name) > most
        ]
        if not problems and self.rounds > 1 and self.rounds * self.width > _MOST_ROWS:
            problems.append(
                f"expected {{rounds}} times {{width}} <= {_MOST_ROWS:,}, got {self.rounds:,} times "
                f"{self.width:,}"
            )
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
        rounds = self.settings.rounds
        sent = "gradient" if rounds == 1 else f"gradients of {rounds} rounds"
        caption = f"what its {sent} gave away ({seconds(self.seconds)} on this machine's CPU)"
        columns = _COLUMNS if len(shown) <= _FEW else _MORE_COLUMNS
        return pictures.side_by_side(self.originals, shown, caption, columns)

    def page(self) -> str:
        """A self-contained HTML page."""
        return self.report().page()

    def report(self) -> Report:
        """The run as a report, to save, to redact or to show."""
        rounds = self.settings.rounds
        title, name = "What one gradient gave away", "One client's gradient"
        notes = (
            "The attack saw the model and one FedSGD gradient, nothing else: not the photos, not the "
            "labels, not the batch size.",
            "The photos are disjoint crops of those in the scikit-image package.",
        )
        if rounds > 1:
            title, name = f"What {rounds} rounds gave away", f"One client's {rounds} rounds"
            notes = (
                "In each round the attack saw the model and one FedSGD gradient of all photos, nothing "
                "else: not the photos, not the labels, not the batch size. Between rounds the server "
                f"trains the model with the gradient, at a learning rate of {_RATE}.",
                "The photos are disjoint crops of those in the scikit-image package, without those "
                "that are nearly alike: the search may not tell these apart.",
            )
        certified = int(self.result.certified.sum())
        found = self.compared.finding(name, notes)
        words = f"{certified} of {len(self.names)} photos were recovered and certified in "
        return Report.new(
            "demo",
            title,
            f"{words}{seconds(self.seconds)}." if certified else found.headline,
            [found],
            settings={"command": _command(self.settings), **dataclasses.asdict(self.settings)},
            seconds=self.seconds,
        )

    def samples(self) -> list[dict[str, object]]:
        """One row per recovered sample, numbered and ordered as on the page."""
        score, found, rows = self.compared.score, self.result.labels, []
        pairs = zip(score.pairs.found.tolist(), score.pairs.truth.tolist(), strict=True)
        for (i, j), psnr in zip(pairs, score.psnr.tolist(), strict=True):
            rows.append(
                {
                    "sample": i + 1,
                    "index": j,
                    "name": self.names[j],
                    "psnr": psnr,
                    "certified": bool(self.result.certified[i]),
                    "label": int(self.compared.batch.labels[j]),
                    "found_label": None if found is None or found[i] < 0 else int(found[i]),
                }
            )
        return sorted(rows, key=lambda row: row["sample"])


def run_demo(
    settings: DemoSettings, on_progress: Callable[[Progress], None] | None = None
) -> DemoRun:
    """Compute one gradient on private photos, or one per round, invert, and compare."""
    originals, names = photo_crops(
        settings.samples,
        settings.pixels,
        settings.seed,
        most_alike=None if settings.rounds == 1 else _MOST_ALIKE,
    )
    image_format = ImageFormat((3, settings.pixels, settings.pixels), (_MEAN,), (_STD,))
    inputs = ((originals - _MEAN) / _STD).flatten(1)  # (b, n)
    generator = torch.Generator().manual_seed(settings.seed)
    labels = torch.randint(_CLASSES, (len(inputs),), generator=generator)
    model = mlp(
        inputs.shape[1], _CLASSES, width=settings.width, depth=settings.depth, seed=settings.seed
    )
    batch = Batch(inputs, labels, model, image_format, names)
    view, seconds = _seen(batch, settings.rounds, on_progress)
    attacked = attack(
        view,
        None,  # each view has the model of its round
        finder=settings.finder,
        generator=generator,
        max_seconds=settings.max_seconds,
        on_progress=on_progress,
    )
    attacked = dataclasses.replace(attacked, seconds=seconds + attacked.seconds)
    return DemoRun(settings, names, compare(batch, attacked))


def _seen(
    batch: Batch, rounds: int, on_progress: Callable[[Progress], None] | None
) -> tuple[LayerUpdate, float]:
    """All that leaves the client, as one view; and the seconds that it took to combine rounds."""
    if rounds == 1:
        return batch.view(), 0.0

    def told() -> Iterator[LayerUpdate]:
        for number, view in enumerate(batch.views(rounds, _RATE), 1):
            if on_progress is not None:
                on_progress(Progress(f"round {number} of {rounds}"))
            yield view

    began = time.monotonic()  # the client's own work is counted too: it is next to nothing
    return combine(told()), time.monotonic() - began


def _command(settings: DemoSettings) -> str:
    """The command line that runs it again."""
    named = dataclasses.asdict(settings).items()
    options = (f"--{name.replace('_', '-')} {value}" for name, value in named if value is not None)
    return " ".join(["spear demo", *options])
