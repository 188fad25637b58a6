"""Which settings a sweep visits: one thing at a time around a base, or all combinations."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear.errors import InvalidOption
from spear.sweep.setting import Setting
from spear.update import NOISE_UNITS as NOISE

AXES = {
    "samples": "batch size",
    "width": "width",
    "epochs": "local epochs",
    "local_batch_size": "local batch size",
    "lr": "local learning rate",
    "clip": "clipping norm C",
    "noise": "noise",
    "precision": "precision",
    "pruned": "share pruned",
    "clients": "clients aggregated",
    "rounds": "rounds of the same data",
}
_PLAIN = tuple(name for name in AXES if name != "noise")
# The sweep that is run by default. For a layer of width 200 it crosses the frontier along every axis,
# in about four minutes on two cores.
DEFAULT: Mapping[str, Sequence[Any]] = {
    "samples": (8, 32, 64, 96),
    "epochs": (0, 1, 5),
    "clip": (None, 1.0),
    "noise_multiplier": (0, 3e-4, 1e-3, 1e-2, 0.1),
    "epsilon": (8.0,),
    "precision": ("float32", "bfloat16", "8-bit"),
    "pruned": (0.0, 0.5),
    "clients": (1, 4, 12),
}
# Clipping and epsilon need Opacus; without it only noise is varied.
_WITHOUT_OPACUS = {"sigma": (0, 3e-5, 1e-4, 1e-3, 1e-2)}


def default_lists(samples: int) -> dict[str, tuple[Any, ...]]:
    """The lists of the built-in sweep, cut to what this many samples allow.

    >>> default_lists(60)["samples"], default_lists(60)["clients"]
    ((8, 32), (1, 4))
    """
    lists = {name: tuple(values) for name, values in DEFAULT.items()}
    if importlib.util.find_spec("opacus") is None:
        lists = {n: v for n, v in lists.items() if n not in ("clip", *NOISE)} | _WITHOUT_OPACUS
    sizes = tuple(b for b in lists["samples"] if b <= samples) or (max(1, samples // 2),)
    clients = tuple(k for k in lists["clients"] if k * sizes[0] <= samples)
    return {**lists, "samples": sizes, "clients": clients or (1,)}


@dataclass(frozen=True)
class Axis:
    """One thing that is varied, and the setting at each of its values."""

    name: str
    points: tuple[tuple[Any, Setting], ...]

    @property
    def title(self) -> str:
        return AXES[self.name]


@dataclass(frozen=True)
class Grid:
    """The settings of a sweep.

    Args:
        values: lists by the names of `Setting`'s fields. The first value of each belongs to the base.
        cross: try all combinations, instead of varying one thing at a time.

    >>> lists = {"samples": (8, 32), "clip": (None, 1.0), "epsilon": (math.inf, 8.0)}
    >>> grid = Grid(lists)
    >>> [setting.words(grid.base) for setting in grid.settings]
    ['base', 'b = 32', 'C = 1', 'C = 1, ε = 8']
    """

    values: Mapping[str, Sequence[Any]]
    cross: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.values) - {*_PLAIN, *NOISE})
        if unknown:
            raise InvalidOption(
                f"expected lists of {', '.join((*_PLAIN, *NOISE))}, got {unknown[0]!r}"
            )
        empty = [name for name, values in self.values.items() if not len(values)]
        if empty:
            raise InvalidOption(f"expected at least one value of {empty[0]}, got none")
        _ = self.settings  # checks every setting

    @property
    def base(self) -> Setting:
        """The first value of every list; for noise: sigma, else multiplier, else epsilon."""
        return self._setting({name: values[0] for name, values in self._lists.items()})

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All settings to measure, each once, the base first."""
        if self.cross:
            names = list(self._lists)
            products = itertools.product(*self._lists.values())
            found = [self._setting(dict(zip(names, row, strict=True))) for row in products]
        else:
            found = [setting for axis in self.axes for _, setting in axis.points]
        return tuple(dict.fromkeys([self.base, *found]))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What is varied: one thing per axis, with all others at the base's values."""
        first = {name: values[0] for name, values in self._lists.items()}
        return tuple(
            Axis(
                name,
                tuple((_shown(v), self._setting({**first, name: v})) for v in values),
            )
            for name, values in self._lists.items()
            if len(values) > 1
        )

    @property
    def _lists(self) -> dict[str, tuple[Any, ...]]:
        """The lists, with noise in any unit merged into one list of (unit, value)."""
        lists = {name: tuple(self.values[name]) for name in _PLAIN if name in self.values}
        noise = [(unit, value) for unit in NOISE for value in self.values.get(unit, ())]
        if noise:
            lists["noise"] = tuple(noise)
        return {name: lists[name] for name in AXES if name in lists}

    def _setting(self, chosen: Mapping[str, Any]) -> Setting:
        values = {name: value for name, value in chosen.items() if name != "noise"}
        unit, amount = chosen.get("noise", ("sigma", 0))
        values[unit] = amount
        if unit != "sigma" and not _is_quiet(unit, amount) and values.get("clip") is None:
            # Noise in these units needs a clipping norm: take the first that was given.
            norms = [norm for norm in self.values.get("clip", ()) if norm is not None]
            values["clip"] = norms[0] if norms else None
        return Setting.of(**values)


def _is_quiet(unit: str, value: float) -> bool:
    return value == (math.inf if unit == "epsilon" else 0)


def _shown(value: Any) -> Any:
    return value[1] if isinstance(value, tuple) else value
