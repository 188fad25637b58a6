"""All experiments: the files of `spear.experiments`, in the order of the paper."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from spear import experiments
from spear.errors import InvalidOption
from spear.experiments.common.experiment import Experiment

# The paper's order: its tables, those of the appendix, its figures; then our own.
ORDER = (
    *("prior_work", "tabular", "main", "layers", "prior", "features", "error_bars", "one_label"),
    *("dpsgd", "fedavg_epochs", "fedavg_rates", "teaser", "overview", "failure"),
    *("failure_validation", "batch_size", "architecture", "two_stages", "training"),
    *("full_batch", "percentiles", "failed_batch", "frontier"),
    *("rounds", "rounds_rate", "rounds_aggregation", "rounds_fedavg", "rounds_noise"),
    "rounds_sampling",
)


def names() -> tuple[str, ...]:
    """Names of all experiments, in the paper's order; new files come last."""
    there = {
        module.name for module in pkgutil.iter_modules(experiments.__path__) if not module.ispkg
    }
    return (*(n for n in ORDER if n in there), *sorted(there - set(ORDER)))


@cache
def load(name: str) -> Experiment:
    """The experiment of a file, by its name."""
    if name not in names():
        raise InvalidOption(f"expected one of the experiments {', '.join(names())}, got {name!r}")
    experiment = importlib.import_module(f"spear.experiments.{name}").EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


def with_sources(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The experiments asked for, after all those they build on."""
    order: dict[str, None] = {}
    for name in wanted:
        order.update(dict.fromkeys((*with_sources(load(name).after), name)))
    return tuple(order)
