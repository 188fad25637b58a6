"""Which trials of an experiment can be run, how to run one, and which rows it draws from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from spear.data import State, survey
from spear.errors import DamagedData, InvalidOption, MissingData
from spear.experiments.common import catalogue
from spear.experiments.common.batches import NAMES, images
from spear.experiments.common.experiment import Case, Plan
from spear.trials import Measured, OnStep, Part, Row, RowFile, Trial, Work, reporter


@dataclass(frozen=True)
class Options:
    """What is run, and where its rows are.

    Args:
        results: folder of the rows.
        data: folder of the datasets.
        batches: per cell; the paper's number unless given.
        seed: of the first batch.
        again: rerun trials that failed or timed out.
    """

    results: Path
    data: Path | None = None
    batches: int | None = None
    seed: int = 0
    again: bool = False

    def __post_init__(self) -> None:
        if self.batches is not None and self.batches < 1:
            raise InvalidOption(f"expected batches >= 1, got {self.batches}")


def plan(name: str, options: Options) -> Part:
    """The trials of an experiment."""
    experiment = catalogue.load(name)
    rows = {source: rows_of(source, options.results) for source in experiment.after}
    wanted = Plan(options.batches or experiment.batches, options.seed, rows)
    file = RowFile(options.results, name)
    return runnable(experiment.trials(name, wanted), file, options.data, options.again)


def runnable(trials: Sequence[Trial], file: RowFile, root: Path | None, again: bool) -> Part:
    """The trials whose data is available, and the names of missing data. Damaged data is an error."""
    if not trials:
        return Part(file, trials)
    if root is None:
        raise InvalidOption(
            "expected {data} or SPEAR_DATA, the folder with the datasets", arguments=("data",)
        )
    needs = catalogue.load(trials[0].experiment).needs
    absent = [name for name in needs if _lacks(root, name)]
    if absent:
        return Part(file, [], again, absent)
    wanted = [str(t.settings.get("data") or t.settings.get("source")) for t in trials]
    missing = [name for name in dict.fromkeys(wanted) if name in NAMES and _unread(root, name)]
    kept = [trial for trial, name in zip(trials, wanted, strict=True) if name not in missing]
    return Part(file, kept, again, [NAMES[name] for name in missing])


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


def work(root: Path | None) -> Work:
    """A function that runs any trial of an experiment, in any process."""
    return partial(_measured, data=Path(root or ".").resolve())


def _measured(trial: Trial, on_step: OnStep, data: Path) -> Measured:
    measure = catalogue.load(trial.experiment).measure
    assert measure is not None
    return measure(Case(trial.settings, trial.seed, data, reporter(trial, on_step)))


def rows_of(name: str, results: Path) -> list[Row]:
    """All rows of an experiment."""
    return list(RowFile(results, name).rows().values())


def rows_for(name: str, results: Path) -> Mapping[str, Sequence[Row]]:
    """All rows that an experiment draws from, by experiment; rows of dropped settings are left out."""
    found: dict[str, Sequence[Row]] = {}
    for source in catalogue.with_sources((name,)):
        grid = catalogue.load(source).trials(source, Plan(1, 0, found))
        cells = [dict(trial.settings) for trial in grid]
        found[source] = [row for row in rows_of(source, results) if row.settings in cells]
    return found
