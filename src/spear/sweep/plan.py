"""The plan of a sweep: its trials, and the summary of their rows. Nothing is run here."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spear.errors import InvalidOption
from spear.federated import Noise, Privacy, fedsgd, noise_of, resolved
from spear.sweep import utility
from spear.sweep.grid import DEFAULT, Grid
from spear.sweep.leakage import Leakage
from spear.sweep.setting import FIELDS, Setting
from spear.sweep.subject import Subject
from spear.sweep.utility import Training
from spear.trials import Part, Row, RowFile, Trial
from spear.update import observe

LEAKAGE, UTILITY = "leakage", "utility"


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is audited, how often and for how long.

    Args:
        subject: model and data.
        grid: the settings.
        repeats: private batches per setting.
        seed: seed of the first batch.
        max_seconds: time limit of one attack.
        privacy: what epsilon covers.
        training: how utility is measured.
    """

    subject: Subject = field(default_factory=Subject)
    grid: Grid = field(default_factory=lambda: Grid(DEFAULT))
    repeats: int = 5
    seed: int = 0
    max_seconds: float = 60.0
    privacy: Privacy = field(default_factory=Privacy)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.repeats < 1 or not self.max_seconds > 0:
            raise InvalidOption(
                f"expected {{repeats}} >= 1 and {{max_seconds}} > 0, got {self.repeats}, "
                f"{self.max_seconds}",
                arguments=("repeats", "max_seconds"),
            )

    def check(self) -> None:
        """Raise if model, data and settings do not fit together, before anything is run."""
        for width in dict.fromkeys(setting.width for setting in self.grid.settings):
            model = self.subject.build(width, self.seed)
            fitted = self.subject.fitted(model)
            x, y = fitted.inputs[:2], fitted.targets[:2]
            observe(model, fedsgd(model, x, y, fitted.loss))
        fitted.draw(max(setting.total for setting in self.grid.settings), 0)

    @cached_property
    def noises(self) -> Mapping[Setting, Noise]:
        return {setting: self._noise(setting) for setting in self.grid.settings}

    def _noise(self, setting: Setting) -> Noise:
        """The noise; epsilon covers every round that the server sees."""
        steps = max(self.privacy.steps, setting.rounds)
        return noise_of(setting, dataclasses.replace(self.privacy, steps=steps))

    def trials(self) -> list[Trial]:
        """The attacks, seed by seed, so that a run that is cut short has covered every setting."""
        seeds = range(self.seed, self.seed + self.repeats)
        settings = self.grid.settings
        found = [self._attack(setting, seed) for seed in seeds for setting in settings]
        return list({trial.key: trial for trial in found}.values())

    def trainings(self) -> list[Trial]:
        """The training runs: each setting, and the same setting without defence."""
        if not self.training.rounds:
            return []
        wanted = [
            twin
            for setting in self.grid.settings
            if not utility.too_small(len(self.subject.samples()), setting)
            for twin in (setting, setting.undefended)
        ]
        seeds = range(self.seed, self.seed + self.training.seeds)
        found = [self._training(setting, seed) for seed in seeds for setting in wanted]
        return list({trial.key: trial for trial in found}.values())

    def parts(self, out: Path, *, again: bool = False) -> list[Part]:
        """What is to be run: attacks, then training runs, each with their own file of rows."""
        kinds = ((LEAKAGE, self.trials()), (UTILITY, self.trainings()))
        return [Part(RowFile(out, kind), trials, again) for kind, trials in kinds if trials]

    def _attack(self, setting: Setting, seed: int) -> Trial:
        return Trial(LEAKAGE, self._attacked[setting], seed)

    @cached_property
    def _attacked(self) -> Mapping[Setting, Mapping[str, Any]]:
        """What the attacks at each setting depend on besides their seed."""
        trained, limits = bool(self.subject.trained_steps), {"max_seconds": self.max_seconds}
        return {
            setting: {
                **self._computed(setting),
                "subject": self._digest(setting, trained=trained or setting.rounds > 1),
                **limits,
            }
            for setting in self.grid.settings
        }

    def _training(self, setting: Setting, seed: int) -> Trial:
        own = {"subject": self._digest(setting, trained=True)}
        # Training does not depend on how many rounds are attacked: its own rounds take their place.
        limits = {"rounds": self.training.rounds, "max_seconds": self.training.max_seconds}
        return Trial(UTILITY, {**self._computed(setting), **own, **limits}, seed)

    def _computed(self, setting: Setting) -> dict[str, Any]:
        """What a result depends on, with noise in one unit, whichever it was given in."""
        noise = self.noises.get(setting) or self._noise(setting)
        same = dataclasses.asdict(resolved(setting, noise.sigma))
        return {name: value for name, value in same.items() if value != FIELDS[name]}

    def _digest(self, setting: Setting, *, trained: bool) -> str:
        """Identifies model, data and loss, so that rows of others are never mixed up with theirs."""
        subject = self.subject
        parts: list[object] = [
            self._models[setting.width],
            self._data,
            subject.loss,
            subject.trained_steps,
        ]
        parts += [subject.server_lr] if trained else []
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @cached_property
    def _models(self) -> Mapping[int | None, str]:
        widths = dict.fromkeys(setting.width for setting in self.grid.settings)
        return {width: self.subject.digest(width) for width in widths}

    @cached_property
    def _data(self) -> str:
        return self.subject.samples().digest

    def summary(self, out: Path) -> list[Leakage]:
        """The rows in `out`, summarised by setting."""
        attacks, trainings = RowFile(out, LEAKAGE).rows(), RowFile(out, UTILITY).rows()
        seeds = range(self.seed, self.seed + self.repeats)
        found = []
        for setting in self.grid.settings:
            keys = [self._attack(setting, seed).key for seed in seeds]
            rows = tuple(attacks[key] for key in keys if key in attacks)
            found.append(
                Leakage(setting, self.noises[setting], rows, self._utility(setting, trainings))
            )
        return found

    def _utility(self, setting: Setting, rows: Mapping[str, Row]) -> utility.Utility | None:
        own = self._qualities(setting, rows)
        plain = self._qualities(setting.undefended, rows) if setting.defended else None
        numbers = self.subject.samples().classes is None
        return utility.utility(own, plain, lower_is_better=numbers)

    def _qualities(self, setting: Setting, rows: Mapping[str, Row]) -> dict[int, float]:
        seeds = range(self.seed, self.seed + self.training.seeds)
        found = {seed: rows.get(self._training(setting, seed).key) for seed in seeds}
        qualities = {s: row.metrics.get("quality") for s, row in found.items() if row is not None}
        return {seed: value for seed, value in qualities.items() if value is not None}
