"""Runs the trials that have no row yet, and says how far each is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spear.search import Progress
from spear.trials.rows import RowFile
from spear.trials.trial import Engine, OnStep, Row, Step, Trial, Work

_BETWEEN = 0.2  # seconds between two reports on a trial's progress


@dataclass(frozen=True)
class Part:
    """The trials whose rows go into one file.

    Args:
        file: where the rows go.
        trials: all of them.
        again: rerun those that failed or ran out of time.
        left_out: names of missing datasets.
    """

    file: RowFile
    trials: Sequence[Trial]
    again: bool = False
    left_out: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.file.path.stem

    @property
    def rows(self) -> list[Row]:
        """Of the trials that are done, in this run or before."""
        rows = self.file.rows()
        return [rows[trial.key] for trial in self.trials if trial.key in rows]

    @property
    def open(self) -> list[Trial]:
        """The trials that are still to be run."""
        rows = self.file.rows()
        done = {key for key, row in rows.items() if not (self.again and row.cut_short)}
        return [trial for trial in self.trials if trial.key not in done]

    def run(self, work: Work, engine: Engine, on_step: OnStep) -> Iterator[Row]:
        """Run the open trials. Each row is on disk before it is yielded."""
        if not self.open:
            return
        with self.file.writing():
            left = self.open  # another run may have had the lock before us
            for row, pictures in engine.run(left, work, on_step):
                self.file.append(row, pictures)
                yield row


def reporter(trial: Trial, on_step: OnStep) -> Callable[[str, float | None], None]:
    """A function that reports a trial's progress, in words and as a share, a few times a second."""
    last = -1.0

    def tell(words: str, share: float | None) -> None:
        nonlocal last
        if time.monotonic() - last > _BETWEEN:
            last = time.monotonic()
            on_step(Step(trial.key, words, share))

    return tell


def progress_words(step: Progress) -> tuple[str, float | None]:
    """The progress of a search, in words and as a share."""
    if step.expected and step.done:
        return f"{step.stage}: {step.done:,} submatrices", step.done / (step.done + step.expected)
    if step.batch_size and step.found:
        return f"{step.stage}: {step.found} of {step.batch_size}", step.found / step.batch_size
    return step.stage, None
