"""Compare recovered rows of a table with the true ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.data import Column, TabularData
from spear.metrics.assignment import Assignment, assign
from spear.metrics.summaries import Average

# A number counts as right within this many standard deviations of its column: TabLeak's measure.
CLOSE = 0.319
# ... and as exact within this many: 60 dB if one standard deviation is the unit.
EXACT = 1e-3


@dataclass(frozen=True, eq=False)
class TabularScore:
    """Recovered rows, each against the true row assigned to it."""

    pairs: Assignment
    columns: tuple[Column, ...]
    right: Tensor  # (p, d) bool: the category is the true one
    error: Tensor  # (p, c) absolute error of a number, in its column's own unit

    @property
    def exact_rows(self) -> Tensor:
        """(p,) bool: every category right, every number within 1e-3 standard deviations."""
        return self.right.all(1) & (self._deviations <= EXACT).all(1)

    @property
    def exact(self) -> bool:
        """Is every row there, and exact?"""
        complete = self.pairs.missing == 0 and self.pairs.surplus == 0 and len(self.pairs) > 0
        return complete and bool(self.exact_rows.all())

    @property
    def discrete_accuracy(self) -> Average:
        """The share of categories that are right."""
        return Average.of(self.right.double(), self.pairs.missing)

    @property
    def continuous_error(self) -> Average:
        """Mean absolute error, each number in its own unit, over all of them: the paper's MAE."""
        return Average.of(self.error, self.pairs.missing)

    @property
    def accuracy(self) -> Average:
        """The share of entries that are right: categories, and numbers within 0.319 deviations."""
        close = self._deviations <= CLOSE  # (p, c); NaN is not close
        return Average.of(torch.cat([self.right, close], 1).double(), self.pairs.missing)

    @property
    def _deviations(self) -> Tensor:
        std = [column.std for column in _continuous(self.columns)]
        return self.error / torch.tensor(std, dtype=torch.float64)


def score_table(recovered: Tensor, truth: Tensor, data: TabularData) -> TabularScore:
    """Assign recovered inputs (k, n) to true ones (b, n) and compare the rows they stand for.

    The assignment is the one of least squared distance between the inputs. Neither argument is
    changed or reordered, no number is rounded.

    >>> rows = {"age": [30, 50], "job": ["cook", "smith"]}
    >>> people = TabularData.of("people", rows, labels=["no", "yes"])
    >>> x, _ = people.batch([0, 1])
    >>> found = score_table(x[[1]] + torch.tensor([0.5, 0, 0]), x, people)
    >>> print(found.discrete_accuracy)
    1 over 1 of 2 samples
    >>> print(found.continuous_error)
    5 over 1 of 2 samples
    """
    values, true = data.to_values(recovered), data.to_values(truth)  # (k, columns), (b, columns)
    pairs = assign(recovered, truth)
    found, true = values[pairs.found], true[pairs.truth]
    discrete = torch.tensor([column.discrete for column in data.columns])
    return TabularScore(
        pairs,
        data.columns,
        right=found[:, discrete] == true[:, discrete],
        error=(found - true)[:, ~discrete].abs(),
    )


def _discrete(columns: tuple[Column, ...]) -> list[Column]:
    return [column for column in columns if column.discrete]


def _continuous(columns: tuple[Column, ...]) -> list[Column]:
    return [column for column in columns if not column.discrete]
