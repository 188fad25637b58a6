"""The command line: its commands, and how errors end it. Importing it imports no torch."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import spear
from spear.cli import audit, bench, check, data, demo, docs, invert, rows, theory
from spear.cli.completion import as_typed, complete_at_first_tab
from spear.cli.console import PlainConsole, complain, give_up_stdout
from spear.cli.reproduce import reproduce
from spear.errors import SpearError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    suggest_commands=False,  # click does
    help="Shows, exactly and provably, what a federated-learning update gives away.",
)
console = PlainConsole()


def run() -> None:
    """Run the command. Our own errors, and those of the disk, end in one sentence and exit code 2.

    Unforeseen ones end in one sentence and exit code 70; `--debug` shows the traceback.
    """
    for stream in (sys.stdout, sys.stderr):  # a console that cannot write × or σ shows a ?
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    keep_private()
    if os.environ.get("_SPEAR_COMPLETE") == "complete_bash":
        line, word = as_typed(os.environ["COMP_WORDS"], int(os.environ["COMP_CWORD"]))
        os.environ.update(COMP_WORDS=line, COMP_CWORD=str(word))
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
            if "--install-completion" in sys.argv:
                complete_at_first_tab(Path.home() / ".zfunc" / "_spear")
    except Exception as error:
        if debug:
            raise
        give_up_stdout()
        sys.exit(_told(error))


def keep_private() -> None:
    """Only the owner may read what this process and its children write, libraries' files included.

    A crash leaves no core dump: memory holds what was recovered.
    """
    os.umask(0o077)
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def _told(error: Exception) -> int:
    """Say what went wrong, and give the exit code."""
    if "t allocate memory" in str(error):  # torch raises it as a RuntimeError
        error = MemoryError()
    if isinstance(error, SpearError | OSError | MemoryError):
        complain(error)
        return 2
    kind = type(error).__name__
    words = f"unexpected error: {kind}: {error}; please report it with the traceback from --debug"
    complain(RuntimeError(words))
    return _UNFORESEEN


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
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """SPEAR audits what a federated-learning update gives away."""


_UNFORESEEN = 70  # as sysexits.h has it: internal software error
_COMMANDS: dict[str, dict[Callable[..., None], str]] = {
    "Start here": {
        demo.demo: demo.EPILOG,
        docs.docs: "Example: spear docs start",
    },
    "Audit": {
        check.check: check.EPILOG,
        invert.invert: invert.EPILOG,
        audit.audit: audit.EPILOG,
    },
    "Research": {
        reproduce: "Example: spear reproduce main --batches 10 --data ~/datasets",
        data.data: "Example: spear data --data ~/datasets",
        bench.bench: "Example: spear bench cifar10:20x200 mnist:20x200:raw --compare 2",
        rows.rows: rows.EPILOG,
        theory.theory: "Example: spear theory --batch-size 16 --width 200",
    },
}
for _panel, _members in _COMMANDS.items():
    for _command, _epilog in _members.items():
        app.command(rich_help_panel=_panel, epilog=_epilog)(_command)
