"""Finders: where the samples of a batch are, as directions in the span of the gradient.

A finder yields growing pools of `Directions`; `invert` selects and judges after each.
`SamplingFinder` is the paper's Algorithm 1, `CascadeFinder` the default. To write your own,
implement `Finder`.
"""

from spear.search.candidates import CandidatePool
from spear.search.cascade import CascadeFinder
from spear.search.checking import is_satisfied, made, made_finder, pools_of, users_name
from spear.search.conjugate import smallest_eigenvalues
from spear.search.deadline import Deadline, TimeIsUp
from spear.search.directions import Directions, Finder
from spear.search.dual import SIGN_AGREEMENT, consistent_samples, dual_problem
from spear.search.kernels import (
    INDEPENDENT,
    Rounded,
    certain_zeros,
    redundancy,
    scale,
    smallest_singular,
    sparsest_independent,
    unit,
    zero_margin,
)
from spear.search.parallel import ParallelMap, workers
from spear.search.sampling import SamplingFinder
from spear.search.watch import Progress, Watch

__all__ = [
    "INDEPENDENT",
    "SIGN_AGREEMENT",
    "CandidatePool",
    "CascadeFinder",
    "Deadline",
    "Directions",
    "Finder",
    "ParallelMap",
    "Progress",
    "Rounded",
    "SamplingFinder",
    "TimeIsUp",
    "Watch",
    "certain_zeros",
    "consistent_samples",
    "dual_problem",
    "is_satisfied",
    "made",
    "made_finder",
    "pools_of",
    "redundancy",
    "scale",
    "smallest_eigenvalues",
    "smallest_singular",
    "sparsest_independent",
    "unit",
    "users_name",
    "workers",
    "zero_margin",
]
