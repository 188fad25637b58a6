"""Progress on the terminal: of one inversion, and of many trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from spear.cli.console import PlainConsole

if TYPE_CHECKING:
    from spear.search import Progress as Stage
    from spear.trials import Part, Remaining, Row, Step, Trial

_TELL = 30.0  # seconds between two lines
console = PlainConsole()


@contextmanager
def progress(console: Console, quiet: bool) -> Iterator[Callable[[Stage], None]]:
    """A bar for `invert(on_progress=...)`: only on terminals, and gone at the end."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bars:
        task = bars.add_task("factorise", total=1, detail="")

        def show(step: Stage) -> None:
            done, detail = 0.0, ""
            if step.expected:
                done = -math.expm1(-step.done / step.expected)
                detail = f"{step.done:,} submatrices, {step.found} directions"
            elif step.batch_size and step.found:
                done = step.found / step.batch_size
                detail = f"{step.found} of {step.batch_size} samples"
            bars.update(task, description=step.stage, completed=done, detail=detail)

        yield show


class _Watch:
    """Counts, and shows nothing: for --quiet, and as a base of the others."""

    def __init__(self, part: Part, remaining: Remaining) -> None:
        self.name, self.total, self.remaining = part.name, len(part.trials), remaining
        self.done, self.bad = self.total - len(part.open), 0

    def step(self, step: Step) -> None:
        """A trial has come this far."""

    def row(self, row: Row) -> None:
        """A trial is done."""
        from spear.trials import Status

        self.done += 1
        self.bad += row.status is not Status.DONE

    @property
    def state(self) -> str:
        left = self.remaining.seconds()
        failed = f", {self.bad} failed or timed out" if self.bad else ""
        rest = f", about {_duration(left)} to go" if left else ""
        return f"{self.done:,} of {self.total:,}{failed}{rest}"


class _Bars(_Watch):
    """A bar for the grid and one for each trial under way."""

    def __init__(self, part: Part, remaining: Remaining, bars: Progress) -> None:
        super().__init__(part, remaining)
        self.bars, self.labels = bars, {trial.key: _label(trial) for trial in part.open}
        self.grid = bars.add_task(
            part.name, total=self.total, completed=self.done, detail=self.state
        )
        self.trials: dict[str, TaskID] = {}

    def step(self, step: Step) -> None:
        if step.key not in self.trials:
            label = escape(self.labels[step.key])
            self.trials[step.key] = self.bars.add_task(f"  {label}", total=1.0, detail="")
        task = self.trials[step.key]
        self.bars.update(task, completed=step.share, detail=escape(step.words))

    def row(self, row: Row) -> None:
        super().row(row)
        if row.key in self.trials:
            self.bars.remove_task(self.trials.pop(row.key))
        self.bars.update(self.grid, completed=self.done, detail=self.state)


class _Lines(_Watch):
    """A line now and then, for logs and pipes."""

    def __init__(self, part: Part, remaining: Remaining) -> None:
        super().__init__(part, remaining)
        self.began = self.told = time.monotonic()
        console.print(f"{self.name}: {len(part.open):,} trials to run, {self.done:,} done before")

    def row(self, row: Row) -> None:
        super().row(row)
        now = time.monotonic()
        last = self.done == self.total
        if last or now - self.told > _TELL:
            self.told = now
            took = f" in {_duration(now - self.began)}" if last else ""
            console.print(f"{self.name}: {self.state}{took}")


@contextmanager
def watched(part: Part, remaining: Remaining, quiet: bool) -> Iterator[_Watch]:
    """Bars on a terminal, a line now and then elsewhere, nothing if quiet."""
    if quiet:
        yield _Watch(part, remaining)
    elif not console.is_terminal:
        yield _Lines(part, remaining)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            yield _Bars(part, remaining, bars)


def _label(trial: Trial) -> str:
    """A trial in few words.

    >>> from spear.trials import Trial
    >>> _label(Trial("main", {"data": "mnist", "b": 20, "max_seconds": 60}, seed=3))
    'mnist b=20 seed 3'
    """
    words = [
        str(value) if isinstance(value, str) else f"{name}={value}"
        for name, value in trial.settings.items()
        if name != "max_seconds"
    ]
    return f"{' '.join(words)[:48]} seed {trial.seed}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(42), _duration(600), _duration(7200)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
