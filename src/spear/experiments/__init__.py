"""One file per table or figure, the paper's and our own; `common` holds what they share.

What they are called is known without torch: the command line completes names, and corrects them.
"""

from __future__ import annotations

import difflib
import pkgutil

from spear import plugins
from spear.errors import InvalidOption

# The claims first, then the paper's tables, its figures, and our own.
ORDER = (
    "claims",
    *("prior_work", "tabular", "main", "layers", "prior", "features", "error_bars", "one_label"),
    *("dpsgd", "fedavg_epochs", "fedavg_rates"),
    *("teaser", "overview", "failure", "batch_size", "architecture", "two_stages", "training"),
    *("failure_validation", "full_batch", "percentiles", "failed_batch"),
    *("frontier", "rounds", "rounds_rate", "rounds_aggregation", "rounds_fedavg", "rounds_noise"),
    "rounds_sampling",
)


def names() -> tuple[str, ...]:
    """Names of our experiments, in the paper's order; new files come last."""
    there = {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}
    return (*(n for n in ORDER if n in there), *sorted(there - set(ORDER)))


def installed() -> tuple[str, ...]:
    """Names of the experiments that installed packages offer, none of which has a name of ours."""
    return tuple(name for name in plugins.offered(plugins.EXPERIMENTS) if name not in names())


def known(name: str) -> str:
    """The name, if there is such an experiment; or the ones that may have been meant."""
    there = (*names(), *installed())
    if name in there:
        return name
    near = difflib.get_close_matches(name.lower().replace("-", "_"), there, cutoff=0.65)
    cure = f"There are {', '.join(there)}; one of your own is a file: my_table.py."
    if near:
        cure = f"Did you mean {' or '.join(near)}?"
    raise InvalidOption(f"expected the name of an experiment, got {name!r}. {cure}")
