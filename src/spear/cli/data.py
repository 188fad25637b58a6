"""The command `spear data`: what is in the folder of the datasets, and where to get the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from spear.cli.console import PlainConsole
from spear.cli.progress import Activity

if TYPE_CHECKING:
    from spear.data import Found

_COLOURS = {"found": "green", "damaged": "red", "missing": "yellow"}  # of states
console = PlainConsole()


def data(
    folder: Annotated[
        Path | None,
        typer.Option("--data", envvar="SPEAR_DATA", help="Folder with the datasets."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show which datasets are there, which are damaged, and where to get the others.

    Ends with 1 if something is damaged, with 2 if no folder was named or there is none.
    """
    activity = Activity.begin()
    from spear.data import catalogue, survey

    activity.tell("looking at the datasets")
    found = catalogue() if folder is None else survey(folder)
    activity.pause()
    if as_json:
        console.out(json.dumps(_record(found, folder), indent=2), highlight=False)
    else:
        _show(found, folder, console.unfolded())
    if folder is None:
        raise typer.Exit(2)
    if any(item.state.value == "damaged" for item in found):
        raise typer.Exit(1)


def _record(found: Sequence[Found], folder: Path | None) -> dict[str, object]:
    return {
        "folder": None if folder is None else str(folder),
        "datasets": [
            {
                "name": item.name,
                "state": item.state.value,
                "where": None if item.where is None else str(item.where),
                "detail": item.detail,
                "page": item.source.page,
                "command": item.source.line(folder),
                "used_by": item.used_by,
            }
            for item in found
        ],
    }


def _show(found: Sequence[Found], folder: Path | None, console: PlainConsole) -> None:
    wanted = [item for item in found if item.state.value != "found"]
    if folder is None:
        console.say("No folder was named: give --data or set SPEAR_DATA. What SPEAR reads there:")
    else:
        console.print(f"Datasets in [b]{escape(str(folder))}[/b]:", soft_wrap=True)
        console.print(_table(found, folder))
        if wanted:
            console.say("Where to get what is missing or damaged (SPEAR downloads nothing):")
    for item in wanted:
        console.print(f"[b]{item.name}[/b], for {escape(item.used_by)}")
        lines = f"  {item.source.page}\n  {item.source.line(folder)}"
        console.print(escape(lines), soft_wrap=True)


def _table(found: Sequence[Found], folder: Path) -> Table:

    table = Table("data", "state", "what is there")
    for column in table.columns:
        column.overflow = "fold"  # rather than cut off
    for item in found:
        colour, what = _COLOURS[item.state.value], item.detail
        if item.state.value == "found" and item.where is not None:
            what = f"{item.where.relative_to(folder)}: {item.detail}"
        table.add_row(item.name, f"[{colour}]{item.state.value}[/{colour}]", escape(what))
    return table
