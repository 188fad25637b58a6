"""What users bring to a run: finders and attacks beside ours, and experiments of their own.

Rows name them with a digest of their source, so that changed code starts new rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spear import plugins
from spear.baselines import ATTACKS, Attack, load_attack, made_attack
from spear.errors import InvalidExtension
from spear.experiments.common.experiment import Settings
from spear.files import UserCode, load_object
from spear.inversion import FINDERS, finder_named
from spear.search import Finder, made_finder
from spear.trials import Measured, Row, Trial

OURS = "cascade"  # the finder that one of the user's takes the place of
_BUILT_IN = "built in"  # the digest of what comes with SPEAR, whose version a row holds


@dataclass(frozen=True)
class Addition:
    """A finder or an attack that was chosen for a run.

    Args:
        kind: "finder" or "attack", the setting that names it.
        name: as rows have it.
        code: where it is; None for one of ours.
    """

    kind: str
    name: str
    code: UserCode | None = None

    @staticmethod
    def finder(spec: str) -> Addition:
        load_finder(spec)  # raises what there is to say of it, before anything runs
        if spec in FINDERS:
            return Addition("finder", spec)
        code = UserCode.of(spec, plugins.FINDERS)
        return Addition("finder", code.name, code)

    @staticmethod
    def attack(spec: str) -> Addition:
        load_attack(spec)
        if spec in ATTACKS:
            return Addition("attack", spec)
        code = UserCode.of(spec, plugins.ATTACKS)
        return Addition("attack", code.name, code)

    @property
    def settings(self) -> dict[str, str]:
        """What it adds to a trial's settings."""
        digest = _BUILT_IN if self.code is None else self.code.digest
        return {self.kind: self.name, f"{self.kind}_code": digest}

    def used_by(self, trial: Trial) -> bool:
        return self.settings.items() <= trial.settings.items()

    def made_finder(self) -> Finder:
        """A new one for every trial, in any process."""
        if self.code is None:
            return finder_named(self.name)
        return made_finder(self.code.load(), self.name)

    def made_attack(self) -> Attack:
        """A new one for every trial, in any process."""
        return (
            load_attack(self.name)
            if self.code is None
            else made_attack(self.code.load(), self.name)
        )


def load_finder(spec: str) -> Finder:
    """A finder by name: one of ours, one of an installed package, or my_finder.py:MyFinder.

    >>> type(load_finder("spear.search:SamplingFinder")).__name__
    'SamplingFinder'
    """
    if plugins.is_code(spec):
        return made_finder(load_object(spec), spec)
    return finder_named(spec)


def with_finder(trials: Iterable[Trial], finder: Addition | None) -> list[Trial]:
    """The trials that use our finder, with another in its place; without one, all as they are."""
    if finder is None:
        return list(trials)
    return [
        replace(trial, settings={**trial.settings, **finder.settings})
        for trial in trials
        if trial.settings.get("finder", OURS) == OURS
        and trial.settings.get("attack", "spear") == "spear"
    ]


def as_ours(rows: Iterable[Row], cells: Iterable[Settings], finder: Addition | None) -> list[Row]:
    """The rows of these cells that the finder made, with the settings that ours would have had."""
    cells = [dict(cell) for cell in cells]
    if finder is None:
        return [row for row in rows if row.settings in cells]
    restored = []
    for row in rows:
        if finder.settings.items() <= row.settings.items():
            rest = {n: v for n, v in row.settings.items() if n not in finder.settings}
            ours = [cell for cell in (rest, {**rest, "finder": OURS}) if cell in cells]
            restored += [replace(row, settings=cell) for cell in ours]
    return restored


def shown_to_measure(settings: Settings) -> dict[str, Any]:
    """A trial's settings as its experiment knows them."""
    known = {name: value for name, value in settings.items() if not name.endswith("_code")}
    return {**known, "finder": OURS} if "finder_code" in settings else known


def checked(measured: Any, experiment: str) -> Measured:
    """What `measure` returned, if a row can hold it."""
    if not isinstance(measured, Measured):
        kind = type(measured).__name__
        raise InvalidExtension(f"measure of {experiment} returned a {kind}, expected Measured(...)")
    as_json(f"the metrics of {experiment}", measured.metrics)
    return measured


def as_json(what: str, content: Mapping[str, Any]) -> None:
    """Raise unless JSON can hold it."""
    try:
        json.dumps(dict(content))
    except (TypeError, ValueError) as error:
        raise InvalidExtension(
            f"expected {what} as JSON has them (numbers, text, lists), got {error}: "
            "call .item() or .tolist() on tensors"
        ) from error
