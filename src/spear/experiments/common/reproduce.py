"""Runs what is missing of an experiment, and draws what is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from spear.data import State, survey
from spear.errors import DamagedData, InvalidOption, MissingData
from spear.experiments.common import catalogue
from spear.experiments.common.batches import DATASETS, NAMES, images
from spear.experiments.common.experiment import Case, Plan
from spear.trials import Engine, Measured, OnStep, Row, RowFile, Step, Trial


def runnable(
    trials: Sequence[Trial], needs: Sequence[str], root: Path
) -> tuple[list[Trial], list[str]]:
    """The trials whose data is there, and the names of what is not. Damaged data is an error."""
    absent = [name for name in needs if _lacks(root, name)]
    if absent:
        return [], absent
    wanted = [str(t.settings.get("data") or t.settings.get("source")) for t in trials]
    missing = [name for name in dict.fromkeys(wanted) if name in DATASETS and _unread(root, name)]
    kept = [trial for trial, name in zip(trials, wanted, strict=True) if name not in missing]
    return kept, [NAMES[name] for name in missing]


@cache
def _unread(root: Path, name: str) -> bool:
    try:
        images(root, name)
    except MissingData:
        return True
    return False


@cache
def _lacks(root: Path, name: str) -> bool:
    found = {item.name: item for item in survey(root)}[name]
    if found.state is State.DAMAGED:
        raise DamagedData(found.detail)
    return found.state is State.MISSING


_BETWEEN = 0.2  # seconds between two words on how far a trial is


@dataclass(frozen=True)
class Options:
    """What is run, and where its rows are.

    Args:
        results: folder of the rows.
        data: folder of the datasets.
        batches: per cell; the paper's number unless given.
        seed: of the first batch.
        again: run failed and timed-out trials once more.
    """

    results: Path
    data: Path | None = None
    batches: int | None = None
    seed: int = 0
    again: bool = False

    def __post_init__(self) -> None:
        if self.batches is not None and self.batches < 1:
            raise InvalidOption(f"expected batches >= 1, got {self.batches}")


@dataclass(frozen=True)
class Part:
    """What is to be done for one experiment."""

    name: str
    trials: Sequence[Trial]
    open: Sequence[Trial]  # without a row yet
    left_out: Sequence[str] = ()  # datasets that are not there


def plan(name: str, options: Options) -> Part:
    """The trials of an experiment, and which of them have no row yet."""
    experiment = catalogue.load(name)
    rows = {source: rows_of(source, options.results) for source in experiment.after}
    wanted = Plan(options.batches or experiment.batches, options.seed, rows)
    trials, absent = experiment.trials(name, wanted), list[str]()
    if trials:
        if options.data is None:
            raise InvalidOption(
                "expected {data} or SPEAR_DATA, the folder with the datasets", arguments=("data",)
            )
        trials, absent = runnable(trials, experiment.needs, options.data)
    left = _left(trials, RowFile(options.results, name), again=options.again)
    return Part(name, trials, left, absent)


def _left(trials: Sequence[Trial], file: RowFile, *, again: bool) -> list[Trial]:
    """Trials without a row, and those that failed or ran out of time if wanted `again`."""
    done = {key for key, row in file.rows().items() if not (again and row.cut_short)}
    return [trial for trial in trials if trial.key not in done]


def rows_of(name: str, results: Path) -> list[Row]:
    """All rows of an experiment."""
    return list(RowFile(results, name).rows().values())


def run(part: Part, options: Options, engine: Engine, on_step: OnStep) -> Iterator[Row]:
    """Run the open trials; each row is on disk before it is told of."""
    if not part.open:
        return
    assert options.data is not None
    work = partial(measured, data=options.data.resolve())
    with RowFile(options.results, part.name).writing() as file:
        left = _left(
            part.open, file, again=options.again
        )  # another run may have had the lock before
        for row, pictures in engine.run(left, work, on_step):
            file.append(row, pictures)
            yield row


def measured(trial: Trial, report: OnStep, data: Path) -> Measured:
    """One trial, wherever we are; what it says of its progress is thinned out."""
    measure = catalogue.load(trial.experiment).measure
    assert measure is not None
    tell = _thinned(lambda words, share: report(Step(trial.key, words, share)))
    return measure(Case(trial.settings, trial.seed, data, tell))


def _thinned(
    tell: Callable[[str, float | None], None],
) -> Callable[[str, float | None], None]:
    last = -1.0

    def thinned(words: str, share: float | None) -> None:
        nonlocal last
        if time.monotonic() - last > _BETWEEN:
            last = time.monotonic()
            tell(words, share)

    return thinned


def rows_for(name: str, results: Path) -> Mapping[str, Sequence[Row]]:
    """All that an experiment draws from, by the experiment's name: rows of settings it still has."""
    found: dict[str, Sequence[Row]] = {}
    for source in catalogue.with_sources((name,)):
        grid = catalogue.load(source).trials(source, Plan(1, 0, found))
        cells = [dict(trial.settings) for trial in grid]
        found[source] = [row for row in rows_of(source, results) if row.settings in cells]
    return found
