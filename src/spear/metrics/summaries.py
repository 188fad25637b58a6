"""Many measurements as one: averages that say what is missing, rates with their interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import scipy
from torch import Tensor

from spear.errors import InvalidOption


@dataclass(frozen=True)
class Average:
    """A mean, and how many of the true samples it is of.

    >>> print(Average(31.25, samples=19, missing=1))
    31.25 over 19 of 20 samples
    >>> print(Average(None, samples=0, missing=20))
    not measured: 0 of 20 samples
    """

    value: float | None  # None where nothing was measured
    samples: int  # true samples it was measured on
    missing: int  # true samples it says nothing of: not recovered, or not a number

    @staticmethod
    def of(values: Tensor, missing: int) -> Average:
        """The mean of a value per sample (p,) or of a row per sample (p, c); NaN counts as missing."""
        rows = values[:, None] if values.ndim == 1 else values  # (p, c)
        measured = rows[~rows.isnan().any(1)]
        empty = measured.numel() == 0
        value = None if empty else float(measured.double().mean())
        samples = 0 if empty else len(measured)
        return Average(value, samples, missing + len(values) - samples)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and self.value is not None

    def __str__(self) -> str:
        total = self.samples + self.missing
        if self.value is None:
            return f"not measured: 0 of {total} samples"
        return f"{self.value:.4g} over {self.samples} of {total} samples"


@dataclass(frozen=True)
class Rate:
    """How many of how many, with the Clopper-Pearson interval.

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
        """Where the true share lies, with at least this confidence; (0, 1) without trials."""
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


class _Judged(Protocol):
    @property
    def exact(self) -> bool: ...


def exact_rate(batches: Iterable[_Judged | None]) -> Rate:
    """The share of batches that are exact: the paper's accuracy. None is a batch without result.

    >>> from spear.metrics import score
    >>> import torch
    >>> x = torch.rand(4, 9)
    >>> print(exact_rate([score(x, x), score(x[:3], x), None]))
    1 of 3 (33.3 %, 95 % interval 0.8-90.6 %)
    """
    verdicts = [batch is not None and batch.exact for batch in batches]
    return Rate(sum(verdicts), len(verdicts))
