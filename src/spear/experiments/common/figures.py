"""Numbers and curves from rows, for tables and figures; numbers say how many values are missing."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import t as student

from spear.experiments.common.experiment import Rows
from spear.metrics import Rate
from spear.trials import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
NOT_RUN = "not run"
NONE = "–"


def where(rows: Rows, **settings: Any) -> list[Row]:
    """The rows with these settings."""
    return [row for row in rows if settings.items() <= row.settings.items()]


def values_of(rows: Rows, setting: str) -> list[Any]:
    """The values of a setting, sorted."""
    return sorted({row.settings[setting] for row in rows})


def metric(rows: Iterable[Row], name: str) -> list[float]:
    """A metric of the rows that have it."""
    values = (row.metrics.get(name) for row in rows)
    return [float(value) for value in values if value is not None]


def decimal(value: float | None, digits: int = 1) -> str:
    """A number to `digits` digits, with a power of ten if that is shorter.

    >>> decimal(0.0000123), decimal(157.68), decimal(0.0)
    ('1.2 × 10⁻⁵', '157.7', '0')
    """
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if 10**-digits <= abs(value) < 1e5:
        return f"{value:.{digits}f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def mean(values: Sequence[float], of: int, digits: int = 1) -> str:
    """A mean with the 95 % interval of the mean (Student), and what it leaves out.

    >>> mean([10.0, 12.0, 14.0], of=4)
    '12.0 ± 5.0 (1 of 4 without)'
    >>> mean([], of=0)
    'not run'
    """
    count = len(values)
    factor = float(student.ppf(0.975, count - 1)) / math.sqrt(count) if count > 1 else 0.0
    return _around(values, of, digits, factor)


def spread(values: Sequence[float], of: int, digits: int = 1) -> str:
    """A mean with 1.96 standard deviations of a single batch.

    >>> spread([10.0, 12.0, 14.0], of=3)
    '12.0 ± 3.9'
    """
    return _around(values, of, digits, 1.96)


def _around(values: Sequence[float], of: int, digits: int, factor: float) -> str:
    """A mean ± `factor` standard deviations."""
    if not of:
        return NOT_RUN
    if not values:
        return NONE
    text = decimal(statistics.fmean(values), digits)
    if len(values) > 1:
        text += f" ± {decimal(factor * statistics.stdev(values), digits)}"
    return text if len(values) == of else f"{text} ({of - len(values)} of {of} without)"


def rate(rows: Sequence[Row], name: str = "exact") -> str:
    """The share of rows where it holds, with 95 % Clopper-Pearson interval; no result counts as no."""
    if not rows:
        return NOT_RUN
    found = share_of(rows, name)
    low, high = found.interval()
    share = 100 * found.count / found.trials
    return f"{share:.4g} % ({100 * low:.1f}–{100 * high:.1f}) of {len(rows)}"


def seconds(rows: Sequence[Row], stage: str | None = None) -> str:
    """The mean time of an attack, or of one of its stages."""
    times = (row.seconds if stage is None else row.stages.get(stage) for row in rows)
    values = [value for value in times if value is not None]
    if not values:
        return NOT_RUN if not rows else NONE
    value = statistics.fmean(values)
    return (f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min") + _without(values, rows)


def median(rows: Sequence[Row], name: str) -> str:
    """The median of a count.

    >>> median([], "submatrices")
    'not run'
    """
    values = metric(rows, name)
    if not values:
        return NOT_RUN if not rows else NONE
    return f"{statistics.median(values):,.0f}" + _without(values, rows)


def _without(values: Sequence[float], rows: Sequence[Row]) -> str:
    """How many rows have no value."""
    return (
        "" if len(values) == len(rows) else f" ({len(rows) - len(values)} of {len(rows)} without)"
    )


def verdicts(rows: Iterable[Row], *, means: bool = True) -> str:
    """A note on what the attack claimed, over all rows with a claim, and how often wrongly.

    `means` says that means over the samples that came back are shown beside it.
    """
    judged = [row for row in rows if "certified_wrong" in row.metrics]
    outcomes = Counter(row.outcome for row in judged)
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    false = sum(bool(row.metrics["false_exact"]) for row in judged)
    wrong = sum(int(row.metrics["certified_wrong"]) for row in judged)
    return (
        f"Verdicts of SPEAR, given without the truth: {told or 'none yet'}. {false} false EXACT, "
        f"{wrong} certified wrong in {len(judged):,} rows.{_incomplete(judged) if means else ''}"
    )


def _incomplete(rows: Sequence[Row]) -> str:
    """A sentence on batches that came back only in part."""
    part = sum(bool(row.metrics.get("missing")) for row in rows)
    if not part:
        return ""
    return f" In {part} of them samples are missing: their means are over those that came back."


def counts(rows: Iterable[Row], name: str = "submatrices") -> list[float]:
    """A count from every row; infinite if the search ended without a match, or the trial failed."""
    return [
        float(row.metrics[name])
        if row.metrics.get("matched") and row.metrics.get(name) is not None
        else math.inf
        for row in rows
    ]


def time_of(row: Row) -> float:
    """Seconds of the search; if the trial was stopped, the time until then."""
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
    """Plot the share of rows where it holds, in per cent, with its 95 % Clopper-Pearson interval."""
    places = [(at, share_of(group, name)) for at, group in zip(x, groups, strict=True) if group]
    if not places:
        return
    at, found = [place for place, _ in places], [rate for _, rate in places]
    axes.plot(at, [100 * (r.share or 0.0) for r in found], **{"marker": "o", **look})
    low, high = ([100 * r.interval()[end] for r in found] for end in (0, 1))
    axes.fill_between(at, low, high, color=look.get("color"), alpha=0.15, linewidth=0)


def share_of(rows: Rows, name: str = "exact") -> Rate:
    """In how many rows it holds; no result counts as no."""
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
    """A sentence on how many searches ended without a match; empty if none did."""
    late = sum(not row.metrics.get("matched") for row in rows)
    return f" {late} of {len(rows)} searches ended before a match and count as infinite." * bool(
        late
    )
