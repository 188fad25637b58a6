"""Many trials, each run once and kept as a row: on this machine's cores or on a Ray cluster.

A trial is an experiment's name, settings and a seed. A row is what came of it. Rows are written as
they come and never rewritten, so that a run which is killed goes on where it stopped.
"""

from spear.trials.demo import DemoRun, DemoSettings, run_demo
from spear.trials.inline import InlineEngine, reraise_interrupts
from spear.trials.local import LocalEngine
from spear.trials.remaining import Remaining
from spear.trials.rows import RowFile, append_line, exclusive_lock, mend_last_line
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
    "DemoRun",
    "DemoSettings",
    "Engine",
    "InlineEngine",
    "LocalEngine",
    "Measured",
    "OnStep",
    "Remaining",
    "Row",
    "RowFile",
    "Status",
    "Step",
    "Trial",
    "Work",
    "append_line",
    "exclusive_lock",
    "measure",
    "mend_last_line",
    "reraise_interrupts",
    "row_without_result",
    "run_demo",
]
