"""`spear audit`: where leakage starts and stops as a protocol is varied, and what defences cost."""

from spear.sweep.examples import forget_examples, keep_examples, kept_examples, pick_examples
from spear.sweep.grid import Grid, default_lists
from spear.sweep.leakage import Leakage, LeakageLevel
from spear.sweep.plan import LEAKAGE, Sweep
from spear.sweep.report import EXPLANATIONS, exit_code, setting_name, sweep_report
from spear.sweep.running import local_engine, sweep, work
from spear.sweep.subject import Subject
from spear.sweep.utility import Training

__all__ = [
    "EXPLANATIONS",
    "LEAKAGE",
    "Grid",
    "Leakage",
    "LeakageLevel",
    "Subject",
    "Sweep",
    "Training",
    "default_lists",
    "exit_code",
    "forget_examples",
    "keep_examples",
    "kept_examples",
    "local_engine",
    "pick_examples",
    "setting_name",
    "sweep",
    "sweep_report",
    "work",
]
