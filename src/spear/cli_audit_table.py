"""What `spear audit` shows when it is done."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spear.audit.leakage import Leakage, Verdict
from spear.audit.plan import Sweep
from spear.audit.sweep_report import EXPLANATIONS
from spear.audit.sweep_tables import name
from spear.report import Report

COLOURS = {
    Verdict.EXACT: "red",
    Verdict.SINGLE: "red",
    Verdict.RECOGNISABLE: "yellow",
    Verdict.NOTHING: "green",
    Verdict.UNMEASURED: "dim",
}


def show(
    console: Console,
    planned: Sweep,
    found: Sequence[Leakage],
    made: Report,
    *,
    quiet: bool,
    verbose: bool,
) -> None:
    """The table, where leakage starts and stops, and the verdict."""
    if not quiet:
        console.print(_table(planned, found))
        for remark in made.remarks:
            if verbose or remark.subject not in EXPLANATIONS:
                console.print(
                    f"[b]{escape(remark.subject)}[/b]: {escape(remark.words)}", soft_wrap=True
                )
    worst = min((a.verdict for a in found), key=list(Verdict).index, default=Verdict.UNMEASURED)
    colour = COLOURS[worst]
    console.print(f"[b {colour}]{escape(made.headline)}[/b {colour}]", soft_wrap=True)


def _table(planned: Sweep, found: Sequence[Leakage]) -> Table:
    classes = planned.subject.samples().classes is not None
    quality = "accuracy" if classes else "loss"
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column("setting", min_width=20, overflow="fold")
    for title in ("leaks", "95 %", "exact", "best dB", "s", quality, "cost"):
        table.add_column(title, justify="right", no_wrap=True)
    for leakage in found:
        colour = COLOURS[leakage.verdict]
        low, high = leakage.leaked.interval()
        gain = leakage.utility
        unit = 100 if classes else 1
        table.add_row(
            escape(name(leakage, planned.grid.base)),
            f"[{colour}]{leakage.leaked.count}/{leakage.leaked.trials}[/{colour}]",
            f"{100 * low:.0f}-{100 * high:.0f}",
            f"{leakage.exact.count}/{leakage.exact.trials}",
            _number(leakage.best, 1),
            _number(leakage.seconds, 1),
            _number(unit * gain.quality if gain else None, 1 if classes else 3),
            _with_spread(gain.cost if gain else None, gain.cost_spread if gain else None, unit),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _with_spread(value: float | None, spread: float | None, unit: float) -> str:
    if value is None:
        return "-"
    shown = ".1f" if unit > 1 else ".2g"
    return f"{unit * value:{shown}}" + ("" if spread is None else f" ±{unit * spread:{shown}}")
