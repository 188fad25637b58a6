"""What was measured before, in small: the rows of the benchmarks summed up, to predict from.

`python -m spear.check.measured benchmarks/rows` writes the summary anew; a test holds that it equals
what the rows give.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from spear.errors import InvalidOption
from spear.metrics import Rate

SUMMARY = "measured.json"
_INPUTS = {"cifar10": 3072, "mnist": 784, "tiny_imagenet": 12288, "imagenet": 3 * 720 * 720}
_ADULT_INPUTS = 108
# How far a row may be from what is asked: a layer four times as wide or narrow, twice the batch.
_WIDTHS, _BATCHES = 4.0, 2.0


@dataclass(frozen=True)
class PastMeasurement:
    """Batches of one size that were inverted from layers of one width."""

    rows: str
    """The file of the single measurements."""
    data: str
    raw: bool
    """Pixels in [0, 1] instead of the usual normalisation?"""
    inputs: int
    b: int
    m: int
    batches: int
    exact: int
    median: float
    """Seconds."""
    p90: float
    machine: str

    @property
    def rate(self) -> Rate:
        return Rate(self.exact, self.batches)

    @property
    def words(self) -> str:
        kind = ", pixels in [0, 1]" if self.raw else ""
        return f"b = {self.b}, m = {self.m}, {self.data}{kind}"


@cache
def measured() -> tuple[PastMeasurement, ...]:
    """The summary that comes with the package."""
    text = resources.files("spear.check").joinpath(SUMMARY).read_text(encoding="utf-8")
    return tuple(PastMeasurement(**row) for row in json.loads(text))


def nearest(b: int, m: int, inputs: int) -> tuple[PastMeasurement, ...]:
    """Rows that are at least as hard, of about this size: the nearest, on all data; none if too far.

    >>> [(row.b, row.m) for row in nearest(20, 200, 3072)][0]
    (20, 200)
    >>> nearest(5000, 50_000, 3072)
    ()
    """
    if b < 1 or m < 1:
        raise InvalidOption(f"expected b >= 1 and m >= 1, got {b} and {m}")
    hard = [
        row
        for row in measured()
        if row.b * m >= b * row.m and max(row.m / m, m / row.m) <= _WIDTHS and row.b * _BATCHES >= b
    ]
    if not hard:
        return ()

    def distance(row: PastMeasurement) -> float:
        return abs(math.log(row.m / m)) + math.log(row.b * m / (b * row.m))

    best = min(hard, key=distance)
    same = [row for row in hard if (row.b, row.m) == (best.b, best.m)]
    return tuple(sorted(same, key=lambda row: abs(math.log(row.inputs / inputs))))
