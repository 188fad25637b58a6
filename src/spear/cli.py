"""The command line: parse, call, show. No maths. The only user of print."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import spear
from spear import cli_audit, cli_check, cli_data, cli_demo, cli_invert, cli_research
from spear.cli_reproduce import reproduce
from spear.errors import SpearError
from spear.report.files import keep_private

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Shows, exactly and provably, what a federated-learning update gives away.",
)
console = Console(highlight=False)


def run() -> None:
    """Run the command; our own errors and the disk's end in one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a console that cannot write × or σ gets a ?
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    keep_private()
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


_COMMANDS: dict[str, dict[Callable[..., None], str]] = {
    "Start here": {cli_demo.demo: "Example: spear demo --batch-size 16 --width 200 --seed 7"},
    "Audit": {
        cli_check.check: cli_check.EPILOG,
        cli_invert.invert: cli_invert.EPILOG,
        cli_audit.audit: cli_audit.EPILOG,
    },
    "Research": {
        reproduce: "Example: spear reproduce main --batches 10 --data ~/datasets",
        cli_data.data: "Example: spear data --data ~/datasets",
        cli_research.bench: "Example: spear bench cifar10:20x200 mnist:20x200:raw --compare 2",
        cli_research.theory: "Example: spear theory --batch-size 16 --width 200",
    },
}
for _panel, _members in _COMMANDS.items():
    for _command, _epilog in _members.items():
        app.command(rich_help_panel=_panel, epilog=_epilog)(_command)
