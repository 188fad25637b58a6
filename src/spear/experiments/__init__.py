"""One file per table or figure, the paper's and our own; `common` holds what they share.

What they are called is known without torch: the command line completes names, and corrects them.
"""

from __future__ import annotations

import difflib
import pkgutil
import re

from spear import plugins
from spear.errors import InvalidOption

# By their numbers in the paper, from 1 on; one that draws several figures stands at each.
TABLES = (
    *("prior_work", "tabular", "main", "layers", "prior", "features", "error_bars", "one_label"),
    *("dpsgd", "fedavg_epochs", "fedavg_rates"),
)
FIGURES = (
    *("teaser", "overview", "failure", "batch_size", "architecture", "two_stages", "training"),
    *("failure_validation", "full_batch", "percentiles", "percentiles", "percentiles"),
    "failed_batch",
)
# The claims first, then the paper's tables, its figures, and our own.
ORDER = (
    "claims",
    *TABLES,
    *dict.fromkeys(FIGURES),
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


def numbered(name: str) -> str | None:
    """The experiment of a table or figure by its number in the paper; None if this is no number.

    >>> numbered("Table 3"), numbered("fig11"), numbered("Figures 10–12"), numbered("main")
    ('main', 'percentiles', 'percentiles', None)
    """
    found = re.fullmatch(r"(tab|fig)[a-z]*[\W_]*(\d+)([\W_]+\d+)?", name.strip().lower())
    if found is None:
        return None
    there, number = (TABLES if found[1] == "tab" else FIGURES), int(found[2])
    if not 1 <= number <= len(there):
        raise InvalidOption(
            f"the paper has no {name!r}: its tables are 1 to {len(TABLES)}, its figures 1 to "
            f"{len(FIGURES)}"
        )
    return there[number - 1]


def known(name: str) -> str:
    """The name of an experiment, if there is one of this name or number; or those that may be meant."""
    there = (*names(), *installed())
    if name in there:
        return name
    if experiment := numbered(name):
        return experiment
    near = difflib.get_close_matches(name.lower().replace("-", "_"), there, cutoff=0.65)
    cure = f"There are {', '.join(there)}; one of your own is a file: my_table.py."
    if near:
        cure = f"Did you mean {' or '.join(near)}?"
    raise InvalidOption(f"expected the name of an experiment, got {name!r}. {cure}")
