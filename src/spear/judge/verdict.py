"""From the evidence to a verdict: the outcome it supports, its cause, and the reason in words.

A reason is one sentence, or two: what happened, and the likely cause or the next step. Everything else
goes into the details.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from spear.factors import Factors
from spear.judge.causes import Cause
from spear.judge.certificate import Certificate
from spear.judge.failures import inputs_moved, too_narrow, why_no_gap, why_noisy, why_not_found
from spear.judge.layer import recognisable
from spear.judge.selection import Selection
from spear.tolerances import LIKELY_MATCH
from spear.update import ENTRYWISE, LayerUpdate

_DROPPED = (
    "Many neurons have no gradient although a sample switches them on, as dropout leaves it: give the "
    "model in train mode, or dropout= for a layer given directly"
)
VISIBLE = (
    "a sample is visible if its share of the update is above the update's noise; exact duplicates "
    "count as one"
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
    barren: str = ""  # the name of a user's finder that gave up without a candidate

    @property
    def details(self) -> tuple[str, ...]:
        return f"the search ended: {self.end.value}", *self.remarks

    @property
    def stopped(self) -> tuple[Cause, str] | None:
        """Why the search ended before it gave up, if it did, and what to do."""
        return None if self.end.cause is None else (self.end.cause, _SEARCH_AGAIN[self.end])


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
        found = "the only sample" if b == 1 else f"all {b} samples"
        updates = "updates" if factors.view.rounds is not None else "update"
        were = "was" if b == 1 else "were"
        proved = f"proved by {certificate.proof.value}"
        reason = f"{found} visible in the {updates} {were} recovered, {proved}"
        return Verdict(Outcome.EXACT, Cause.PROVED, reason, (VISIBLE,))
    first, *doubts = (*certificate.doubts, *_unresolved(factors))
    if count:
        cause = Cause.MISSING if certificate.cause is Cause.PROVED else certificate.cause
        reason = f"{count} of {b} samples certified; {first}"
        return Verdict(Outcome.PARTIAL, cause, reason, (*doubts, *ended.details))
    if factors.noisy and not bool(certificate.precise.any()):
        reached = _of_noisy_samples(factors, certificate, inputs)
        return reached.with_details(*_unresolved(factors))
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
    why, words = why_not_found(factors, ended.stopped)
    reason = (
        f"no samples were found that fit the update (lambda {selection.match:.3f} at best). {words}"
    )
    return _cannot_tell(why, reason, first, *doubts, *ended.details)


def _likely(factors: Factors, certificate: Certificate) -> str:
    """How near the inputs most likely are, in words."""
    exact = int(certificate.precise.sum()) * (not inputs_moved(factors.view))
    if exact < factors.b:
        return f"{exact or 'none'} of them likely exact"
    return "likely exact" + " but for the scale" * (certificate.cause is Cause.SCALE)


def _of_noisy_samples(factors: Factors, certificate: Certificate, inputs: Tensor) -> Verdict:
    """With too much noise for anything exact: is anything recognisable?"""
    error = certificate.predicted_error
    known = recognisable(error, inputs)
    unit = f"about {float(error[known].median()):.1e} per input"
    # The scale hangs on one number and its noise: the shape of a sample may show although it drowns.
    shape = certificate.shape_error
    sizes = inputs.double().square().mean(1, keepdim=True).sqrt()
    shown = recognisable(shape, inputs.double() / sizes)
    if int(shown.sum()) > int(known.sum()):
        known = shown
        unit = (
            f"about {float(shape[shown].median()):.0%} of their size, but for a factor each, since "
            "their scale drowns"
        )
    if bool(known.any()):
        count, b = int(known.sum()), factors.b
        samples = f"the {b} samples" if count == b else f"{count} of the {b} samples"
        are = "is" if count == 1 < b else "are"
        reason = (
            f"{_noise(factors)}, too much for an exact recovery: {samples} {are} known to {unit}"
        )
        return Verdict(Outcome.APPROXIMATE, Cause.IMPRECISE, reason)
    return _of_drowned_samples(factors)


def _noise(factors: Factors) -> str:
    faint = ", or samples as faint as noise," * factors.has_unresolved_samples
    return f"the update carries noise{faint} of {factors.relative_noise:.1e} of its entries"


def _of_drowned_samples(factors: Factors) -> Verdict:
    """Samples that were found, and of which noise leaves nothing."""
    drown = f"the {factors.b} samples drown: errors would be as large as they are"
    reason = f"{_noise(factors)}, in which {drown}"
    if (why := why_noisy(factors)) is not None:
        cause, words = why
        return _cannot_tell(cause, f"{reason}. {words}")
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
    batch = "1 sample" if factors.b == 1 else f"{factors.b} samples"
    if ended.barren:
        reason = (
            f"finder {ended.barren} found no candidate for {batch}, which does not tell whether data "
            'leaks: mend it, or leave it to ours (finder="cascade")'
        )
        return _cannot_tell(Cause.FINDER, reason, *ended.details)
    cause, words = why_not_found(factors, ended.stopped)
    return _cannot_tell(cause, f"no input of {batch} could be read. {words}", *ended.details)


def of_some_samples(
    factors: Factors, inputs: Tensor, noise: Tensor, ended: SearchSummary
) -> Verdict:
    """Fewer than b directions, and the inputs that their patterns alone give, with their noise."""
    count = len(inputs)
    if factors.noisy and not bool(recognisable(noise, inputs).any()):
        return _of_drowned_samples(factors).with_details(*ended.details)
    reason = (
        f"{count} of {factors.b} samples were found and read from the pattern of their zeros alone, so "
        f"they are approximate: exact inputs take all {factors.b}"
    )
    cause, words = why_not_found(factors, ended.stopped)
    if cause is Cause.UNFIT and factors.noisy:
        cause, words = Cause.NOISE, "The update's noise hides the zeros of the others"
    elif cause is Cause.UNFIT:  # most samples are there: it is what it was said to be
        cause, words = Cause.NARROW, too_narrow(factors)
    return Verdict(Outcome.APPROXIMATE, cause, f"{reason}. {words}", ended.details)


def of_no_batch(factors: Factors) -> Verdict:
    """The spectrum shows no batch."""
    if factors.batch_size is None:
        return _cannot_tell(*why_no_gap(factors))
    if not bool(factors.live_rows.any()):
        reason = "the gradient is zero: no sample left a trace in this layer"
        return Verdict(Outcome.FAILED, Cause.NO_GRADIENT, reason, returned=False)
    if (why := why_noisy(factors)) is not None:
        cause, words = why
        return _cannot_tell(cause, f"the difference of the weights looks like noise. {words}")
    reason = "the gradient is noise: no sample stands out from it"
    return Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)


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
        said.append("samples fainter than the noise, if there are any, are not visible")
    if factors.trained:
        said.append(
            f"the difference of the weights carries noise of {factors.relative_noise:.0e} of an entry, "
            "from rounding and whatever was added"
        )
    if factors.view.meaning:
        said.append(factors.view.meaning)
    return said


def _unresolved(factors: Factors) -> list[str]:
    """Samples that are visible, but too faintly to be found."""
    if not factors.has_unresolved_samples:
        return []
    return [
        f"besides these {factors.b}, the batch holds samples whose gradient has all but vanished: they "
        "cannot be told from noise, and are not guessed"
    ]


def _cannot_tell(cause: Cause, reason: str, *details: str) -> Verdict:
    return Verdict(Outcome.INCONCLUSIVE, cause, reason, details, returned=False)
