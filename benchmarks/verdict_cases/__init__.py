"""The updates that `verdicts.py` judges: each family draws its settings from a seed.

A case is an update, and what is true about it. Families that are no honest gradient of the model say
what may be certified all the same: the planted inputs, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from verdict_cases import batches, networks, updates, weighing
from verdict_cases.base import Case, Client, client
from verdict_cases.rivals import Rival, rivals

__all__ = ["FAMILIES", "Case", "Client", "Rival", "case", "client", "rivals"]

Family = Callable[[Random], Case]

EARLIER: dict[str, Family] = {
    "exact": batches.exact,
    "trained network": batches.trained_network,
    "deeper layer": batches.deeper_layer,
    "one class": batches.one_class,
    "other losses": batches.other_losses,
    "noisy": updates.noisy,
    "pruned": updates.pruned,
    "quantised": updates.quantised,
    "FedAvg": updates.local_training,
    "clipped": updates.clipped,
    "near-duplicates": batches.near_duplicates,
    "b >= m": batches.large_batch,
    "vanishing samples": batches.vanishing,
    "random matrix": updates.random_matrix,
    "other model": updates.other_model,
    "stitched": updates.stitched,
    "adversarial": updates.adversarial,
}
DECEIVING: dict[str, Family] = {
    "one cell": batches.one_cell,
    "cancellation": batches.cancellation,
    "opposite labels": batches.opposite_labels,
    "small features": batches.small_features,
    "bias learning rate": weighing.bias_rate,
    "uneven weights": weighing.uneven,
    "pairs": weighing.pairs,
    "wrong learning rate": updates.wrong_rate,
    "trained apart": updates.trained_apart,
    "autocast": updates.autocast,
    "masks": networks.masks,
}
ORDINARY: dict[str, Family] = {
    "soft targets": weighing.soft_targets,
    "penalties": weighing.penalties,
    "class weights": weighing.class_weights,
    "odd losses": weighing.odd_losses,
    "aggregates": updates.aggregates,
    "stale weights": updates.stale,
    "odd optimisers": updates.odd_optimisers,
    "dependent samples": networks.dependent,
    "broken rows": networks.broken_rows,
    "b = n": networks.as_many_as_inputs,
    "mixed precisions": updates.mixed_precisions,
    "architectures": networks.architectures,
    "extremes": networks.extremes,
    "foreign rows": networks.foreign_rows,
}
WRONG_NUMBER: dict[str, Family] = {"wrong number": networks.wrong_number}
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
