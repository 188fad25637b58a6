"""Algorithm 1 up to its choice of directions: how many submatrices that takes, and what it gives.

Without the certificate: it has no part in the count, and takes longer than the search where layers are
wide. Whether a choice is right is judged against the truth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spear import theory
from spear.errors import InvalidOption
from spear.experiments.common.experiment import Case
from spear.factors import Factors, Side, factorise
from spear.judge import Selection, select
from spear.metrics import EXACT_DB, score_images
from spear.search import (
    CandidatePool,
    CascadeFinder,
    Finder,
    Rounded,
    SamplingFinder,
    Watch,
    is_satisfied,
    pools_of,
    unit,
)
from spear.trials import Batch, Measured, Row, progress_words, quality
from spear.update import LayerUpdate

LIMIT_SINGULAR = 0.5  # the limit of the chance of a singular matrix (the lemma's bound has 0.939)
_FINE = 100  # checks of the pool within the expected number of submatrices: counts are good to 1 %
_INVERSES = 4096  # blocks at once, at most: more are no faster


@dataclass(frozen=True, eq=False)
class Searched:
    """How a search ended."""

    selection: Selection | None  # the choice with the best match
    matched: bool  # did every sign fit? If not, the budget or the time ran out
    counts: dict[str, int]  # submatrices and starts up to then
    seconds: float


def searched(
    case: Case, view: LayerUpdate, finder: Finder, stages: Sequence[bool] = (True,)
) -> tuple[Factors, list[Searched]]:
    """Search until a choice matches, once for every way to choose: with the second stage, or without.

    All ways see the same candidates; the search goes on until the last of them has ended.
    """
    watch = Watch(lambda step: case.report(*progress_words(step)), case["max_seconds"])
    factors = factorise(view)
    best: list[Selection | None] = [None for _ in stages]
    ended: dict[int, Searched] = {}
    began, generator = time.monotonic(), case.generator()
    if factors.batch_size:
        for pool in pools_of(finder, factors, generator=generator, watch=watch):
            for i in (i for i in range(len(stages)) if i not in ended):
                chosen = select(factors, pool, watch, second_stage=stages[i])
                before = best[i]
                if chosen is not None and (before is None or chosen.match > before.match):
                    best[i] = chosen
                    if is_satisfied(finder, factors, chosen.match):
                        ended[i] = Searched(chosen, True, _counts(watch), time.monotonic() - began)
            if len(ended) == len(stages):
                break
    late = time.monotonic() - began
    return factors, [
        ended.get(i, Searched(best[i], False, _counts(watch), late)) for i in range(len(stages))
    ]


def _counts(watch: Watch) -> dict[str, int]:
    return {n: int(watch.stats[n]) for n in ("submatrices", "starts") if n in watch.stats}


def truth_of(batch: Batch, factors: Factors, ended: Searched) -> dict[str, Any]:
    """How good a choice is, as a row's metrics."""
    chosen = ended.selection
    inputs = batch.inputs[:0] if chosen is None else factors.reconstruct(chosen.C)
    score = score_images(batch.pixels(inputs), batch.pixels(batch.inputs))
    return {
        "exact": score.exact,
        "recovered": int((score.psnr >= EXACT_DB).sum()),
        # If a sample's gradient has vanished, the rest may match but is not the whole batch.
        "matched": ended.matched and factors.batch_size == len(batch.inputs),
        "match": None if chosen is None else chosen.match,
        "worst": quality(score)["worst"],
        "batch_size": factors.batch_size,
        **ended.counts,
    }


@dataclass(frozen=True)
class Zeros:
    """Zeros of dL/dZ: those of each column, and the rows that are zero in all of them."""

    columns: list[int]
    silent: int
    width: int

    @staticmethod
    def of(batch: Batch) -> Zeros:
        """From the true preactivations of the first layer."""
        first = batch.model.get_submodule("0")
        assert isinstance(first, nn.Linear)
        with torch.no_grad():
            off: Tensor = first(batch.inputs) <= 0  # (b, m)
        return Zeros(off.sum(1).tolist(), int(off.all(0).sum()), off.shape[1])

    @staticmethod
    def of_row(row: Row) -> Zeros:
        """From the metrics that `counted` wrote."""
        return Zeros(row.metrics["zeros"], row.metrics["silent"], row.settings["m"])

    @property
    def sparsity(self) -> float:
        """Share of zeros in the column with the fewest."""
        return min(self.columns) / self.width

    def expected(
        self, *, singular: float = theory.SINGULAR_BASE, overlapping: bool = False
    ) -> float:
        """The expected number of submatrices: hypergeometric, among the rows that are not silent."""
        counts = [zeros - self.silent for zeros in self.columns]
        return theory.expected_samples_narrow(
            len(counts),
            self.width - self.silent,
            counts,
            singular=singular,
            overlapping=overlapping,
        )


def finder_of(name: str, zeros: Zeros, **options: Any) -> Finder:
    """A finder by its name in settings, counting to within 1 % of the expected number.

    Args:
        name: cascade, independent or overlapping.
        zeros: of the batch; they determine the step.
        options: further options of the sampling finder.
    """
    if name == "cascade":
        return CascadeFinder()
    if name not in ("independent", "overlapping"):
        raise InvalidOption(f"expected cascade, independent or overlapping, got {name!r}")
    each = 1 if name == "independent" else len(zeros.columns)
    expected = zeros.expected(singular=LIMIT_SINGULAR, overlapping=name == "overlapping")
    step = min(expected / each / _FINE, _INVERSES)
    return SamplingFinder(
        adaptive=False,
        independent=name == "independent",
        at_once=max(1, math.floor(step)),
        **options,
    )


def counted(case: Case, batch: Batch) -> Measured:
    """One search with the setting `finder`: its count, and what the theory expects of it."""
    zeros = Zeros.of(batch)
    options = {n: case[n] for n in ("max_samples", "threshold") if n in case.settings}
    own = case.chosen(case["finder"])
    finder = finder_of(own, zeros, **options) if isinstance(own, str) else own
    factors, (ended,) = searched(case, batch.view(), finder)
    overlapping = case["finder"] == "overlapping"
    truth = truth_of(batch, factors, ended)
    metrics = {
        **truth,
        "zeros": zeros.columns,
        "silent": zeros.silent,
        "sparsity": zeros.sparsity,
        "expected_lemma": theory.expected_samples(len(batch.inputs)),
        "expected_hypergeometric": _finite(zeros.expected()),
        "expected": _finite(zeros.expected(singular=LIMIT_SINGULAR, overlapping=overlapping)),
    }
    return Measured("MATCHED" if truth["matched"] else "NOT MATCHED", metrics, ended.seconds)


def _finite(value: float) -> float | None:
    """None if the expectation is infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None


class PlainPool(CandidatePool):
    """Keeps every candidate that passes the sparsity filter, with nothing held against mixes.

    Ours asks besides that a direction is held by more zeros than it was solved for. A mix of samples is
    not, so that hardly any is left for the second stage of the choice to throw out.
    """

    def _add(self, candidates: Tensor) -> None:
        candidates, _ = self._sparse(candidates[~self._overdetermined.holds(candidates)])
        self._take(candidates)

    def _keep(self, q: Tensor, zeros: Tensor) -> Tensor:
        white = unit((q * self.side.scales)[None])
        if int(zeros.sum()) + self.side.empty_rows >= self.threshold * self.side.size:
            # Redundancy is ignored: sparsity alone decides.
            self._overdetermined.add([Rounded(q, zeros, white, 0)])
        return white


@dataclass(frozen=True)
class PlainFinder(SamplingFinder):
    """Algorithm 1 with the paper's filter alone."""

    def _pool(self, side: Side, watch: Watch) -> CandidatePool:
        return PlainPool(side, self._threshold(side), watch)
