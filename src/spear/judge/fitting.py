"""Which loss explains the update: the one told, cross-entropy, or any."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spear.errors import Declined
from spear.judge.fit import Fit, LossKind
from spear.judge.layer import Part, Recovered
from spear.judge.losses import (
    Loss,
    compares_numbers,
    is_binary,
    negative_probability,
    usual_loss,
)
from spear.judge.replay import Replay, replaying


@replaying()
def fit_losses(
    found: Recovered,
    loss: Loss | None,
    *,
    generator: torch.Generator | None,
    part: Part | None = None,
) -> Fit | Declined:
    """The first loss that explains the update: the one told, cross-entropy, or any with free targets.

    Losses on probabilities have gradients parallel to those on logits, with other weights: of losses
    that nobody told, one that weighs all samples alike comes before others that explain the update. If
    none explains all of it, the one that matches most samples. If the model cannot be run, why.
    """
    tried: list[Fit] = []
    declined: list[Declined] = []
    for known, kind, free in _hypotheses(loss):
        found.factors.check_time()
        if kind is LossKind.ANY and any(map(_explains, tried)):
            break
        if kind in _OF_PROBABILITIES and not any(fit.replay.squash for fit in tried):
            continue

        def explain(replay: Replay, kind: LossKind = kind, free: bool = free) -> Fit | None:
            if kind is LossKind.TOLD and free and not _may_be_free(loss, replay.outputs):
                return None
            if free:
                return replay.with_free_targets(kind, kind is LossKind.TOLD)
            return replay.labelled(kind, kind is LossKind.TOLD, generator)

        error = found.error / found.sizes
        fit = Replay.attempt(found, known, relative_error=error, use=explain, part=part)
        if isinstance(fit, Declined):
            declined.append(fit)
            continue
        if fit is None:
            continue
        # With one output all targets have parallel gradients: only weights tell numbers from labels.
        unsure = not free and _may_be_free(known, fit.replay.outputs)
        if unsure and not (_explains(fit) and fit.weighs_evenly):
            continue
        tried.append(fit)
        # What was told is believed: without its class weights, say, merged samples might weigh alike.
        if _explains(fit) and (fit.told or fit.labels is None or fit.weighs_evenly):
            return fit
    if not tried:
        too_many = Declined("the network has too many outputs to solve for gradients")
        return declined[0] if declined else too_many
    return max(tried, key=_worth)


_OF_PROBABILITIES = (LossKind.ON_PROBABILITIES, LossKind.NEGATIVE_PROBABILITY)


def _may_be_free(loss: Loss | None, outputs: int) -> bool:
    """May targets be something else than one label for each sample?"""
    return compares_numbers(loss) or (is_binary(loss) and outputs > 1)


def _hypotheses(loss: Loss | None) -> Iterator[tuple[Loss | None, LossKind, bool]]:
    """Losses, what they are, and whether their targets are free."""
    if loss is not None:
        yield loss, LossKind.TOLD, False
    if _may_be_free(loss, outputs=2):
        yield loss, LossKind.TOLD, True
    yield None, LossKind.CROSS_ENTROPY, False
    yield usual_loss, LossKind.ON_PROBABILITIES, False
    yield negative_probability, LossKind.NEGATIVE_PROBABILITY, False
    yield None, LossKind.ANY, True


def _explains(fit: Fit) -> bool:
    """Does it explain all that can be compared?"""
    return fit.agrees or (fit.usable and not fit.compared and fit.labels is not None)


def _worth(fit: Fit) -> tuple[bool, int, bool, int]:
    labelled = fit.labels is not None
    return not fit.disagreements, int(fit.matched.sum()), labelled, fit.weighing_alike
