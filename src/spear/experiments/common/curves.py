"""What figures share: rows by their settings, medians with what was not found, bands and captions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spear.experiments.common.experiment import Rows
from spear.metrics import Rate
from spear.trials import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def where(rows: Rows, **settings: Any) -> list[Row]:
    """The rows with these settings."""
    return [row for row in rows if settings.items() <= row.settings.items()]


def values_of(rows: Rows, setting: str) -> list[Any]:
    """The values a setting has, in order."""
    return sorted({row.settings[setting] for row in rows})


def counts(rows: Iterable[Row], name: str = "submatrices") -> list[float]:
    """A count of every row: infinite where the search ended without a match, or the trial failed."""
    return [
        float(row.metrics[name])
        if row.metrics.get("matched") and row.metrics.get(name) is not None
        else math.inf
        for row in rows
    ]


def time_of(row: Row) -> float:
    """Seconds of the search; of a trial that was stopped, those it took until then."""
    return row.took if row.seconds is None else row.seconds


def quantile(values: Sequence[float], p: float) -> float:
    """The smallest value that a share p does not exceed; values may be infinite.

    >>> quantile([3.0, 1.0, math.inf], 0.5), quantile([1.0, math.inf], 0.9)
    (3.0, inf)
    """
    return float(np.quantile(values, p, method="inverted_cdf"))


def band(axes: Axes, x: Sequence[float], groups: Sequence[Sequence[float]], **look: Any) -> None:
    """The median of each group, with the 10th to the 90th percentile shaded.

    Where a percentile is infinite, as some searches did not end, the shade ends above all there is.
    """
    places = [(at, group) for at, group in zip(x, groups, strict=True) if group]
    if not places:
        return
    at = [place for place, _ in places]
    low, middle, high = ([quantile(g, p) for _, g in places] for p in (0.1, 0.5, 0.9))
    finite = [value for value in (*low, *middle, *high) if math.isfinite(value)]
    top = 3 * max(finite, default=1.0)
    drawn = [value if math.isfinite(value) else math.nan for value in middle]
    axes.plot(at, drawn, **{"marker": "o", **look})
    bottom, upper = ([min(value, top) for value in edge] for edge in (low, high))
    axes.fill_between(at, bottom, upper, color=look.get("color"), alpha=0.18, linewidth=0)


def rates(
    axes: Axes, x: Sequence[float], groups: Sequence[Rows], name: str = "exact", **look: Any
) -> None:
    """The share of rows that hold it, in per cent, with its 95 % Clopper-Pearson interval."""
    places = [(at, share_of(group, name)) for at, group in zip(x, groups, strict=True) if group]
    if not places:
        return
    at, found = [place for place, _ in places], [rate for _, rate in places]
    axes.plot(at, [100 * (r.share or 0.0) for r in found], **{"marker": "o", **look})
    low, high = ([100 * r.interval()[end] for r in found] for end in (0, 1))
    axes.fill_between(at, low, high, color=look.get("color"), alpha=0.15, linewidth=0)


def share_of(rows: Rows, name: str = "exact") -> Rate:
    """How many rows hold it; no result counts as no."""
    return Rate(sum(bool(row.metrics.get(name)) for row in rows), len(rows))


def per_point(rows: Rows) -> str:
    """How many rows a point stands for, in words.

    >>> per_point([])
    'no batches yet'
    """
    sizes = Counter(repr(sorted(row.settings.items(), key=lambda item: item[0])) for row in rows)
    if not sizes:
        return "no batches yet"
    low, high = min(sizes.values()), max(sizes.values())
    if high == 1:
        return "1 batch a point"
    return f"{low if low == high else f'{low} to {high}'} batches a point"


def unfinished(rows: Rows) -> str:
    """In words: how many searches ended without a match; nothing where none did."""
    late = sum(not row.metrics.get("matched") for row in rows)
    return f" {late} of {len(rows)} searches ended before a match and count as infinite." * bool(
        late
    )
