"""`spear bench`: what the engine does on fresh batches of real images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from spear.cli.console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole
from spear.cli.output_files import writable
from spear.errors import InvalidOption

if TYPE_CHECKING:
    from spear.experiments.bench.frontier import Row

console = PlainConsole()


def bench(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help="Rows as data:BxM or data:BxM:raw; the whole bar without any."),
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, max=MOST_TRIALS, help="Fresh batches per row.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the first batch.")] = 0,
    compare: Annotated[
        int, typer.Option(min=0, help="Batches per row that the sampling finder inverts as well.")
    ] = 0,
    max_seconds: Annotated[float, typer.Option(help="Per inversion.")] = 600,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_WORKERS, help="CPU threads.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where rows are appended.")] = Path("frontier.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier from OUT's rows.")] = None,
    only_draw: Annotated[bool, typer.Option("--only-draw", help="Run nothing.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure once more what this code has a row of.")
    ] = False,
) -> None:
    """Measure the engine on fresh batches of real images: exact rate, time, memory, PSNR."""
    import torch

    from spear.experiments.bench import frontier, tables

    settings = [frontier.Setting.parse(row) for row in rows] if rows else frontier.DEFAULT_SETTINGS
    if threads:
        torch.set_num_threads(threads)
    for path in (out, plot):
        writable(path)
    if not only_draw:
        if data is None:
            raise InvalidOption("expected --data or SPEAR_DATA, the folder with the datasets")
        measure = partial(
            frontier.run,
            settings,
            data,
            batches=batches,
            seed=seed,
            compare=compare,
            max_seconds=max_seconds,
        )
        _run(out, again, lambda there: measure(there=there))
    measured = tables.load(out)
    console.print(escape(tables.table(measured)), soft_wrap=True)
    console.print(escape(tables.stages(measured)), soft_wrap=True)
    if plot is not None:
        tables.plot(measured, plot)


def _run(out: Path, again: bool, measured: Callable[[list[Row]], Iterator[Row]]) -> None:
    """Append the rows that are missing, each on disk before it is told of."""
    from spear.experiments.bench import tables
    from spear.trials import append_line, exclusive_lock, mend_last_line

    with exclusive_lock(out):
        mend_last_line(out, json.loads)
        there = tables.load(out) if out.exists() and not again else []
        try:
            for row in measured(there):
                append_line(out, json.dumps(row))
                console.print(
                    f"{row['data']} {row['b']}x{row['m']}{' raw' if row['raw'] else ''} "
                    f"seed {row['seed']} {row['finder']}: {row['outcome']}, {row['seconds']:.2f} s"
                )
        except KeyboardInterrupt:
            words = f"stopped; what was done is in {out}: the same command goes on from there"
            console.print(escape(words), soft_wrap=True)
            raise typer.Exit(130) from None
