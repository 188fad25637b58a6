"""`spear invert`: files in, verdict out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spear.cli import options as told
from spear.cli.console import LARGEST_SEED, PlainConsole
from spear.cli.output_files import apart, parse_image_format, writable, write
from spear.cli.progress import progress
from spear.errors import InvalidOption
from spear.files import UpdateFiles
from spear.inversion import FINDERS, Outcome
from spear.report import ASSUMPTIONS, Finding, invert_files, save_inputs
from spear.update import Protocol, Sends

_COLOURS = {
    Outcome.EXACT: "red",  # for whoever audits, an exact recovery is the bad news
    Outcome.PARTIAL: "red",
    Outcome.APPROXIMATE: "yellow",
    Outcome.INCONCLUSIVE: "magenta",
    Outcome.FAILED: "green",
}
_EXIT_CODES = {
    Outcome.EXACT: 20,
    Outcome.PARTIAL: 10,
    Outcome.APPROXIMATE: 10,
    Outcome.INCONCLUSIVE: 30,
    Outcome.FAILED: 0,
}
_SHOWN = 20  # samples in the terminal's table; the report has all
_WHAT, _WRITE, _SEARCH = "What was sent", "What to write", "The search"

EPILOG = """Examples:

  spear invert --weights before.safetensors --update grads.safetensors

  spear invert --weights w.pt --update g.pt --model mypackage.nets:Net --shape 3x32x32 --report r.html

  spear invert --weights before.npz --after after.npz --lr 0.01 --epochs 5 --json result.json

Exit codes: 0 nothing recovered, 10 partly or approximately, 20 exact, 30 cannot tell, 2 bad input,
130 interrupted."""


def invert(
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights the client was sent: .safetensors, .npz or .pt.", rich_help_panel=_WHAT
        ),
    ] = None,
    update: Annotated[
        Path | None,
        typer.Option(
            help="Gradients it sent (FedSGD): the same kinds of file.", rich_help_panel=_WHAT
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(help="Or the weights it sent back (FedAvg).", rich_help_panel=_WHAT),
    ] = None,
    difference: Annotated[
        Path | None,
        typer.Option(
            help="Or the difference, weights sent back minus weights received.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="package.module:factory or file.py:factory, for the proof by replay and for labels. "
            "A plain MLP is recognised without it.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="Layer to attack; the one closest to the data unless given.", rich_help_panel=_WHAT
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="cross-entropy, bce, mse or package.module:function.", rich_help_panel=told.HOW
        ),
    ] = None,
    samples: told.Samples = None,
    lr: told.Lr = None,
    epochs: told.Epochs = None,
    local_steps: told.LocalSteps = None,
    local_batch_size: told.LocalBatchSize = None,
    momentum: told.Momentum = 0.0,
    nesterov: told.Nesterov = False,
    weight_decay: told.WeightDecay = 0.0,
    proximal: told.Proximal = 0.0,
    optimizer: told.Optimizer = "sgd",
    clients: told.Clients = 1,
    clip: told.Clip = None,
    clipping: told.Clipping = None,
    sigma: told.Sigma = None,
    noise_multiplier: told.NoiseMultiplier = None,
    precision: told.Precision = "float32",
    pruned: told.Pruned = 0.0,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Of a picture, channels first: 3x32x32 or 1x28x28.", rich_help_panel=_WRITE
        ),
    ] = None,
    mean: Annotated[
        str,
        typer.Option(help="Subtracted from pixels, per channel or one.", rich_help_panel=_WRITE),
    ] = "0",
    std: Annotated[
        str,
        typer.Option(help="Pixels were divided by, per channel or one.", rich_help_panel=_WRITE),
    ] = "1",
    truth: Annotated[
        Path | None,
        typer.Option(
            help="File with the client's 'inputs' and 'labels', to compare; the attack never sees it.",
            rich_help_panel=_WRITE,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for recovered.safetensors, and PNGs with --shape.", rich_help_panel=_WRITE
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="The result as JSON (spear.load reads it); - is the terminal.",
            rich_help_panel=_WRITE,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="The report: one HTML file.", rich_help_panel=_WRITE)
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact", help="Leave recovered data out of JSON and report.", rich_help_panel=_WRITE
        ),
    ] = False,
    finder: Annotated[
        str, typer.Option(help=f"{' or '.join(sorted(FINDERS))}.", rich_help_panel=_SEARCH)
    ] = "cascade",
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop after this long.", rich_help_panel=_SEARCH)
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the search.", rich_help_panel=_SEARCH)
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Layers, stages and assumptions too.")
    ] = False,
) -> None:
    """Recover the private batch behind an update, and say what is proved of it."""
    if redact and out is not None:
        raise InvalidOption(
            "--redact leaves recovered data out, and --out writes it: give one of them"
        )
    sends: Sends = "gradient" if after is None and difference is None else "weights"
    protocol = Protocol(
        sends=sends if difference is None else "difference",
        samples=samples,
        lr=told.rates(lr),
        epochs=epochs,
        local_steps=local_steps,
        local_batch_size=local_batch_size,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        proximal=proximal,
        optimizer=optimizer,
        clients=clients,
        clip=clip,
        clipping=clipping,  # type: ignore[arg-type]
        sigma=sigma,
        noise_multiplier=noise_multiplier,
        precision=precision,
        pruned=pruned,
    )
    files = UpdateFiles(weights, update, after, difference, protocol, model, layer, loss)
    image_format = None if shape is None else parse_image_format(shape, mean, std)
    for path in (json, report, out and out / "recovered.safetensors"):
        writable(path, weights, update, after, difference, truth)
    apart(json, report)
    console = PlainConsole(stderr=str(json) == "-")
    with progress(console, quiet) as show:
        made = invert_files(
            files,
            image_format=image_format,
            truth=truth,
            settings={"command": shlex.join(["spear", *sys.argv[1:]]), "seed": seed},
            finder=finder,
            max_seconds=max_seconds,
            generator=torch.Generator().manual_seed(seed),
            on_progress=show,
        )
    finding = made.findings[0]
    show_finding(
        console, finding, quiet=quiet, verbose=verbose
    )  # first: a full disk loses no verdict
    written = write(made.redacted() if redact else made, json, report)
    if out is not None:
        written += save_inputs(finding, out)
    for path in [] if quiet else written:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    interrupted = finding.stats.get("interrupted")
    raise typer.Exit(130 if interrupted else _EXIT_CODES[finding.outcome])


def show_finding(console: Console, finding: Finding, *, quiet: bool, verbose: bool) -> None:
    """The verdict, and what it rests on, on the terminal."""
    if not quiet:
        layers = finding.layer.splitlines()
        console.print(escape("\n".join(layers if verbose else layers[:1])), soft_wrap=True)
        for note in finding.notes:
            console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
        if finding.recovered:
            console.print(_samples(finding))
        if verbose:
            console.print(_stages(finding))
    colour = _COLOURS[finding.outcome]
    what = ", ".join(_qualities(finding))
    said = f"{finding.outcome.name} ({what})" if what else finding.outcome.name
    verdict = f"[b {colour}]{said}[/b {colour}]"
    console.print(f"{verdict}: {escape(finding.reason)}", soft_wrap=True)
    for detail in () if quiet else finding.details:
        console.print(f"  {escape(detail)}", soft_wrap=True)
    if finding.assumptions and not quiet:
        console.print(ASSUMPTIONS)
        for assumption in finding.assumptions:
            console.print(f"  - {escape(assumption)}", soft_wrap=True)


def _qualities(finding: Finding) -> list[str]:
    """What an outcome's name does not say."""
    said = ["likely exact, not proved"] if finding.is_likely else []
    if finding.outcome is Outcome.INCONCLUSIVE:
        said.append("cannot tell")
    if finding.activations and finding.recovered:
        said.append("activations, not the data")
    return said


def _samples(finding: Finding) -> Table:
    truth = finding.truth
    table = Table("sample", "certified", "label", "error about")
    if truth is not None:
        table.add_column("true sample")
        table.add_column("PSNR (dB)")
    for i in range(min(finding.recovered, _SHOWN)):
        label = None if finding.labels is None else int(finding.labels[i])
        row = [
            str(i + 1),
            "[green]yes[/green]" if finding.certified[i] else "[yellow]no[/yellow]",
            "-" if label is None or label < 0 else str(label),
            _error(finding, i),
        ]
        if truth is not None:
            known = truth.index[i] >= 0
            row += (
                [escape(truth.names[truth.index[i]]), f"{truth.psnr[i]:.1f}"]
                if known
                else ["-", "-"]
            )
        table.add_row(*row)
    if finding.recovered > _SHOWN:
        table.caption = f"{finding.recovered - _SHOWN} more are in the JSON and the report"
    return table


def _error(finding: Finding, i: int) -> str:
    """The error expected of an input from the update's noise."""
    return "-" if finding.predicted_error is None else f"{finding.predicted_error[i]:.0e}"


def _stages(finding: Finding) -> Table:
    table = Table("stage", "")
    for name, value in finding.stats.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.3f} s")
    return table
