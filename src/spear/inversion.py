"""invert(): Algorithm 1 of the paper, from an update to judged inputs. The flow, no maths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from spear.cascade import CascadeFinder
from spear.directions import Directions, Finder, Progress, Watch
from spear.errors import InvalidOption, InvalidUpdate, NotExact
from spear.factors import Factors, factorise
from spear.judge import (
    Cause,
    Certificate,
    Loss,
    Proof,
    Selection,
    approximate_inputs,
    certify,
    explained,
    has_content,
    rescale,
    select,
    without_spoilt,
)
from spear.penalty import without_penalty
from spear.sampling import SamplingFinder
from spear.spread import Spread
from spear.tolerances import LIKELY_MATCH, ROWS_PER_SAMPLE
from spear.update import LayerUpdate, scales_entries
from spear.update.protocol import ENTRYWISE, NOISE_UNITS

FINDERS: dict[str, Callable[[], Finder]] = {
    "cascade": CascadeFinder,
    "sampling": SamplingFinder,
}


class Outcome(Enum):
    """How an inversion ended."""

    EXACT = "exact"  # every sample recovered and certified
    PARTIAL = "partial"  # some samples certified
    APPROXIMATE = (
        "approximate"  # recognisable, not exact: a noisy update, or read from patterns alone
    )
    FAILED = "failed"  # attacked properly, nothing recovered
    INCONCLUSIVE = "inconclusive"  # cannot tell: no gap, no time, or not what it was said to be


@dataclass(frozen=True, eq=False)
class Inversion:
    """What an update gave away, with the evidence."""

    inputs: Tensor = field(repr=False)
    """(k, n): what was recovered, k <= batch_size."""
    batch_size: int | None
    """Number of samples the layer can tell apart, read off the update: one that is there twice, or
    whose gradient vanished, does not show. None where the spectrum has no gap."""
    certified: Tensor
    """(k,) bool: which of them are proved, without ground truth."""
    approximate: Tensor
    """(k,) bool: which of them are pictures only: too noisy to be exact, or read from the pattern of
    their zeros alone, while others of the batch are missing."""
    proof: Proof
    outcome: Outcome
    reason: str
    """Why it ended so, and what to try."""
    cause: Cause
    """The same as a value, for programs."""
    assumptions: tuple[str, ...]
    """What the verdict rests on and could not test, in plain words."""
    match: float | None
    """The paper's sparsity matching coefficient lambda; None if no b directions were found."""
    labels: Tensor | None = field(repr=False)
    """(k,) int64 when a model was given, -1 where none matched."""
    predicted_error: Tensor | None = field(repr=False)
    """(k,) standard deviation of an input's error, from the update's noise."""
    stats: Mapping[str, float] = field(repr=False)
    """Seconds per stage, submatrices sampled, directions found."""
    mistake: str = ""
    """What the update was said to be and is not, in words; `reason` begins with it."""


def invert(
    view: LayerUpdate,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    finder: str | Finder = "cascade",
    generator: torch.Generator | None = None,
    max_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    executor: Executor | None = None,
    throw: bool = False,
) -> Inversion:
    """Recover the inputs of a layer from its update, and prove it.

    Args:
        view: one layer as the server sees it, from `LayerUpdate` or `observe`; the model that `observe`
            was given is replayed.
        model: the model the client was sent, for a bare `LayerUpdate`, or another one than observed.
        loss: the client's loss, `loss(outputs, targets)`; found out unless given: cross-entropy, or
            any whose gradient at the outputs can be anything.
        finder: "cascade" (the default), "sampling" (the paper's), or an options object such as
            `SamplingFinder(...)`.
        generator: randomness; the same seed gives the same bits on the same machine.
        max_seconds: stop after this long and return what was found. Ctrl-C does the same.
        on_progress: called with a `Progress` as the work goes on.
        executor: workers to spread a large inversion over, say `spear.workers(2)`. The result is the
            same, bit for bit, with any number of them, as long as all use as many threads.
        throw: raise `NotExact` unless the outcome is EXACT.

    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    >>> x, y = torch.randn(3, 30), torch.tensor([0, 4, 2])
    >>> loss = nn.functional.cross_entropy(net(x), y)
    >>> result = invert(observe(net, torch.autograd.grad(loss, list(net.parameters()))))
    >>> result.outcome.name, result.batch_size, sorted(result.labels.tolist())
    ('EXACT', 3, [0, 2, 4])
    """
    search = _checked(view, finder, max_seconds, executor)
    loss = _told_loss(view) if loss is None else loss
    watch = Watch(on_progress, max_seconds, spread=Spread(executor))
    if view.trained and not view.protocol.is_sgd:
        return _finish(_not_sgd(view, watch.stats), view.mistake, throw, watch)
    watch.report("factorise")
    with watch.stage("factorise"):
        factors, penalty = without_penalty(factorise(view))
    notes = () if penalty is None else (penalty.words,)
    if scales_entries(view) and not factors.low_rank:
        return _finish(_entrywise(factors, watch.stats), view.mistake, throw, watch)
    if not factors.batch_size:
        return _finish(_no_batch(factors, watch.stats), view.mistake, throw, watch)
    generator = generator or torch.Generator(factors.left.device).manual_seed(0)

    found = _searched(factors, search, generator, watch, notes)
    best = found.best
    if best is None and found.pool is not None:
        with watch.stage("select"):
            factors, best = explained(factors, found.pool, watch)
    if best is None:
        with watch.stage("reconstruct"):
            C = approximate_inputs(factors, found.pool) if found.pool is not None else None
            result = _incomplete(factors, C, watch.stats, found)
            return _finish(result, view.mistake, throw, watch)

    watch.report("judge", batch_size=factors.b)
    model = model if model is not None else view.model
    with watch.stage("certify"):
        best = without_spoilt(factors, best)
        factors, certificate, mistake = _certified(factors, best, model, loss, generator)
    if model is not None and factors.noisy and not bool(certificate.precise.any()):
        with watch.stage("rescale"):
            best, certificate = _rescaled(factors, best, certificate, model, loss)
    with watch.stage("reconstruct"):
        inputs = factors.reconstruct(best.C)
    result = _conclude(factors, best, certificate, inputs, watch.stats, found)
    return _finish(result, mistake, throw, watch)


def _told_loss(view: LayerUpdate) -> Loss | None:
    """Cross-entropy with the class weights that were told; None where there are none."""
    weights = view.protocol.class_weights
    if weights is None:
        return None
    return nn.CrossEntropyLoss(weight=torch.tensor(weights), reduction=view.protocol.reduction)


def _certified(
    factors: Factors,
    selection: Selection,
    model: nn.Module | None,
    loss: Loss | None,
    generator: torch.Generator,
) -> tuple[Factors, Certificate, str]:
    """What is proved of a selection, of the update or of its negative; and what was said wrongly."""
    view = factors.view
    judged = certify(factors, selection, model=model, loss=loss, generator=generator)
    if model is None or not _may_be_turned(view, judged):
        return factors, judged, view.mistake
    turned = factors.negated
    other = certify(turned, selection, model=model, loss=loss, generator=generator)
    if other.labels is None or not bool(other.certified.any()):
        return factors, judged, view.mistake
    return turned, other, view.mistake or _turned_words(view)


def _may_be_turned(view: LayerUpdate, certificate: Certificate) -> bool:
    """Might the update have the other sign? Inputs are the same then, but no loss with labels fits."""
    told = view.protocol.sends == "weights" and not view.mistake  # whose sign is beyond doubt
    fits = certificate.labels is not None and bool((certificate.labels >= 0).any())
    return not fits and not certificate.whole and not told


def _turned_words(view: LayerUpdate) -> str:
    if view.trained:
        return "the difference has the opposite sign, before minus after: read that way"
    return (
        "this was given as a gradient, but it has the sign of a difference, after minus before: read "
        "as a difference"
    )


class _End(Enum):
    """How a search ended."""

    MATCHED = "every pattern matched"
    GAVE_UP = "the finder gave up"
    TIME = "its time was over"
    INTERRUPTED = "it was interrupted"


@dataclass(frozen=True, eq=False)
class _Found:
    """What a search came to."""

    best: Selection | None
    pool: Directions | None
    end: _End
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was done to the update before

    @property
    def words(self) -> str:
        return "; ".join([f"the search ended: {self.end.value}", *self.remarks])

    @property
    def cause(self) -> Cause | None:
        """If the search, and nothing in the update, is why it ended."""
        return {_End.TIME: Cause.TIME, _End.INTERRUPTED: Cause.INTERRUPTED}.get(self.end)


def _searched(
    factors: Factors,
    search: Finder,
    generator: torch.Generator,
    watch: Watch,
    notes: tuple[str, ...],
) -> _Found:
    """Directions, and the best choice of b of them, until every pattern matches or the search ends."""
    best: Selection | None = None
    pool: Directions | None = None
    end = _End.GAVE_UP
    try:
        with watch.stage("search"):
            for pool in search.search(factors, generator=generator, watch=watch):
                with watch.stage("select"):
                    chosen = select(factors, pool, watch)
                if chosen is not None and (best is None or chosen.match > best.match):
                    best = chosen
                if best is not None and search.satisfied(factors, best.match):
                    end = _End.MATCHED
                    break
    except KeyboardInterrupt:
        watch.count("interrupted")
        end = _End.INTERRUPTED
    if end is _End.GAVE_UP and watch.expired:
        end = _End.TIME
    return _Found(best, pool, end, tuple(watch.remarks), notes)


def _rescaled(
    factors: Factors,
    selection: Selection,
    certificate: Certificate,
    model: nn.Module,
    loss: Loss | None,
) -> tuple[Selection, Certificate]:
    """Noisy samples with the scale, and the labels, that the model gives them."""
    rescaled = rescale(factors, selection, model, loss)
    if isinstance(rescaled, str) or bool((rescaled.labels < 0).all()):
        return selection, certificate  # another loss than one with labels
    judged = dataclasses.replace(certificate, labels=rescaled.labels, remark=rescaled.remark)
    return rescaled.selection, judged


def _checked(
    view: LayerUpdate, finder: str | Finder, max_seconds: float | None, executor: Executor | None
) -> Finder:
    """The finder, after everything that can be said before any work is done."""
    if not isinstance(view, LayerUpdate):
        raise InvalidUpdate(
            [
                f"expected a LayerUpdate, got a {type(view).__name__}: "
                "call spear.observe(model, gradients) first"
            ]
        )
    number = isinstance(max_seconds, (int, float)) and 0 < max_seconds < float("inf")
    if max_seconds is not None and not number:
        raise InvalidOption(
            f"expected {{max_seconds}} > 0, got {max_seconds!r}", arguments=["max_seconds"]
        )
    if executor is not None and not hasattr(executor, "submit"):
        raise InvalidOption(f"expected an executor such as spear.workers(2), got {executor!r}")
    if executor is not None and view.weight_grad.device.type != "cpu":  # pragma: no cover: a GPU
        raise InvalidOption(
            "expected an update on the CPU, where an executor's workers compute, got one on "
            f"{view.weight_grad.device}: move it, or leave out executor="
        )
    if not isinstance(finder, str):
        if isinstance(finder, type) or not hasattr(finder, "search"):
            raise InvalidOption(f"expected a finder such as SamplingFinder(), got {finder!r}")
        return finder
    if finder not in FINDERS:
        raise InvalidOption(f"expected finder to be one of {sorted(FINDERS)}, got {finder!r}")
    return FINDERS[finder]()


@dataclass(frozen=True)
class _Verdict:
    """An outcome and why."""

    outcome: Outcome
    cause: Cause
    reason: str
    returned: bool = True  # is what was recovered worth returning?


def _conclude(
    factors: Factors,
    selection: Selection,
    certificate: Certificate,
    inputs: Tensor,
    stats: Mapping[str, float],
    found: _Found,
) -> Inversion:
    verdict = _verdict(factors, selection, certificate, inputs, found)
    reason = "; ".join([verdict.reason, *found.notes, *_remarks(factors, certificate)])
    if not verdict.returned:
        return _nothing(factors, stats, verdict.outcome, verdict.cause, reason)
    return Inversion(
        inputs=inputs,
        batch_size=factors.b,
        certified=certificate.certified.to(inputs.device),
        approximate=~certificate.precise.to(inputs.device),
        proof=certificate.proof,
        outcome=verdict.outcome,
        reason=reason,
        cause=verdict.cause,
        assumptions=certificate.assumptions if bool(certificate.certified.any()) else (),
        match=selection.match,
        labels=None if certificate.labels is None else certificate.labels.to(inputs.device),
        predicted_error=certificate.predicted_error.to(inputs.device),
        stats=stats,
    )


def _verdict(
    factors: Factors,
    selection: Selection,
    certificate: Certificate,
    inputs: Tensor,
    found: _Found,
) -> _Verdict:
    """The outcome that the evidence entitles to."""
    count, b = int(certificate.certified.sum()), factors.b
    doubts = "; ".join(certificate.doubts)
    if certificate.whole and not factors.faded:
        reason = f"all {b} samples that show were recovered, proved by {certificate.proof.value}"
        return _Verdict(Outcome.EXACT, Cause.PROVED, reason)
    if count:
        cause = Cause.MISSING if certificate.cause is Cause.PROVED else certificate.cause
        reason = "; ".join(filter(None, [f"{count} of {b} samples certified", doubts, found.words]))
        return _Verdict(Outcome.PARTIAL, cause, reason)
    if factors.noisy and not bool(certificate.precise.any()):
        return _noisy_verdict(factors, certificate, inputs)
    if selection.match >= LIKELY_MATCH or selection.one_sided:
        likely = "likely exact" + " but for their scale" * (certificate.cause is Cause.SCALE)
        reason = (
            f"{b} samples were found that fit the update (lambda {selection.match:.3f}), {likely}, but "
            f"nothing is proved: {doubts}"
        )
        return _Verdict(Outcome.APPROXIMATE, certificate.cause, reason)
    reason = (
        f"no samples were found that fit the update (lambda {selection.match:.3f} at best): {doubts}; "
        f"{found.words}; {_NOT_AS_SAID}"
    )
    return _Verdict(Outcome.INCONCLUSIVE, found.cause or Cause.UNFIT, reason, returned=False)


def _noisy_verdict(factors: Factors, certificate: Certificate, inputs: Tensor) -> _Verdict:
    """With too much noise for anything exact: is there anything recognisable?"""
    noise = f"the update carries noise of {factors.relative_noise:.1e} of its entries"
    if not has_content(certificate.predicted_error, inputs):
        reason = (
            f"{noise}, in which the {factors.b} samples drown: errors would be as large as they are"
        )
        if _may_be_stale(factors.view):
            reason = f"{reason}; {_STALE}"
            return _Verdict(Outcome.INCONCLUSIVE, Cause.NOISE, reason, returned=False)
        return _Verdict(Outcome.FAILED, Cause.NOISE, reason, returned=False)
    error = float(certificate.predicted_error.median())
    reason = (
        f"{noise}, too much for an exact recovery: the {factors.b} samples are known to about "
        f"{error:.1e} per input"
    )
    return _Verdict(Outcome.APPROXIMATE, Cause.IMPRECISE, reason)


_NOT_AS_SAID = (
    "likely causes: weights of another round than the client's, no ReLU after the layer, an optimiser "
    "other than SGD, or too few neurons; see what `spear check` says"
)


def _remarks(factors: Factors, certificate: Certificate) -> list[str]:
    """What else a reader should know."""
    said = [certificate.remark] if certificate.remark else []
    if factors.noisy and factors.uneven and not factors.faded:
        said.append("samples fainter than the noise, if there are any, do not show")
    if factors.faded:
        said.append(
            f"besides these {factors.b} the batch holds samples whose gradient has vanished, or "
            "nearly: they are too faint to be told from noise, and not guessed"
        )
    if factors.view.trained:
        said.append(
            f"the difference of the weights carries noise of {factors.relative_noise:.0e} of an entry, "
            "rounding and whatever else was added"
        )
    if factors.view.meaning:
        said.append(factors.view.meaning)
    return said


def _incomplete(
    factors: Factors, C: Tensor | None, stats: Mapping[str, float], found: _Found
) -> Inversion:
    """Fewer than b directions: what was read from the pattern of those that were found."""
    b = factors.b
    if C is None or not len(C):
        if found.cause is not None:
            reason = f"no input of {b} samples could be read: {found.words}; give it more time"
            return _nothing(factors, stats, Outcome.INCONCLUSIVE, found.cause, reason)
        wide = int(factors.live_rows.sum()) >= ROWS_PER_SAMPLE * b
        why = _NOT_AS_SAID if wide else "the layer is too narrow for the batch: attack a wider one"
        cause = Cause.UNFIT if wide else Cause.NARROW
        reason = f"no input of {b} samples could be read: {found.words}; {why}"
        return _nothing(factors, stats, Outcome.INCONCLUSIVE, cause, reason)
    inputs = factors.reconstruct(C)
    reason = (
        f"{len(C)} of {b} samples were found, and their inputs read from the pattern of their zeros "
        f"alone: these are approximate, exact ones take all {b}; {found.words}"
    )
    cause = found.cause or Cause.NARROW
    return _uncertified(factors, inputs, Outcome.APPROXIMATE, cause, stats, reason)


def _no_batch(factors: Factors, stats: Mapping[str, float]) -> Inversion:
    """The spectrum shows no batch."""
    m, n = factors.view.outputs, factors.view.inputs
    if factors.batch_size is None and factors.view.trained:
        reason = (
            "the difference of the weights shows no samples: likely causes are weights of another "
            f"round than those the client was sent, {min(m, n)} samples or more, an optimiser other "
            "than SGD, or noise. This does not tell whether data leaks"
        )
        return _nothing(factors, stats, Outcome.INCONCLUSIVE, Cause.NO_GAP, reason)
    if factors.batch_size is None:
        reason = (
            f"the spectrum shows no gap: the batch has min(m, n) = {min(m, n)} samples or more, or "
            "noise, pruning, another optimiser than SGD or weights in place of gradients hide them. "
            "This does not tell whether data leaks; attack a wider layer"
        )
        return _nothing(factors, stats, Outcome.INCONCLUSIVE, Cause.NO_GAP, reason)
    if not bool(factors.live_rows.any()):
        reason = "the gradient is zero: no sample left a trace in this layer"
        return _nothing(factors, stats, Outcome.FAILED, Cause.NO_GRADIENT, reason)
    if _may_be_stale(factors.view):
        reason = f"the difference of the weights looks like noise: {_STALE}"
        return _nothing(factors, stats, Outcome.INCONCLUSIVE, Cause.NOISE, reason)
    reason = "the gradient is noise: no sample stands out of it"
    return _nothing(factors, stats, Outcome.FAILED, Cause.NOISE, reason)


_STALE = (
    "either the client adds noise (then tell how much, sigma=), or these are weights of another round. "
    "So this does not tell whether data leaks"
)


def _may_be_stale(view: LayerUpdate) -> bool:
    """Might the noise be the difference of two rounds' weights, since nobody told of noise?"""
    return view.trained and not view.protocol.given(*NOISE_UNITS) and not view.protocol.coarse


def _not_sgd(view: LayerUpdate, stats: Mapping[str, float]) -> Inversion:
    """An optimiser that was told, and that is not attacked."""
    name = view.protocol.optimizer
    scales = ", which scales every entry on its own" * (name.lower() in ENTRYWISE)
    reason = (
        f"clients train with {name}{scales}: this attack reads SGD's updates only, so it cannot tell "
        "whether data leaks"
    )
    none = view.weight_grad.new_zeros(0, view.inputs)
    return _uncertified(None, none, Outcome.INCONCLUSIVE, Cause.OPTIMISER, stats, reason)


def _entrywise(factors: Factors, stats: Mapping[str, float]) -> Inversion:
    """An optimiser that nobody mentioned."""
    reason = (
        "the update looks like one of Adam, or of another optimiser that scales every entry on its "
        "own: its entries are about as large as each other, and it has no low rank. This attack reads "
        "SGD's updates only, so it cannot tell whether data leaks; name the optimiser if that is so"
    )
    return _nothing(factors, stats, Outcome.INCONCLUSIVE, Cause.OPTIMISER, reason)


def _nothing(
    factors: Factors, stats: Mapping[str, float], outcome: Outcome, cause: Cause, reason: str
) -> Inversion:
    none = factors.view.weight_grad.new_zeros(0, factors.view.inputs)
    return _uncertified(factors, none, outcome, cause, stats, reason)


def _uncertified(
    factors: Factors | None,
    inputs: Tensor,
    outcome: Outcome,
    cause: Cause,
    stats: Mapping[str, float],
    reason: str,
) -> Inversion:
    no = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    return Inversion(
        inputs=inputs,
        batch_size=None if factors is None else factors.batch_size,
        certified=no,
        approximate=~no,
        proof=Proof.NONE,
        outcome=outcome,
        reason=reason,
        cause=cause,
        assumptions=(),
        match=None,
        labels=None,
        predicted_error=None,
        stats=stats,
    )


def _finish(result: Inversion, mistake: str, throw: bool, watch: Watch) -> Inversion:
    if mistake:  # first: whoever reads on should know
        result = dataclasses.replace(result, mistake=mistake, reason=f"{mistake}; {result.reason}")
    if watch.spread.trouble:  # told whatever the outcome: who runs the workers should know
        result = dataclasses.replace(result, reason=f"{result.reason}; {watch.spread.trouble}")
    if throw and result.outcome is not Outcome.EXACT:
        raise NotExact(result)
    return result
