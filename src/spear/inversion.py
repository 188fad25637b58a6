"""invert(): Algorithm 1 of the paper, from an update to judged inputs. The flow, without the maths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spear import plugins
from spear.errors import Declined, InvalidOption, InvalidUpdate, NotExact
from spear.factors import Factors, factorise, without_penalty
from spear.judge import (
    Cause,
    Certificate,
    Loss,
    Outcome,
    Proof,
    SearchEnd,
    SearchSummary,
    Selection,
    Verdict,
    approximate_inputs,
    certify_either_sign,
    contradicted_rounds,
    mark_unscaled,
    rescale,
    scale_from_model,
    select,
    select_part,
    verdict,
)
from spear.search import (
    CascadeFinder,
    Directions,
    Finder,
    ParallelMap,
    Progress,
    SamplingFinder,
    TimeIsUp,
    Watch,
    is_satisfied,
    made_finder,
    pools_of,
    users_name,
)
from spear.update import UNKNOWN_PROTOCOL, LayerUpdate, Protocol, looks_like_adam

if TYPE_CHECKING:
    from spear.report import Report

_STALE_ROUND = "its update does not fit the weights given for it, as if they were another round's"

# Of `max_seconds`, kept for what comes after the search. The judge took 0.18 to 0.31 of the time of an
# inversion (medians of the cascade's settings in results/frontier.jsonl).
_JUDGING_SHARE = 0.3
_Stopped = (TimeIsUp, KeyboardInterrupt)
_WORST_FIRST = (
    *(Outcome.EXACT, Outcome.PARTIAL, Outcome.APPROXIMATE),
    *(Outcome.INCONCLUSIVE, Outcome.FAILED),
)

__all__ = ["FINDERS", "Inversion", "Outcome", "finder_named", "invert"]

FINDERS: dict[str, Callable[[], Finder]] = {
    "cascade": CascadeFinder,
    "sampling": SamplingFinder,
}


@dataclass(frozen=True, eq=False)
class Inversion:
    """What an update gave away, with the evidence."""

    inputs: Tensor = field(repr=False)
    """(k, n): what was recovered, k <= batch_size."""
    batch_size: int | None
    """Samples the layer can tell apart, read off the update: duplicates, and samples whose gradient
    vanished, do not show. None where the spectrum has no gap."""
    certified: Tensor
    """(k,) bool: which of them are proved, without ground truth."""
    approximate: Tensor
    """(k,) bool: which are only pictures: too noisy to be exact, or read from their zeros alone while
    others of the batch are missing; and all of them if there was no time to judge."""
    proof: Proof
    outcome: Outcome
    reason: str
    """What happened and what to do, in a sentence or two."""
    cause: Cause
    """The reason as a value, for programs."""
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
    details: tuple[str, ...] = ()
    """What else was seen: further doubts, numbers, what the search tried."""
    layer: str = ""
    """Which layer was attacked, and why."""
    reads_data: bool = True
    """Are these the client's data? Else they are inputs of an inner layer, computed from the data."""
    rounds: int = 1
    """Rounds of the same data that were used; those left out are named in `details`."""
    protocol: Protocol = UNKNOWN_PROTOCOL
    """How the update came to be, as it was told."""
    noise: Tensor | None = field(default=None, repr=False)
    """(k,) what the noise of the update left in each entry of an input, evenly: a standard deviation,
    for `denoise`. The rest of `predicted_error` is shares of other samples, and the scale."""

    @property
    def explanation(self) -> str:
        """The reason with all details."""
        return "; ".join([self.reason, *self.details])

    def report(
        self,
        path: str | Path | None = None,
        *,
        title: str = "What the update gives away",
        shape: Sequence[int] | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        truth: Tensor | tuple[Tensor, Tensor] | None = None,
        columns: Sequence[str] = (),
        redact: bool = False,
    ) -> Report:
        """The result as a report; written to `path`, if given, for its owner only.

        Args:
            path: x.html for a page, x.json for a file that `spear.load` reads.
            title: of the page.
            shape: of an input as a picture, (3, 32, 32) or (28, 28), to show pictures.
            mean: what the client subtracted from pixels, one number or one per channel.
            std: what it then divided them by.
            truth: the client's inputs (b, ...), or these and their labels (b,), to compare with.
            columns: names of the inputs, if they are rows of a table; `sex=Female`, `sex=Male` are one
                column of categories, and "age,38.6,13.6" adds the mean and std it was standardised by.
            redact: leave out everything that was recovered.
        """
        from spear.report import ImageFormat, Report, columns_of, compare

        if path is not None and Path(path).suffix not in (".html", ".json"):
            raise InvalidOption(f"expected a path that ends in .html or .json, got {str(path)!r}")
        image_format = None if shape is None else ImageFormat.of(shape, mean, std)
        known = None
        if truth is not None:
            inputs, labels = truth if isinstance(truth, tuple) else (truth, None)
            known = compare(self.inputs, inputs.flatten(1), labels, image_format=image_format)
        made = Report.of(
            self, title=title, image_format=image_format, truth=known, columns=columns_of(columns)
        )
        made = made.redacted() if redact else made
        if path is not None:
            (made.save if Path(path).suffix == ".json" else made.save_page)(path)
        return made

    def log(
        self,
        log_metrics: Callable[..., object],
        *,
        log_tags: Callable[[dict[str, str]], object] | None = None,
        step: int | None = None,
    ) -> None:
        """Hand the verdict to a tracker, such as `result.log(mlflow.log_metrics, step=round)`.

        Nothing recovered is in it; `spear.Report.log` says more.
        """
        self.report().log(log_metrics, log_tags=log_tags, step=step)

    def __repr__(self) -> str:
        return f"<Inversion {self.outcome.name}: {self.reason}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


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
        view: one layer as the server sees it, from `LayerUpdate` or `observe`; the model given to
            `observe` is replayed.
        model: the model the client was sent, for a bare `LayerUpdate` or to replace the observed one.
        loss: the client's loss, `loss(outputs, targets)`. Unless given it is found out: cross-entropy,
            or any loss, whatever its gradient at the outputs.
        finder: "cascade" (the default), "sampling" (the paper's), the name of one that an installed
            package offers, or an object: `SamplingFinder(...)`, or one of your own (`Finder`).
        generator: randomness; the same seed gives the same bits on the same machine.
        max_seconds: stop after this long and return what was found. Ctrl-C does the same. The search
            gets 70 % of it at most, so that there is time to prove what it finds.
        on_progress: called with a `Progress` as the work goes on.
        executor: workers to spread a large inversion over, such as `spear.workers(2)`. The result is
            the same, bit for bit, with any number of workers that use equally many threads.
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
    if not isinstance(generator, torch.Generator | None):
        raise InvalidOption(
            f"expected generator to be a torch.Generator, got {generator!r}: "
            "torch.Generator().manual_seed(3), for example"
        )
    view = view if model is None else view.with_model(model)
    loss = _told_loss(view) if loss is None else loss
    watch = Watch(on_progress, max_seconds, parallel=ParallelMap(executor))
    result = _inverted(view, loss, search, generator, watch)
    result = dataclasses.replace(
        result, layer=view.choice, reads_data=view.reads_data, protocol=view.protocol
    )
    if watch.parallel.failure:  # whatever the outcome: whoever runs the workers should know
        result = dataclasses.replace(result, details=(*result.details, watch.parallel.failure))
    if throw and result.outcome is not Outcome.EXACT:
        raise NotExact(result)
    return result


def _inverted(
    view: LayerUpdate,
    loss: Loss | None,
    finder: Finder,
    generator: torch.Generator | None,
    watch: Watch,
) -> Inversion:
    """Algorithm 1: factorise, search for directions and choose among them, scale, reconstruct."""
    if view.trained and not view.protocol.is_sgd:
        return _without_samples(view, None, verdict.of_optimiser(view), watch)
    try:
        watch.report("factorise")
        with watch.stage("factorise"):
            factors, penalty = without_penalty(factorise(view, watch.check))  # dL/dW = L R
    except _Stopped as stopped:
        return _without_samples(view, None, verdict.of_no_factors(_end(stopped, watch)), watch)
    unfit = not factors.low_rank and looks_like_adam(view)
    if unfit or not factors.batch_size:
        reached = verdict.of_scaled_entries() if unfit else verdict.of_no_batch(factors)
        return _without_samples(view, factors, reached, watch)
    generator = _on_cpu(generator)
    notes = [] if penalty is None else [penalty.words]
    result = _found(factors, loss, finder, generator, watch, notes)
    others = None if _is_enough(factors, result) else _with_other_rows(factors, watch)
    if others is None or not others.batch_size:
        return result
    return _worse(result, _found(others, loss, finder, generator, watch, notes))


def _is_enough(factors: Factors, result: Inversion) -> bool:
    """Or might rows of another size prove more? The loud samples alone, say, or the faint ones too."""
    if factors.row_factors is None:
        return result.outcome is Outcome.EXACT
    return bool(result.certified.any())


def _with_other_rows(factors: Factors, watch: Watch) -> Factors | None:
    """The factors with rows of another size, if there is a difference, and time."""
    if factors.row_factors is None and factors.evened is None:
        return None
    try:
        if watch.stats.get("interrupted") or watch.expired:
            return None
        with watch.stage("factorise"):
            return factors.with_other_rows
    except _Stopped:
        return None


def _worse(one: Inversion, other: Inversion) -> Inversion:
    """Of two readings of an update, the one that is worse for the client; the first if neither is."""

    def severity(result: Inversion) -> tuple[int, int]:
        proved = int(result.certified.sum())
        return -_WORST_FIRST.index(result.outcome), proved

    return other if severity(other) > severity(one) else one


def _found(
    factors: Factors,
    loss: Loss | None,
    finder: Finder,
    generator: torch.Generator,
    watch: Watch,
    notes: list[str],
) -> Inversion:
    """Directions of these factors, the choice among them, and what is proved of it."""
    pool, best, ended = _searched(factors, finder, generator, watch)
    if best is None and pool is not None:
        factors, best, ended = _found_in_part(factors, pool, ended, watch)
    loud = factors.loudest_part() if best is None else None
    if loud is not None:  # the loud samples first; the faint ones then count as noise
        _, best, ended = _searched(loud, finder, generator, watch)
        factors = factors if best is None else loud
    if best is None:
        return _read_from_patterns(factors, pool, ended, watch)
    another = _another_reading(factors, best)
    if another is not None:
        return _inverted(another, loss, finder, generator, watch)
    return _judged(factors, best, ended, notes=notes, loss=loss, generator=generator, watch=watch)


def _another_reading(factors: Factors, best: Selection) -> LayerUpdate | None:
    """The view without rounds that contradict it, or with dropout that it shows; None as it is."""
    stale = contradicted_rounds(factors, best)
    if stale:
        return factors.view.without_rounds(stale, _STALE_ROUND)
    # Dropout takes rows from every sample; a wrong direction contradicts itself and a few others.
    dropped = best.only_extra_zeros and 2 * int((best.contradictions > 0).sum()) > best.b
    return factors.view.with_dropout() if dropped else None


def _judged(
    factors: Factors,
    best: Selection,
    ended: SearchSummary,
    *,
    notes: list[str],
    loss: Loss | None,
    generator: torch.Generator,
    watch: Watch,
) -> Inversion:
    """What is proved of b samples, and their inputs."""
    view = factors.view
    inputs: Tensor | None = None
    try:
        watch.report("judge", batch_size=factors.b)
        with watch.stage("reconstruct"):
            inputs = factors.reconstruct(best.C)  # X = Q^-1 R
        with watch.stage("certify"):
            scaled = scale_from_model(factors, mark_unscaled(factors, best), loss)
            factors, certificate, mistake = certify_either_sign(
                factors, scaled, loss, generator, partial(_tell_of_judging, watch, factors.b)
            )
        if view.model is not None and factors.noisy and not bool(certificate.precise.any()):
            with watch.stage("rescale"):
                scaled, certificate = _rescaled(factors, scaled, certificate, loss)
        if scaled is not best:
            with watch.stage("reconstruct"):
                best, inputs = scaled, factors.reconstruct(scaled.C)
    except _Stopped as stopped:
        reached = verdict.of_unjudged_samples(factors, best, ended, _end(stopped, watch))
        reached = reached.with_details(*notes)
        if inputs is None or not reached.returned:
            return _without_samples(view, factors, reached, watch)
        noise = factors.input_noise(best.C)
        return _result(view, factors, reached, inputs, watch, view.mistake, noise, best.match)
    reached = verdict.of_samples(factors, best, certificate, inputs, ended)
    reached = reached.with_details(*notes, *verdict.remarks_on(factors, certificate))
    if not reached.returned:
        return _without_samples(view, factors, reached, watch, mistake)
    noise = factors.input_noise(best.C)
    return _result(view, factors, reached, inputs, watch, mistake, noise, best.match, certificate)


def _tell_of_judging(watch: Watch, b: int, words: str) -> None:
    watch.report("judge", batch_size=b, detail=words)


def _end(stopped: BaseException, watch: Watch) -> SearchEnd:
    """What stopped it: the time, or somebody who pressed Ctrl-C."""
    if isinstance(stopped, TimeIsUp):
        return SearchEnd.TIME
    watch.count("interrupted")
    return SearchEnd.INTERRUPTED


def _searched(
    factors: Factors, finder: Finder, generator: torch.Generator, watch: Watch
) -> tuple[Directions | None, Selection | None, SearchSummary]:
    """Directions and the best b of them, until every pattern matches or the search ends."""
    best: Selection | None = None
    pool: Directions | None = None
    end = SearchEnd.GAVE_UP
    try:
        with watch.keeping(_JUDGING_SHARE), watch.stage("search"):
            for pool in pools_of(finder, factors, generator=generator, watch=watch):
                with watch.stage("select"):
                    chosen = select(factors, pool, watch)
                if chosen is not None and (best is None or chosen.match > best.match):
                    best = chosen
                if best is not None and is_satisfied(finder, factors, best.match):
                    end = SearchEnd.MATCHED
                    break
            if end is SearchEnd.GAVE_UP and watch.expired:
                end = SearchEnd.TIME
    except _Stopped as stopped:
        end = _end(stopped, watch)
    barren = users_name(finder) if end is SearchEnd.GAVE_UP and not pool else ""
    return pool, best, SearchSummary(end, tuple(watch.remarks), barren)


def _found_in_part(
    factors: Factors, pool: Directions, ended: SearchSummary, watch: Watch
) -> tuple[Factors, Selection | None, SearchSummary]:
    """Fewer than b directions: the samples found, if what they leave over is no more than noise."""
    try:
        with watch.stage("select"):
            return *select_part(factors, pool, watch), ended
    except _Stopped as stopped:
        return factors, None, dataclasses.replace(ended, end=_end(stopped, watch))


def _rescaled(
    factors: Factors, selection: Selection, certificate: Certificate, loss: Loss | None
) -> tuple[Selection, Certificate]:
    """Noisy samples with the scale and the labels that the model gives them."""
    rescaled = rescale(factors, selection, loss)
    if isinstance(rescaled, Declined) or bool((rescaled.labels < 0).all()):
        return selection, certificate  # the loss has no labels
    judged = dataclasses.replace(certificate, labels=rescaled.labels, remark=rescaled.remark)
    if rescaled.predicted_error is not None:
        judged = dataclasses.replace(judged, predicted_error=rescaled.predicted_error)
    return rescaled.selection, judged


def _read_from_patterns(
    factors: Factors, pool: Directions | None, ended: SearchSummary, watch: Watch
) -> Inversion:
    """Fewer than b directions: what the patterns of those found give."""
    view = factors.view
    inputs, noise = _no_inputs(view), None
    try:
        with watch.stage("reconstruct"):
            if pool is not None:
                C = approximate_inputs(factors, pool, watch)
                inputs, noise = factors.reconstruct(C), factors.input_noise(C)
    except _Stopped as stopped:
        ended = dataclasses.replace(ended, end=_end(stopped, watch))
    if noise is None or not len(inputs):
        reached = verdict.of_no_samples(factors, ended)
        return _without_samples(view, factors, reached, watch)
    reached = verdict.of_some_samples(factors, inputs, noise, ended)
    if not reached.returned:
        return _without_samples(view, factors, reached, watch)
    return _result(view, factors, reached, inputs, watch, view.mistake, noise)


def _no_inputs(view: LayerUpdate) -> Tensor:
    return view.weight_grad.new_zeros(0, view.inputs, dtype=view.input_precision)


def _without_samples(
    view: LayerUpdate,
    factors: Factors | None,
    reached: Verdict,
    watch: Watch,
    mistake: str | None = None,
) -> Inversion:
    """A verdict with nothing recovered."""
    words = view.mistake if mistake is None else mistake
    return _result(view, factors, reached, _no_inputs(view), watch, words)


def _result(
    view: LayerUpdate,
    factors: Factors | None,
    reached: Verdict,
    inputs: Tensor,
    watch: Watch,
    mistake: str,
    noise: Tensor | None = None,
    match: float | None = None,
    certificate: Certificate | None = None,
) -> Inversion:
    """The verdict and its evidence as users get them; nothing is proved without a certificate."""
    inputs = view.sent_back(inputs)
    no = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    rounds = None if factors is None else factors.view.rounds
    left_out = () if rounds is None else rounds.left_out
    result = Inversion(
        inputs=inputs,
        batch_size=None if factors is None else factors.batch_size,
        certified=no,
        approximate=~no,
        proof=Proof.NONE,
        outcome=reached.outcome,
        reason=f"{mistake}; {reached.reason}" if mistake else reached.reason,
        cause=reached.cause,
        assumptions=(),
        match=match,
        labels=None,
        predicted_error=None,
        stats=watch.stats,
        mistake=mistake,
        details=(*reached.details, *left_out),
        rounds=1 if rounds is None else len(rounds),
        noise=None if noise is None else view.sent_back(noise),
    )
    if certificate is None:
        return result
    return dataclasses.replace(
        result,
        certified=certificate.certified.to(inputs.device),
        approximate=~certificate.precise.to(inputs.device),
        proof=certificate.proof,
        assumptions=certificate.assumptions if bool(certificate.certified.any()) else (),
        labels=None if certificate.labels is None else certificate.labels.to(inputs.device),
        predicted_error=view.sent_back(certificate.predicted_error),
    )


def _on_cpu(generator: torch.Generator | None) -> torch.Generator:
    """The generator that everything is drawn from, so that all devices get the same numbers.

    One of another device gives the seed.
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    if generator.device.type != "cpu":  # pragma: no cover: a GPU
        seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
        return torch.Generator().manual_seed(int(seed))
    return generator


def _told_loss(view: LayerUpdate) -> Loss | None:
    """Cross-entropy with the class weights that were told; None if there are none."""
    weights = view.protocol.class_weights
    if weights is None:
        return None
    return nn.CrossEntropyLoss(weight=torch.tensor(weights), reduction=view.protocol.reduction)


def _checked(
    view: LayerUpdate, finder: str | Finder, max_seconds: float | None, executor: Executor | None
) -> Finder:
    """The finder, after all checks that need no work."""
    if not isinstance(view, LayerUpdate):
        words = f"expected a LayerUpdate, got a {type(view).__name__}"
        raise InvalidUpdate([f"{words}: call spear.observe(model, gradients) first"])
    number = isinstance(max_seconds, (int, float)) and 0 < max_seconds < float("inf")
    if max_seconds is not None and not number:
        raise InvalidOption(
            f"expected {{max_seconds}} > 0, got {max_seconds!r}", arguments=["max_seconds"]
        )
    if executor is not None and not hasattr(executor, "submit"):
        raise InvalidOption(f"expected an executor such as spear.workers(2), got {executor!r}")
    if executor is not None and view.weight_grad.device.type != "cpu":
        raise InvalidOption(
            f"expected an update on the CPU, where workers compute, got one on "
            f"{view.weight_grad.device}: move it, or leave out executor="
        )
    if isinstance(finder, str):
        return finder_named(finder)
    if isinstance(finder, type) or not (hasattr(finder, "search") or hasattr(finder, "satisfied")):
        raise InvalidOption(f"expected a finder such as SamplingFinder(), got {finder!r}")
    return made_finder(finder, "the finder")


def finder_named(name: str) -> Finder:
    """A finder of ours, or one that an installed package offers under this name.

    >>> type(finder_named("sampling")).__name__
    'SamplingFinder'
    """
    if name in FINDERS:
        return FINDERS[name]()
    offered = plugins.offered(plugins.FINDERS)
    if name in offered:
        return made_finder(plugins.load(plugins.FINDERS, name), name)
    raise InvalidOption(
        f"expected finder to be one of {', '.join(sorted({*FINDERS, *offered}))}, got {name!r}; "
        "one of your own is given as an object, or on the command line as my_finder.py:MyFinder"
    )
