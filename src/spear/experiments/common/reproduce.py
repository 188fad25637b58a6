"""Which trials of an experiment can be run, how to run one, and which rows it draws from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from spear.data import State, survey
from spear.errors import DamagedData, InvalidOption, MissingData
from spear.experiments.common import catalogue
from spear.experiments.common.additions import (
    Addition,
    as_ours,
    checked,
    shown_to_measure,
    with_finder,
)
from spear.experiments.common.batches import NAMES, images
from spear.experiments.common.experiment import Case, Plan
from spear.experiments.common.only import Only
from spear.files import UserCode
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
        finder: in place of ours.
        only: the cells that are run.
    """

    results: Path
    data: Path | None = None
    batches: int | None = None
    seed: int = 0
    again: bool = False
    finder: Addition | None = None
    only: Only = field(default_factory=Only)

    def __post_init__(self) -> None:
        if self.batches is not None and self.batches < 1:
            raise InvalidOption(f"expected batches >= 1, got {self.batches}")


def plan(name: str, options: Options) -> Part:
    """The trials of an experiment."""
    experiment = catalogue.load(name)
    trials = _planned(name, options)
    if options.finder is not None and not trials and (experiment.cells or experiment.plan):
        raise InvalidOption(
            f"no trial of {name} uses our finder: {{finder}} has no place in it",
            arguments=("finder",),
        )
    wanted = [trial for trial in trials if options.only.has(shown_to_measure(trial.settings))]
    return runnable(wanted, RowFile(options.results, name), options.data, options.again)


def check_only(names: Sequence[str], options: Options) -> None:
    """Raise unless these experiments have the cells that are asked for."""
    planned = [trial for name in names for trial in _planned(name, options)]
    options.only.check([shown_to_measure(trial.settings) for trial in planned])


def _planned(name: str, options: Options) -> list[Trial]:
    """All trials of an experiment, as far as the rows that it builds on are there."""
    experiment = catalogue.load(name)
    rows = {source: _rows_of_finder(source, options) for source in experiment.after}
    wanted = Plan(options.batches or experiment.batches, options.seed, rows)
    return _trials(name, wanted, options.finder)


def _trials(name: str, wanted: Plan, finder: Addition | None) -> list[Trial]:
    """The trials with the digest of a user's code in their settings, and a user's finder for ours."""
    trials = with_finder(catalogue.load(name).trials(name, wanted), finder)
    code = catalogue.code_of(name)
    if code is None:
        return trials
    return [
        replace(trial, settings={**trial.settings, "experiment_code": code}) for trial in trials
    ]


def runnable(trials: Sequence[Trial], file: RowFile, root: Path | None, again: bool) -> Part:
    """The trials whose data is available, and the names of missing data. Damaged data is an error."""
    if not trials:
        return Part(file, trials)
    name = trials[0].experiment
    needs = catalogue.load(name).needs
    wanted = [str(t.settings.get("data") or t.settings.get("source")) for t in trials]
    if root is None:
        if name not in catalogue.names() and not needs and not set(wanted) & set(NAMES):
            return Part(file, trials, again)  # a user's, without datasets
        raise InvalidOption(
            "expected {data} or SPEAR_DATA, the folder with the datasets", arguments=("data",)
        )
    absent = [name for name in needs if _lacks(root, name)]
    if absent:
        return Part(file, [], again, absent)
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


def work(root: Path | None, additions: Sequence[Addition] = ()) -> Work:
    """A function that runs any trial of an experiment, in any process."""
    data = Path(root or ".").resolve()
    return partial(_measured, data=data, additions=additions, files=catalogue.added())


def _measured(
    trial: Trial,
    on_step: OnStep,
    data: Path,
    additions: Sequence[Addition],
    files: Sequence[UserCode],
) -> Measured:
    for code in files:
        catalogue.add(code)
    measure = catalogue.load(trial.experiment).measure
    assert measure is not None
    used = {addition.kind: addition for addition in additions if addition.used_by(trial)}
    finder, attack = used.get("finder"), used.get("attack")
    case = Case(
        shown_to_measure(trial.settings),
        trial.seed,
        data,
        reporter(trial, on_step),
        finder=None if finder is None else finder.made_finder(),
        attack=None if attack is None else attack.made_attack(),
    )
    measured = checked(measure(case), trial.experiment)
    if finder is not None and not case.asked:
        raise InvalidOption(
            f"{trial.experiment} does not use our finder in {dict(case.settings)}: {{finder}} has no "
            "place in it",
            arguments=("finder",),
        )
    return measured


def rows_of(name: str, results: Path) -> list[Row]:
    """All rows of an experiment."""
    return list(RowFile(results, name).rows().values())


def _rows_of_finder(name: str, options: Options) -> Sequence[Row]:
    """What an experiment that builds on another is planned with."""
    if options.finder is not None:
        return rows_for(name, options.results, options.finder)[name]
    return [row for row in rows_of(name, options.results) if "finder_code" not in row.settings]


def rows_for(
    name: str, results: Path, finder: Addition | None = None
) -> Mapping[str, Sequence[Row]]:
    """All rows that an experiment draws from, by experiment; rows of dropped settings are left out.

    Those of a finder in place of ours look like ours, so that all that draws ours draws them.
    """
    found: dict[str, Sequence[Row]] = {}
    for source in catalogue.with_sources((name,)):
        grid = _trials(source, Plan(1, 0, found), None)
        cells = [trial.settings for trial in grid]
        found[source] = as_ours(rows_of(source, results), cells, finder)
    return found
