"""`spear reproduce`: the paper's tables and figures, run and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from spear.errors import InvalidOption
from spear.paper import catalogue
from spear.paper import page as pages
from spear.paper import reproduce as flow
from spear.trials import Engine, LocalEngine, Row, Status, Step

console = Console(highlight=False)
_TELL = 30.0  # seconds between two lines where nobody watches a bar


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Names as --list shows them, or all.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Batches per cell; the paper's number unless given.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first batch.")] = 0,
    data: Annotated[
        Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and drawings.")] = Path(
        "spear-results"
    ),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; one per core.")
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
    page: Annotated[Path | None, typer.Option(help="Write one Markdown page of all here.")] = None,
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
        for name in order:
            _run(name, options, chosen, quiet)
    drawn = results / "drawn"
    for name in wanted:
        text = pages.write(name, results, drawn)
        if not quiet:
            console.print(escape(text), soft_wrap=True)
    if page is not None:
        folder = page.parent / "images" / page.stem
        pages.page(wanted, results, folder, page)
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
    if not part.open:
        return
    done = len(part.trials) - len(part.open)
    with _watched(name, len(part.trials), done, quiet) as watch:
        for row in flow.run(part, options, engine, watch.step):
            watch.row(row)


class _Bars:
    """A bar for the grid and one for each trial under way."""

    def __init__(self, bars: Progress, name: str, total: int, done: int) -> None:
        self.bars, self.bad = bars, 0
        self.grid = bars.add_task(name, total=total, completed=done)
        self.trials: dict[str, TaskID] = {}

    def step(self, step: Step) -> None:
        if step.key not in self.trials:
            self.trials[step.key] = self.bars.add_task("", total=1.0)
        words = f"  {escape(step.words)}"
        self.bars.update(self.trials[step.key], description=words, completed=step.share)

    def row(self, row: Row) -> None:
        if row.key in self.trials:
            self.bars.remove_task(self.trials.pop(row.key))
        self.bars.advance(self.grid)


class _Lines:
    """A line now and then."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.name, self.total, self.done, self.ran, self.bad = name, total, done, 0, 0
        self.began = self.told = time.monotonic()
        console.print(f"{name}: {total - done} trials to run, {done} done before")

    def step(self, step: Step) -> None:
        """Only whole trials are worth a line."""

    def row(self, row: Row) -> None:
        self.ran += 1
        self.bad += row.status is not Status.DONE
        now = time.monotonic()
        left = self.total - self.done - self.ran
        if left and now - self.told < _TELL:
            return
        self.told = now
        rest = (now - self.began) / self.ran * left
        failed = f", {self.bad} failed or timed out" if self.bad else ""
        console.print(
            f"{self.name}: {self.done + self.ran} of {self.total}{failed}, about "
            f"{_duration(rest)} to go"
            if left
            else f"{self.name}: {self.total} of {self.total}{failed}, {_duration(now - self.began)}"
        )


class _Silence:
    def step(self, step: Step) -> None:
        """Nothing."""

    def row(self, row: Row) -> None:
        """Nothing."""


@contextmanager
def _watched(name: str, total: int, done: int, quiet: bool) -> Iterator[_Bars | _Lines | _Silence]:
    if quiet:
        yield _Silence()
    elif not console.is_terminal:
        yield _Lines(name, total, done)
    else:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as bars:
            yield _Bars(bars, name, total, done)


def _duration(seconds: float) -> str:
    """
    >>> _duration(42), _duration(600), _duration(7200)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
