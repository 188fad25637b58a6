"""`spear check`: is this model with this protocol exposed? A rehearsal on made-up data says so."""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from spear.cli import options as told
from spear.cli.console import PlainConsole
from spear.cli.options import option
from spear.cli.output_files import apart, existing, exit_code, writable, write
from spear.errors import InvalidOption

if TYPE_CHECKING:
    from spear.check import Preflight

_EXIT_CODES = {"not exposed": 0, "partly exposed": 10, "unknown": 10, "exposed": 20}
_COLOURS = {0: "green", 10: "yellow", 20: "red"}  # by exit code
_NEXT = {
    0: "spear audit measures it on data like yours, and utility beside it.",
    10: "spear audit measures on data like yours where leakage starts and stops.",
    20: "spear audit measures which batch sizes, noise or aggregation stop it, and what they cost.",
}
_GROUPS = {
    "exposed": ("red", "What exposes it"),
    "protected": ("green", "What stands in the way"),
    "note": ("dim", "Good to know"),
}
_WHAT, _WRITE = "What to judge", told.WRITE
_MOST_INPUTS = 10**8  # of one sample

EPILOG = """Examples:

  spear check --model mypackage.nets:Net -b 20

  spear check --weights w.safetensors -b 20 --noise-multiplier 1.1 --clip 1.0 --dataset-size 5000

  spear check --model net.py:Net -b 32 --lr 0.01 --epochs 5 --local-batch-size 8 --clients 10

  spear check --model net.py:Net -b 100 --rounds 10

  spear check --model net.py:Net --weights w.pt --update g.pt --json check.json --report check.html

Exit codes: 0 not exposed, 10 partly or unknown, 20 exposed, 2 bad input. With --fail-on: 1 if
the verdict is that bad or worse, else 0; exposed counts as exact, partly as partial, unknown as
inconclusive."""


def check(
    model: Annotated[
        str | None, option(_WHAT, "package.module:factory or file.py:factory.")
    ] = None,
    weights: Annotated[
        Path | None,
        option(_WHAT, "The weights clients are sent; a plain MLP needs no model beside them."),
    ] = None,
    update: Annotated[
        Path | None, option(_WHAT, "Gradients that a client sent: inverted instead of a rehearsal.")
    ] = None,
    after: Annotated[Path | None, option(_WHAT, "Or the weights it sent back.")] = None,
    difference: Annotated[
        Path | None, option(_WHAT, "Or the weights sent back minus the weights received.")
    ] = None,
    layer: Annotated[str | None, option(_WHAT, "Judge this layer.")] = None,
    shape: Annotated[str | None, option(_WHAT, "Shape of one input: 3x32x32, or 784.")] = None,
    data: Annotated[
        str | None,
        option(_WHAT, "Made-up photos, pixels (in [0, 1]), drawings, table or numbers; or all."),
    ] = None,
    mode: Annotated[
        str | None, option(_WHAT, "train or eval; by default as the factory leaves it.")
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
    epsilon: told.Epsilon = None,
    precision: told.Precision = "float32",
    pruned: told.Pruned = 0.0,
    delta: told.Delta = 1e-5,
    dataset_size: told.DatasetSize = None,
    steps: told.Steps = 1,
    rounds: Annotated[
        int,
        option(told.HOW, "Rehearse so many rounds of the same data, seen together.", min=1),
    ] = 1,
    server_lr: Annotated[
        float,
        option(told.HOW, "Learning rate at which gradients move the model between rounds."),
    ] = 0.05,
    max_seconds: Annotated[
        float, typer.Option(help="Time limit of one search, in seconds.", min=0.1)
    ] = 30.0,
    json: Annotated[
        Path | None, option(_WRITE, "The result as JSON, for spear.load; - prints it.")
    ] = None,
    report: Annotated[Path | None, option(_WRITE, "The report: one HTML file.")] = None,
    junit: told.Junit = None,
    sarif: told.Sarif = None,
    fail_on: told.FailOn = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
) -> None:
    """Rehearse the attack with made-up data: are this model and protocol exposed, and why?"""
    words = told.of_protocol(locals())
    existing(model, weights, update, after, difference)
    for path in (json, report, junit, sarif):
        writable(path, weights, update, after, difference)
    apart(json=json, report=report, junit=junit, sarif=sarif)

    from spear.check import CheckFiles, check_files
    from spear.federated import Privacy
    from spear.update import Protocol

    files = CheckFiles(model, weights, update, after, difference, mode)
    if files.sends is not None:
        words["sends"] = files.sends
    protocol, privacy = Protocol.of(**words), Privacy(delta, dataset_size, steps)
    input_shape = None if shape is None else _sizes(shape)
    began = time.monotonic()
    status = PlainConsole(stderr=True)
    found = check_files(
        files,
        protocol=protocol,
        privacy=privacy,
        layer=layer,
        input_shape=input_shape,
        data=data,
        rounds=rounds,
        server_lr=server_lr,
        max_seconds=max_seconds,
        tell=lambda words: None if quiet else status.print(f"[dim]{escape(words)} ...[/dim]"),
    )
    seconds = time.monotonic() - began
    console = PlainConsole(stderr=str(json) == "-")
    _show(console, found, quiet)
    command = shlex.join(["spear", *sys.argv[1:]])
    name = model or (weights.name if weights else "the model")
    made = found.report(f"Is {name} exposed?", settings={"command": command}, seconds=seconds)
    for path in write(made, json, report, junit=junit, sarif=sarif, fail_on=fail_on):
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    raise typer.Exit(exit_code(made, fail_on, _EXIT_CODES[found.verdict.value]))


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
    code = _EXIT_CODES[found.verdict.value]
    colour = _COLOURS[code]
    console.print(f"[b {colour}]{escape(verdict)}[/b {colour}]:{escape(rest)}", soft_wrap=True)
    if quiet:
        return
    for level, (tint, title) in _GROUPS.items():
        own = [remark for remark in found.remarks if remark.level.value == level]
        if own:
            console.print(f"\n[b]{title}[/b]")
        for remark in own:
            words = f"  [{tint}]{escape(remark.subject)}[/{tint}]: {escape(remark.words)}"
            console.print(words, soft_wrap=True)
    console.print(f"\n[b]What to do[/b]\n  {_NEXT[code]}", soft_wrap=True)
