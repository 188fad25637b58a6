"""What the files in `experiments/` share.

An experiment declares a grid of trials, how one is measured, and what is shown of the rows. `reproduce`
runs what is missing and draws what is there; drawing computes nothing again.
"""

from spear.experiments.common.drawing import Plot, Section, table
from spear.experiments.common.experiment import Case, Experiment, Plan

__all__ = ["Case", "Experiment", "Plan", "Plot", "Section", "table"]
