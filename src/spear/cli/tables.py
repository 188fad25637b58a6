"""Tables and sections of experiments on the terminal: as wide as it is, without Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from spear.cli.console import PlainConsole

if TYPE_CHECKING:
    from spear.experiments.common.page import Drawn
    from spear.report import Table as Figures

_BETWEEN = 2  # columns between two of a table
_MOST_KEYS = 3
_FIGURE = re.compile(r"\d|^[–-]?$|NaN")
_MARKS = re.compile(r"`([^`]*)`|\*\*([^*]*)\*\*")  # of Markdown


def show_drawn(console: PlainConsole, drawn: Drawn, folder: Path) -> None:
    """What is drawn of an experiment; of images their files, which are in the folder."""
    console.say(f"\n[b]{escape(drawn.heading)}[/b]")
    for table in drawn.section.tables:
        console.print()
        show_table(console, table)
    for file, caption in drawn.images:
        console.print(f"\n[b]{escape(str(folder / file))}[/b]", soft_wrap=True)
        show_text(console, caption)
    for note in (*drawn.section.notes, drawn.origin):
        console.print()
        show_text(console, note)


def show_text(console: PlainConsole, markdown: str) -> None:
    """Paragraphs and lists of Markdown."""
    for line in markdown.splitlines():
        bullet, words = ("- ", line[2:]) if line.startswith("- ") else ("", line)
        console.say(escape(_plain(words)), lead=bullet)


def show_table(console: PlainConsole, table: Figures) -> None:
    """Figures in columns. Those for which the terminal is too narrow go below, beside the same names of
    rows. Where no width is known all stand side by side.
    """
    rows = [[_plain(str(cell)) for cell in row] for row in table.rows]
    console = console.unfolded()
    room = console.width
    keys = _keys(rows, len(table.columns))
    widths = _widths(table.columns, rows, keys, room)
    for number, columns in enumerate(_blocks(widths, keys, room)):
        whole = {i: max(widths[i], cell_len(table.columns[i])) for i in columns}
        fits = sum(whole.values()) + _BETWEEN * (len(columns) - 1) <= room
        shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for i in columns:
            figures = i >= keys and all(_FIGURE.search(row[i]) for row in rows)
            shown.add_column(
                escape(table.columns[i]),
                justify="right" if figures else "left",
                width=whole[i] if fits else widths[i],
            )
        for row in rows:
            shown.add_row(*(escape(row[i]) for i in columns))
        if number:
            console.print()
        console.print(shown)
    if table.caption:
        console.print()
        show_text(console, table.caption)


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], keys: int, room: int
) -> list[int]:
    """Of all columns: headers may be folded at words, and so may text for which there is no room."""
    natural = [
        max(map(cell_len, (*name.split(), *(row[i] for row in rows))), default=1)
        for i, name in enumerate(columns)
    ]
    left = max(room - sum(width + _BETWEEN for width in natural[:keys]), 1)
    return [width if i < keys else min(width, left) for i, width in enumerate(natural)]


def _keys(rows: Sequence[Sequence[str]], columns: int) -> int:
    """How many columns at the left tell rows apart."""
    for count in range(1, min(_MOST_KEYS, columns - 1) + 1):
        if len({tuple(row[:count]) for row in rows}) == len(rows):
            return count
    return min(1, columns)


def _blocks(widths: Sequence[int], keys: int, room: int) -> Iterator[list[int]]:
    """Columns that fit side by side, the keys in front each time."""
    names = list(range(keys))
    block = [*names]
    for i in range(keys, len(widths)):
        if len(block) > keys and sum(widths[j] + _BETWEEN for j in (*block, i)) - _BETWEEN > room:
            yield block
            block = [*names]
        block.append(i)
    yield block


def _plain(markdown: str) -> str:
    return _MARKS.sub(lambda found: found[1] or found[2], markdown)
