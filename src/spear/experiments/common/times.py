"""How long experiments take: the sum of what their rows took, kept in a file beside this one.

`python benchmarks/expected_times.py results` writes the file anew.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from spear.experiments.common import catalogue
from spear.experiments.common.experiment import Plan
from spear.experiments.common.reproduce import rows_of

FILE = Path(__file__).with_name("times.json")


@dataclass(frozen=True)
class Taken:
    """What an experiment took, in seconds of one process."""

    one: float  # with one batch of every cell
    all: float  # with as many batches as in the paper
    cells: int
    unmeasured: int  # cells without a row, whose trials are not in the sums
    where: str  # machine, torch and threads of the rows


@cache
def kept() -> Mapping[str, Taken]:
    """Of every experiment that has trials of its own, by its name."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: Taken(**taken) for name, taken in read.items()}


def where() -> str:
    """The machine, torch and threads of most, and of which others they differ."""
    usual, *others = Counter(taken.where for taken in kept().values()).most_common()
    apart = [
        f"{', '.join(name for name, taken in kept().items() if taken.where == words)}: {words}"
        for words, _ in others
    ]
    return "; ".join([usual[0], *apart])


def measured(results: Path) -> dict[str, Taken]:
    """The same from the rows of a campaign."""
    found = {name: _measured(name, results) for name in catalogue.names()}
    return {name: taken for name, taken in found.items() if taken.cells}


def text(taken: Mapping[str, Taken]) -> str:
    """The file."""
    lines = []
    for name, own in taken.items():
        seconds = {"one": float(f"{own.one:.3g}"), "all": float(f"{own.all:.3g}")}
        lines.append(f"{json.dumps(name)}: {json.dumps(asdict(own) | seconds)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _measured(name: str, results: Path) -> Taken:
    experiment, rows = catalogue.load(name), rows_of(name, results)
    sources = {source: rows_of(source, results) for source in experiment.after}
    took: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        took[_cell(row.settings)].append(row.took)
    means = {cell: statistics.fmean(seconds) for cell, seconds in took.items()}
    planned = [
        [_cell(trial.settings) for trial in experiment.trials(name, Plan(batches, 0, sources))]
        for batches in (1, experiment.batches)
    ]
    one, every = (sum(means.get(cell, 0.0) for cell in cells) for cells in planned)
    cells = set(planned[1])
    where = {
        f"{row.versions.get('machine', 'machine not noted')}, torch {row.versions['torch']}, "
        f"{row.engine.partition(', ')[2] or '1 thread'}"
        for row in rows
        if _cell(row.settings) in cells
    }
    return Taken(one, every, len(cells), len(cells - means.keys()), " or ".join(sorted(where)))


def _cell(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
