"""Parts of a batch: what can be said of the samples found while others are missing."""

from __future__ import annotations

from torch import Tensor

from spear import theory
from spear.factors import Factors
from spear.judge.selection import Selection, select
from spear.search import SIGN_AGREEMENT, Directions, Watch, consistent_samples, dual_problem, unit
from spear.tolerances import MISSING_TO_FOUND_RATIO, PART_CHANCE, PATTERN_AGREES_NOISY


def select_part(
    factors: Factors, pool: Directions, watch: Watch
) -> tuple[Factors, Selection | None]:
    """The samples found, with everything they do not explain taken for noise; None if that is loud.

    Gradients of a trained network span many orders of magnitude, and the faintest samples drown. The
    others are x = D^+ dL/dW, off by no more than what is left over.
    """
    if not 0 < len(pool) < factors.b or pool.side.name != "outputs":
        return factors, None
    white = unit(pool.vectors * pool.side.scales[:, None], 0)  # (b, k)
    part = factors.restricted_to(white.T)
    if float(part.spectrum[-1]) > MISSING_TO_FOUND_RATIO * float(part.singular_values[0]):
        return factors, None
    live = part.left[part.live_rows]
    inside = unit((live.T @ (pool.side.white @ white)) / part.singular_values[:, None], 0)  # (k, k)
    directions = Directions(part.outputs, inside, pool.zeros, pool.redundancy)
    chosen = select(part, directions, watch)
    return (part, chosen) if chosen is not None else (factors, None)


def approximate_inputs(factors: Factors, pool: Directions) -> Tensor:
    """C (k, b) of samples read from their pattern alone, X ~ C R, where some of the b were not found.

    Empty if there are too few rows for a pattern to say anything, or if the zeros are the inputs'.
    """
    by_chance = theory.pattern_by_chance(len(pool.side.basis), factors.b)
    if pool.side.name != "outputs" or by_chance > PART_CHANCE:
        return pool.vectors.T[:0]
    white = unit((pool.vectors * pool.side.scales[:, None]).T)
    agrees = SIGN_AGREEMENT if not factors.noisy else PATTERN_AGREES_NOISY
    _, c = consistent_samples(dual_problem(factors), white, pool.zeros.T, agrees)
    h = factors.bias_coordinates * factors.singular_values
    return c / (c @ h)[:, None] * factors.singular_values
