"""`spear check`: is this model with this protocol exposed? A rehearsal on made-up data says so."""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from spear.cli import completion
from spear.cli import options as told
from spear.cli.console import PlainConsole, as_option
from spear.cli.options import option
from spear.cli.output_files import apart, existing, exit_code, writable, write
from spear.cli.progress import Activity
from spear.cli.tables import show_table
from spear.errors import InvalidOption

if TYPE_CHECKING:
    from spear.check import Advice, Preflight
    from spear.report import Report

_EXIT_CODES = {"not exposed": 0, "partly exposed": 10, "unknown": 10, "exposed": 20}
_COLOURS = {0: "green", 10: "yellow", 20: "red"}  # by exit code
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
    layer: Annotated[
        str | None, option(_WHAT, "Judge this layer.", autocompletion=completion.layers)
    ] = None,
    shape: Annotated[str | None, option(_WHAT, "Shape of one input: 3x32x32, or 784.")] = None,
    data: Annotated[
        str | None,
        option(
            _WHAT,
            "Made-up photos, pixels (in [0, 1]), drawings, table or numbers; or all.",
            autocompletion=completion.one_of(("photos", "pixels", "drawings", "table", "numbers")),
        ),
    ] = None,
    mode: Annotated[
        str | None,
        option(
            _WHAT,
            "train or eval; by default as the factory leaves it.",
            autocompletion=completion.one_of(("train", "eval")),
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
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="All there is to know, and the layers.")
    ] = False,
) -> None:
    """Rehearse the attack with made-up data: are this model and protocol exposed, and why?"""
    words = told.of_protocol(locals())
    existing(model, weights, update, after, difference)
    for path in (json, report, junit, sarif):
        writable(path, weights, update, after, difference)
    apart(json=json, report=report, junit=junit, sarif=sarif)

    activity = Activity.begin(quiet=quiet)
    from spear.check import CheckFiles, check_files
    from spear.federated import Privacy
    from spear.update import Protocol

    files = CheckFiles(model, weights, update, after, difference, mode)
    if files.sends is not None:
        words["sends"] = files.sends
    protocol, privacy = Protocol.of(**words), Privacy(delta, dataset_size, steps)
    input_shape = None if shape is None else _sizes(shape)
    began = time.monotonic()
    activity.tell("building the model")
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
        tell=activity.tell,
    )
    seconds = time.monotonic() - began
    activity.pause()
    console = PlainConsole(stderr=str(json) == "-")
    command = shlex.join(["spear", *sys.argv[1:]])
    name = model or (weights.name if weights else "the model")
    made = found.report(f"Is {name} exposed?", settings={"command": command}, seconds=seconds)
    _show(console, found, made, quiet=quiet, verbose=verbose)
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


def _show(
    console: PlainConsole, found: Preflight, made: Report, *, quiet: bool, verbose: bool
) -> None:
    """One screen of 80 columns and 24 lines; all there is to know if verbose."""
    verdict, _, rest = found.headline.partition(":")
    colour = _COLOURS[_EXIT_CODES[found.verdict.value]]
    console.say(f"[b {colour}]{escape(verdict)}[/b {colour}]:{escape(rest)}")
    if quiet:
        return
    if verbose:
        _show_all(console, found)
    else:
        console.print("\n[b]Why[/b]")
        for reason in found.reasons:
            tint, _ = _GROUPS[reason.level.value]
            console.say(
                f"[{tint}]{reason.subject.value}[/{tint}]: {escape(reason.words)}", lead="  - "
            )
    console.print("\n[b]What to do[/b]")
    for number, advice in enumerate(found.what_to_do, 1):
        console.say(f"{escape(advice.words)}{_how(advice, made)}", lead=f"  {number}. ")
    if not verbose:
        console.print("[dim]Details: the same command with -v[/dim]")


def _how(advice: Advice, made: Report) -> str:
    """What to type, as markup."""
    pairs = ((as_option(name), value) for name, value in advice.options.items())
    options = " ".join(f"{o} {v:g}" if isinstance(v, float) else f"{o} {v}" for o, v in pairs)
    if options:
        return f" Add [b]{escape(options)}[/b]."
    if advice.action.name == "MEASURE":
        command = escape(made.advice.steps[-1].command)
        return f" [b]{command}[/b] (on a built-in network; yours with --model, --data)"
    return ""


def _show_all(console: PlainConsole, found: Preflight) -> None:
    for level, (tint, title) in _GROUPS.items():
        own = [remark for remark in found.remarks if remark.level.value == level]
        if own:
            console.print(f"\n[b]{title}[/b]")
        for remark in own:
            words = f"[{tint}]{escape(remark.subject)}[/{tint}]: {escape(remark.words)}"
            console.say(words, lead="  - ")
    if found.layers.rows:
        console.print(f"\n[b]{found.layers.title}[/b]")
        show_table(console, found.layers)
