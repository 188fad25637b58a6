"""Averages that say how many samples they leave out, and rates with their interval."""

from __future__ import annotations

from dataclasses import dataclass

import scipy
from torch import Tensor

from spear.errors import InvalidOption


@dataclass(frozen=True)
class Average:
    """A mean, and how many of the true samples it covers.

    >>> print(Average(31.25, samples=19, missing=1))
    31.25 over 19 of 20 samples
    >>> print(Average(None, samples=0, missing=20))
    not measured: 0 of 20 samples
    """

    value: float | None  # None if nothing was measured
    samples: int  # true samples it was measured on
    missing: int  # true samples it does not cover: not recovered, or not a number

    @staticmethod
    def of(values: Tensor, missing: int) -> Average:
        """The mean of a value per sample (p,) or of a row per sample (p, c); NaN counts as missing."""
        rows = values[:, None] if values.ndim == 1 else values  # (p, c)
        measured = rows[~rows.isnan().any(1)]
        empty = measured.numel() == 0
        value = None if empty else float(measured.double().mean())
        samples = 0 if empty else len(measured)
        return Average(value, samples, missing + len(values) - samples)

    def __str__(self) -> str:
        total = self.samples + self.missing
        if self.value is None:
            return f"not measured: 0 of {total} samples"
        return f"{self.value:.4g} over {self.samples} of {total} samples"


@dataclass(frozen=True)
class Rate:
    """A share of trials, with its Clopper-Pearson interval.

    >>> print(Rate(99, 100))
    99 of 100 (99.0 %, 95 % interval 94.6-100.0 %)
    """

    count: int
    trials: int

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.trials:
            raise InvalidOption(f"expected 0 <= count <= trials, got {self.count}, {self.trials}")

    @property
    def share(self) -> float | None:
        """None without trials."""
        return self.count / self.trials if self.trials else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Holds the true share with at least this confidence; (0, 1) if there were no trials."""
        if not 0 < confidence < 1:
            raise InvalidOption(f"expected 0 < confidence < 1, got {confidence}")
        if not self.trials:
            return (0.0, 1.0)
        k, n, tail = self.count, self.trials, (1 - confidence) / 2
        low = float(scipy.special.betaincinv(k, n - k + 1, tail)) if k else 0.0
        high = float(scipy.special.betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
        return (low, high)

    def __str__(self) -> str:
        if self.share is None:
            return "no trials"
        low, high = self.interval()
        return (
            f"{self.count} of {self.trials} ({100 * self.share:.1f} %, "
            f"95 % interval {100 * low:.1f}-{100 * high:.1f} %)"
        )
