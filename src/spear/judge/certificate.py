"""The sole judge of "exact": what can be proved about recovered samples, without ground truth.

PATTERN needs the layer only: every condition that a true sample must meet. REPLAY needs the model:
each sample is run through it, the label whose gradient is the recovered column of dL/dZ is found,
and the whole update is computed again from recovered inputs and labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.factors import Factors
from spear.judge.causes import Proof
from spear.judge.free_targets import compares_numbers, replay_numbers
from spear.judge.layer import (
    outside_next_layer,
    pattern_holds,
    precise_enough,
    predicted_error,
    signs_hold,
    telling,
    uncontaminated,
)
from spear.judge.replay import Loss, Replay, Replayed
from spear.judge.selection import Selection
from spear.judge.training import Retrained, retrain

_UNSEEN = (
    "the layer alone cannot show whether a sample is the mean of several that are nearly the same, "
    "nor whether its weight and bias gradients were clipped apart"
)


@dataclass(frozen=True, eq=False)
class Certificate:
    """The evidence on each selected sample."""

    certified: Tensor  # (b,) bool
    proof: Proof
    predicted_error: Tensor  # (b,) standard deviation of an input's error
    precise: Tensor  # (b,) bool: is that error small enough to speak of exact?
    labels: Tensor | None  # (b,) int64, -1 where no label matched; None without a model
    whole: bool  # all samples certified, and the update as a whole agrees
    doubts: tuple[str, ...]  # what speaks against a stronger verdict
    remark: str  # what the proof leaves out


def certify(
    factors: Factors,
    selection: Selection,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Certificate:
    """Judge a selection: by replay if a model is given and can be run, else by pattern."""
    error = predicted_error(factors, selection)
    size = selection.C.norm(dim=1) / math.sqrt(factors.view.inputs)  # root mean square, (b,)
    precise = precise_enough(factors, selection, error)
    if factors.noisy and not bool(precise.any()):
        no = torch.zeros_like(precise)
        return Certificate(no, Proof.NONE, error, precise, None, False, (), "")
    if factors.view.training is not None and not factors.view.training.one_step:
        retrained = _retrained(factors, selection, model, loss)
        return _of_training(selection, retrained, error, precise)
    outside = outside_next_layer(factors, selection)
    certified, doubts = pattern_holds(factors, selection, outside)
    replayed: Replayed | str = "no model was given"
    known = factors.view.model if model is None else model
    if known is not None:
        replayed = Replay.attempt(
            factors,
            selection,
            known,
            loss,
            relative_error=error / size,
            use=lambda replay: (
                replay_numbers(replay) if compares_numbers(loss) else replay.run(generator)
            ),
        )
    labels, proof, whole = None, Proof.PATTERN, True
    # A replay stands in for redundancy, not for the signs or the bias gradient.
    by_signs = signs_hold(factors, selection) & ~outside
    if model is None:
        if not isinstance(replayed, str) and replayed.agrees and telling(selection):
            certified = by_signs  # for those whose zeros leave nothing to spare
        certified, doubts, whole = _not_refuted(replayed, certified, doubts)
        remark = _UNSEEN
    elif isinstance(replayed, str):
        remark = f"no replay: {replayed}; {_UNSEEN}"
    else:
        if replayed.compared:
            proof, certified = Proof.REPLAY, by_signs
        certified, doubts = _by_replay(selection, replayed, certified, doubts)
        remark, whole = _left_out(replayed), not replayed.vanished
        if replayed.labels is not None:
            labels = torch.where(replayed.matched, replayed.labels, -1)
    doubts = (*doubts, *_faint(certified, precise))
    certified = certified & precise
    whole = whole and bool(certified.all())
    proof = proof if bool(certified.any()) else Proof.NONE
    return Certificate(certified, proof, error, precise, labels, whole, doubts, remark)


def _not_refuted(
    replayed: Replayed | str, certified: Tensor, doubts: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...], bool]:
    """What a replay that proves nothing leaves of what was certified, and whether samples are missing.

    The loss is not known. But where a gradient is that of cross-entropy, the others must be so, too,
    and their weights tell of samples that have merged or vanished.
    """
    if isinstance(replayed, str) or not bool(replayed.matched.any()):
        return certified, doubts, True
    unlike = int((certified & ~replayed.matched).sum())
    if unlike:
        doubts = (*doubts, f"{unlike} of them match no label, though others do")
    if replayed.vanished:
        doubts = (*doubts, _vanished(replayed.vanished, len(certified)))
    if bool(replayed.merged.any()):
        doubts = (*doubts, _merged(int(replayed.merged.sum())))
    return certified & replayed.matched & ~replayed.merged, doubts, not replayed.vanished


def _by_replay(
    selection: Selection, replayed: Replayed, certified: Tensor, doubts: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """What the replay leaves of what was certified, and the doubts it raises."""
    certified = certified & replayed.matched
    doubts = _doubts_of(replayed, certified, doubts)
    if replayed.vanished:
        doubts = (*doubts, _vanished(replayed.vanished, len(certified)))
    if bool(replayed.merged.any()):
        doubts = (*doubts, _merged(int(replayed.merged.sum())))
        certified = certified & ~replayed.merged
    if replayed.objections:
        return torch.zeros_like(certified), doubts
    if selection.directions.side.name == "outputs" and not bool(certified.all()):
        # Gradients hardly notice a small share of a wrong direction in an input.
        certified = certified & uncontaminated(selection, certified)
    return certified, doubts


def _left_out(replayed: Replayed) -> str:
    """What a replay does not show."""
    if replayed.free_targets:
        # Any weight fits a gradient at the outputs that is free.
        return f"{_UNSEEN}, and targets that are numbers do not tell whether samples have vanished"
    if not replayed.compared:
        return "no gradient of a later layer to compare, so the replay only gave labels"
    return ""


def _faint(certified: Tensor, precise: Tensor) -> tuple[str, ...]:
    """In words: how many samples are right, but not known well enough to be called exact."""
    faint = int((certified & ~precise).sum())
    words = f"{faint} of {len(precise)} samples are too faint against the update's noise"
    return (words,) if faint else ()


def _retrained(
    factors: Factors, selection: Selection, model: nn.Module | None, loss: Loss | None
) -> Retrained | str:
    if model is None:
        return "no model was given"
    return retrain(factors, selection, model, loss)


def _of_training(
    selection: Selection, retrained: Retrained | str, error: Tensor, precise: Tensor
) -> Certificate:
    """After several local steps signs and zeros need not match: only repeating them proves."""
    no = torch.zeros_like(precise)
    doubts: tuple[str, ...]
    if isinstance(retrained, str):
        doubts = (f"several local steps are proved only by repeating them, and {retrained}",)
        return Certificate(no, Proof.NONE, error, precise, None, False, doubts, "")
    firm = (selection.directions.firmness > 0) | retrained.closely
    certified, doubts = retrained.matched & firm, retrained.objections
    if not bool(certified.all()):
        lost = int((~certified).sum())
        words = f"repeating the local training does not confirm {lost} of {len(certified)} samples"
        doubts = (words, *doubts)
    if not bool((retrained.recognised & firm).all()):
        certified = certified & uncontaminated(selection, retrained.recognised & firm)
    if retrained.objections:
        certified = no
    doubts = (*doubts, *_faint(certified, precise))
    certified = certified & precise
    labels = torch.where(retrained.matched, retrained.labels, -1)
    proof = Proof.REPLAY if bool(certified.any()) else Proof.NONE
    remark = f"{retrained.epochs} local epoch{'s' * (retrained.epochs != 1)} repeated"
    whole = bool(certified.all())
    return Certificate(certified, proof, error, precise, labels, whole, doubts, remark)


def _vanished(count: int, shown: int) -> str:
    return (
        f"the gradients were divided by {shown + count}, so {count} more samples than the {shown} that "
        "show were in the batch: their gradient has vanished, and nothing is known of them"
    )


def _merged(count: int) -> str:
    return (
        f"{count} of the samples weighs as much as several others, or too few others match to compare: "
        "it may be the mean of samples so nearly the same that the update does not tell them apart"
    )


def _doubts_of(
    replayed: Replayed, certified: Tensor, by_pattern: tuple[str, ...]
) -> tuple[str, ...]:
    lost = int((~replayed.matched).sum())
    if not lost:
        return replayed.objections if bool(certified.all()) else (*by_pattern, *replayed.objections)
    return (
        *by_pattern,
        *replayed.objections,
        f"the gradient of {lost} of {len(certified)} samples matches no label in the replay "
        "(other weights or loss than the client's, weight and bias clipped apart, or wrong samples)",
    )
