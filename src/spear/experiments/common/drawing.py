"""What experiments show of their rows: tables as Markdown and LaTeX, plots, pictures and notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spear.report import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(columns: str | Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table of text, with signs such as ±, × 10⁻⁵ and σ; columns may be one text with commas."""
    names = columns.split(", ") if isinstance(columns, str) else columns
    return Table("", tuple(names), tuple(tuple(row) for row in rows), caption)


def markdown(table: Table) -> str:
    """A table as Markdown, its caption below."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return f"{text}\n\n{table.caption}" if table.caption else text


def latex(table: Table) -> str:
    """A table as a booktabs tabular."""
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{to_latex(table.caption)}}}" if table.caption else "",
        rf"\begin{{tabular}}{{@{{}}l{'r' * (len(table.columns) - 1)}@{{}}}}",
        r"\toprule",
        " & ".join(map(to_latex, table.columns)) + r" \\",
        r"\midrule",
        *(" & ".join(to_latex(str(cell)) for cell in row) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


@dataclass(frozen=True)
class Plot:
    """A figure and its caption."""

    name: str  # of its files
    figure: Callable[[], Figure]
    caption: str


@dataclass(frozen=True)
class Picture:
    """An image that a trial has drawn, and its caption."""

    name: str
    file: str  # among the pictures beside the rows
    caption: str


@dataclass(frozen=True)
class Section:
    """All that is shown of an experiment."""

    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()  # paragraphs of Markdown


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS: Mapping[str, str] = {
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "<": r"$<$",
    ">": r"$>$",
    "σ": r"$\sigma$",
    "η": r"$\eta$",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
    "×": r"$\times$",
    "–": "--",
    "→": r"$\to$",
}
_ESCAPED = {c: f"\\{c}" for c in "%&#_$"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def to_latex(text: str) -> str:
    r"""Plain text as LaTeX.

    >>> to_latex("1.2 × 10⁻⁵ ± 3 %")
    '$1.2 \\times 10^{-5}$ $\\pm$ 3 \\%'
    """
    powers: list[str] = []

    def power(found: re.Match[str]) -> str:
        exponent = found[2].translate(_SUPERSCRIPTS)
        powers.append(rf"${found[1]} \times 10^{{{exponent}}}$")
        return f"\0{len(powers) - 1}\0"

    text = re.sub(r"([\d.]+) × 10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", power, text)
    text = re.sub(r"`([^`]*)`|\*\*([^*]*)\*\*", lambda found: found[1] or found[2], text)
    text = "".join(_ESCAPED.get(c, _SIGNS.get(c, c)) for c in text)
    return re.sub(r"\0(\d+)\0", lambda found: powers[int(found[1])], text)
