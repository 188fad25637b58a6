"""The low-rank factors of an update: rank, noise level and bases, streamed where the layer is large."""

from spear.factors.combining import Combination, combine
from spear.factors.factorisation import Factors, Side, factorise, leading_part
from spear.factors.history import RoundHistory
from spear.factors.penalty import without_penalty
from spear.factors.spectrum import batch_size_from, rounding_of

__all__ = [
    "Combination",
    "Factors",
    "RoundHistory",
    "Side",
    "batch_size_from",
    "combine",
    "factorise",
    "leading_part",
    "rounding_of",
    "without_penalty",
]
