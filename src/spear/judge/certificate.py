"""The only place that says "exact": what is proved about recovered samples, without ground truth.

A sample is certified once every rival explanation of the update has been tried and fails. PATTERN needs
only the layer, and rests on what no layer alone can show, which is listed. REPLAY needs the model: the
update is recomputed from the recovered samples, and from the rivals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import Declined
from spear.factors import Factors
from spear.judge import rivals
from spear.judge.causes import Cause, Proof
from spear.judge.fit import Fit
from spear.judge.layer import (
    Recovered,
    bias_in_span,
    fits_at_another_scale,
    outside_next_layer,
    patterns_are_significant,
    rows_that_tell,
)
from spear.judge.losses import Loss, UserCodeFailed
from spear.judge.replay import declined, replaying
from spear.judge.replay_rounds import fit_rounds
from spear.judge.rivals import Ruling
from spear.judge.selection import Selection
from spear.judge.simulation import Simulated, simulate
from spear.judge.training import Retrained, knows_order, retrain, retrain_in_order_found
from spear.search import TimeIsUp
from spear.update import LayerUpdate

_REPLAY = "replaying the samples, and rival explanations"


@dataclass(frozen=True, eq=False)
class Certificate:
    """The evidence on each selected sample."""

    certified: Tensor  # (b,) bool
    proof: Proof
    predicted_error: Tensor  # (b,) standard deviation of an input's error
    shape_error: Tensor  # (b,) the same but for its scale, relative to its size
    precise: Tensor  # (b,) bool: is that error small enough to speak of exact?
    labels: Tensor | None  # (b,) int64, -1 where no label matched; None without a model
    whole: bool  # all samples certified, and as many as were told
    cause: Cause
    doubts: tuple[str, ...]  # what speaks against a stronger verdict, a sentence or two each
    assumptions: tuple[str, ...]  # what the verdict rests on and could not test
    remark: str  # what else is worth saying


def certify(
    factors: Factors,
    selection: Selection,
    *,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Certificate:
    """Judge a selection: by replay if the model runs and explains the update, otherwise by pattern.

    Args:
        factors: of the update.
        selection: the b samples.
        loss: the client's, if it was told.
        generator: for neighbours of a sample at which a replay is tried again.
        tell: called with a few words on each step as it starts.
    """
    found = Recovered(factors, selection)
    if factors.noisy and not bool(found.precise.any()):
        return _composed(found, [_imprecise(found)], Proof.NONE)
    protocol = factors.protocol
    rounds = factors.view.rounds
    if rounds is not None and rounds.trained:
        words = "several local steps in every round are not repeated, so nothing is proved"
        unproved = _unproved(found, Cause.TRAINING, (words,))
        if rounds.steps_told:
            return unproved
        tell(_REPLAY)
        single = _of_one_step(found, loss, generator)  # as below: nobody said how many there were
        return single if bool(single.certified.any()) else unproved
    if protocol.one_step:
        tell(_REPLAY)
        return _of_one_step(found, loss, generator)
    tell("repeating the local training")
    repeated = _of_training(found, loss)
    if not repeated.whole:
        repeated = _best_of_simulations(found, loss, repeated, tell)
    if repeated.whole or protocol.steps is not None or protocol.mini_batches:
        return repeated
    # Nobody said how many steps there were. The proof for one step holds at any learning rate.
    tell(_REPLAY)
    single = _of_one_step(found, loss, generator)
    return single if single.certified.sum() > repeated.certified.sum() else repeated


def _best_of_simulations(
    found: Recovered, loss: Loss | None, repeated: Certificate, tell: Callable[[str], None]
) -> Certificate:
    """Where the training does not repeat: simulated, or in the order that simulations lead to."""
    tell("simulating clients")
    simulated = simulate(found, loss)
    if isinstance(simulated, Declined):
        return repeated
    by_pattern = _of_training_by_pattern(found, simulated)
    if by_pattern.certified.sum() > repeated.certified.sum() or not knows_order(found):
        repeated = by_pattern
    if repeated.whole or not simulated.order_may_explain:
        return repeated
    tell("looking for the order of the samples")
    ordered = _of_training_in_order_found(found, loss)
    if ordered is None or not ordered.certified.sum() > repeated.certified.sum():
        return repeated
    return ordered


def certify_either_sign(
    factors: Factors,
    selection: Selection,
    loss: Loss | None,
    generator: torch.Generator,
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[Factors, Certificate, str]:
    """What is proved of the update or of its negative; and what was said wrongly."""
    view = factors.view
    judged = certify(factors, selection, loss=loss, generator=generator, tell=tell)
    if view.model is None or not _may_be_negated(view, judged):
        return factors, judged, view.mistake
    negated = factors.negated
    other = certify(negated, selection, loss=loss, generator=generator, tell=tell)
    if other.labels is None or not bool(other.certified.any()):
        return factors, judged, view.mistake
    return negated, other, view.mistake or _negated_words(view)


def _may_be_negated(view: LayerUpdate, certificate: Certificate) -> bool:
    """Might the update have the other sign? The inputs stay the same, but no loss with labels fits."""
    told = view.protocol.sends == "weights" and not view.mistake  # whose sign is beyond doubt
    fits = certificate.labels is not None and bool((certificate.labels >= 0).any())
    return not fits and not certificate.whole and not told


def _negated_words(view: LayerUpdate) -> str:
    if view.trained:
        return "the difference has the opposite sign, before minus after: read that way"
    return (
        "this was given as a gradient, but it has the sign of a difference, after minus before: "
        "read as a difference"
    )


def _of_one_step(
    found: Recovered, loss: Loss | None, generator: torch.Generator | None
) -> Certificate:
    """The gradient of one batch at weights that are known."""
    try:
        with replaying():
            return _by_replay(found, loss, generator)
    except UserCodeFailed as failed:
        return _by_pattern(found, declined(failed).reason)


def _by_replay(
    found: Recovered, loss: Loss | None, generator: torch.Generator | None
) -> Certificate:
    """With the model, as far as it runs."""
    fit = fit_rounds(found, loss, generator=generator)
    if found.view.dropout and not isinstance(fit, Declined) and fit.agrees and fit.dimensions > 1:
        found = Recovered(found.factors, found.selection, replayed=True)  # with smaller errors
        fit = fit_rounds(found, loss, generator=generator)
    if isinstance(fit, Declined):
        return _by_pattern(found, fit.reason)
    if fit.labels is None and not fit.has_later:
        return _by_pattern(found, "there is no gradient of a later layer to compare")
    if not fit.usable or (fit.labels is None and not fit.can_compare):
        return _unfit(found, fit)
    rulings = [
        rivals.mix(found, fit),
        rivals.contradicted(fit),
        rivals.scale(found, fit),
        rivals.merge(found, fit),
        *_of_the_layer(found, fit),
        _imprecise(found),
    ]
    labels = None if fit.labels is None else torch.where(fit.matched, fit.labels, -1)
    proof = Proof.REPLAY if fit.can_compare else Proof.PATTERN
    remark = _other_rate(found, fit) if fit.told or fit.labels is not None else _ANY_LOSS
    return _composed(found, rulings, proof, labels, remark)


def _other_rate(found: Recovered, fit: Fit) -> str:
    """That one local step was not as long as the learning rate told makes it; else empty."""
    view, protocol = found.view, found.view.protocol
    told = (
        view.trained and protocol.given("lr") and not protocol.given("clip", "clients", "reduction")
    )
    if not told or view.rounds is not None or fit.weights is None or not fit.agrees:
        return ""
    ratio = float(fit.weights.median()) * (view.samples or found.b) / found.b
    if 2 * fit.weighing_alike <= found.b or abs(ratio - 1) <= float(fit.weight_error.max()):
        return ""
    return (
        f"the client's step was {ratio:.3g} times as long as the learning rate that was told makes it: "
        f"either its rate was {ratio * protocol.rate:.3g} and not {protocol.rate:g}, or its loss was "
        "summed, what it sent was scaled, or samples left no trace. What was recovered is the same at "
        "any rate"
    )


_ANY_LOSS = (
    "no known loss explains the update, but a loss with some other gradient at the outputs does: name "
    "the client's loss (loss=) to get labels"
)


def _by_pattern(found: Recovered, why: str) -> Certificate:
    """With only the layer to go by."""
    rulings = [
        rivals.mix(found, None),
        rivals.scale(found, None),
        rivals.merge(found, None),
        *_of_the_layer(found, None),
        _imprecise(found),
    ]
    remark = "" if found.view.model is None else f"no replay: {why}"
    return _composed(found, rulings, Proof.PATTERN, remark=remark)


def _of_the_layer(found: Recovered, fit: Fit | None) -> list[Ruling]:
    """What must hold of the whole layer before anything in it is believed."""
    factors, selection = found.factors, found.selection
    everyone = torch.ones(selection.b, dtype=torch.bool, device=selection.C.device)
    replayed = fit is not None and fit.agrees and fit.dimensions > 1
    scaled = everyone & bias_in_span(factors)
    if selection.unscaled is not None:
        scaled = ~selection.unscaled
    no_scale = Ruling(
        Cause.UNFIT,
        scaled,
        "have a scale that the bias gradient does not give. Likely causes: an input that is all zero, "
        "inputs that depend on each other linearly, or the bias gradient of another batch",
    )
    if not factors.view.has_bias:
        no_scale = Ruling(Cause.SCALE, scaled, rivals.NO_BIAS)
    unknown = outside_next_layer(found)
    return [
        Ruling(
            Cause.NARROW,
            everyone & (replayed or patterns_are_significant(found)),
            f"cannot be judged: {rows_that_tell(found)} rows prove nothing about {selection.b} samples"
            f"{', since dropout hides the others' * bool(found.view.dropout)}. Attack a wider layer",
        ),
        no_scale,
        _clipped_apart(found),
        Ruling(
            Cause.SCALE,
            everyone & (not bool(unknown.any())),
            f"do not fit the next layer's gradient ({int(unknown.sum())} at this scale). Likely "
            "causes: dropout behind this layer, or weight and bias gradients that were clipped "
            "apart",
        ),
    ]


def _clipped_apart(found: Recovered) -> Ruling:
    """Were weight and bias gradients clipped by different factors, as told or as the signs show?"""
    factors, selection = found.factors, found.selection
    everyone = torch.ones(found.b, dtype=torch.bool, device=selection.C.device)
    apart = factors.view.clipped_apart or fits_at_another_scale(factors, selection)
    words = (
        "are known only up to a factor each, since weight and bias gradients were clipped apart "
        "(per-layer clipping)"
        if factors.view.clipped_apart
        else "fit their zeros only at a scale that the bias gradient does not give. Likely causes: "
        "weight and bias gradients were clipped apart (per-layer clipping), or come from different "
        "batches"
    )
    return Ruling(Cause.SCALE, everyone & (not apart), words)


def _imprecise(found: Recovered) -> Ruling:
    words = "are too faint against the update's noise to be called exact"
    return Ruling(Cause.IMPRECISE, found.precise, words)


def _unfit(found: Recovered, fit: Fit) -> Certificate:
    """A replay that explains nothing does not speak against a sample, but proves nothing either."""
    if not fit.is_precise:
        words = "the update is too coarse or too noisy for a replay to show anything"
        return _unproved(found, Cause.IMPRECISE, (words,))
    if not found.view.has_bias:
        return _unproved(found, Cause.SCALE, (f"{found.b} of {found.b} samples {rivals.NO_BIAS}",))
    apart = _clipped_apart(found)
    if not bool(apart.excluded.all()):
        return _unproved(found, Cause.SCALE, (f"{found.b} of {found.b} samples {apart.words}",))
    words = (
        "the model does not reproduce the update with any loss, so another scale or merged samples "
        "may explain it as well. "
    )
    if found.view.idle_dropout:
        words += (
            f"Likely cause: the client's dropout ({found.view.idle_dropout!r}), which is switched off "
            "in this model: give it in train mode"
        )
        return _unproved(found, Cause.DROPOUT, (words, *fit.disagreements[:1]))
    words += (
        "Likely causes: weights of another round than the client's, clipping by layer, or another "
        "network behind the layer"
    )
    return _unproved(found, Cause.UNFIT, (words, *fit.disagreements[:1]))


def _unproved(found: Recovered, cause: Cause, doubts: tuple[str, ...]) -> Certificate:
    no = torch.zeros_like(found.precise)
    return Certificate(
        no,
        Proof.NONE,
        found.error,
        found.shape_error,
        found.precise,
        None,
        False,
        cause,
        doubts,
        (),
        "",
    )


def _composed(
    found: Recovered,
    rulings: list[Ruling],
    proof: Proof,
    labels: Tensor | None = None,
    remark: str = "",
) -> Certificate:
    """What all rulings together leave."""
    certified = torch.ones_like(found.precise)
    cause, doubts = Cause.PROVED, list[str]()
    if found.view.clipped_apart:  # told: whatever else does not fit likely follows from it
        rulings = [_clipped_apart(found), *rulings]
    excluded = torch.stack(
        [certified, *(ruling.excluded for ruling in rulings)]
    )  # (1 + rulings, b)
    for ruling, lost in zip(rulings, (~excluded).sum(1).tolist()[1:], strict=True):
        if lost:
            cause = ruling.cause if cause is Cause.PROVED else cause
            doubts.append(f"{lost} of {found.b} samples {ruling.words}")
    certified = excluded.all(0)
    missing = (rivals.missing(found.factors), *(ruling.missing for ruling in rulings))
    lacking = [words for words in missing if words]
    if lacking:
        cause = Cause.MISSING if cause is Cause.PROVED else cause
        doubts += lacking
    whole = bool(certified.all()) and not lacking
    assumptions = tuple(dict.fromkeys(words for ruling in rulings for words in ruling.assumptions))
    proof = proof if bool(certified.any()) else Proof.NONE
    return Certificate(
        certified,
        proof,
        found.error,
        found.shape_error,
        found.precise,
        labels,
        whole,
        cause,
        tuple(dict.fromkeys(doubts)),
        assumptions,
        remark,
    )


def _penalty(told: float, length: float) -> str:
    """A penalty as a cause of steps of another length, to end a list with."""
    if told:
        return (
            f", or a proximal term other than {told:g} / 2 times the squared change of the weights"
        )
    untold = ", or a penalty on their change that was not told (FedProx: give proximal=)"
    return untold if length < 1 else ""


def _of_training(found: Recovered, loss: Loss | None) -> Certificate:
    """After several local steps signs and zeros need not match: the steps are repeated."""
    retrained = retrain(found, loss)
    told = found.view.samples
    nothing = isinstance(retrained, Declined) or not bool(retrained.matched.any())
    if nothing and told is not None and found.b > told and not found.view.reads_data:
        words = (
            f"{found.b} inputs of the layer show, and {told} samples were told: the layers before it "
            "were trained as well, so that every local step gave it other inputs"
        )
        return _unproved(found, Cause.TRAINING, (words,))
    if nothing and told is not None and found.b > told:
        words = (
            f"{found.b} samples show, and {told} were told. Likely cause: random augmentation, which "
            "makes another version of a sample in every epoch, so that the training cannot be repeated"
        )
        return _unproved(found, Cause.AUGMENTED, (words,))
    if isinstance(retrained, Declined):
        words = f"several local steps are proved by repeating them, and {retrained.reason}"
        cause = Cause.DROPOUT if found.view.dropout else Cause.TRAINING
        return _unproved(found, cause, (words,))
    if nothing and retrained.other_rate is not None:
        words = (
            "repeating the local training changes the same neurons, but the client went "
            f"{retrained.other_rate:.2g} times as far. Likely causes: a learning rate that changes "
            "from step to step (give lr= one for each), clipping, another learning rate, momentum or "
            f"number of epochs{_penalty(found.view.protocol.proximal, retrained.other_rate)}"
        )
        return _unproved(found, Cause.SCHEDULE, (words,))
    return _of_repetition(found, retrained)


def _of_repetition(found: Recovered, retrained: Retrained) -> Certificate:
    """What a repeated training shows."""
    determined = (found.selection.directions.redundancy > 0) | retrained.closely
    repeated = retrained.matched & determined & (not retrained.objections)
    if not bool((retrained.recognised & determined).all()):
        repeated = repeated & rivals.unmixed(found, retrained.recognised & determined)
    words = "; ".join(
        ["are not confirmed by repeating the local training", *retrained.objections[:1]]
    )
    rulings = [
        Ruling(Cause.TRAINING, repeated, words),
        rivals.scale_in_training(found, retrained.off),
        rivals.merge_in_training(found, retrained.dimensions),
        _imprecise(found),
    ]
    labels = torch.where(retrained.matched, retrained.labels, -1)
    remark = f"{retrained.epochs} local epoch{'s' * (retrained.epochs != 1)} repeated"
    return _composed(found, rulings, Proof.REPLAY, labels, remark)


def _of_training_in_order_found(found: Recovered, loss: Loss | None) -> Certificate | None:
    """Several epochs of mini-batches, repeated in the order that comes nearest; None without one."""
    try:
        retrained = retrain_in_order_found(found, loss)
    except TimeIsUp:  # what was proved without it stands
        return None
    return None if isinstance(retrained, Declined) else _of_repetition(found, retrained)


def _of_training_by_pattern(found: Recovered, simulated: Simulated) -> Certificate:
    """Several local steps that cannot be repeated to the bit: order, rounding.

    Every zero of a direction says that its sample was off in all of its steps, every other entry that
    it was on in one. Training in an order of our own says where that is so, up to what the order
    changes; entries that it may decide count for nothing. The zeros that are left hold the direction,
    and the bias gradient its scale, as after one step. The simulation also shows that no trace weighs
    as several samples, and that weights and biases moved alike.
    """
    known = simulated.recognised
    rulings = [
        Ruling(
            Cause.TRAINING,
            known,
            "are changed otherwise by the local training, simulated as it was told"
            + ", in mini-batches of any order" * (not simulated.ordered),
        ),
        rivals.mix_in_training(found, simulated),
        rivals.scale_of_all(found, simulated),
        rivals.merge_in_simulation(found, simulated),
        _imprecise(found),
    ]
    labels = torch.where(known, simulated.labels, -1)
    return _composed(found, rulings, Proof.PATTERN, labels, "the local training was simulated")
