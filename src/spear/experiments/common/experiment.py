"""A table or figure of the paper as the runner sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spear.baselines import Attack
from spear.errors import InvalidOption
from spear.experiments.common.drawing import Section
from spear.search import Finder
from spear.trials import Measured, Row, Trial

Settings = Mapping[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True)
class Plan:
    """How much of an experiment to run."""

    batches: int  # per cell of the grid
    seed: int  # of the first batch
    rows: Mapping[str, Rows]  # of the experiments it builds on, by their name

    def each(
        self, cells: Iterable[Settings], experiment: str, *, at_most: int | None = None
    ) -> Iterator[Trial]:
        """Every cell with every seed, seed by seed, so that a run cut short has covered all cells.

        `at_most` bounds the batches of cells that take long.
        """
        cells = list(cells)
        batches = self.batches if at_most is None else min(self.batches, at_most)
        for seed in range(self.seed, self.seed + batches):
            for settings in cells:
                yield Trial(experiment, settings, seed)


@dataclass(frozen=True)
class Case:
    """A trial as an experiment gets it: with the data, and a callback for its progress.

    Args:
        settings: of the trial.
        seed: of the batch, and of everything else that is drawn.
        data: folder of the datasets.
        report: called with words and a share as the trial goes on.
        finder: the user's, in place of ours.
        attack: the user's, by the setting `attack`.
    """

    settings: Settings
    seed: int
    data: Path
    report: Callable[[str, float | None], None]
    finder: Finder | None = None
    attack: Attack | None = None
    asked: list[Finder] = field(default_factory=list, repr=False, compare=False)

    def chosen(self, finder: str | Finder) -> str | Finder:
        """This finder, or the user's in place of ours; `asked` then holds it."""
        if self.finder is None or finder != "cascade":
            return finder
        self.asked.append(self.finder)
        return self.finder

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def generator(self) -> torch.Generator:
        """A fresh generator with the case's seed."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Args:
        place: where it is in the paper, such as "Table 3".
        title: one line that says what it shows.
        batches: per cell, in the paper; what `--batches` replaces.
        draw: makes the section from rows, its own and those of `after`, by the experiment's name.
        cells: the settings of one trial each; each is measured with `batches` seeds.
        plan: trials that depend on other rows, instead of `cells`.
        measure: one trial.
        needs: data as `spear data` names it, without which nothing can run. The dataset of a trial,
            its setting `data`, needs no mention.
        after: experiments whose rows it draws or plans with; they are run first.
    """

    place: str
    title: str
    batches: int
    draw: Callable[[Mapping[str, Rows]], Section]
    cells: Sequence[Settings] = ()
    plan: Callable[[Plan], Iterable[Trial]] | None = None
    measure: Callable[[Case], Measured] | None = None
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.cells or self.plan) and self.measure is None:
            raise InvalidOption("expected a measure along with cells or a plan")

    def trials(self, name: str, plan: Plan) -> list[Trial]:
        return list(self.plan(plan) if self.plan else plan.each(self.cells, name))
