"""The experiments there are: files of `experiments/`, in the order of the paper."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

from spear.errors import DataError, InvalidOption
from spear.paper.experiment import Experiment

# In a wheel the folder lies inside the package, in a checkout beside `src`.
_PLACES = (
    Path(__file__).resolve().parents[1] / "experiments",
    Path(__file__).resolve().parents[3] / "experiments",
)
# The paper's order: its tables, those of the appendix, then its figures.
ORDER = (
    "prior_work",
    "tabular",
    "main",
    "layers",
    "prior",
    "features",
    "error_bars",
    "one_label",
    "dpsgd",
    "fedavg_epochs",
    "fedavg_rates",
    "teaser",
    "overview",
    "failure",
    "failure_validation",
    "batch_size",
    "architecture",
    "two_stages",
    "training",
    "full_batch",
    "percentiles",
    "failed_batch",
)


def folder() -> Path:
    """Where the experiments' files are."""
    for place in _PLACES:
        if (place / "main.py").is_file():
            return place
    raise DataError(
        f"the experiments are not at {_PLACES[0]}: install spear-fl again, or run it from a clone"
    )


def names() -> tuple[str, ...]:
    """Of all experiments, in the paper's order; a new file comes last."""
    there = {path.stem for path in folder().glob("*.py") if not path.stem.startswith("_")}
    return (*(n for n in ORDER if n in there), *sorted(there - set(ORDER)))


@cache
def load(name: str) -> Experiment:
    """The experiment of a file, by its name."""
    if name not in names():
        raise InvalidOption(f"expected an experiment of {', '.join(names())}, got {name!r}")
    module_name = f"spear_experiments_{name}"
    spec = importlib.util.spec_from_file_location(module_name, folder() / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


def with_sources(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The experiments asked for and all they build on, those first."""
    order: dict[str, None] = {}
    for name in wanted:
        order.update(dict.fromkeys((*with_sources(load(name).after), name)))
    return tuple(order)
