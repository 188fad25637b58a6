"""The paper's tables and figures: what the files in `experiments/` share.

An experiment declares a grid of trials, how one is measured, and how rows are drawn. `reproduce` runs
what is missing and draws what is there; drawing computes nothing again.
"""

from spear.paper.drawing import Drawing, Plot, Table
from spear.paper.experiment import Case, Experiment, Plan

__all__ = ["Case", "Drawing", "Experiment", "Plan", "Plot", "Table"]
