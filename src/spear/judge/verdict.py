"""From the evidence to a verdict: the outcome it supports, its cause, and the reason in words.

A reason is one sentence, or two: what happened, and the likely cause or the next step. Everything else
goes into the details.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from spear import theory
from spear.factors import Factors
from spear.judge.causes import Cause
from spear.judge.certificate import Certificate
from spear.judge.layer import exceeds_noise
from spear.judge.selection import Selection
from spear.tolerances import LIKELY_MATCH, MOVED_TOO_FAR, ROWS_PER_SAMPLE
from spear.update import ENTRYWISE, NOISE_UNITS, LayerUpdate

_NOT_AS_SAID = (
    "Likely causes: weights of another round than the client's, no ReLU after the layer, an optimiser "
    "other than SGD, or too few neurons; `spear check` says more"
)
_STALE = (
    "Either the client adds noise (then give sigma=), or these are weights of another round: this does "
    "not tell whether data leaks"
)
_DROPPED = (
    "Many neurons have no gradient although a sample switches them on, as dropout leaves it: give the "
    "model in train mode, or dropout= for a layer given directly"
)
_SGD_ONLY = "This attack reads updates of SGD only, so it cannot tell whether data leaks"


class Outcome(Enum):
    """How an inversion ended."""

    EXACT = "exact"  # every sample recovered and certified
    PARTIAL = "partial"  # some samples certified
    APPROXIMATE = "approximate"  # recognisable: a noisy update, or read from patterns alone
    FAILED = "failed"  # attacked properly, nothing recovered
    INCONCLUSIVE = "inconclusive"  # cannot tell: no gap, no time, or not what it was said to be


class SearchEnd(Enum):
    """How a search ended."""

    MATCHED = "every pattern matched"
    GAVE_UP = "the finder gave up"
    TIME = "its time was over"
    INTERRUPTED = "it was interrupted"

    @property
    def cause(self) -> Cause | None:
        """Set if the search, and nothing in the update, is why no more was found."""
        return {SearchEnd.TIME: Cause.TIME, SearchEnd.INTERRUPTED: Cause.INTERRUPTED}.get(self)


_STOPPED = {
    SearchEnd.TIME: (Cause.TIME, "the time was over", "give it more (max_seconds=)"),
    SearchEnd.INTERRUPTED: (Cause.INTERRUPTED, "it was interrupted", "run it again"),
}
_SEARCH_AGAIN = {
    SearchEnd.TIME: "The search ran out of time: give it more (max_seconds=)",
    SearchEnd.INTERRUPTED: "The search was interrupted: run it again",
}


@dataclass(frozen=True)
class SearchSummary:
    """How a search ended, and what the finder says about it."""

    end: SearchEnd
    remarks: tuple[str, ...] = ()

    @property
    def details(self) -> tuple[str, ...]:
        return f"the search ended: {self.end.value}", *self.remarks


@dataclass(frozen=True)
class Verdict:
    """An outcome and why."""

    outcome: Outcome
    cause: Cause
    reason: str
    details: tuple[str, ...] = ()
    returned: bool = True  # is what was recovered worth returning?

    def with_details(self, *more: str) -> Verdict:
        return dataclasses.replace(self, details=(*self.details, *more))


def of_samples(
    factors: Factors,
    selection: Selection,
    certificate: Certificate,
    inputs: Tensor,
    ended: SearchSummary,
) -> Verdict:
    """The outcome that the evidence supports."""
    count, b = int(certificate.certified.sum()), factors.b
    if certificate.whole and not factors.has_unresolved_samples:
        reason = f"all {b} samples that show were recovered, proved by {certificate.proof.value}"
        return Verdict(Outcome.EXACT, Cause.PROVED, reason)
    first, *doubts = (*certificate.doubts, *_unresolved(factors))
    if count:
        cause = Cause.MISSING if certificate.cause is Cause.PROVED else certificate.cause
        reason = f"{count} of {b} samples certified; {first}"
        return Verdict(Outcome.PARTIAL, cause, reason, (*doubts, *ended.details))
    if factors.noisy and not bool(certificate.precise.any()):
        return _of_noisy_samples(factors, certificate, inputs).with_details(*_unresolved(factors))
    dropped = selection.only_extra_zeros and selection.match < 1
    if selection.match >= LIKELY_MATCH or selection.only_extra_zeros:
        found = "1 sample was found that fits" if b == 1 else f"{b} samples were found that fit"
        likely = _likely(factors, certificate)
        reason = (
            f"{found} the update (lambda {selection.match:.3f}), {likely}, but nothing is proved: "
            f"{first}"
        )
        if dropped and certificate.cause is not Cause.SCALE:
            return Verdict(Outcome.APPROXIMATE, Cause.DROPOUT, f"{reason}. {_DROPPED}", (*doubts,))
        return Verdict(Outcome.APPROXIMATE, certificate.cause, reason, tuple(doubts))
    why, words = _why_not(factors, ended)
    reason = (
        f"no samples were found that fit the update (lambda {selection.match:.3f} at best). {words}"
    )
    return _cannot_tell(why, reason, first, *doubts, *ended.details)


def _likely(factors: Factors, certificate: Certificate) -> str:
    """How near the inputs most likely are, in words."""
    moved = not (factors.view.reads_data or factors.protocol.one_step)  # from step to step
    exact = int(certificate.precise.sum()) * (not moved)
    if exact < factors.b:
        return f"{exact or 'none'} of them likely exact"
    return "likely exact" + " but for the scale" * (certificate.cause is Cause.SCALE)


def _of_noisy_samples(factors: Factors, certificate: Certificate, inputs: Tensor) -> Verdict:
    """With too much noise for anything exact: is anything recognisable?"""
    noise = f"the update carries noise of {factors.relative_noise:.1e} of its entries"
    if exceeds_noise(certificate.predicted_error, inputs):
        error = float(certificate.predicted_error.median())
        reason = (
            f"{noise}, too much for an exact recovery: the {factors.b} samples are known to about "
            f"{error:.1e} per input"
        )
        return Verdict(Outcome.APPROXIMATE, Cause.IMPRECISE, reason)
    reason = (
        f"{noise}, in which the {factors.b} samples drown: errors would be as large as they are"
    )
    if _may_be_stale(factors.view):
        return _cannot_tell(Cause.NOISE, f"{reason}. {_STALE}")
    return Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)


def of_unjudged_samples(
    factors: Factors, selection: Selection, ended: SearchSummary, stopped: SearchEnd
) -> Verdict:
    """Samples that a search found, and the judge was stopped before it could prove them."""
    cause, happened, cure = _STOPPED[stopped]
    match = f"(lambda {selection.match:.3f})"
    found = "1 sample was found" if factors.b == 1 else f"{factors.b} samples were found"
    if factors.noisy:
        reason = (
            f"{found} in an update with noise {match}, but {happened} before they could be judged: "
            f"{cure}"
        )
        return Verdict(Outcome.INCONCLUSIVE, cause, reason, ended.details)
    if selection.match >= LIKELY_MATCH or selection.only_extra_zeros:
        reason = (
            f"{found} that fit the update {match}, but {happened} before the samples could be proved: "
            f"{cure}"
        )
        return Verdict(Outcome.APPROXIMATE, cause, reason, ended.details)
    reason = f"no samples that fit the update were found {match} before {happened}: {cure}"
    return _cannot_tell(cause, reason, *ended.details)


def of_no_factors(stopped: SearchEnd) -> Verdict:
    """Stopped before anything was known of the update."""
    cause, happened, cure = _STOPPED[stopped]
    reason = f"{happened} before the samples in the update were counted: {cure}"
    return _cannot_tell(cause, reason)


def of_no_samples(factors: Factors, ended: SearchSummary) -> Verdict:
    """Fewer than b directions, from which no input could be read."""
    cause, words = _why_not(factors, ended)
    batch = "1 sample" if factors.b == 1 else f"{factors.b} samples"
    return _cannot_tell(cause, f"no input of {batch} could be read. {words}", *ended.details)


def _why_not(factors: Factors, ended: SearchSummary) -> tuple[Cause, str]:
    """Why the search found no samples, or not all, and what to do."""
    view, rows = factors.view, int(factors.live_rows.sum())
    narrow = view.rounds is not None or rows < ROWS_PER_SAMPLE * factors.b
    moved = local_movement(factors)
    if moved > MOVED_TOO_FAR:
        words = (
            f"The client's local training moved preactivations by {moved:.0%} of their size, so that "
            "which neurons are off changed on the way: fewer or smaller local steps would show more"
        )
        return Cause.MOVED, words
    if ended.end.cause is not None:
        again = _SEARCH_AGAIN[ended.end]
        return ended.end.cause, f"{again}. {_too_narrow(factors)}" if narrow else again
    if narrow:
        return Cause.NARROW, _too_narrow(factors)
    if view.dropout and (1 - view.dropout) * rows < ROWS_PER_SAMPLE * factors.b:
        words = (
            f"Dropout of {view.dropout:g} leaves each sample few of the layer's {rows} rows: a wider "
            "layer or a smaller batch would show more"
        )
        return Cause.DROPOUT, words
    if view.batch_norm:
        words = (
            f"Likely cause: batch norm ({view.batch_norm!r}, in train mode) couples the samples of a "
            "batch, so that none has a gradient of its own"
        )
        return Cause.UNFIT, words
    return Cause.UNFIT, _NOT_AS_SAID


def local_movement(factors: Factors) -> float:
    """How far several local steps moved preactivations, as a share of their size; 0 for one step."""
    if not factors.trained or factors.protocol.one_step or factors.view.rounds is not None:
        return 0.0
    before, after = factors.before_and_after[0]  # (m, b) each
    size = before.norm(dim=1)[factors.live_rows].clamp_min(1e-300)
    return float(((after - before).norm(dim=1)[factors.live_rows] / size).median())


def of_some_samples(factors: Factors, count: int, ended: SearchSummary) -> Verdict:
    """Fewer than b directions, and the inputs that their patterns alone give."""
    reason = (
        f"{count} of {factors.b} samples were found and read from the pattern of their zeros alone, so "
        f"they are approximate: exact inputs take all {factors.b}"
    )
    cause, words = _why_not(factors, ended)
    if cause is Cause.UNFIT:  # most samples are there: it is what it was said to be
        cause, words = Cause.NARROW, _too_narrow(factors)
    return Verdict(Outcome.APPROXIMATE, cause, f"{reason}. {words}", ended.details)


def _too_narrow(factors: Factors, samples: int | None = None) -> str:
    """What would help a layer that does not tell the samples apart, in words."""
    rounds = factors.view.rounds
    if rounds is None:
        if not factors.view.reads_data:
            return "The layer is too narrow for the batch: attack a wider one"
        needed = theory.rounds_needed(samples or factors.b, factors.m, inputs=factors.n)
        several = "several" if needed is None else f"about {max(needed, 2)}"
        return (
            "The layer is too narrow for the batch: attack a wider one, or combine "
            f"{several} rounds of the same data (spear.combine)"
        )
    needed = theory.rounds_needed(
        factors.b,
        rounds.width,
        movement=movement(factors),
        noise=min(factors.relative_noise, 0.5),
        inputs=factors.n,
    )
    if needed is None:
        return (
            "The weights hardly move from round to round, so that more rounds add little: attack a "
            "wider layer, or rounds with a larger learning rate"
        )
    if needed > len(rounds):
        more = needed - len(rounds)
        return (
            f"{len(rounds)} rounds are too few for a layer of {rounds.width} neurons: about {more} "
            f"more would do"
        )
    return (
        "These rounds should hold enough zeros. Likely causes: samples that are nearly alike, weights "
        "that hardly move or that change most signs in a round, or rounds of other data. More rounds "
        "may help"
    )


def movement(factors: Factors) -> float:
    """How far preactivations go from one round to the next, as a share of their size."""
    rounds = factors.view.rounds
    assert rounds is not None
    each = factors.preactivation.view(len(rounds), rounds.width, -1)  # (R, m, b)
    if len(rounds) < 2:
        return 0.0
    steps = (each[1:] - each[:-1]).flatten(1).norm(dim=1)
    return float((steps / each[:-1].flatten(1).norm(dim=1).clamp_min(1e-300)).median())


def of_no_batch(factors: Factors) -> Verdict:
    """The spectrum shows no batch."""
    if factors.batch_size is None:
        return _cannot_tell(*_why_no_gap(factors))
    if not bool(factors.live_rows.any()):
        reason = "the gradient is zero: no sample left a trace in this layer"
        return Verdict(Outcome.FAILED, Cause.NO_GRADIENT, reason, returned=False)
    if _may_be_stale(factors.view):
        return _cannot_tell(
            Cause.NOISE, f"the difference of the weights looks like noise. {_STALE}"
        )
    reason = "the gradient is noise: no sample stands out from it"
    return Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)


def _why_no_gap(factors: Factors) -> tuple[Cause, str]:
    """Why the spectrum does not show where the samples end."""
    rounds, smaller = factors.view.rounds, min(factors.m, factors.n)
    told, epochs = factors.view.samples, factors.protocol.epochs or 1
    if told is not None and told < smaller <= told * epochs and factors.view.reads_data:
        return Cause.AUGMENTED, (
            f"the difference of the weights shows {smaller} samples or more, and {told} were told. "
            f"Likely cause: random augmentation, which makes {epochs} versions of each in {epochs} "
            "epochs, too many for the layer: this does not tell whether data leaks"
        )
    if rounds is not None:
        return Cause.NO_GAP, (
            f"{len(rounds)} rounds of {rounds.width} neurons show no end of the samples, which does "
            f"not tell whether data leaks. Likely causes: {smaller} samples or more (give more "
            "rounds), augmentation or changing clients, so that every round has other data, or noise"
        )
    if told is not None and told >= smaller:
        return Cause.NARROW, (
            f"{told} samples were told, and the layer has {factors.n} inputs and {factors.m} outputs: "
            f"{smaller} samples or more cannot be told apart. {_too_narrow(factors, told)}"
        )
    if factors.trained:
        return Cause.NO_GAP, (
            "the difference of the weights shows no samples, which does not tell whether data leaks. "
            "Likely causes: weights of another round than those the client was sent, "
            f"{smaller} samples or more, an optimiser other than SGD, or noise"
        )
    return Cause.NO_GAP, (
        "the spectrum shows no gap, which does not tell whether data leaks. Likely causes: a "
        f"batch of min(m, n) = {smaller} samples or more (attack a wider layer), noise, "
        "pruning, an optimiser other than SGD, or weights in place of gradients"
    )


def _may_be_stale(view: LayerUpdate) -> bool:
    """Might the noise be the difference between two rounds' weights, since nobody told of noise?"""
    return view.trained and not view.protocol.given(*NOISE_UNITS) and not view.protocol.coarse


def of_optimiser(view: LayerUpdate) -> Verdict:
    """An optimiser that was told and is not attacked."""
    name = view.protocol.optimizer
    scales = ", which scales every entry on its own" * (name.lower() in ENTRYWISE)
    return _cannot_tell(Cause.OPTIMISER, f"clients train with {name}{scales}. {_SGD_ONLY}")


def of_scaled_entries() -> Verdict:
    """An optimiser that nobody mentioned."""
    reason = (
        "the update looks like one of Adam, or of another optimiser that scales every entry on its "
        f"own. {_SGD_ONLY}; if that is so, name the optimiser"
    )
    seen = "its entries are all about the same size, and its rank is not low"
    return _cannot_tell(Cause.OPTIMISER, reason, seen)


def remarks_on(factors: Factors, certificate: Certificate) -> list[str]:
    """What else a reader should know."""
    said = [certificate.remark] if certificate.remark else []
    if factors.noisy and factors.has_weak_sample and not factors.has_unresolved_samples:
        said.append("samples fainter than the noise, if there are any, do not show")
    if factors.trained:
        said.append(
            f"the difference of the weights carries noise of {factors.relative_noise:.0e} of an entry, "
            "from rounding and whatever was added"
        )
    if factors.view.meaning:
        said.append(factors.view.meaning)
    return said


def _unresolved(factors: Factors) -> list[str]:
    """Samples that show, but too faintly to be found."""
    if not factors.has_unresolved_samples:
        return []
    return [
        f"besides these {factors.b}, the batch holds samples whose gradient has all but vanished: they "
        "cannot be told from noise, and are not guessed"
    ]


def _cannot_tell(cause: Cause, reason: str, *details: str) -> Verdict:
    return Verdict(Outcome.INCONCLUSIVE, cause, reason, details, returned=False)
