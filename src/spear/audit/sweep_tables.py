"""A sweep's tables: every setting, what leaked, what it costs, and its noise in all units."""

from __future__ import annotations

from collections.abc import Sequence

from spear.audit.leakage import Leakage
from spear.audit.plan import Sweep
from spear.audit.setting import Setting
from spear.report import Table
from spear.report.report import Cell


def leakage_table(sweep: Sweep, found: Sequence[Leakage]) -> Table:
    """What leaked at every setting, and what it costs."""
    classes = sweep.subject.samples().classes is not None
    unit = 100 if classes else 1
    columns = (
        "setting",
        "verdict",
        "batches leaking, %",
        "at least, %",
        "at most, %",
        "batches exact, %",
        "samples exact, %",
        "samples recognisable, %",
        "best PSNR, dB",
        "median seconds",
        "held-out accuracy, %" if classes else "held-out loss",
        "± over runs",
        "cost, points" if classes else "cost, loss",
        "± of cost",
    )
    base = sweep.grid.base
    rows: list[tuple[Cell, ...]] = []
    for leakage in found:
        low, high = leakage.leaked.interval()
        gain = leakage.utility
        rows.append(
            (
                name(leakage, base),
                leakage.verdict.value,
                _rounded(leakage.leaked.share, 100),
                round(100 * low, 1),
                round(100 * high, 1),
                _rounded(leakage.exact.share, 100),
                _rounded(leakage.share("recovered"), 100),
                _rounded(leakage.share("recognised"), 100),
                _rounded(leakage.best),
                _rounded(leakage.seconds, digits=2),
                _rounded(gain.quality if gain else None, unit, 1 if classes else 4),
                _rounded(gain.spread if gain else None, unit, 1 if classes else 4),
                _rounded(gain.cost if gain else None, unit, 1 if classes else 4),
                _rounded(gain.cost_spread if gain else None, unit, 1 if classes else 4),
            )
        )
    caption = (
        f"{sweep.repeats} private batches at each setting, each with weights of its own. A setting is "
        "named by what tells it from the base."
    )
    return Table("Leakage and cost", columns, tuple(rows), caption)


def settings_table(sweep: Sweep, found: Sequence[Leakage]) -> Table:
    """Every setting in full."""
    columns = (
        "setting",
        "batch size",
        "width",
        "protocol",
        "C",
        "σ",
        "noise multiplier z",
        "ε",
        "precision",
        "pruned",
        "clients",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            name(leakage, sweep.grid.base),
            leakage.setting.samples,
            leakage.setting.width,
            leakage.setting.training,
            leakage.setting.clip,
            leakage.noise.sigma and float(f"{leakage.noise.sigma:.4g}"),
            leakage.noise.multiplier and float(f"{leakage.noise.multiplier:.4g}"),
            leakage.noise.epsilon and float(f"{leakage.noise.epsilon:.4g}"),
            leakage.setting.precision,
            leakage.setting.pruned,
            leakage.setting.clients,
        )
        for leakage in found
    ]
    caption = "Every setting in full, its noise in all units that can be told."
    return Table("Settings", columns, tuple(rows), caption)


def name(leakage: Leakage, base: Setting) -> str:
    """A setting by what tells it from the base."""
    own = leakage.setting == base
    return f"base: {leakage.setting.words()}" if own else leakage.setting.words(base)


def _rounded(value: float | None, unit: float = 1, digits: int = 1) -> float | None:
    return None if value is None else round(unit * value, digits)
