"""`spear bench` and `spear theory`: what the engine does, and what the paper's lemmas say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from spear import theory as lemmas
from spear.audit import frontier, frontier_report
from spear.audit.frontier import Row
from spear.cli_console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole
from spear.cli_invert import writable
from spear.errors import InvalidOption
from spear.trials.rows import alone, append_line, mend_last_line

console = PlainConsole()
_WIDEST = 10**6  # the sums over all neurons take a second


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
    settings = [frontier.Setting.parse(row) for row in rows] if rows else frontier.BAR
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
    measured = frontier_report.load(out)
    console.print(escape(frontier_report.table(measured)), soft_wrap=True)
    console.print(escape(frontier_report.stages(measured)), soft_wrap=True)
    if plot is not None:
        frontier_report.plot(measured, plot)


def _run(out: Path, again: bool, measured: Callable[[list[Row]], Iterator[Row]]) -> None:
    """Append the rows that are missing, each on disk before it is told of."""
    with alone(out):
        mend_last_line(out, json.loads)
        there = frontier_report.load(out) if out.exists() and not again else []
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


def theory(
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Samples, b.")] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Neurons of the layer, m.")] = 200,
    p: Annotated[float, typer.Option(help="Failure probability allowed.")] = 1e-8,
    p_fr: Annotated[
        float, typer.Option(help="Chance that the sparsity filter rejects a right direction.")
    ] = 1e-10,
) -> None:
    """What the paper's lemmas say about a batch size and a width."""
    b, m = batch_size, width
    if m > _WIDEST:
        raise InvalidOption(f"expected a width of at most {_WIDEST:,}, got {m:,}")
    if b >= m:
        raise InvalidOption(f"expected a batch smaller than the layer, got b = {b} and m = {m}")
    table = Table("quantity", "value", title=f"b = {b}, m = {m}")
    tau = lemmas.sparsity_threshold(m, p_fr)
    rows = {
        "q: a submatrix gives a direction": f"{lemmas.success_probability(b):.3g}",
        "expected submatrices, m >> b": f"{lemmas.expected_samples(b):.3g}",
        f"expected submatrices at m = {m}": f"{lemmas.expected_samples_narrow(b, m):.3g}",
        f"submatrices with probability 1 - {p:g}, m >> b": (
            f"{lemmas.samples_with_high_probability(b, p, p_fr):.3g}"
        ),
        f"tau for p_fr = {p_fr:g}": f"{tau:g}",
        "failure even if exhaustive, bound": f"{lemmas.failure_bound(b, m, p_fr):.3g}",
        "failure even if exhaustive, approximation": (
            f"{lemmas.failure_approximation(b, m, p_fr):.3g}"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
