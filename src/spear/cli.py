"""The command line: parse, call, show. No maths. The only user of print."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import spear
from spear import cli_audit, cli_check, cli_data, cli_invert
from spear import theory as lemmas
from spear.audit import frontier, frontier_report
from spear.audit.demo import DemoRun, DemoSettings, run_demo
from spear.cli_progress import progress
from spear.cli_reproduce import reproduce
from spear.errors import InvalidOption, SpearError
from spear.inversion import Outcome

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Shows, exactly and provably, what a federated-learning update gives away.",
)
console = Console(highlight=False)
cli_data.register(app, console)


def run() -> None:
    """Run the command; our own errors and the disk's end in one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a console that cannot write × or σ gets a ?
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()
    except (SpearError, OSError) as error:
        if debug:
            raise
        complaints = Console(stderr=True, highlight=False)
        complaints.print("[red]spear:[/red]", escape(str(error)), soft_wrap=True)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"spear {spear.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere in the line).")
    ] = False,
) -> None:
    """SPEAR audits what a federated-learning update gives away."""


@app.command(epilog="Example: spear demo --batch-size 16 --width 200 --seed 7")
def demo(
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Photos in the batch.")
    ] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Width of the layers.")] = 400,
    depth: Annotated[int, typer.Option(help="Linear layers of the network.")] = 6,
    pixels: Annotated[int, typer.Option(help="Photos are pixels x pixels.")] = 64,
    seed: Annotated[int, typer.Option(help="Of weights, photos and search.")] = 0,
    finder: Annotated[str, typer.Option(help="How directions are found.")] = "cascade",
    max_seconds: Annotated[float | None, typer.Option(help="Stop after this long.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the page.")] = Path(
        "spear-demo"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
) -> None:
    """Recover real photos from one gradient, and show them beside the originals."""
    settings = DemoSettings(batch_size, width, depth, pixels, seed, finder, max_seconds)
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written to ends it here
    if not quiet:
        console.print(
            f"A client computes one gradient on [b]{batch_size}[/b] private photos "
            f"({pixels} x {pixels}, {depth}-layer ReLU network of width {width}).\n"
            "The server sees the model and the gradient, nothing else."
        )
    with progress(console, quiet) as show:
        run = run_demo(settings, show)
    if len(run.recovered):
        (out / "recovered.png").write_bytes(run.picture())
        (out / "report.html").write_text(run.page(), encoding="utf-8")
    _show_demo(run, out, quiet)
    if run.result.stats.get("interrupted"):
        raise typer.Exit(130)
    if run.result.outcome is not Outcome.EXACT:
        raise typer.Exit(1)


def _show_demo(run: DemoRun, out: Path, quiet: bool) -> None:
    if not quiet and len(run.recovered):
        table = Table("photo", "PSNR (dB)", "certified", "label", "label found")
        for row in run.samples():
            found = row["found_label"]
            table.add_row(
                str(row["name"]),
                f"{row['psnr']:.1f}",
                "[green]yes[/green]" if row["certified"] else "[red]no[/red]",
                str(row["label"]),
                "none" if found is None else str(found),
            )
        console.print(table)
    colour = "green" if run.result.outcome is Outcome.EXACT else "red"
    stats = run.result.stats
    work = f"{int(stats.get('rounds', 0))} rounds"
    if stats.get("submatrices"):
        work = f"{int(stats['submatrices']):,} submatrices"
    console.print(
        f"[b {colour}]{run.result.outcome.name}[/b {colour}]: {escape(run.result.reason)} "
        f"({run.seconds:.1f} s, {work})",
        soft_wrap=True,
    )
    if len(run.recovered):
        files = f"picture: {out / 'recovered.png'}\npage:    {out / 'report.html'}"
        console.print(escape(files), soft_wrap=True)


@app.command(epilog="Example: spear bench cifar10:20x200 mnist:20x200:raw --batches 50 --compare 2")
def bench(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help="Rows as data:BxM or data:BxM:raw; the whole bar without any."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Fresh batches per row.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the first batch.")] = 0,
    compare: Annotated[
        int, typer.Option(min=0, help="Batches per row that the sampling finder inverts as well.")
    ] = 0,
    max_seconds: Annotated[float, typer.Option(help="Per inversion.")] = 600,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where rows are appended.")] = Path("frontier.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier from OUT's rows.")] = None,
    only_draw: Annotated[bool, typer.Option("--only-draw", help="Run nothing.")] = False,
) -> None:
    """Measure the engine on fresh batches of real images: exact rate, time, memory, PSNR."""
    settings = [frontier.Setting.parse(row) for row in rows] if rows else frontier.BAR
    if threads:
        torch.set_num_threads(threads)
    if not only_draw:
        if data is None:
            raise InvalidOption("expected --data or SPEAR_DATA, the folder with the datasets")
        with out.open("a", encoding="utf-8") as file:
            for row in frontier.run(
                settings, data, batches=batches, seed=seed, compare=compare, max_seconds=max_seconds
            ):
                file.write(json.dumps(row) + "\n")
                file.flush()
                console.print(
                    f"{row['data']} {row['b']}x{row['m']}{' raw' if row['raw'] else ''} "
                    f"seed {row['seed']} {row['finder']}: {row['outcome']}, {row['seconds']:.2f} s"
                )
    measured = frontier_report.load(out)
    console.print(escape(frontier_report.table(measured)), soft_wrap=True)
    console.print(escape(frontier_report.stages(measured)), soft_wrap=True)
    if plot is not None:
        frontier_report.plot(measured, plot)


app.command(epilog=cli_invert.EPILOG)(cli_invert.invert)
app.command(epilog=cli_check.EPILOG)(cli_check.check)
app.command(epilog=cli_audit.EPILOG)(cli_audit.audit)
app.command(epilog="Example: spear reproduce main --batches 10 --data ~/datasets")(reproduce)


@app.command(epilog="Example: spear theory --batch-size 16 --width 200")
def theory(
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Samples, b.")] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Neurons of the layer, m.")] = 200,
    p: Annotated[float, typer.Option(help="Failure probability allowed.")] = 1e-8,
    false_rejection: Annotated[float, typer.Option(help="p_fr of the sparsity filter.")] = 1e-10,
) -> None:
    """What the paper's lemmas say about a batch size and a width."""
    b, m = batch_size, width
    if b >= m:
        raise InvalidOption(f"expected a batch smaller than the layer, got b = {b} and m = {m}")
    table = Table("quantity", "value", title=f"b = {b}, m = {m}")
    tau = lemmas.sparsity_threshold(m, false_rejection)
    rows = {
        "q: a submatrix gives a direction": f"{lemmas.success_probability(b):.3g}",
        "expected submatrices, m >> b": f"{lemmas.expected_samples(b):.3g}",
        f"expected submatrices at m = {m}": f"{lemmas.expected_samples_narrow(b, m):.3g}",
        f"submatrices with probability 1 - {p:g}, m >> b": (
            f"{lemmas.samples_with_high_probability(b, p, false_rejection):.3g}"
        ),
        f"tau for p_fr = {false_rejection:g}": f"{tau:g}",
        "failure even if exhaustive, bound": f"{lemmas.failure_bound(b, m, false_rejection):.3g}",
        "failure even if exhaustive, approximation": (
            f"{lemmas.failure_approximation(b, m, false_rejection):.3g}"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
