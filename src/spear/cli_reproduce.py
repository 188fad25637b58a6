"""`spear reproduce`: the paper's tables and figures, run and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from spear.cli_console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole
from spear.errors import InvalidOption
from spear.paper import catalogue
from spear.paper import page as pages
from spear.paper import reproduce as flow
from spear.trials import Engine, LocalEngine, Row, Status, Step, Trial
from spear.trials.remaining import Remaining

console = PlainConsole()
_TELL = 30.0  # seconds between two lines where nobody watches a bar


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names as --list shows them, or all.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    batches: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TRIALS, help="Batches per cell; the paper's number unless given."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the first batch.")] = 0,
    data: Annotated[
        Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and drawings.")] = Path(
        "spear-results"
    ),
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="Processes, one thread each; one per core."),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop a trial after this long; it counts as timed out.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run failed and timed-out trials once more.")
    ] = False,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster; starts one here unless given.")
    ] = None,
    only_draw: Annotated[
        bool, typer.Option("--only-draw", help="Draw the rows there are; run nothing.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Draw everything on one Markdown page.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
) -> None:
    """Run the paper's tables and figures, and draw them with the paper's figures beside ours."""
    if show_list or not experiments:
        _show_list(results)
        return
    wanted = catalogue.names() if experiments == ["all"] else tuple(experiments)
    order = catalogue.with_sources(wanted)
    options = flow.Options(results, data, batches, seed, again)
    if not only_draw:
        chosen = _engine(engine, address, workers, max_seconds)
        try:
            for name in order:
                _run(name, options, chosen, quiet)
        except KeyboardInterrupt:
            words = f"stopped; what was done is in {results}: the same command goes on from there"
            console.print(escape(words), soft_wrap=True)
            raise typer.Exit(130) from None
    if page is not None:
        pages.page(wanted, results, page)
        return
    drawn = results / "drawn"
    for name in wanted:
        text = pages.write(name, results, drawn)
        if not quiet:
            console.print(Markdown(text) if console.is_terminal else escape(text), soft_wrap=True)
    if not quiet:
        console.print(escape(f"\nrows: {results}\ntables, plots and pictures: {drawn}"))


def _engine(
    name: str, address: str | None, workers: int | None, max_seconds: float | None
) -> Engine:
    if name == "local":
        if address is not None:
            raise InvalidOption("expected --engine ray beside --address")
        return LocalEngine(**({"workers": workers} if workers else {}), max_seconds=max_seconds)
    if name == "ray":
        from spear.integrations.ray import RayEngine

        return RayEngine(address=address, workers=workers, max_seconds=max_seconds)
    raise InvalidOption(f"expected --engine local or ray, got {name!r}")


def _show_list(results: Path) -> None:
    table = Table("name", "in the paper", "what it shows", "batches", "rows here", box=None)
    for name in catalogue.names():
        e = catalogue.load(name)
        rows = flow.rows_of(name, results)
        own = bool(e.cells or e.plan)
        table.add_row(
            name, e.place, escape(e.title), str(e.batches) if own else "", str(len(rows) or "")
        )
    console.print(table)
    console.print("\nspear reproduce NAME runs and draws one, spear reproduce all everything.")


def _run(name: str, options: flow.Options, engine: Engine, quiet: bool) -> None:
    part = flow.plan(name, options)
    if part.left_out and not quiet:
        words = (
            f"{name}: without {', '.join(part.left_out)}, not in {options.data} (see spear data)"
        )
        console.print(escape(words), soft_wrap=True)
    if not part.open:
        return
    remaining = Remaining(part.open, flow.rows_of(name, options.results))
    with watched(part, remaining, quiet) as watch:
        for row in flow.run(part, options, engine, watch.step):
            remaining.done(row)
            watch.row(row)


class _Watch:
    """Shows nothing: for --quiet, and what the others begin with."""

    def __init__(self, part: flow.Part, remaining: Remaining) -> None:
        self.name, self.total, self.remaining = part.name, len(part.trials), remaining
        self.done, self.bad = self.total - len(part.open), 0

    def step(self, step: Step) -> None:
        """A trial is so far."""

    def row(self, row: Row) -> None:
        """A trial is done."""
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

    def __init__(self, part: flow.Part, remaining: Remaining, bars: Progress) -> None:
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
    """A line now and then, where nobody watches a bar."""

    def __init__(self, part: flow.Part, remaining: Remaining) -> None:
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
def watched(part: flow.Part, remaining: Remaining, quiet: bool) -> Iterator[_Watch]:
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
    """A trial in few words: what tells it from the others is mostly short.

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
