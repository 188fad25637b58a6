"""`spear invert`: files in, verdict out."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import click
import typer
from rich.markup import escape
from rich.table import Table

from spear.cli import completion
from spear.cli import options as told
from spear.cli.advice import show_advice
from spear.cli.console import LARGEST_SEED, PlainConsole
from spear.cli.options import option
from spear.cli.output_files import (
    apart,
    existing,
    exit_code,
    parse_image_format,
    writable,
    write,
)
from spear.cli.progress import Activity
from spear.errors import InvalidOption

if TYPE_CHECKING:
    from spear.files import UpdateFiles
    from spear.report import Finding

# By outcome: the colour of the verdict, and the exit code. For whoever audits, exact is the bad news.
_COLOURS = {
    "exact": "red",
    "partial": "red",
    "approximate": "yellow",
    "inconclusive": "magenta",
    "failed": "green",
}
_EXIT_CODES = {"exact": 20, "partial": 10, "approximate": 10, "inconclusive": 30, "failed": 0}
_SHOWN = 20  # samples in the terminal's table; the report has all
_WHAT, _WRITE, _SEARCH = "What was sent", told.WRITE, "The search"
_ROUNDS = "Several rounds of the same data"

EPILOG = """Examples:

  spear invert --weights before.safetensors --update grads.safetensors

  spear invert --weights w.pt --update g.pt --model mypackage.nets:Net --shape 3x32x32 --report r.html

  spear invert --weights before.npz --after after.npz --lr 0.01 --epochs 5 --json result.json

  spear invert --round before1.pt grads1.pt --round before2.pt grads2.pt --report r.html

  spear invert --weights w.pt --update g.pt --junit spear.xml --sarif spear.sarif --fail-on partial

  spear invert --rounds watched    (watched/round1/before.pt, watched/round1/update.pt, ...)

Exit codes: 0 nothing recovered, 10 partly or approximately, 20 exact, 30 cannot tell, 2 bad input,
130 interrupted. With --fail-on: 1 if it is that bad or worse, else 0; 2 and 130 as above."""


class _Round(NamedTuple):
    """The files of one round."""

    before: Path
    sent: Path


class _TwoFiles(click.Tuple):
    """A value of --round. Typer has no lists of pairs, click has."""

    def __init__(self) -> None:
        super().__init__([click.Path(path_type=Path), click.Path(path_type=Path)])

    def convert(self, value: Any, *where: Any) -> _Round:
        return _Round(*super().convert(value, *where))


def invert(
    weights: Annotated[
        Path | None,
        option(_WHAT, "The weights the client was sent: .safetensors, .npz or .pt."),
    ] = None,
    update: Annotated[
        Path | None, option(_WHAT, "The gradients it sent back (FedSGD), in such a file.")
    ] = None,
    after: Annotated[Path | None, option(_WHAT, "Or the weights it sent back (FedAvg).")] = None,
    difference: Annotated[
        Path | None, option(_WHAT, "Or the weights sent back minus the weights received.")
    ] = None,
    model: Annotated[
        str | None,
        option(
            _WHAT,
            "package.module:factory or file.py:factory, for the proof by replay and for labels. "
            "A plain MLP is recognised without it.",
        ),
    ] = None,
    layer: Annotated[
        str | None,
        option(
            _WHAT,
            "The layer to attack; by default the one closest to the data.",
            autocompletion=completion.layers,
        ),
    ] = None,
    each_round: Annotated[
        list[_Round] | None,
        option(
            _ROUNDS,
            "Weights and update of one round; give it once for each, in their order.",
            "--round",
            click_type=_TwoFiles(),
            metavar="BEFORE UPDATE",
        ),
    ] = None,
    sends: Annotated[
        str | None,
        option(
            _ROUNDS,
            "What the UPDATE of --round is: gradient, weights (sent back) or difference.",
            show_default="gradient",
            autocompletion=completion.one_of(("gradient", "weights", "difference")),
        ),
    ] = None,
    rounds: Annotated[
        Path | None,
        option(
            _ROUNDS,
            "Or a folder with one folder for each round, in the order of the numbers in their names. "
            "In each: before.*, and update.* (gradients), after.* or difference.*.",
        ),
    ] = None,
    loss: Annotated[
        str | None, option(told.HOW, "cross-entropy, bce, mse or package.module:function.")
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
        str | None, option(_WRITE, "Shape of a picture, channels first: 3x32x32 or 1x28x28.")
    ] = None,
    mean: Annotated[
        str, option(_WRITE, "What the client subtracted from pixels: one number, or per channel.")
    ] = "0",
    std: Annotated[str, option(_WRITE, "And then divided them by.")] = "1",
    truth: Annotated[
        Path | None,
        option(
            _WRITE,
            "File with the client's 'inputs' and 'labels', to compare with; the attack never sees it.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        option(
            _WRITE,
            "Names of a table's inputs: age,income,... or a file with one on each line. "
            "sex=Female and sex=Male are one feature.",
        ),
    ] = None,
    out: Annotated[
        Path | None, option(_WRITE, "Folder for recovered.safetensors, and PNGs with --shape.")
    ] = None,
    json: Annotated[
        Path | None, option(_WRITE, "The result as JSON, for spear.load; - prints it.")
    ] = None,
    report: Annotated[Path | None, option(_WRITE, "The report: one HTML file.")] = None,
    junit: told.Junit = None,
    sarif: told.Sarif = None,
    fail_on: told.FailOn = None,
    redact: Annotated[
        bool, option(_WRITE, "Leave recovered data out of JSON and report.", "--redact")
    ] = False,
    finder: Annotated[
        str,
        option(
            _SEARCH,
            "cascade, sampling, or your own: my_finder.py:MyFinder.",
            autocompletion=completion.finders,
        ),
    ] = "cascade",
    max_seconds: Annotated[float | None, option(_SEARCH, "Stop after this long.")] = None,
    seed: Annotated[int, option(_SEARCH, "Seed of the search.", min=0, max=LARGEST_SEED)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only the verdict.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show layers and stages too.")
    ] = False,
) -> None:
    """Recover the private batch behind an update, and say what is proved."""
    words = told.of_protocol(locals())
    if redact and out is not None:
        raise InvalidOption(
            "--redact leaves recovered data out, and --out writes it: give only one of them"
        )
    if columns is not None and shape is not None:
        raise InvalidOption(
            "--columns names the inputs of a table, and --shape is of pictures: give one"
        )
    one = {"weights": weights, "update": update, "after": after, "difference": difference}
    _told_once(one, each_round, rounds, sends)
    read = [*one.values(), *(path for pair in each_round or () for path in pair), truth]
    existing(*read, model)
    for path in (json, report, junit, sarif, out and out / "recovered.safetensors"):
        writable(path, *read)
    apart(json=json, report=report, junit=junit, sarif=sarif)

    activity = Activity.begin(quiet=quiet)
    import torch  # takes seconds: what can be told without it has been told

    from spear.experiments.common.additions import Addition
    from spear.report import invert_files, read_columns, save_inputs

    chosen = Addition.finder(finder)
    own = {} if chosen.code is None else chosen.settings  # a user's finder, and which code it was
    shared = {"model": model, "layer": layer, "loss": loss}
    files = _files(one, each_round, rounds, sends, words, shared)
    image_format = None if shape is None else parse_image_format(shape, mean, std)
    console = PlainConsole(stderr=str(json) == "-")
    activity.tell("reading the files")
    made = invert_files(
        files,
        image_format=image_format,
        truth=truth,
        columns=() if columns is None else read_columns(columns),
        settings={"command": shlex.join(["spear", *sys.argv[1:]]), "seed": seed, **own},
        finder=chosen.made_finder(),
        max_seconds=max_seconds,
        generator=torch.Generator().manual_seed(seed),
        on_progress=activity.stage,
    )
    activity.pause()
    finding = made.findings[0]
    # Shown before it is written: a full disk loses no verdict.
    show_finding(console, finding, quiet=quiet, verbose=verbose)
    kept = made.redacted() if redact else made
    if not quiet:
        show_advice(console, made)
    if columns is not None and report is None and not quiet:
        console.say(
            "The rows, under the names of their columns, are on the page: add --report FILE.html"
        )
    written = write(kept, json, report, junit=junit, sarif=sarif, fail_on=fail_on)
    if out is not None:
        written += save_inputs(finding, out)
    for path in [] if quiet else written:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    if finding.stats.get("interrupted"):
        raise typer.Exit(130)
    raise typer.Exit(exit_code(made, fail_on, _EXIT_CODES[finding.outcome.value]))


def _told_once(
    one: dict[str, Any], pairs: list[_Round] | None, folder: Path | None, sends: str | None
) -> None:
    """Raise unless the files are told in one way: of one update, of each round, or by a folder."""
    given = [name for name, path in one.items() if path is not None]
    several = [name for name, value in (("round", pairs), ("rounds", folder)) if value]
    if len(several) > 1 or (several and given):
        names = [*several, *given]
        raise InvalidOption(
            f"expected the files of one update, {{round}} for each round, or {{rounds}}, got "
            f"{' and '.join(f'{{{name}}}' for name in names)}",
            arguments=("round", "rounds", *given),
        )
    if sends is not None and not pairs:
        raise InvalidOption(
            "{sends} says what the updates of {round} are, and there are none",
            arguments=("sends", "round"),
        )
    if folder is not None and not folder.is_dir():
        there = "is a file" if folder.exists() else "does not exist"
        raise InvalidOption(
            f"{folder} {there}: expected a folder with one folder for each round ({{rounds}})",
            arguments=("rounds",),
        )


def _files(
    one: dict[str, Any],
    pairs: list[_Round] | None,
    folder: Path | None,
    sends: Any,
    words: dict[str, Any],
    shared: dict[str, Any],
) -> list[UpdateFiles]:
    """One update, or one for each round."""
    from spear.files import UpdateFiles, rounds_in, rounds_of
    from spear.update import Protocol

    if folder is not None:
        found = rounds_in(folder, **shared)
    elif pairs:
        found = rounds_of(pairs, sends=sends or "gradient", **shared)
    else:
        found = [UpdateFiles(**one, **shared)]
    protocol = Protocol(**words, sends=found[0].sends)
    return [dataclasses.replace(files, protocol=protocol) for files in found]


def show_finding(console: PlainConsole, finding: Finding, *, quiet: bool, verbose: bool) -> None:
    """Show the verdict, and what it rests on, on the terminal."""
    from spear.report import ASSUMPTIONS

    if not quiet:
        layers = finding.layer.splitlines()
        console.say(escape("\n".join(layers if verbose else layers[:1])))
        for note in finding.notes:
            console.say(f"[dim]{escape(note)}[/dim]")
        if finding.recovered:
            console.print(_samples(finding))
        if verbose:
            console.print(_stages(finding))
    colour = _COLOURS[finding.outcome.value]
    what = ", ".join(_qualities(finding))
    said = f"{finding.outcome.name} ({what})" if what else finding.outcome.name
    verdict = f"[b {colour}]{said}[/b {colour}]"
    console.say(f"{verdict}: {escape(finding.reason)}")
    for detail in () if quiet else finding.details:
        console.say(escape(detail), lead="  ")
    if finding.assumptions and not quiet:
        console.print(ASSUMPTIONS)
        for assumption in finding.assumptions:
            console.say(escape(assumption), lead="  - ")


def _qualities(finding: Finding) -> list[str]:
    """What an outcome's name does not say."""
    said = ["likely exact, not proved"] if finding.is_likely else []
    if finding.outcome.value == "inconclusive":
        said.append("cannot tell")
    if finding.activations and finding.recovered:
        said.append("activations, not the data")
    return said


def _samples(finding: Finding) -> Table:
    truth, errors = finding.truth, finding.predicted_error
    table = Table("sample", "certified", "label found", "predicted error")
    if truth is not None:
        table.add_column("true sample")
        table.add_column("PSNR (dB)")
    for i in range(min(finding.recovered, _SHOWN)):
        label = None if finding.labels is None else int(finding.labels[i])
        row = [
            str(i + 1),
            "[green]yes[/green]" if finding.certified[i] else "[yellow]no[/yellow]",
            "-" if label is None or label < 0 else str(label),
            "-" if errors is None else f"{errors[i]:.0e}",
        ]
        if truth is not None and truth.index[i] >= 0:
            row += [escape(truth.names[truth.index[i]]), f"{truth.psnr[i]:.1f}"]
        elif truth is not None:
            row += ["-", "-"]
        table.add_row(*row)
    if finding.recovered > _SHOWN:
        table.caption = f"{finding.recovered - _SHOWN} more are in the JSON and the report"
    return table


def _stages(finding: Finding) -> Table:
    from spear.report import counts, stages

    table = Table("stage", "")
    for name, value in stages(finding):
        table.add_row(name, f"{value:.3f} s")
    for name, value in counts(finding):
        table.add_row(name, f"{value:,}")
    return table
