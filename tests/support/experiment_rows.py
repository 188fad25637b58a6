"""Cases, trials and rows of experiments, for tests that run none or one of them."""

import json
from pathlib import Path

from spear.experiments.common import Case, Plan, catalogue
from spear.trials import Row, Status


def trials(name, batches=2, seed=0, **rows):
    """Of one experiment; `rows` are those it builds on."""
    return catalogue.load(name).trials(name, Plan(batches, seed, rows))


def case(settings, seed=0, data=Path("nowhere")):
    return Case(settings, seed, data, lambda words, share: None)


def row(trial, metrics, status=Status.DONE, outcome="EXACT", seconds=2.0, **more):
    """As it comes back from the disk; without a result unless it is done."""
    done = status is Status.DONE
    return Row(
        trial.key,
        trial.experiment,
        json.loads(json.dumps(trial.settings)),
        trial.seed,
        status,
        outcome if done else None,
        metrics if done else {},
        seconds if done else None,
        took=3.0,
        **{"stages": {}, "error": None if done else "ValueError: no", **more},
    )
