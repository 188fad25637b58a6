"""`spear bench`: the experiment `frontier` for any dataset, batch size and width."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from spear.cli import completion
from spear.cli.console import MOST_TRIALS, PlainConsole
from spear.cli.progress import Activity, duration
from spear.cli.reproduce import Again, Data, OnlyDraw, Seed, Workers, end, run_part, stoppable
from spear.cli.tables import show_table
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
    finder: Annotated[
        list[str] | None,
        typer.Option(
            help="A finder beside ours, on the same batches; may be given again.",
            autocompletion=completion.finders,
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="A rival attack beside ours: geiping, cocktail or your own; likewise."),
    ] = None,
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

    A setting is data:BxM or data:BxM:raw, such as cifar10:20x200.
    Without any, four small ones run, about a minute; `spear reproduce frontier` has many.
    A finder or an attack is a name, my_file.py:Name or package.module:name.
    """
    activity = Activity.begin()
    from spear.cli.output_files import writable
    from spear.experiments import frontier
    from spear.experiments.common import Plan, reproduce
    from spear.experiments.common.additions import Addition
    from spear.trials import LocalEngine, RowFile

    if out.suffix != ".jsonl":
        raise InvalidOption(f"expected --out to end in .jsonl, got {out}")
    for path in (out, plot):
        writable(path)
    file, wanted = RowFile(out.parent, out.stem), Plan(batches, seed, {})
    finders = [name for name in finder or () if name != "cascade"]  # it runs anyway
    additions = [*map(Addition.finder, finders), *map(Addition.attack, attack or ())]
    cells = [frontier.cell(text, "cascade", max_seconds) for text in settings or frontier.SMALL]
    sampling = [{**cell, "finder": "sampling"} for cell in cells]
    beside = [frontier.beside(cell, addition) for addition in additions for cell in cells]
    parts = []
    if not only_draw:
        trials = [
            *wanted.each([*cells, *beside], "frontier"),
            *wanted.each(sampling, "frontier", at_most=compare),
        ]
        once = list({trial.key: trial for trial in trials}.values())
        activity.tell("looking at the datasets")
        parts = [reproduce.runnable(once, file, data, again)]
        if not settings:
            _announce(frontier.expected(parts[0].open), workers, activity)
        with stoppable(out):
            run_part(parts[0], reproduce.work(data, additions), LocalEngine(workers), activity)
    rows = list(file.rows().values())
    activity.pause()
    tables = [frontier.frontier_table(rows), frontier.stages_table(rows)]
    compared = frontier.comparison_table(rows)
    for table in tables if compared is None else [*tables, compared]:
        console.print()
        show_table(console, table)
    console.print(escape(f"\nrows: {out}"), soft_wrap=True)
    if plot is not None:
        from spear.report import plots

        with plots.style():
            plots.save(frontier.figure(rows), plot)
    end(parts)


def _announce(seconds: float, workers: int | None, activity: Activity) -> None:
    """How long our finder will take on the small settings that were not asked for by name."""
    if seconds:
        processes = workers or os.cpu_count() or 1
        activity.pause()
        activity.console.say(
            f"four small settings: about {duration(seconds / processes)} for our finder "
            f"(--workers {processes}); name others if you like, such as cifar10:32x200"
        )
