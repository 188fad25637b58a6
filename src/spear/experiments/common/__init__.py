"""The paper's tables and figures: what the files in `experiments/` share.

An experiment declares a grid of trials, how one is measured, and how rows are drawn. `reproduce` runs
what is missing and draws what is there; drawing computes nothing again.
"""

from spear.experiments.common.drawing import Drawing, Plot, Table
from spear.experiments.common.experiment import Case, Experiment, Plan

__all__ = ["Case", "Drawing", "Experiment", "Plan", "Plot", "Table"]
