"""All experiments: ours in the order of the paper, those of installed packages, and of users' files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from spear import plugins
from spear.errors import InvalidExtension, InvalidOption
from spear.experiments import installed, known, names
from spear.experiments.common.additions import as_json
from spear.experiments.common.experiment import Experiment
from spear.files import UserCode

__all__ = ["add", "added", "code_of", "installed", "load", "names", "resolve", "with_sources"]


_files: dict[str, UserCode] = {}  # that were named in this process, by the experiment's name


def add(code: UserCode) -> str:
    """Make the experiment of a user's file known here; returns its name, that of the file."""
    name = Path(code.spec.rpartition(":")[0]).stem
    if name in (*names(), *installed()):
        raise InvalidOption(f"there is an experiment {name!r} already: give your file another name")
    if _files.get(name) != code:
        _files[name] = code
        _of_file.cache_clear()
    return name


def resolve(specs: Sequence[str]) -> tuple[str, ...]:
    """Names of experiments: as given, by their numbers in the paper ("Table 3"), or of files such as
    my_table.py, which are then known."""
    found: dict[str, str] = {}
    for spec in specs:
        if not plugins.is_code(spec):
            name = spec if spec in _files else known(spec)
            found.setdefault(name, name)
            continue
        whole = spec if ":" in spec else f"{spec}:EXPERIMENT"
        name = add(UserCode.of(whole, plugins.EXPERIMENTS))
        if found.setdefault(name, spec) != spec:
            raise InvalidOption(f"{found[name]} and {spec} would have the same rows: rename one")
    return tuple(found)


def added() -> tuple[UserCode, ...]:
    """The experiments of files, as workers need them."""
    return tuple(_files.values())


def load(name: str) -> Experiment:
    """An experiment by its name."""
    if name in _files:
        return _of_file(name)
    if known(name) in names():
        return _ours(name)
    return _checked(plugins.load(plugins.EXPERIMENTS, name), name)


def code_of(name: str) -> str | None:
    """A digest of the code behind the user's trials; None for an experiment of ours.

    Of a file, what `measure` rests on: a change in `draw` throws no row away.
    """
    if name in _files:
        return _files[name].digest_behind(getattr(load(name).measure, "__name__", ""))
    if name in installed():
        return UserCode.of(name, plugins.EXPERIMENTS).digest
    return None


@cache
def _ours(name: str) -> Experiment:
    experiment = importlib.import_module(f"spear.experiments.{name}").EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


@cache
def _of_file(name: str) -> Experiment:
    return _checked(_files[name].load(), name)


def _checked(found: Any, name: str) -> Experiment:
    if not isinstance(found, Experiment):
        raise InvalidExtension(
            f"expected {name} to be an Experiment(...), got a {type(found).__name__}"
        )
    for cell in found.cells:
        as_json(f"the cells of {name}", cell)
    return found


def with_sources(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The experiments asked for, after all those they build on."""
    order: dict[str, None] = {}
    for name in wanted:
        order.update(dict.fromkeys((*with_sources(load(name).after), name)))
    return tuple(order)
