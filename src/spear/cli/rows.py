"""`spear rows`: the raw rows of trials as a table."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from spear.cli import completion
from spear.cli.console import PlainConsole, shown
from spear.cli.output_files import writable
from spear.cli.progress import Activity
from spear.errors import MissingData
from spear.experiments import numbered

if TYPE_CHECKING:
    from spear.trials import Row

console = PlainConsole()
EPILOG = """Examples:

  spear rows main

  spear rows main one_label --csv rows.csv

  spear rows frontier.jsonl --csv - | head

In Python: pandas.read_csv("rows.csv"), or spear.trials.RowFile(folder, name).rows() without a file."""
# As a row has them; what may be missing last.
_ORDER = (
    *(
        "experiment",
        "seed",
        "settings",
        "status",
        "outcome",
        "seconds",
        "took",
        "metrics",
        "stages",
    ),
    *("error", "engine", "commit", "versions", "pictures", "key"),
)
_SHORT = 40  # characters of a value on the terminal
_GAP = 2  # columns between two of a table: rich's padding
# Shown on the terminal: the others are in the CSV.
_SUMMARY = ("exact", "psnr", "worst", "certified")


def rows(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Experiments, or files of rows that end in .jsonl.",
            autocompletion=completion.experiments_with_rows,
        ),
    ],
    results: Annotated[Path, typer.Option(help="Folder of the experiments' rows.")] = Path(
        "spear-results"
    ),
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", help="Write every setting and every metric as CSV; - prints it."),
    ] = None,
) -> None:
    """Show the raw rows of trials, one line each; with --csv nothing is left out."""
    activity = Activity.begin()
    found = [row for name in names for row in _read(name, results)]
    activity.pause()
    if csv_file is None:
        _show(found)
        return
    writable(csv_file, *(Path(name) for name in names))
    text = as_csv(found)
    if str(csv_file) == "-":
        sys.stdout.write(text)
        return
    from spear.files import write_private

    write_private(csv_file, text.encode("utf-8-sig"))  # the mark tells Excel what the bytes are
    console.print(escape(f"wrote {csv_file}: {len(found):,} rows"), soft_wrap=True)


def _read(name: str, results: Path) -> list[Row]:
    """The rows of an experiment by its name, or of a file."""
    from spear.trials import RowFile

    path = Path(name)
    if not name.endswith(".jsonl"):  # as `spear reproduce` takes it
        own = path.stem if name.endswith(".py") else numbered(name) or name
        path = results / f"{own}.jsonl"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in results.glob("*.jsonl"))) or "none"
        raise MissingData(
            f"there is no file {path}: expected a file of rows, or an experiment that has rows in "
            f"{results} ({there})"
        )
    return list(RowFile(path.parent, path.stem).rows().values())


def as_csv(rows: Sequence[Row]) -> str:
    """One column for each field, setting, metric and stage that any row has; nothing is left out.

    The names are those of `pandas.json_normalize`; lists are JSON, and None is empty.
    """
    lines = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    order = sorted(columns, key=lambda name: (_ORDER.index(name.split(".")[0]), "." not in name))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, order, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """A row's fields, mappings as one column an entry."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(row.line()).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{part}": _entry(inner) for part, inner in value.items()}
        else:
            flat[name] = _entry(value)
    return flat


def _entry(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _show(rows: Sequence[Row]) -> None:
    """What differs from row to row, and how each ended."""
    flat = [_flat(row) for row in rows]
    settings = list(dict.fromkeys(name for line in flat for name in line if "settings." in name))
    same = [n for n in settings if len({str(line.get(n)) for line in flat}) == 1 and len(flat) > 1]
    metrics = dict.fromkeys(n for row in rows for n, v in row.metrics.items() if _is_scalar(v))
    chosen = [n for n in _SUMMARY if n in metrics] or list(metrics)[: len(_SUMMARY)]
    varied = [name for name in settings if name not in same]
    columns = ["experiment", *varied, "seed", "outcome", *(f"metrics.{n}" for n in chosen), "took"]
    if any(row.error for row in rows):
        columns.append("error")
    for line in flat:
        if line["outcome"] is None:
            line["outcome"] = line["status"]
    cells = {name: [_title(name), *(_short(line.get(name)) for line in flat)] for name in columns}
    wide = console.unfolded()
    left_out = _without_room(cells, wide.width)
    shown = [name for name in columns if name not in left_out]
    table = Table(*map(_title, shown), box=None)
    for entries in zip(*(cells[name][1:] for name in shown), strict=True):
        table.add_row(*map(escape, entries))
    wide.print(table)
    told = ", ".join(f"{_title(name)} {_short(flat[0][name])}" for name in same)
    words = f"{len(rows):,} row{'s' * (len(rows) != 1)}{f', all with {told}' if told else ''}"
    words += "; --csv FILE has every column"
    if left_out:
        words += f"; no room here for {', '.join(map(_title, left_out))}"
    console.print()
    console.say(escape(words))


def _title(name: str) -> str:
    return name.partition(".")[2] or name


def _without_room(cells: dict[str, list[str]], room: int) -> list[str]:
    """Columns to leave out so that the others stand whole: an experiment that all rows are of, then
    from the right, and seed and outcome never."""
    widths = {name: max(map(cell_len, own)) + _GAP for name, own in cells.items()}
    first = ["experiment"] if len(set(cells["experiment"][1:])) == 1 else []
    others = [name for name in reversed(cells) if name not in (*first, "seed", "outcome")]
    left_out: set[str] = set()
    for name in (*first, *others):
        if sum(widths.values()) <= room:
            break
        left_out.add(name)
        del widths[name]
    return [name for name in cells if name in left_out]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _short(value: Any) -> str:
    """A value for people: five digits, no more than fits."""
    text = "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return shown(text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}...")
