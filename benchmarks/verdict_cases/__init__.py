"""The updates that `verdicts.py` judges: each family draws its settings from a seed.

A case is an update, and what is true about it. Families that are no honest gradient of the model say
what may be certified all the same: the planted inputs, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from verdict_cases import (
    cells,
    defended,
    foreign,
    hidden,
    honest,
    layers,
    losses,
    odd,
    protocols,
    weights,
)
from verdict_cases.base import Case, Client, client
from verdict_cases.rivals import Rival, rivals

__all__ = ["FAMILIES", "Case", "Client", "Rival", "case", "client", "rivals"]

Family = Callable[[Random], Case]

EARLIER: dict[str, Family] = {
    "exact": honest.exact,
    "trained network": honest.trained_network,
    "deeper layer": honest.deeper_layer,
    "one class": honest.one_class,
    "other losses": honest.other_losses,
    "noisy": defended.noisy,
    "pruned": defended.pruned,
    "quantised": defended.quantised,
    "FedAvg": defended.local_training,
    "clipped": defended.clipped,
    "near-duplicates": hidden.near_duplicates,
    "b >= m": hidden.large_batch,
    "vanishing samples": hidden.vanishing,
    "random matrix": foreign.random_matrix,
    "other model": foreign.other_model,
    "stitched": foreign.stitched,
    "adversarial": foreign.adversarial,
}
DECEIVING: dict[str, Family] = {
    "one cell": cells.one_cell,
    "cancellation": cells.cancellation,
    "opposite labels": cells.opposite_labels,
    "small features": cells.small_features,
    "bias learning rate": weights.bias_rate,
    "uneven weights": weights.uneven,
    "pairs": weights.pairs,
    "wrong learning rate": protocols.wrong_rate,
    "autocast": protocols.autocast,
    "masks": layers.masks,
}
ORDINARY: dict[str, Family] = {
    "soft targets": losses.soft_targets,
    "penalties": losses.penalties,
    "class weights": losses.class_weights,
    "odd losses": losses.odd_losses,
    "aggregates": protocols.aggregates,
    "stale weights": protocols.stale,
    "odd optimisers": protocols.odd_optimisers,
    "dependent samples": layers.dependent,
    "broken rows": layers.broken_rows,
    "b = n": layers.as_many_as_inputs,
    "mixed precisions": protocols.mixed_precisions,
    "architectures": odd.architectures,
    "extremes": odd.extremes,
    "foreign rows": odd.foreign_rows,
}
WRONG_NUMBER: dict[str, Family] = {"wrong number": odd.wrong_number}
FAMILIES: dict[str, Family] = {**EARLIER, **DECEIVING, **ORDINARY, **WRONG_NUMBER}
TOLD = 0.3  # the share of new cases in which the number of samples is told, rightly


def case(family: str, seed: int) -> Case:
    """The update of a family that a seed gives, always the same."""
    drawn = FAMILIES[family](Random(f"{family} {seed}"))
    tell = Random(f"samples {family} {seed}").random() < TOLD
    if not tell or drawn.truth is None or family not in {**DECEIVING, **ORDINARY}:
        return drawn
    if family == "foreign rows":  # of which nobody knows whose they are
        return drawn
    b = len(drawn.truth)
    view = drawn.view.told(samples=b)
    return replace(drawn, view=view, settings={**drawn.settings, "samples": b})
