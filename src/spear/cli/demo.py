"""`spear demo`: real photos out of one gradient, or out of those of several rounds."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from spear.cli import completion
from spear.cli.console import LARGEST_SEED, PlainConsole
from spear.cli.progress import Activity

if TYPE_CHECKING:
    from spear.trials import DemoRun

console = PlainConsole()

EPILOG = """Example: spear demo --samples 16 --width 200 --seed 7

Exit codes: 0 every photo came back exactly, 1 not every one, 2 bad input, 130 interrupted."""
_FEW = 40  # photos that have a line each
_PIXELS, _PIXELS_OVER_ROUNDS = 64, 32  # the photos have fewer large crops that are not nearly alike


def demo(
    samples: Annotated[int, typer.Option("--samples", "-b", help="Photos in the batch.")] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Width of the layers.")] = 400,
    depth: Annotated[int, typer.Option(help="Linear layers of the network.")] = 6,
    rounds: Annotated[int, typer.Option(help="Gradients, with training in between.")] = 1,
    pixels: Annotated[
        int | None,
        typer.Option(
            help="Photos are pixels x pixels.",
            show_default=f"{_PIXELS}; {_PIXELS_OVER_ROUNDS} with several rounds",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of weights, photos and search.")
    ] = 0,
    finder: Annotated[
        str,
        typer.Option(help="How directions are found.", autocompletion=completion.finders),
    ] = "cascade",
    max_seconds: Annotated[float | None, typer.Option(help="Stop after this long.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the page.")] = Path(
        "spear-demo"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
) -> None:
    """Recover real photos from one gradient, and show them beside the originals.

    With several rounds, batches larger than the layers come back: --rounds 20 -b 200 -m 100.
    """
    activity = Activity.begin(quiet=quiet)
    from spear.files import make_private, write_private
    from spear.trials import DemoSettings, run_demo

    if pixels is None:
        pixels = _PIXELS if rounds <= 1 else _PIXELS_OVER_ROUNDS
    settings = DemoSettings(samples, width, depth, pixels, seed, finder, max_seconds, rounds)
    make_private(out)  # a folder that cannot be written to ends it here
    if not quiet:
        activity.pause()
        several = rounds > 1
        console.say(
            f"A client computes one gradient {'per round ' if several else ''}on [b]{samples}[/b] "
            f"private photos {f'for [b]{rounds}[/b] rounds ' if several else ''}"
            f"({pixels} x {pixels}, {depth}-layer ReLU network of width {width})."
        )
        console.say(
            f"The server sees the model and the gradient{' of each round' if several else ''}, "
            "nothing else."
        )
    activity.tell("computing the gradient of private photos")
    run = run_demo(settings, activity.stage)
    if len(run.recovered):
        activity.tell("drawing the picture and the page")
        write_private(out / "recovered.png", run.picture())
        run.report().save_page(out / "report.html")
    activity.pause()
    _show_demo(run, out, quiet)
    if not len(run.recovered) and not quiet:
        console.say(
            "Nothing came back, so there is no page. Try fewer photos (--samples), more neurons "
            "(--width) or several rounds (--rounds)."
        )
    if run.result.stats.get("interrupted"):
        raise typer.Exit(130)
    if run.result.outcome.name != "EXACT":
        raise typer.Exit(1)


def _show_demo(run: DemoRun, out: Path, quiet: bool) -> None:
    from spear.report import seconds

    if not quiet and len(run.recovered) > _FEW:
        console.print(_summary(run))
    elif not quiet and len(run.recovered):
        table = Table("sample", "photo", "PSNR (dB)", "certified", "true label", "label found")
        for row in run.samples():
            found = row["found_label"]
            table.add_row(
                str(row["sample"]),
                str(row["name"]),
                f"{row['psnr']:.1f}",
                "[green]yes[/green]" if row["certified"] else "[red]no[/red]",
                str(row["label"]),
                "none" if found is None else str(found),
            )
        console.print(table)
    colour = "green" if run.result.outcome.name == "EXACT" else "red"
    stats = run.result.stats
    work = f"{int(stats.get('rounds', 0))} search passes"
    if stats.get("submatrices"):
        work = f"{int(stats['submatrices']):,} submatrices"
    console.say(
        f"[b {colour}]{run.result.outcome.name}[/b {colour}]: {escape(run.result.reason)} "
        f"({seconds(run.seconds)}, {work})"
    )
    if len(run.recovered):
        files = f"picture: {out / 'recovered.png'}\npage:    {out / 'report.html'}"
        console.print(escape(files), soft_wrap=True)
        if not quiet:
            console.print("next:    spear docs start  (is a model of yours exposed?)")


def _summary(run: DemoRun) -> Table:
    """Many photos in a few lines."""
    rows, of = run.samples(), f"of {len(run.names)}"
    decibels = [float(str(row["psnr"])) for row in rows]
    right = sum(row["label"] == row["found_label"] for row in rows)
    table = Table("photos", str(len(run.names)))
    table.add_row("recovered", f"{len(rows)} {of}")
    table.add_row("certified", f"{sum(bool(row['certified']) for row in rows)} {of}")
    table.add_row("labels right", f"{right} {of}")
    table.add_row("worst PSNR (dB)", f"{min(decibels):.1f}")
    table.add_row("median PSNR (dB)", f"{median(decibels):.1f}")
    return table
