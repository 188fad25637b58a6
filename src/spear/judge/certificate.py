"""The sole judge of "exact": what is proved about recovered samples, without ground truth.

A sample is certified when every rival explanation of the update has been tried, and fails. PATTERN
needs the layer only, and rests on what no layer alone can show, which is listed. REPLAY needs the
model: the update is computed again from recovered samples, and from the rivals.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.factors import Factors
from spear.judge import rivals
from spear.judge.causes import Cause, Proof
from spear.judge.layer import (
    bias_in_span,
    fits_at_another_scale,
    outside_next_layer,
    patterns_tell,
    precise_enough,
    predicted_error,
    sizes,
)
from spear.judge.replay import Fit, Loss, weigh_losses
from spear.judge.rivals import Ruling
from spear.judge.selection import Selection
from spear.judge.training import Retrained, retrain


@dataclass(frozen=True, eq=False)
class Certificate:
    """The evidence on each selected sample."""

    certified: Tensor  # (b,) bool
    proof: Proof
    predicted_error: Tensor  # (b,) standard deviation of an input's error
    precise: Tensor  # (b,) bool: is that error small enough to speak of exact?
    labels: Tensor | None  # (b,) int64, -1 where no label matched; None without a model
    whole: bool  # all samples certified, and as many as were told
    cause: Cause
    doubts: tuple[str, ...]  # what speaks against a stronger verdict
    assumptions: tuple[str, ...]  # what the verdict rests on and could not test
    remark: str  # what else is worth saying


def certify(
    factors: Factors,
    selection: Selection,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Certificate:
    """Judge a selection: by replay where the model can be run and explains the update, else by pattern.

    Args:
        factors: of the update.
        selection: the b samples.
        model: the client's, if not the one that `observe` was given.
        loss: the client's, if it was told.
        generator: for neighbours at which a replay is tried again.
    """
    error = predicted_error(factors, selection)
    precise = precise_enough(factors, selection, error)
    model = factors.view.model if model is None else model
    if factors.noisy and not bool(precise.any()):
        return _composed([_imprecise(precise)], error, precise, Proof.NONE)
    if factors.view.training is not None and not factors.view.training.one_step:
        return _of_training(factors, selection, error, precise, model, loss)
    fit: Fit | str = "no model was given"
    if model is not None:
        relative = error / sizes(factors, selection)
        fit = weigh_losses(
            factors, selection, model, loss, relative_error=relative, generator=generator
        )
    if isinstance(fit, str):
        return _by_pattern(factors, selection, error, precise, fit)
    if not fit.usable:
        return _unfit(fit, error, precise)
    rulings = [
        rivals.mix(factors, selection, fit),
        rivals.contradicted(fit),
        rivals.scale(factors, selection, fit),
        rivals.merge(factors, selection, fit),
        *_of_the_layer(factors, selection),
        _imprecise(precise),
    ]
    labels = None if fit.labels is None else torch.where(fit.matched, fit.labels, -1)
    proof = Proof.REPLAY if fit.replay.compared else Proof.PATTERN
    remark = "" if fit.told or fit.labels is not None else _ANY_LOSS
    return _composed(
        rulings, error, precise, proof, labels, missing=rivals.missing(factors), remark=remark
    )


_ANY_LOSS = (
    "no loss that is known explains the update, but one whose gradient at the outputs can be anything "
    "does; name the client's loss if labels are wanted"
)


def _by_pattern(
    factors: Factors, selection: Selection, error: Tensor, precise: Tensor, why: str
) -> Certificate:
    """With the layer alone."""
    rulings = [
        rivals.mix(factors, selection, None),
        rivals.scale(factors, selection, None),
        rivals.merge(factors, selection, None),
        *_of_the_layer(factors, selection),
        _imprecise(precise),
    ]
    remark = "" if factors.view.model is None else f"no replay: {why}"
    return _composed(
        rulings, error, precise, Proof.PATTERN, missing=rivals.missing(factors), remark=remark
    )


def _of_the_layer(factors: Factors, selection: Selection) -> list[Ruling]:
    """What must hold of the whole layer before anything in it is believed."""
    everyone = torch.ones(selection.b, dtype=torch.bool, device=selection.C.device)
    side = selection.directions.side
    scaled = everyone & bias_in_span(factors)
    if selection.spoilt is not None:
        scaled = ~selection.spoilt
    ruled = [
        Ruling(
            Cause.NARROW,
            everyone & patterns_tell(selection),
            f"cannot be judged: {len(side.basis)} live rows prove nothing about {selection.b} samples; "
            "attack a wider layer",
        ),
        Ruling(
            Cause.UNFIT,
            scaled,
            "have a scale that the bias gradient does not give: it is no combination of theirs (an input "
            "that is zero, inputs that depend on each other linearly, or another batch's)",
        ),
    ]
    apart = factors.view.clipped_apart or fits_at_another_scale(factors, selection)
    words = (
        "weight and bias gradients were clipped apart (per-layer clipping), so the bias gradient does "
        "not give a sample's scale: each may be right but for one factor"
        if factors.view.clipped_apart
        else "fit their zeros at another scale only than the bias gradient gives: weight and bias "
        "gradients were clipped apart (per-layer clipping), or are not of one batch"
    )
    ruled.append(Ruling(Cause.SCALE, everyone & (not apart), words))
    unknown = outside_next_layer(factors, selection)
    known = everyone & (not bool(unknown.any()))
    ruled.append(
        Ruling(
            Cause.SCALE,
            known,
            f"are not what the next layer's gradient knows ({int(unknown.sum())} at this scale): weight "
            "and bias gradients were clipped apart (per-layer clipping), or differ otherwise",
        )
    )
    return ruled


def _imprecise(precise: Tensor) -> Ruling:
    return Ruling(
        Cause.IMPRECISE, precise, "are too faint against the update's noise to be called exact"
    )


def _unfit(fit: Fit, error: Tensor, precise: Tensor) -> Certificate:
    """A replay that explains nothing is no evidence against a sample, but nothing is proved either."""
    no = torch.zeros_like(precise)
    words = (
        "the model does not reproduce the update with any loss, so nothing excludes another scale or "
        "merged samples (other weights than the client's, clipping by layer, or another network "
        "behind the layer)"
    )
    doubts = (words, *fit.disagreements[:1])
    return Certificate(no, Proof.NONE, error, precise, None, False, Cause.UNFIT, doubts, (), "")


def _composed(
    rulings: list[Ruling],
    error: Tensor,
    precise: Tensor,
    proof: Proof,
    labels: Tensor | None = None,
    *,
    missing: str = "",
    remark: str = "",
) -> Certificate:
    """What all rulings together leave."""
    certified = torch.ones_like(precise)
    cause, doubts = Cause.PROVED, []
    for ruling in rulings:
        lost = int((~ruling.excluded).sum())
        if lost:
            cause = ruling.cause if cause is Cause.PROVED else cause
            doubts.append(f"{lost} of {len(precise)} samples {ruling.words}")
        certified = certified & ruling.excluded
    lacking = [words for words in (missing, *(r.missing for r in rulings)) if words]
    if lacking:
        cause = Cause.MISSING if cause is Cause.PROVED else cause
        doubts += lacking
    whole = bool(certified.all()) and not lacking
    assumptions = tuple(dict.fromkeys(words for ruling in rulings for words in ruling.assumptions))
    proof = proof if bool(certified.any()) else Proof.NONE
    return Certificate(
        certified, proof, error, precise, labels, whole, cause, tuple(doubts), assumptions, remark
    )


def _of_training(
    factors: Factors,
    selection: Selection,
    error: Tensor,
    precise: Tensor,
    model: nn.Module | None,
    loss: Loss | None,
) -> Certificate:
    """After several local steps signs and zeros need not match: only repeating them proves."""
    no = torch.zeros_like(precise)
    retrained: Retrained | str = "no model was given"
    if model is not None:
        retrained = retrain(factors, selection, model, loss)
    if isinstance(retrained, str):
        words = f"several local steps are proved only by repeating them, and {retrained}"
        return Certificate(
            no, Proof.NONE, error, precise, None, False, Cause.TRAINING, (words,), (), ""
        )
    firm = (selection.directions.firmness > 0) | retrained.closely
    repeated = retrained.matched & firm & (not retrained.objections)
    if not bool((retrained.recognised & firm).all()):
        repeated = repeated & rivals.unmixed(factors, selection, retrained.recognised & firm)
    ruling = Ruling(Cause.TRAINING, repeated, "are not confirmed by repeating the local training")
    merged = rivals.merge_in_training(factors, selection, retrained.dimensions)
    labels = torch.where(retrained.matched, retrained.labels, -1)
    remark = f"{retrained.epochs} local epoch{'s' * (retrained.epochs != 1)} repeated"
    certificate = _composed(
        [ruling, merged, _imprecise(precise)],
        error,
        precise,
        Proof.REPLAY,
        labels,
        missing=rivals.missing(factors),
        remark=remark,
    )
    if not retrained.objections:
        return certificate
    doubts = (*certificate.doubts, *retrained.objections)
    return dataclasses.replace(certificate, doubts=doubts)
