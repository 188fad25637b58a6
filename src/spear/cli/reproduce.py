"""`spear reproduce`: the paper's tables and figures, run and drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from spear.cli.console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole
from spear.errors import InvalidOption

if TYPE_CHECKING:
    from spear.trials import Engine, Part, Work

console = PlainConsole()
# Options that `spear bench` has as well.
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the first batch.")]
Data = Annotated[Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_WORKERS, help="Processes, one thread each; one per core."),
]
Again = Annotated[bool, typer.Option("--again", help="Run failed and timed-out trials once more.")]
OnlyDraw = Annotated[
    bool, typer.Option("--only-draw", help="Draw the rows there are; run nothing.")
]


def reproduce(
    experiments: Annotated[list[str] | None, typer.Argument()] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what there is.")] = False,
    batches: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TRIALS, help="Batches per cell; the paper's number unless given."
        ),
    ] = None,
    seed: Seed = 0,
    data: Data = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and drawings.")] = Path(
        "spear-results"
    ),
    workers: Workers = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop a trial after this long; it counts as timed out.")
    ] = None,
    again: Again = False,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster; one is started here unless given."),
    ] = None,
    only_draw: OnlyDraw = False,
    page: Annotated[Path | None, typer.Option(help="Draw everything on one Markdown page.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
) -> None:
    """Run the paper's tables and figures, and draw them with the paper's figures beside ours.

    Experiments have the names that --list shows; "all" stands for all of them.
    """
    from spear.experiments.common import catalogue
    from spear.experiments.common import page as pages
    from spear.experiments.common import reproduce as flow

    if show_list or not experiments:
        _show_list(results)
        return
    wanted = catalogue.names() if experiments == ["all"] else tuple(experiments)
    order = catalogue.with_sources(wanted)
    options = flow.Options(results, data, batches, seed, again)
    if not only_draw:
        chosen = _engine(engine, address, workers, max_seconds)
        with stoppable(console, results):
            for name in order:  # one after the other: some are planned by the rows of others
                run_part(flow.plan(name, options), flow.work(data), chosen, console, quiet=quiet)
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
        from spear.trials import LocalEngine

        return LocalEngine(workers, max_seconds)
    if name == "ray":
        from spear.integrations.ray import RayEngine

        return RayEngine(address=address, workers=workers, max_seconds=max_seconds)
    raise InvalidOption(f"expected --engine local or ray, got {name!r}")


def _show_list(results: Path) -> None:
    from spear.experiments.common import catalogue
    from spear.experiments.common import reproduce as flow

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


@contextmanager
def stoppable(console: Console, where: Path) -> Iterator[None]:
    """A Ctrl-C within ends the command, and says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        words = f"stopped; what was done is in {where}: the same command goes on from there"
        console.print(escape(words), soft_wrap=True)
        raise typer.Exit(130) from None


def run_part(
    part: Part, work: Work, engine: Engine, console: Console, *, quiet: bool = False
) -> None:
    """Run what is missing of a part, and show how far it is."""
    from spear.cli.progress import watched
    from spear.trials import Remaining

    if part.left_out and not quiet:
        words = f"{part.name}: without {', '.join(part.left_out)}, not there (see spear data)"
        console.print(escape(words), soft_wrap=True)
    if not part.open:
        return
    remaining = Remaining(part.open, part.file.rows().values())
    with watched(part, remaining, quiet) as watch:
        for row in part.run(work, engine, watch.step):
            remaining.done(row)
            watch.row(row)
