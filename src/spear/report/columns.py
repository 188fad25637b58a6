"""Names of the features of a table, so that a recovered row reads as the person it is about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from torch import Tensor

from spear.data import Column
from spear.errors import InvalidFile, InvalidOption
from spear.files import bytes_of

_LARGEST = 2**24  # bytes of a file of names
_CATEGORY = "="


def columns_of(names: Iterable[str]) -> tuple[Column, ...]:
    """Columns from the names of the inputs, in their order.

    Neighbours such as `sex=Female` and `sex=Male` are one column of categories, one input each. A
    name may be followed by the mean and the standard deviation that its numbers were standardised by.

    >>> age, sex = columns_of(["age,38.6,13.6", "sex=Female", "sex=Male"])
    >>> age.mean, sex.categories
    (38.6, ('Female', 'Male'))
    """
    entries = [name.strip() for name in names]
    if not all(entries):
        raise InvalidOption("expected a name for each input in {columns}, got an empty one")
    found: list[Column] = []
    for name, group in groupby(entries, lambda entry: entry.partition(_CATEGORY)[:2]):
        if name[1]:
            found.append(Column(name[0], tuple(e.partition(_CATEGORY)[2] for e in group)))
        else:
            found += map(_number, group)
    return tuple(found)


def read_columns(given: str) -> tuple[Column, ...]:
    """Columns from a list such as `age,income`, or from a file with one name on each line."""
    path = Path(given)
    if not path.is_file():
        if "," not in given and (path.suffix or len(path.parts) > 1):
            raise InvalidFile(
                f"{given} does not exist: expected a file of names, or names like a,b"
            )
        return columns_of(given.split(","))
    try:
        lines = [line for line in bytes_of(path, _LARGEST).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InvalidFile(f"{path}: expected a text file with one name on each line") from error
    return columns_of(lines[0].split(",") if len(lines) == 1 else lines)


def _number(entry: str) -> Column:
    """A column of numbers: its name, or its name, mean and standard deviation."""
    name, *moments = entry.rsplit(",", 2)
    try:
        mean, std = map(float, moments)
    except ValueError:
        return Column(entry)
    if not (math.isfinite(mean) and 0 < std < math.inf):
        raise InvalidOption(f"expected a finite mean and std > 0 in {{columns}}, got {entry!r}")
    return Column(name, mean=mean, std=std)


def check_columns(columns: Sequence[Column], inputs: Tensor) -> None:
    """Raise unless the columns name every input of (k, n)."""
    if not all(0 < column.std < math.inf for column in columns):
        raise InvalidOption("expected std > 0 of every column", arguments=("columns",))
    named = sum(column.width for column in columns)
    if inputs.ndim != 2 or inputs.shape[1] != named:
        raise InvalidOption(
            f"expected a name for each of the layer's {inputs.shape[-1]} inputs in {{columns}}, got "
            f"{named}",
            arguments=("columns",),
        )


def rows_of(columns: Sequence[Column], inputs: Tensor) -> list[list[str]]:
    """Inputs (k, n) as people read them: k rows with an entry for each column."""
    ends = list(accumulate(column.width for column in columns))
    groups = inputs.detach().double().tensor_split(ends[:-1], 1)
    shown = [_entries(*pair) for pair in zip(columns, groups, strict=True)]
    return [list(row) for row in zip(*shown, strict=True)]


def _entries(column: Column, inputs: Tensor) -> list[str]:
    values = column.value(inputs)
    return column.names(values) if column.discrete else column.rounded(values)
