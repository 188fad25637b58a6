"""Many trials, each run once and kept as a row: on this machine's cores or on a Ray cluster.

A trial is an experiment's name, settings and a seed. A row is what came of it. Rows are written as
they come and never rewritten, so that a run which is killed goes on where it stopped.
"""

from spear.trials.local import LocalEngine
from spear.trials.rows import RowFile
from spear.trials.trial import Engine, Measured, Row, Status, Step, Trial

__all__ = ["Engine", "LocalEngine", "Measured", "Row", "RowFile", "Status", "Step", "Trial"]
