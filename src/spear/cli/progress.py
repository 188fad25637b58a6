"""Progress: what a command is doing, of one inversion, and of many trials. All of it on stderr."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import click
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from spear.cli.console import PlainConsole

if TYPE_CHECKING:
    from spear.search import Progress as Stage
    from spear.trials import Part, Remaining, Row, Step, Trial

_SOON = 1.5  # seconds until the first line in a log
_LATER = 8.0  # seconds until the second; each further one waits as long as all before
_SELDOM = 600.0  # at most
_BAR = 16  # columns of a bar
_LABEL, _BESIDE = 20, 56  # columns of a trial's label at least, and of what stands beside it
_STAGES = {  # of an inversion; others keep their name
    "factorise": "reading the batch size off the update",
    "search": "searching for the samples",
    "judge": "proving what was found",
}


class Activity:
    """What a command is doing and for how long: a line that goes again on a terminal; in a log, a line
    where something takes long, and then seldom.

    It begins before torch is imported, which takes seconds, and ends with the command at the latest. A
    thread keeps it alive, so that what reports nothing shows as well.
    """

    def __init__(self, words: str, *, quiet: bool = False) -> None:
        self.console, self.quiet = PlainConsole(stderr=True), quiet
        self.shows = self.console.is_terminal and not self.console.is_dumb_terminal
        self._words, self._share, self._detail = words, 0.0, ""
        self._began = time.monotonic()
        self._live: Live | None = None
        self._over = threading.Event()
        self._over.set()

    @classmethod
    def begin(cls, words: str = "loading PyTorch", *, quiet: bool = False) -> Self:
        """Of the command that is running."""
        activity = cls(words, quiet=quiet)
        click.get_current_context().call_on_close(activity.pause)
        activity._resume()
        return activity

    def tell(self, words: str, share: float = 0.0, detail: str = "") -> None:
        """It does this now, and has come this far; `pause` ends the line."""
        changed = words != self._words
        self._words, self._share, self._detail = words, share, detail
        if self._over.is_set():
            self._resume()
        elif changed and self._live is not None:
            self._live.refresh()

    def stage(self, step: Stage) -> None:
        """For `invert(on_progress=...)`."""
        share, detail = 0.0, ""
        if step.expected:
            share = -math.expm1(-step.done / step.expected)
            detail = f"{step.done:,} submatrices, {step.found} directions"
        elif step.batch_size and step.found:
            share = step.found / step.batch_size
            detail = f"{step.found} of {step.batch_size}"
        words = _STAGES.get(step.stage, step.stage)
        self.tell(f"{words}: {step.detail}" if step.detail else words, share, detail)

    def pause(self) -> None:
        """Nothing is shown until the next `tell`: before anything else is printed."""
        self._over.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _resume(self) -> None:
        if self.quiet:
            return
        self._over = threading.Event()
        if self.shows:
            # What a user's model prints goes above the line, if it goes to this terminal at all.
            here = sys.stdout.isatty()
            self._live = Live(self, console=self.console, transient=True, redirect_stdout=here)
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._lines, args=(self._over,), daemon=True).start()

    def _lines(self, over: threading.Event) -> None:
        """In a log: soon, then seldom."""
        pause = _SOON
        while not over.wait(pause):
            self.console.print(escape(f"spear: {self._said()} ..."), soft_wrap=True)
            pause = min(max(_LATER, time.monotonic() - self._began), _SELDOM)

    def _said(self) -> str:
        detail = f", {self._detail}" if self._detail else ""
        return f"{self._words}{detail} ({duration(time.monotonic() - self._began)})"

    def __rich__(self) -> Text:
        wheel = "-\\|/"[int(4 * time.monotonic()) % 4]
        full = int(_BAR * self._share)
        bar = f"[{'#' * full}{'.' * (_BAR - full)}] " if self._share else ""
        return Text(f"{wheel} {bar}{self._said()}", no_wrap=True, overflow="ellipsis")


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
        rest = f", about {duration(left)} to go" if left else ""
        return f"{self.done:,} of {self.total:,}{failed}{rest}"


class _Bars(_Watch):
    """A bar for the grid and one for each trial under way."""

    def __init__(self, part: Part, remaining: Remaining, bars: Progress) -> None:
        super().__init__(part, remaining)
        room = max(_LABEL, bars.console.width - _BESIDE)
        self.bars, self.labels = bars, {trial.key: _label(trial, room) for trial in part.open}
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

    def __init__(self, part: Part, remaining: Remaining, activity: Activity) -> None:
        super().__init__(part, remaining)
        self.began, self.activity, self.console = time.monotonic(), activity, activity.console
        words = f"{self.name}: {len(part.open):,} trials to run, {self.done:,} done before"
        self.console.print(words, soft_wrap=True)
        activity.tell(f"{self.name}: {self.state}")

    def row(self, row: Row) -> None:
        super().row(row)
        if self.done < self.total:
            self.activity.tell(f"{self.name}: {self.state}")
            return
        self.activity.pause()
        took = duration(time.monotonic() - self.began)
        self.console.print(f"{self.name}: {self.state} in {took}", soft_wrap=True)


@contextmanager
def watched(part: Part, remaining: Remaining, activity: Activity) -> Iterator[_Watch]:
    """Bars on a terminal, a line now and then elsewhere, nothing if quiet."""
    activity.pause()
    if activity.quiet:
        yield _Watch(part, remaining)
    elif not activity.shows:
        yield _Lines(part, remaining, activity)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=activity.console, transient=True) as bars:
            yield _Bars(part, remaining, bars)
    activity.pause()


def _label(trial: Trial, room: int = 60) -> str:
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
    seed = f" seed {trial.seed}"
    return f"{' '.join(words)[: room - len(seed)]}{seed}"


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(600), duration(7200)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
