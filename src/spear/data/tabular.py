"""Tables of people and things: how rows become inputs of a network, and inputs rows again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from spear.errors import InvalidOption

NO_VALUE = "nan"  # shown for a category whose inputs are not finite


@dataclass(frozen=True)
class Column:
    """One column: categories (one input each) or a number (one input, standardised).

    >>> Column.of("sex", ["Male", "Female", "Male"]).categories
    ('Female', 'Male')
    >>> Column.of("age", [20.0, 40.0]).std
    10.0
    """

    name: str
    categories: tuple[str, ...] = ()  # empty for a column of numbers
    mean: float = 0.0
    std: float = 1.0
    constant: bool = False  # all its numbers were equal: its input is always 0

    @staticmethod
    def of(name: str, entries: Sequence[str] | Sequence[float]) -> Column:
        """A column for these entries: strings become sorted categories, anything else is a number.

        A constant column gets a standard deviation of 1, to avoid dividing by 0.
        """
        if not len(entries):
            raise InvalidOption(f"column {name!r}: expected at least one entry, got none")
        texts = [entry for entry in entries if isinstance(entry, str)]
        if len(texts) == len(entries):
            return Column(name, tuple(sorted(set(texts))))
        if texts:
            raise InvalidOption(
                f"column {name!r}: expected all strings or all numbers, got {len(texts)} strings "
                f"among {len(entries)} entries"
            )
        numbers = torch.tensor(entries, dtype=torch.float64)
        if not bool(numbers.isfinite().all()):
            raise InvalidOption(f"column {name!r}: expected finite numbers, got NaN or infinity")
        std = float(numbers.std(correction=0))
        # Differences within rounding, or so small that their squares vanish, count as constant.
        constant = std <= torch.finfo(torch.float64).eps * float(numbers.abs().max())
        mean = float(numbers[0] if constant else numbers.mean())
        return Column(name, mean=mean, std=1.0 if constant else std, constant=constant)

    @property
    def discrete(self) -> bool:
        return bool(self.categories)

    @property
    def width(self) -> int:
        """How many inputs it takes."""
        return len(self.categories) or 1

    def read(self, entries: Sequence[str] | Sequence[float]) -> Tensor:
        """Entries as category indices or numbers (k,), float64."""
        indices = {category: i for i, category in enumerate(self.categories)}
        values = [indices[entry] if isinstance(entry, str) else entry for entry in entries]
        return torch.tensor(values, dtype=torch.float64)

    def encode(self, values: Tensor) -> Tensor:
        """Category indices or numbers (k,) to inputs (k, width), float64."""
        if self.discrete:
            return torch.nn.functional.one_hot(values.long(), self.width).double()
        return ((values - self.mean) / self.std)[:, None]

    def value(self, inputs: Tensor) -> Tensor:
        """Inputs (k, width) to category indices or numbers (k,), float64; NaN stays NaN."""
        if not self.discrete:
            return inputs[:, 0].double() * self.std + self.mean
        index = inputs.argmax(1).double()
        return index.where(inputs.isfinite().all(1), torch.nan)

    def names(self, indices: Tensor) -> list[str]:
        """The categories of these indices (k,)."""
        known = [None if math.isnan(index) else int(index) for index in indices.tolist()]
        return [NO_VALUE if index is None else self.categories[index] for index in known]

    def rounded(self, numbers: Tensor) -> list[str]:
        """Numbers (k,) as text, to a thousandth of the standard deviation, or at least to integers."""
        decimals = max(0, 3 - math.floor(math.log10(self.std)))
        return [f"{round(number, decimals) + 0.0:.12g}" for number in numbers.tolist()]


@dataclass(frozen=True, eq=False)
class TabularData:
    """A table with labels. Its rows become inputs: one-hot categories, standardised numbers.

    >>> rows = {"age": [30, 50], "job": ["cook", "smith"]}
    >>> people = TabularData.of("people", rows, labels=["no", "yes"])
    >>> x, y = people.batch([1, 0])
    >>> x.tolist(), y.tolist()
    ([[1.0, 0.0, 1.0], [-1.0, 1.0, 0.0]], [1, 0])
    >>> people.decode(x)
    {'age': [50.0, 30.0], 'job': ['smith', 'cook']}
    >>> print(people.table(x, y))
    age  job    label
    50   smith  yes
    30   cook   no
    """

    name: str
    columns: tuple[Column, ...]
    label_names: tuple[str, ...]
    labels: Tensor  # (N,) int64
    values: Tensor = field(repr=False)  # (N, columns) float64: numbers and category indices

    @staticmethod
    def of(
        name: str,
        rows: Mapping[str, Sequence[str] | Sequence[float]],
        labels: Sequence[str],
    ) -> TabularData:
        """A table of your own: the entries of each column, by column name, and a label per row."""
        uneven = [f"{key!r} {len(entries)}" for key, entries in rows.items()]
        if not rows or any(len(entries) != len(labels) for entries in rows.values()):
            raise InvalidOption(
                f"expected columns of {len(labels)} entries, one for each label, got "
                f"{', '.join(uneven) or 'no columns'}"
            )
        columns = tuple(Column.of(key, entries) for key, entries in rows.items())
        values = [column.read(rows[column.name]) for column in columns]
        label_names = tuple(sorted(set(labels)))
        index = torch.tensor([label_names.index(label) for label in labels])
        return TabularData(name, columns, label_names, index, torch.stack(values, 1))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return len(self.label_names)

    @property
    def inputs(self) -> int:
        """How many inputs a row becomes."""
        return sum(column.width for column in self.columns)

    def batch(
        self, indices: Sequence[int], *, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Inputs (k, n) as a fully connected network takes them, and labels (k,)."""
        rows = self.values[list(indices)]
        encoded = [column.encode(rows[:, i]) for i, column in enumerate(self.columns)]
        return torch.cat(encoded, 1).to(dtype), self.labels[list(indices)]

    def to_values(self, inputs: Tensor) -> Tensor:
        """Inputs (k, n) to numbers and category indices (k, columns), float64, unrounded.

        The category is the one with the largest input. NaN stays NaN.
        """
        if inputs.ndim != 2 or inputs.shape[1] != self.inputs:
            raise InvalidOption(
                f"expected inputs (k, {self.inputs}) of {self.name}, got {tuple(inputs.shape)}"
            )
        ends = list(accumulate(column.width for column in self.columns))
        groups = inputs.detach().cpu().tensor_split(ends[:-1], 1)
        pairs = zip(self.columns, groups, strict=True)
        return torch.stack([column.value(group) for column, group in pairs], 1)

    def decode(self, inputs: Tensor) -> dict[str, list[str] | list[float]]:
        """Inputs (k, n) to the entries of each column, by its name."""
        values = self.to_values(inputs)  # (k, columns)
        return {
            column.name: column.names(entries) if column.discrete else entries.tolist()
            for column, entries in zip(self.columns, values.T, strict=True)
        }

    def table(self, inputs: Tensor, labels: Tensor | None = None) -> str:
        """Inputs (k, n) as lines of text; numbers to a thousandth of their standard deviation."""
        values = self.to_values(inputs)  # (k, columns)
        shown = {
            column.name: column.names(entries) if column.discrete else column.rounded(entries)
            for column, entries in zip(self.columns, values.T, strict=True)
        }
        if labels is not None:
            known = [0 <= label < self.classes for label in labels.tolist()]
            shown["label"] = [
                self.label_names[label] if ok else "unknown"
                for label, ok in zip(labels.tolist(), known, strict=True)
            ]
        cells = [[name, *entries] for name, entries in shown.items()]
        widths = [max(map(len, column)) for column in cells]
        lines = zip(*cells, strict=True)
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
