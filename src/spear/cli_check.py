"""`spear check`: before any attack, is this model with this protocol exposed?"""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spear.audit.check_files import CheckFiles, check_files
from spear.audit.preflight import Preflight, Verdict
from spear.cli_console import PlainConsole
from spear.cli_invert import apart, writable, write
from spear.errors import InvalidOption
from spear.report import Level
from spear.report import Table as Rows

EXIT = {Verdict.NOT_EXPOSED: 0, Verdict.PARTLY: 10, Verdict.UNKNOWN: 10, Verdict.EXPOSED: 20}
_COLOURS = {
    Verdict.EXPOSED: "red",
    Verdict.PARTLY: "yellow",
    Verdict.UNKNOWN: "yellow",
    Verdict.NOT_EXPOSED: "green",
}
_GROUPS = {
    Level.EXPOSED: ("red", "What exposes it"),
    Level.PROTECTED: ("green", "What stands in the way"),
    Level.NOTE: ("dim", "Good to know"),
}
_WHAT, _HOW, _DEFENCES, _WRITE = (
    "What to judge",
    "How clients train",
    "What they do to updates",
    "What to write",
)
_MOST_INPUTS = 10**8  # of one sample
_WIDE = 1000  # characters of a line that no terminal folds

EPILOG = """Examples:

  spear check --model mypackage.nets:Net -b 20

  spear check --weights w.safetensors -b 20 --noise-multiplier 1.1 --clip 1.0 --dataset-size 5000

  spear check --model net.py:Net -b 32 --lr 0.01 --epochs 5 --local-batch-size 8 --clients 10

  spear check --model net.py:Net --weights w.pt --update g.pt --json check.json --report check.html

Exit codes: 0 not exposed, 10 partly or unknown, 20 exposed, 2 bad input."""


def check(
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory or file.py:factory.", rich_help_panel=_WHAT),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights clients are sent: .safetensors, .npz or .pt. Alone, a plain MLP is assumed.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    update: Annotated[
        Path | None,
        typer.Option(
            help="Gradients one client sent: size, spectrum and noise are read off.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(help="Or the weights it sent back; needs --lr.", rich_help_panel=_WHAT),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Judge this layer.", rich_help_panel=_WHAT)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Of one input: 3x32x32, or 784.", rich_help_panel=_WHAT),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="train or eval; as the factory leaves it unless given.", rich_help_panel=_WHAT
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            "-b",
            help="Samples of one update: the batch, or with local training all of a client's.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Local learning rate (FedAvg).", rich_help_panel=_HOW)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs.", rich_help_panel=_HOW)] = None,
    local_batch_size: Annotated[
        int | None, typer.Option(help="Samples a local step.", rich_help_panel=_HOW)
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Local optimiser.", rich_help_panel=_HOW)] = "sgd",
    clients: Annotated[
        int,
        typer.Option(help="Clients aggregated before the server sees it.", rich_help_panel=_HOW),
    ] = 1,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Of DP-SGD, in Opacus' units.", rich_help_panel=_DEFENCES),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Norm samples are clipped to.", rich_help_panel=_DEFENCES),
    ] = None,
    clipping: Annotated[
        str, typer.Option(help="flat or per_layer.", rich_help_panel=_DEFENCES)
    ] = "flat",
    sigma: Annotated[
        float | None,
        typer.Option(help="Or the noise on an entry.", rich_help_panel=_DEFENCES),
    ] = None,
    dataset_size: Annotated[
        int | None,
        typer.Option(help="Of a client, to state epsilon.", rich_help_panel=_DEFENCES),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Steps that epsilon is stated for.", rich_help_panel=_DEFENCES)
    ] = 1,
    delta: Annotated[float, typer.Option(help="Of epsilon.", rich_help_panel=_DEFENCES)] = 1e-5,
    precision: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16, 8-bit, ...", rich_help_panel=_DEFENCES),
    ] = None,
    prune: Annotated[
        float,
        typer.Option(help="Share of the smallest entries not sent.", rich_help_panel=_DEFENCES),
    ] = 0.0,
    json: Annotated[
        Path | None,
        typer.Option(
            help="As JSON (spear.load reads it); - is the terminal.", rich_help_panel=_WRITE
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="The report: one HTML file.", rich_help_panel=_WRITE)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
) -> None:
    """Say, before any attack, whether a model and a protocol are exposed, and why or why not."""
    files = CheckFiles(model, weights, update, after, mode)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "lr": lr,
        "epochs": epochs,
        "local_batch_size": local_batch_size,
        "optimizer": optimizer,
        "clients": clients,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": clip,
        "clipping": clipping,
        "sigma": sigma,
        "dataset_size": dataset_size,
        "rounds": rounds,
        "delta": delta,
        "precision": precision,
        "pruned": prune,
        "input_shape": None if shape is None else _sizes(shape),
    }
    for path in (json, report):
        writable(path, weights, update, after)
    apart(json, report)
    began = time.monotonic()
    found = check_files(files, layer=layer, **options)
    seconds = time.monotonic() - began
    console = PlainConsole(stderr=str(json) == "-")
    _show(console, found, quiet)
    command = shlex.join(["spear", *sys.argv[1:]])
    name = model or (weights.name if weights else "the model")
    made = found.report(f"Is {name} exposed?", settings={"command": command}, seconds=seconds)
    for path in write(made, json, report):
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    raise typer.Exit(EXIT[found.verdict])


def _sizes(shape: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in shape.lower().split("x"))
    except ValueError as error:
        raise InvalidOption(f"expected --shape like 3x32x32 or 784, got {shape!r}") from error
    if min(sizes) < 1 or math.prod(sizes) > _MOST_INPUTS:
        raise InvalidOption(f"expected --shape like 3x32x32 or 784, got {shape!r}")
    return sizes


def _show(console: Console, found: Preflight, quiet: bool) -> None:
    verdict, _, rest = found.headline.partition(":")
    colour = _COLOURS[found.verdict]
    console.print(f"[b {colour}]{escape(verdict)}[/b {colour}]:{escape(rest)}", soft_wrap=True)
    if quiet:
        return
    for level, (tint, title) in _GROUPS.items():
        own = [remark for remark in found.remarks if remark.level is level]
        if own:
            console.print(f"\n[b]{title}[/b]")
        for remark in own:
            words = f"  [{tint}]{escape(remark.subject)}[/{tint}]: {escape(remark.words)}"
            console.print(words, soft_wrap=True)
    # Lines are folded for terminals only.
    wide = console if console.is_terminal else PlainConsole(file=console.file, width=_WIDE)
    for table in (found.predictions.table(), found.layers):
        if table.rows:
            wide.print()
            wide.print(_drawn(table))


def _drawn(rows: Rows) -> Table:
    table = Table(*rows.columns, title=rows.title, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # rather than cut off
    for row in rows.rows:
        table.add_row(*(escape("" if cell is None else str(cell)) for cell in row))
    return table
