"""From the evidence to a verdict: the outcome it entitles to, its cause, and the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from spear.factors import Factors
from spear.judge.causes import Cause
from spear.judge.certificate import Certificate
from spear.judge.layer import exceeds_noise
from spear.judge.selection import Selection
from spear.tolerances import LIKELY_MATCH, ROWS_PER_SAMPLE
from spear.update import ENTRYWISE, NOISE_UNITS, LayerUpdate


class Outcome(Enum):
    """How an inversion ended."""

    EXACT = "exact"  # every sample recovered and certified
    PARTIAL = "partial"  # some samples certified
    APPROXIMATE = (
        "approximate"  # recognisable, not exact: a noisy update, or read from patterns alone
    )
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
        """If the search, and nothing in the update, is why nothing more was found."""
        return {SearchEnd.TIME: Cause.TIME, SearchEnd.INTERRUPTED: Cause.INTERRUPTED}.get(self)


@dataclass(frozen=True)
class SearchSummary:
    """How a search ended, and what the finder has to say about it."""

    end: SearchEnd
    remarks: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return "; ".join([f"the search ended: {self.end.value}", *self.remarks])


@dataclass(frozen=True)
class Verdict:
    """An outcome and why."""

    outcome: Outcome
    cause: Cause
    reason: str
    returned: bool = True  # is what was recovered worth returning?


def of_samples(
    factors: Factors,
    selection: Selection,
    certificate: Certificate,
    inputs: Tensor,
    ended: SearchSummary,
) -> Verdict:
    """The outcome that the evidence entitles to."""
    count, b = int(certificate.certified.sum()), factors.b
    doubts = "; ".join(certificate.doubts)
    if certificate.whole and not factors.has_unresolved_samples:
        reason = f"all {b} samples that show were recovered, proved by {certificate.proof.value}"
        return Verdict(Outcome.EXACT, Cause.PROVED, reason)
    if count:
        cause = Cause.MISSING if certificate.cause is Cause.PROVED else certificate.cause
        reason = "; ".join(filter(None, [f"{count} of {b} samples certified", doubts, ended.words]))
        return Verdict(Outcome.PARTIAL, cause, reason)
    if factors.noisy and not bool(certificate.precise.any()):
        return _of_noisy_samples(factors, certificate, inputs)
    if selection.match >= LIKELY_MATCH or selection.only_extra_zeros:
        likely = "likely exact" + " but for their scale" * (certificate.cause is Cause.SCALE)
        reason = (
            f"{b} samples were found that fit the update (lambda {selection.match:.3f}), {likely}, but "
            f"nothing is proved: {doubts}"
        )
        return Verdict(Outcome.APPROXIMATE, certificate.cause, reason)
    reason = (
        f"no samples were found that fit the update (lambda {selection.match:.3f} at best): {doubts}; "
        f"{ended.words}; {_NOT_AS_SAID}"
    )
    return Verdict(Outcome.INCONCLUSIVE, ended.end.cause or Cause.UNFIT, reason, returned=False)


def _of_noisy_samples(factors: Factors, certificate: Certificate, inputs: Tensor) -> Verdict:
    """With too much noise for anything exact: is there anything recognisable?"""
    noise = f"the update carries noise of {factors.relative_noise:.1e} of its entries"
    if not exceeds_noise(certificate.predicted_error, inputs):
        reason = (
            f"{noise}, in which the {factors.b} samples drown: errors would be as large as they are"
        )
        if _may_be_stale(factors.view):
            reason = f"{reason}; {_STALE}"
            return Verdict(Outcome.INCONCLUSIVE, Cause.NOISE, reason, returned=False)
        return Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)
    error = float(certificate.predicted_error.median())
    reason = (
        f"{noise}, too much for an exact recovery: the {factors.b} samples are known to about "
        f"{error:.1e} per input"
    )
    return Verdict(Outcome.APPROXIMATE, Cause.IMPRECISE, reason)


_NOT_AS_SAID = (
    "likely causes: weights of another round than the client's, no ReLU after the layer, an optimiser "
    "other than SGD, or too few neurons; see what `spear check` says"
)


def of_no_samples(factors: Factors, ended: SearchSummary) -> Verdict:
    """Fewer than b directions, and no input could be read from those."""
    reason = f"no input of {factors.b} samples could be read: {ended.words}"
    if ended.end.cause is not None:
        return _cannot_tell(ended.end.cause, f"{reason}; give it more time")
    if int(factors.live_rows.sum()) >= ROWS_PER_SAMPLE * factors.b:
        return _cannot_tell(Cause.UNFIT, f"{reason}; {_NOT_AS_SAID}")
    return _cannot_tell(
        Cause.NARROW, f"{reason}; the layer is too narrow for the batch: attack a wider one"
    )


def of_some_samples(factors: Factors, count: int, ended: SearchSummary) -> Verdict:
    """Fewer than b directions, and the inputs that their patterns alone give."""
    reason = (
        f"{count} of {factors.b} samples were found, and their inputs read from the pattern of their "
        f"zeros alone: these are approximate, exact ones take all {factors.b}; {ended.words}"
    )
    return Verdict(Outcome.APPROXIMATE, ended.end.cause or Cause.NARROW, reason)


def of_no_batch(factors: Factors) -> Verdict:
    """The spectrum shows no batch."""
    m, n = factors.m, factors.n
    if factors.batch_size is None and factors.trained:
        reason = (
            "the difference of the weights shows no samples: likely causes are weights of another "
            f"round than those the client was sent, {min(m, n)} samples or more, an optimiser other "
            "than SGD, or noise. This does not tell whether data leaks"
        )
        return _cannot_tell(Cause.NO_GAP, reason)
    if factors.batch_size is None:
        reason = (
            f"the spectrum shows no gap: the batch has min(m, n) = {min(m, n)} samples or more, or "
            "noise, pruning, another optimiser than SGD or weights in place of gradients hide them. "
            "This does not tell whether data leaks; attack a wider layer"
        )
        return _cannot_tell(Cause.NO_GAP, reason)
    if not bool(factors.live_rows.any()):
        reason = "the gradient is zero: no sample left a trace in this layer"
        return Verdict(Outcome.FAILED, Cause.NO_GRADIENT, reason, returned=False)
    if _may_be_stale(factors.view):
        reason = f"the difference of the weights looks like noise: {_STALE}"
        return _cannot_tell(Cause.NOISE, reason)
    reason = "the gradient is noise: no sample stands out of it"
    return Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)


_STALE = (
    "either the client adds noise (then tell how much, sigma=), or these are weights of another round. "
    "So this does not tell whether data leaks"
)


def _may_be_stale(view: LayerUpdate) -> bool:
    """Might the noise be the difference of two rounds' weights, since nobody told of noise?"""
    return view.trained and not view.protocol.given(*NOISE_UNITS) and not view.protocol.coarse


def of_optimiser(view: LayerUpdate) -> Verdict:
    """An optimiser that was told, and that is not attacked."""
    name = view.protocol.optimizer
    scales = ", which scales every entry on its own" * (name.lower() in ENTRYWISE)
    reason = (
        f"clients train with {name}{scales}: this attack reads SGD's updates only, so it cannot tell "
        "whether data leaks"
    )
    return _cannot_tell(Cause.OPTIMISER, reason)


def of_scaled_entries() -> Verdict:
    """An optimiser that nobody mentioned."""
    reason = (
        "the update looks like one of Adam, or of another optimiser that scales every entry on its "
        "own: its entries are about as large as each other, and it has no low rank. This attack reads "
        "SGD's updates only, so it cannot tell whether data leaks; name the optimiser if that is so"
    )
    return _cannot_tell(Cause.OPTIMISER, reason)


def remarks_on(factors: Factors, certificate: Certificate) -> list[str]:
    """What else a reader should know."""
    said = [certificate.remark] if certificate.remark else []
    if factors.noisy and factors.has_weak_sample and not factors.has_unresolved_samples:
        said.append("samples fainter than the noise, if there are any, do not show")
    if factors.has_unresolved_samples:
        said.append(
            f"besides these {factors.b} the batch holds samples whose gradient has vanished, or "
            "nearly: they are too faint to be told from noise, and not guessed"
        )
    if factors.trained:
        said.append(
            f"the difference of the weights carries noise of {factors.relative_noise:.0e} of an entry, "
            "rounding and whatever else was added"
        )
    if factors.view.meaning:
        said.append(factors.view.meaning)
    return said


def _cannot_tell(cause: Cause, reason: str) -> Verdict:
    return Verdict(Outcome.INCONCLUSIVE, cause, reason, returned=False)
