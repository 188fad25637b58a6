"""Numbers as a table shows them, with what is missing said beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from scipy.stats import t as student

from spear.metrics import Rate
from spear.trials import Row

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
NOT_RUN = "not run"
NONE = "–"


def metric(rows: Iterable[Row], name: str) -> list[float]:
    """A metric of the rows that have it."""
    values = (row.metrics.get(name) for row in rows)
    return [float(value) for value in values if value is not None]


def decimal(value: float, digits: int = 1) -> str:
    """
    >>> decimal(0.0000123), decimal(157.68), decimal(0.0)
    ('1.2 × 10⁻⁵', '157.7', '0')
    """
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
    if not of:
        return NOT_RUN
    if not values:
        return NONE
    text = decimal(statistics.fmean(values), digits)
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        text += f" ± {decimal(float(student.ppf(0.975, len(values) - 1)) * spread, digits)}"
    return text if len(values) == of else f"{text} ({of - len(values)} of {of} without)"


def rate(rows: Sequence[Row], name: str = "exact") -> str:
    """How many rows hold it, with the 95 % Clopper-Pearson interval; no result counts as no."""
    if not rows:
        return NOT_RUN
    count = sum(bool(row.metrics.get(name)) for row in rows)
    low, high = Rate(count, len(rows)).interval()
    share = 100 * count / len(rows)
    return f"{share:.4g} % ({100 * low:.1f}–{100 * high:.1f}) of {len(rows)}"


def seconds(rows: Sequence[Row]) -> str:
    """The mean time of an attack."""
    values = [row.seconds for row in rows if row.seconds is not None]
    if not values:
        return NOT_RUN if not rows else NONE
    value = statistics.fmean(values)
    return f"{value:.2f} s" if value < 60 else f"{value / 60:.1f} min"
