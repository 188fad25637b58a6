"""Some cells of an experiment, chosen by their settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear.errors import InvalidOption
from spear.experiments.common.experiment import Settings

_MOST = 24  # values that an error lists


@dataclass(frozen=True)
class Only:
    """The cells that are as any of these say; all cells if there are none.

    >>> only = Only.of(["b=20,finder=cascade", "sigma=1e-5"])
    >>> only.has({"b": 20, "finder": "cascade"}), only.has({"b": 20}), only.has({"sigma": 0.00001})
    (True, False, True)
    """

    choices: Sequence[Mapping[str, str]] = ()

    @staticmethod
    def of(texts: Iterable[str]) -> Only:
        """From texts such as b=20,finder=cascade."""
        return Only([_parsed(text) for text in texts])

    def has(self, cell: Settings) -> bool:
        return not self.choices or any(_as(choice, cell) for choice in self.choices)

    def check(self, cells: Sequence[Settings]) -> None:
        """Raise unless each of these chooses a cell; the error lists what there is."""
        for choice in self.choices:
            if not any(_as(choice, cell) for cell in cells):
                raise InvalidOption(f"{{only}}: {_lacking(choice, cells)}", arguments=("only",))


def _parsed(text: str) -> dict[str, str]:
    parts = re.split(r",(?=\s*\w+\s*=)", text)  # a value may be a list
    pairs = [part.partition("=") for part in parts]
    if not all(name.strip() and sign and value.strip() for name, sign, value in pairs):
        raise InvalidOption(
            f"expected {{only}} to be settings such as b=20,finder=cascade, got {text!r}",
            arguments=("only",),
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


def _as(choice: Mapping[str, str], cell: Settings) -> bool:
    return all(name in cell and _is(text, cell[name]) for name, text in choice.items())


def _is(text: str, value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == _words(value)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _lacking(choice: Mapping[str, str], cells: Sequence[Settings]) -> str:
    """What no cell has, and what there is instead."""
    for name, text in choice.items():
        values = [cell[name] for cell in cells if name in cell]
        if not values:
            there = _listed(name for cell in cells for name in cell)
            return f"no cell has a setting {name}; there are {there}"
        if not any(_is(text, value) for value in values):
            return f"no cell has {name}={text}; cells have {name}={_listed(map(_words, values))}"
    asked = ", ".join(f"{name}={text}" for name, text in choice.items())
    return f"no cell has {asked} together, though each alone is in some"


def _listed(words: Iterable[str]) -> str:
    different = list(dict.fromkeys(words))
    more = ", ..." if len(different) > _MOST else ""
    return ", ".join(different[:_MOST]) + more
