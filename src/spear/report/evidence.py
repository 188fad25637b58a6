"""What is shown of one finding: its samples beside the truth, as pictures or as values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from spear.report import pictures, words
from spear.report.columns import rows_of
from spear.report.finding import Finding
from spear.report.report import Cell, Table

MOST_SAMPLES = 64  # shown as pictures or values, of one finding
MOST_FINDINGS = 500  # shown one by one; the table has all
MOST_LINES = 300  # of a table, until the reader asks for the rest
MOST_ROWS = 1000  # of a table of certificates
MOST_COLUMNS = 10  # values of a sample
MOST_CHARACTERS = 24_000_000  # of all pictures on a page, so that it can still be mailed
_CERTIFICATE = (
    *("sample", "certified", "approximate", "label found", "true label"),
    *("predicted error", "PSNR (dB)", "original"),
)


@dataclass(frozen=True)
class Sample:
    """One sample: recovered, true, or both."""

    found: int | None  # its row among the recovered
    true: int | None  # its row in the truth
    title: str
    original: str  # the name of its true sample, if that is known and no title
    certified: bool
    approximate: bool
    psnr: float | None

    @property
    def state(self) -> str:
        if self.found is None:
            return "missing"
        if self.certified:
            return "certified"
        return "approximate" if self.approximate else "uncertified"

    @property
    def words(self) -> str:
        """Its state in words, for the reader."""
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
    """The room left on a page for pictures."""

    def __init__(self, characters: int = MOST_CHARACTERS) -> None:
        self.left = characters

    def take(self, uri: str) -> str:
        self.left -= len(uri)
        return uri


def samples(finding: Finding) -> list[Sample]:
    """All samples in the order of `Inversion.inputs`, then those that were not recovered.

    Tiles, tables and the terminal have this order, and its numbers.
    """
    truth = finding.truth
    if truth is None:
        return [_sample(finding, i, None) for i in range(finding.recovered)]
    found = [_sample(finding, i, j if j >= 0 else None) for i, j in enumerate(truth.index)]
    missing = sorted(set(range(len(truth.names))) - set(truth.index))
    return [*found, *(_sample(finding, None, j) for j in missing)]


def _sample(finding: Finding, i: int | None, j: int | None) -> Sample:
    truth = finding.truth
    original = "" if truth is None or j is None else truth.names[j]
    title = original if i is None else f"Sample {i + 1}"
    psnr = truth.psnr[i] if truth is not None and i is not None and j is not None else None
    sure, rough = (False, False) if i is None else (finding.certified[i], finding.approximate[i])
    return Sample(i, j, title, "" if title == original else original, sure, rough, psnr)


def cards(finding: Finding, shown: Sequence[Sample], budget: PictureBudget) -> list[Card]:
    """The samples as pictures, as many as there is room for."""
    if finding.image_format is None:
        return []
    true = finding.truth.inputs if finding.truth else None
    found, kept = (
        None if rows is None else finding.image_format.pictures(rows)
        for rows in (finding.inputs, true)
    )
    drawn = []
    for sample in shown[:MOST_SAMPLES]:
        if budget.left <= 0 or (found is None and kept is None):
            break
        original, recovered = _uri(kept, sample.true, budget), _uri(found, sample.found, budget)
        drawn.append(Card(sample, original, recovered))
    return drawn


def _uri(images: Tensor | None, row: int | None, budget: PictureBudget) -> str | None:
    if images is None or row is None:
        return None
    return budget.take(pictures.data_uri(images[row]))


def values(finding: Finding, shown: Sequence[Sample]) -> list[tuple[Sample, list[Line]]]:
    """The first values of each sample, with originals and differences if known."""
    if finding.image_format is not None or finding.inputs is None or finding.columns:
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


def people(finding: Finding, shown: Sequence[Sample]) -> Table | None:
    """The rows of a table whose columns have names: one for each person, with what differs."""
    if finding.image_format is not None or finding.inputs is None or not finding.columns:
        return None
    true = finding.truth.inputs if finding.truth else None
    found = rows_of(finding.columns, finding.inputs)
    kept = None if true is None else rows_of(finding.columns, true)
    labelled = finding.labels is not None
    lines: list[tuple[Cell, ...]] = []
    for sample in shown[:MOST_SAMPLES]:
        own = None if sample.found is None else found[sample.found]
        original = None if kept is None or sample.true is None else kept[sample.true]
        if labelled and own is not None:
            own = [*own, words.cell(_label_found(finding, sample.found))]
        if labelled and original is not None:
            original = [*original, words.cell(_true_label(finding, sample.true))]
        if own is None or original is None:
            cells = own or [f"({entry})" for entry in original or ()]
        else:
            pairs = zip(own, original, strict=True)
            cells = [a if b in (a, words.NONE) else f"{a} ({b})" for a, b in pairs]
        title = sample.title.removeprefix("Sample ")
        lines.append((title if sample.certified else f"{title} ({sample.words})", *cells))
    columns = ("sample", *(column.name for column in finding.columns), *["label"] * labelled)
    caption = (
        "One row for each sample: as recovered, and the original in brackets where it differs."
    )
    if kept is None:
        caption = "One row for each sample, as recovered."
    return Table("The rows that came back", columns, tuple(lines), caption)


def certificates(finding: Finding, shown: Sequence[Sample]) -> Table:
    """How far to trust each sample; columns without any known value are left out."""
    rows = [_certificate(finding, sample) for sample in shown[:MOST_ROWS]]
    known = {name for row in rows for name, cell in row.items() if cell is not None}
    known -= set() if any(row["approximate"] for row in rows) else {"approximate"}
    columns = tuple(name for name in (rows[0] if rows else ()) if name in {"sample"} | known)
    return Table(
        f"Certificates of {finding.name}",
        columns,
        tuple(tuple(row[name] for name in columns) for row in rows),
    )


def _certificate(finding: Finding, sample: Sample) -> dict[str, Cell]:
    row: dict[str, Cell] = dict.fromkeys(_CERTIFICATE)
    i, j, truth = sample.found, sample.true, finding.truth
    row |= {"certified": "not recovered", "PSNR (dB)": sample.psnr}
    if i is not None:
        row |= {"sample": i + 1, "certified": sample.certified, "approximate": sample.approximate}
        row["label found"] = _label_found(finding, i)
        if finding.predicted_error is not None:
            row["predicted error"] = finding.predicted_error[i]
    if truth is not None and j is not None:
        row["original"] = truth.names[j]
        row["true label"] = _true_label(finding, j)
    return row


def _label_found(finding: Finding, row: int | None) -> Cell:
    if finding.labels is None or row is None:
        return None
    label: Cell = finding.labels[row].item()
    # Targets of regression may be -1.0.
    return "none matched" if label == -1 and isinstance(label, int) else label


def _true_label(finding: Finding, row: int | None) -> Cell:
    known = None if finding.truth is None else finding.truth.labels
    return None if known is None or row is None else known[row].item()


def stages(finding: Finding) -> list[tuple[str, float]]:
    """Seconds of each stage, in the order they began, without those of the stages within it."""
    timed = ((name, value) for name, value in finding.stats.items() if isinstance(value, float))
    return [(words.STAGES.get(name, name), value) for name, value in timed if math.isfinite(value)]


def counts(finding: Finding) -> list[tuple[str, int]]:
    """What was counted during the search."""
    counted = ((name, value) for name, value in finding.stats.items() if isinstance(value, int))
    return [(words.COUNTS.get(name, name), value) for name, value in counted]
