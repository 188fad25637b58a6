"""`spear bench`: the experiment `frontier` for any dataset, batch size and width."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from spear.cli.console import MOST_TRIALS, PlainConsole
from spear.cli.reproduce import Again, Data, OnlyDraw, Seed, Workers, run_part, stoppable
from spear.errors import InvalidOption

console = PlainConsole()


def bench(
    settings: Annotated[list[str] | None, typer.Argument()] = None,
    batches: Annotated[
        int, typer.Option(min=1, max=MOST_TRIALS, help="Fresh batches per setting.")
    ] = 20,
    seed: Seed = 0,
    compare: Annotated[
        int, typer.Option(min=0, help="Batches per setting that the sampling finder inverts too.")
    ] = 0,
    max_seconds: Annotated[
        float, typer.Option(help="Time limit of one inversion, in seconds.")
    ] = 600,
    workers: Workers = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Where rows are appended.")] = Path("frontier.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier from OUT's rows.")] = None,
    only_draw: OnlyDraw = False,
    again: Again = False,
) -> None:
    """Measure the engine on fresh batches of real images: exact rate, time, memory, PSNR.

    A setting is data:BxM or data:BxM:raw, such as cifar10:20x200; without any, those of the README.
    """
    from spear.cli.output_files import writable
    from spear.experiments import frontier
    from spear.experiments.common import Plan, drawing, reproduce
    from spear.trials import LocalEngine, RowFile

    if out.suffix != ".jsonl":
        raise InvalidOption(f"expected --out to end in .jsonl, got {out}")
    for path in (out, plot):
        writable(path)
    file, wanted = RowFile(out.parent, out.stem), Plan(batches, seed, {})
    cells = {
        finder: [frontier.cell(text, finder, max_seconds) for text in settings or frontier.BAR]
        for finder in ("cascade", "sampling")
    }
    if not only_draw:
        trials = [
            *wanted.each(cells["cascade"], "frontier"),
            *wanted.each(cells["sampling"], "frontier", at_most=compare),
        ]
        part = reproduce.runnable(trials, file, data, again)
        with stoppable(console, out):
            run_part(part, reproduce.work(data), LocalEngine(workers), console)
    rows = list(file.rows().values())
    for table in (frontier.frontier_table(rows), frontier.stages_table(rows)):
        console.print(escape(drawing.markdown(table)), soft_wrap=True)
    if plot is not None:
        from spear.report import plots

        with plots.style():
            plots.save(frontier.figure(rows), plot)
