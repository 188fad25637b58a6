"""What a page shows of one finding: its samples beside the truth, as pictures or as values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from spear.report import pictures, words
from spear.report.finding import Finding
from spear.report.report import Cell, Table

MOST_SAMPLES = 64  # shown as pictures or values, of one finding
MOST_FINDINGS = 500  # shown one by one; the table has all
MOST_LINES = 300  # of a table, until the reader asks for all
MOST_ROWS = 1000  # of its table of certificates
MOST_COLUMNS = 10  # values of a sample
MOST_CHARACTERS = 24_000_000  # of all pictures on a page: what a mail still takes


@dataclass(frozen=True)
class Sample:
    """One sample: as it came back, as it was, or both."""

    found: int | None  # its row among the recovered
    true: int | None  # its row in the truth
    title: str
    certified: bool
    approximate: bool
    psnr: float | None

    @property
    def number(self) -> int | None:
        return None if self.found is None else self.found + 1

    @property
    def state(self) -> str:
        if self.found is None:
            return "missing"
        if self.certified:
            return "certified"
        return "approximate" if self.approximate else "uncertified"

    @property
    def words(self) -> str:
        """Its state as a reader sees it."""
        return {
            "missing": "not recovered",
            "certified": "certified, approximate" if self.approximate else "certified",
            "approximate": "approximate, not certified",
            "uncertified": "not certified",
        }[self.state]


@dataclass(frozen=True)
class Card:
    """One sample in pictures, as data URIs."""

    sample: Sample
    original: str | None
    recovered: str | None


@dataclass(frozen=True)
class Line:
    """Values of one sample: recovered, original or their difference."""

    name: str
    cells: tuple[str, ...]


class PictureBudget:
    """What is left on a page for pictures."""

    def __init__(self, characters: int = MOST_CHARACTERS) -> None:
        self.left = characters

    def take(self, uri: str) -> str:
        self.left -= len(uri)
        return uri


def samples(finding: Finding) -> list[Sample]:
    """All samples: in the order of the truth where it is known, those that match nothing last."""
    truth = finding.truth
    if truth is None:
        return [_sample(finding, i, None) for i in range(finding.recovered)]
    of: dict[int, list[int]] = {}
    for i, j in enumerate(truth.index):
        of.setdefault(j, []).append(i)
    order = [*range(len(truth.names)), -1]
    pairs = [(i, j) for j in order for i in of.get(j, [None] if j >= 0 else [])]
    return [_sample(finding, i, j if j >= 0 else None) for i, j in pairs]


def _sample(finding: Finding, i: int | None, j: int | None) -> Sample:
    truth = finding.truth
    title = f"Sample {(i or 0) + 1}" if truth is None or j is None else truth.names[j]
    psnr = truth.psnr[i] if truth is not None and i is not None and j is not None else None
    return Sample(
        i,
        j,
        title,
        i is not None and finding.certified[i],
        i is not None and finding.approximate[i],
        psnr,
    )


def cards(finding: Finding, shown: Sequence[Sample], budget: PictureBudget) -> list[Card]:
    """As many of the samples as pictures as there is room for."""
    if finding.image_format is None:
        return []
    true = finding.truth.inputs if finding.truth else None
    found = None if finding.inputs is None else finding.image_format.pictures(finding.inputs)
    kept = None if true is None else finding.image_format.pictures(true)
    drawn = []
    for sample in shown[:MOST_SAMPLES]:
        if budget.left <= 0 or (found is None and kept is None):
            break
        drawn.append(
            Card(sample, _uri(kept, sample.true, budget), _uri(found, sample.found, budget)),
        )
    return drawn


def _uri(images: Tensor | None, row: int | None, budget: PictureBudget) -> str | None:
    if images is None or row is None:
        return None
    return budget.take(pictures.data_uri(images[row]))


def values(finding: Finding, shown: Sequence[Sample]) -> list[tuple[Sample, list[Line]]]:
    """The first values of each sample; with the originals and the differences where these are known."""
    if finding.image_format is not None or finding.inputs is None:
        return []
    return [(sample, list(_lines(finding, sample))) for sample in shown[:MOST_SAMPLES]]


def _lines(finding: Finding, sample: Sample) -> Iterator[Line]:
    true = finding.truth.inputs if finding.truth else None
    found = _first(finding.inputs, sample.found)
    kept = _first(true, sample.true)
    if found is not None:
        yield Line("recovered", tuple(words.cell(value) for value in found))
    if kept is not None:
        yield Line("original", tuple(words.cell(value) for value in kept))
    if found is not None and kept is not None:
        gaps = [a - b for a, b in zip(found, kept, strict=True)]
        yield Line("difference", tuple("0" if gap == 0 else f"{gap:.1e}" for gap in gaps))


def _first(rows: Tensor | None, row: int | None) -> list[float] | None:
    if rows is None or row is None:
        return None
    first: list[float] = rows[row, :MOST_COLUMNS].double().tolist()
    return first


def certificates(finding: Finding, shown: Sequence[Sample]) -> Table:
    """Sample by sample, how far it is to be trusted; columns that nothing is known for are absent."""
    columns = (
        "sample",
        "certified",
        "approximate",
        "label found",
        "true label",
        "predicted error",
        "PSNR (dB)",
        "original",
    )
    rows = [_certificate(finding, sample) for sample in shown[:MOST_ROWS]]
    keep = [
        i
        for i in range(len(columns))
        if i < 2 or any(row[i] is not None and row[i] is not False for row in rows)
    ]
    return Table(
        f"Certificates of {finding.name}",
        tuple(columns[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in rows),
    )


def _certificate(finding: Finding, sample: Sample) -> tuple[Cell, ...]:
    i, j, truth = sample.found, sample.true, finding.truth
    label = None if i is None or finding.labels is None else finding.labels[i].item()
    unmatched = label == -1 and isinstance(label, int)  # regression has targets of any value
    return (
        sample.number,
        "not recovered" if i is None else sample.certified,
        None if i is None else sample.approximate,
        "none matched" if unmatched else label,
        truth.labels[j].item() if truth and j is not None and truth.labels is not None else None,
        finding.predicted_error[i] if finding.predicted_error and i is not None else None,
        sample.psnr,
        truth.names[j] if truth and j is not None else None,
    )


def stages(finding: Finding) -> list[tuple[str, float]]:
    """Seconds of each stage, as they began."""
    timed = ((name, value) for name, value in finding.stats.items() if isinstance(value, float))
    return [(name, value) for name, value in timed if math.isfinite(value)]


def counts(finding: Finding) -> list[tuple[str, int]]:
    """What was counted on the way."""
    return [(name, value) for name, value in finding.stats.items() if isinstance(value, int)]
