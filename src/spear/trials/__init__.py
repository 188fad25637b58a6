"""Trials, each run once and kept as a row: on this machine's cores or on a Ray cluster.

A trial is an experiment's name, settings and a seed. It draws a private batch (`Batch`), attacks what
the server sees of it (`Attacked`), compares what came back with the truth (`Compared`), and what it
`Measured` becomes a `Row`. Rows are written as they come and never rewritten, so a run that was
killed resumes where it stopped.
"""

from spear.trials.batch import Attacked, Batch, Compared, attack, claims, compare, quality
from spear.trials.demo import DemoRun, DemoSettings, run_demo
from spear.trials.inline import InlineEngine, reraise_interrupts
from spear.trials.local import LocalEngine
from spear.trials.remaining import Remaining
from spear.trials.rows import RowFile
from spear.trials.running import Part, progress_words, reporter
from spear.trials.trial import (
    Engine,
    Measured,
    OnStep,
    Row,
    Status,
    Step,
    Trial,
    Work,
    measure,
    row_without_result,
)

__all__ = [
    "Attacked",
    "Batch",
    "Compared",
    "DemoRun",
    "DemoSettings",
    "Engine",
    "InlineEngine",
    "LocalEngine",
    "Measured",
    "OnStep",
    "Part",
    "Remaining",
    "Row",
    "RowFile",
    "Status",
    "Step",
    "Trial",
    "Work",
    "attack",
    "claims",
    "compare",
    "measure",
    "progress_words",
    "quality",
    "reporter",
    "reraise_interrupts",
    "row_without_result",
    "run_demo",
]
