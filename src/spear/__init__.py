"""SPEAR: shows, exactly and provably, what a federated-learning update gives away."""

from spear.cascade import CascadeFinder
from spear.certificate import Proof
from spear.directions import Progress
from spear.errors import (
    InvalidFile,
    InvalidOption,
    InvalidReport,
    InvalidUpdate,
    MissingExtra,
    NoAttackableLayer,
    NotExact,
    SpearError,
)
from spear.inversion import Inversion, Outcome, invert
from spear.report import Report, load
from spear.sampling import SamplingFinder
from spear.spread import workers
from spear.update import LayerUpdate, observe

__version__ = "0.1.0"

__all__ = [
    "CascadeFinder",
    "InvalidFile",
    "InvalidOption",
    "InvalidReport",
    "InvalidUpdate",
    "Inversion",
    "LayerUpdate",
    "MissingExtra",
    "NoAttackableLayer",
    "NotExact",
    "Outcome",
    "Progress",
    "Proof",
    "Report",
    "SamplingFinder",
    "SpearError",
    "invert",
    "load",
    "observe",
    "workers",
]
