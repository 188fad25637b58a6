"""Tables as Markdown and LaTeX, plots as PNG and SVG, pictures: what rows become."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """Cells as text, with signs such as ±, × 10⁻⁵ and σ that LaTeX gets its own way."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{text}\n\n{self.caption}" if self.caption else text

    def latex(self) -> str:
        """A booktabs tabular in a table."""
        body = [" & ".join(map(to_latex, line)) + r" \\" for line in self.rows]
        head = " & ".join(map(to_latex, self.columns)) + r" \\"
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{to_latex(self.caption)}}}" if self.caption else "",
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(self.columns) - 1)}@{{}}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(line for line in lines if line) + "\n"


@dataclass(frozen=True)
class Plot:
    """A figure and the words below it."""

    name: str  # of its files
    figure: Callable[[], Figure]
    caption: str


@dataclass(frozen=True)
class Picture:
    """An image that a trial has drawn, and the words below it."""

    name: str
    file: str  # among the pictures beside the rows
    caption: str


@dataclass(frozen=True)
class Drawing:
    """All that is drawn of an experiment."""

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


@dataclass(frozen=True)
class Written:
    """The files of a drawing."""

    folder: Path
    files: Sequence[Path] = field(default_factory=tuple)
