"""`spear audit`: where does leakage start and stop, and what does each defence cost?"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from spear.cli import options as told
from spear.cli.advice import show_advice
from spear.cli.console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole
from spear.cli.progress import Activity
from spear.errors import DataError, InvalidOption

if TYPE_CHECKING:
    from spear.data import Column
    from spear.report import Cell, Finding, ImageFormat, Report
    from spear.report import Table as ReportTable
    from spear.sweep import Sweep
    from spear.trials import Engine

_COLOURS = {  # of verdicts, the worst first
    "whole batches exact": "red",
    "single samples exact": "red",
    "recognisable": "yellow",
    "blurred": "yellow",
    "cannot tell": "cyan",
    "nothing recovered": "green",
    "not measured": "dim",
}
EPILOG = """Examples:

  spear audit   (a built-in network and photos: about 8 minutes of computing, over all cores)

  spear audit --model mynets:Net --data train.npz --samples 8,32,128 --clip 1 --epsilon inf,8,1

  spear audit --samples 8,16,32,64 --width 100,200,400 --cross --repeats 3

  spear audit --samples 60 --width 60 --rounds 1,5,20

Lists: the first value of each is the base, and one thing is varied at a time around it; --cross runs
all combinations. Noise multiplier and epsilon need --clip.

Exit codes, of the worst setting: 0 nothing recovered, 10 something came back, 20 a whole batch exact,
30 cannot tell, 2 bad input, 130 interrupted (the page has what was done, and the same command goes
on). With --fail-on: 1 if the verdict on any setting is that bad or worse, else 0."""


_about, _cost, _run, _write = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("What is audited", "What training costs", "The run", told.WRITE)
)
_varied = partial(typer.Option, rich_help_panel=told.VARIED)
_DATA = (
    "File (.npz, .safetensors, .pt) with 'inputs' and 'labels'; cifar10, mnist, tiny_imagenet or adult "
    "under SPEAR_DATA; package.module:function giving (inputs, labels). Photos unless given."
)
_LOSS = "cross-entropy, bce, mse or package.module:function; by the labels unless given."
_MODEL = "package.module:factory or file.py:factory; a ReLU MLP unless given."
_TRAINED = "Attack the model after so many training steps."
_ROUNDS = "Rounds of the same data that are attacked together."
_SERVER_LR = "Learning rate of the server, in training and between --rounds."
_AGAIN = "Run failed and timed-out trials once more."
_COLUMNS = (
    "Names of a table's inputs: age,income,... or a file with one on each line. ADULT's are known."
)
_COUNT = {"min": 1, "max": MOST_TRIALS}


def audit(
    model: Annotated[str | None, _about(help=_MODEL)] = None,
    data: Annotated[str | None, _about(help=_DATA)] = None,
    loss: Annotated[str | None, _about(help=_LOSS)] = None,
    shape: Annotated[str | None, _about(help="Shape of a picture: 3x32x32.")] = None,
    mean: Annotated[str, _about(help="Subtracted from pixels.")] = "0",
    std: Annotated[str, _about(help="Pixels were divided by.")] = "1",
    columns: Annotated[str | None, _about(help=_COLUMNS)] = None,
    trained_steps: Annotated[int, _about(min=0, max=MOST_TRIALS, help=_TRAINED)] = 0,
    samples: told.ManySamples = None,
    width: Annotated[str | None, _varied(help="Given to the factory as width=.")] = None,
    epochs: told.ManyEpochs = None,
    local_batch_size: told.ManyLocalBatchSizes = None,
    lr: told.ManyLrs = None,
    clip: told.ManyClips = None,
    sigma: told.ManySigmas = None,
    noise_multiplier: told.ManyNoiseMultipliers = None,
    epsilon: told.ManyEpsilons = None,
    precision: told.ManyPrecisions = None,
    pruned: told.ManyPruned = None,
    clients: told.ManyClients = None,
    rounds: Annotated[str | None, _varied(help=_ROUNDS)] = None,
    cross: Annotated[bool, _varied("--cross", help="All combinations.")] = False,
    delta: told.Delta = 1e-5,
    dataset_size: told.DatasetSize = None,
    steps: told.Steps = 1,
    training_rounds: Annotated[
        int, _cost(min=0, max=MOST_TRIALS, help="Rounds of training; 0 leaves it out.")
    ] = 150,
    training_seeds: Annotated[int, _cost(**_COUNT, help="Runs of each training.")] = 3,
    server_lr: Annotated[float, _cost(help=_SERVER_LR)] = 0.05,
    repeats: Annotated[int, _run(**_COUNT, help="Private batches a setting.")] = 5,
    seed: Annotated[int, _run(min=0, max=LARGEST_SEED, help="Seed of the first batch.")] = 0,
    max_seconds: Annotated[float, _run(help="Time limit of one attack, in seconds.")] = 60,
    workers: Annotated[
        int | None, _run(min=1, max=MOST_WORKERS, help="Processes; one per core.")
    ] = None,
    out: Annotated[Path, _write(help="Folder of the rows.")] = Path("spear-audit"),
    json: Annotated[Path | None, _write(help="The report as JSON; - is stdout.")] = None,
    report_file: Annotated[
        Path | None, _write("--report", help="The HTML; OUT/report.html.")
    ] = None,
    junit: told.Junit = None,
    sarif: told.Sarif = None,
    fail_on: told.FailOn = None,
    redact: Annotated[bool, _write("--redact", help="Keep no recovered data.")] = False,
    again: Annotated[bool, _run("--again", help=_AGAIN)] = False,
    only_draw: Annotated[bool, _write("--only-draw", help="Run nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Explain the figures too.")
    ] = False,
) -> None:
    """Attack a model under many settings: where does leakage start and stop, and at what cost?"""
    from spear.cli import output_files
    from spear.cli.output_files import apart, existing, writable, write

    target = report_file or out / "report.html"
    existing(model, data)
    for path in (json, target, junit, sarif, out / "rows"):
        writable(path, None if data is None else Path(data))
    apart(json=json, report=target, junit=junit, sarif=sarif)

    activity = Activity.begin(quiet=quiet)
    from spear.federated import Privacy
    from spear.sweep import (
        Grid,
        Subject,
        Sweep,
        Training,
        default_lists,
        exit_code,
        forget_examples,
        local_engine,
        sweep_report,
    )

    began = time.monotonic()
    lists = {
        name: _list(name, text, kind)
        for kind, given in (
            (int, {"samples": samples, "width": width, "epochs": epochs, "clients": clients}),
            (int, {"local_batch_size": local_batch_size, "rounds": rounds}),
            (float, {"lr": lr, "clip": clip, "sigma": sigma, "pruned": pruned}),
            (float, {"noise_multiplier": noise_multiplier, "epsilon": epsilon}),
            (str, {"precision": precision}),
        )
        for name, text in given.items()
    }
    image_format, named = _look(shape, mean, std, columns)
    activity.tell("reading the data")
    subject = Subject(
        model,
        data,
        loss,
        image_format,
        trained_steps=trained_steps,
        server_lr=server_lr,
        columns=named,
    )
    given = {key: values for key, values in lists.items() if values}
    planned = Sweep(
        subject,
        Grid(given or default_lists(len(subject.samples())), cross),
        repeats,
        seed,
        max_seconds,
        Privacy(delta, dataset_size, steps),
        Training(training_rounds, training_seeds),
    )
    console = PlainConsole(stderr=str(json) == "-")
    planned.check()
    if redact and not only_draw and forget_examples(out):
        activity.pause()
        console.say("--redact: recovered samples that an earlier run kept here are removed")
    shown: Sequence[Finding] = ()
    try:
        if not only_draw:
            engine = local_engine(workers, subject)
            _run_missing(planned, out, engine, console, activity, again=again)
        activity.tell("attacking a few updates again, to show them")
        shown, stopped = _examples(planned, out, only_draw=only_draw, redact=redact), False
    except KeyboardInterrupt:
        stopped = True
        if not any(part.rows for part in planned.parts(out)):
            console.say("interrupted before anything was done")
            raise typer.Exit(130) from None
    activity.tell("drawing the report")
    made = sweep_report(
        planned,
        out,
        examples=shown,
        settings={"command": shlex.join(["spear", *sys.argv[1:]])},
        seconds=None if only_draw else time.monotonic() - began,
        interrupted=stopped,
    )
    activity.pause()
    kept = made.redacted() if redact else made
    if stopped:
        write(kept, json, target, junit=junit, sarif=sarif, fail_on=fail_on)
        words = f"interrupted: {target} has what was done; the same command goes on from there"
        console.say(escape(words))
        raise typer.Exit(130)
    show(console, made, quiet=quiet, verbose=verbose)
    if not quiet:
        show_advice(console, made)
    for path in write(kept, json, target, junit=junit, sarif=sarif, fail_on=fail_on):
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    usual = exit_code(planned.summary(out))
    raise typer.Exit(output_files.exit_code(made, fail_on, usual))


def _look(
    shape: str | None, mean: str, std: str, columns: str | None
) -> tuple[ImageFormat | None, tuple[Column, ...]]:
    """How samples are shown: as pictures, as named rows of a table, or as numbers."""
    from spear.cli.output_files import parse_image_format
    from spear.report import read_columns

    if columns is not None and shape is not None:
        raise InvalidOption(
            "--columns names the inputs of a table, and --shape is of pictures: give one"
        )
    image_format = None if shape is None else parse_image_format(shape, mean, std)
    return image_format, () if columns is None else read_columns(columns)


def _run_missing(
    planned: Sweep,
    out: Path,
    engine: Engine,
    console: PlainConsole,
    activity: Activity,
    *,
    again: bool,
) -> None:
    from spear.cli.reproduce import run_part
    from spear.report import count
    from spear.sweep import work

    if not activity.quiet:
        activity.pause()
        model, private = planned.subject.model, planned.subject.data
        console.say(
            f"attacking {escape(str(model or 'a built-in ReLU network'))} on "
            f"{escape(str(private or 'photos'))}"
        )
        console.say(
            f"{count(len(planned.grid.settings), 'setting')}, "
            f"{count(planned.repeats, 'private batch', 'private batches')} each; base: "
            f"{escape(planned.grid.base.words())}"
        )
        attacks, trainings = len(planned.trials()), len(planned.trainings())
        console.say(
            f"{count(attacks, 'attack')} of at most {planned.max_seconds:g} s each, and "
            f"{count(trainings, 'training run')}"
        )
    for part in planned.parts(out, again=again):
        run_part(part, work(planned), engine, activity)


def _examples(planned: Sweep, out: Path, *, only_draw: bool, redact: bool) -> Sequence[Finding]:
    """Of an earlier run if nothing is to be run; kept beside the rows unless redacted."""
    from spear.sweep import LEAKAGE, keep_examples, kept_examples, pick_examples
    from spear.trials import RowFile

    if only_draw:
        if not RowFile(out, LEAKAGE).rows():
            raise DataError(f"{out} holds no rows of an audit: run it without --only-draw first")
        return kept_examples(out)
    shown = pick_examples(planned, planned.summary(out))
    if not redact:
        keep_examples(out, shown)
    return shown


def _list(name: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Values separated by commas; none and off are no value.

    >>> _list("lr", "8,16", int), _list("clip", "none, 1", float), _list("lr", None, int)
    ((8, 16), (None, 1.0), ())
    """
    if text is None:
        return ()
    try:
        parts = [part.strip() for part in text.split(",")]
        return tuple(None if part in ("none", "off") else kind(part) for part in parts)
    except ValueError as error:
        such = "0.1,1" if kind is float else "8,16,32"
        raise InvalidOption(
            f"expected {{{name}}} to be numbers such as {such}, got {text!r}", arguments=(name,)
        ) from error


def show(console: PlainConsole, made: Report, *, quiet: bool, verbose: bool) -> None:
    """The table, where leakage starts and stops, and the verdict."""
    from spear.sweep import EXPLANATIONS

    if not quiet:
        console.print(_table(*made.tables[:2]))
        for remark in made.remarks:
            if verbose or remark.subject not in EXPLANATIONS:
                console.say(f"[b]{escape(remark.subject)}[/b]: {escape(remark.words)}")
    verdicts = {str(row[1]) for row in made.tables[0].rows}
    colour = next((_COLOURS[verdict] for verdict in _COLOURS if verdict in verdicts), "dim")
    console.say(f"[b {colour}]{escape(made.headline)}[/b {colour}]")


def _table(full: ReportTable, times: ReportTable) -> Table:
    """What the terminal has room for."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column("setting", min_width=20, overflow="fold")
    quality = full.columns[6].removeprefix("held-out ").removesuffix(", %")
    for title in ("leaks", "95 %", "exact", "best dB", "s", quality, "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    seconds = {row[0]: row[times.columns.index("seconds")] for row in times.rows}
    for name, verdict, leaks, interval, exact, best, gain, cost, *_ in full.rows:
        colour = _COLOURS[str(verdict)]
        table.add_row(
            escape(str(name)),
            f"[{colour}]{_number(leaks, '%')}[/{colour}]",
            _text(interval),
            _number(exact, "%"),
            *map(_number, (best, seconds[name], gain)),
            _text(cost),
        )
    return table


def _text(value: Cell) -> str:
    """Figures of the page in the terminal's narrower form.

    >>> _text("9\u201399"), _text("0.7 ± 3.4")
    ('9-99', '0.7 ±3.4')
    """
    return "-" if value is None else str(value).replace("\u2013", "-").replace("± ", "±")


def _number(value: Cell, unit: str = "") -> str:
    return "-" if value is None else f"{value:.3g}{unit}"
