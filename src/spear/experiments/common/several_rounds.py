"""Trials over several rounds of the same data: played, attacked together, and drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spear import theory
from spear.experiments.common.batches import attack
from spear.experiments.common.experiment import Case, Rows, Settings
from spear.experiments.common.figures import metric
from spear.factors import combine
from spear.federated import Sent
from spear.trials import Batch, Compared, Measured, compare
from spear.update import LayerUpdate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Played = Iterable[tuple[nn.Module, Sent]]


def cell(b: int, m: int, rounds: int, lr: float, max_seconds: float, **more: Any) -> Settings:
    """Settings that all experiments over rounds share: CIFAR-10 and a network of three layers."""
    sizes = {"data": "cifar10", "b": b, "m": m, "depth": 3, "rounds": rounds, "lr": lr}
    return {**sizes, **more, "max_seconds": max_seconds}


def compared(case: Case, batch: Batch, played: Played) -> tuple[Compared, float]:
    """All rounds attacked together, beside the truth; and the movement of the weights."""
    ends = [_preactivations(batch.model, batch.inputs)] * 2  # of the first round and of the last

    def views() -> Iterator[LayerUpdate]:
        for number, (model, sent) in enumerate(played, 1):
            case.report("rounds", number / case["rounds"])
            ends[1] = _preactivations(model, batch.inputs)
            yield sent.view(model)

    found = compare(batch, attack(case, combine(views()), None))
    return found, movement(ends[0], ends[1], case["rounds"])


def sent_of(batch: Batch, samples: Tensor) -> Batch:
    """The samples that took part in some round: no attack can find the others."""
    own = sorted(set(samples.flatten().tolist()))
    return replace(batch, inputs=batch.inputs[own], labels=batch.labels[own])


def measured(case: Case, batch: Batch, played: Played, **more: Any) -> Measured:
    """What a row keeps of that; the batch holds the samples that were sent, and no others."""
    found, moved = compared(case, batch, played)
    return found.measured({"movement": moved, "sent": len(batch.inputs), **more})


def _preactivations(model: nn.Module, inputs: Tensor) -> Tensor:
    """Of the first layer (b, m)."""
    with torch.no_grad():
        outputs: Tensor = model.get_submodule("0")(inputs)
    return outputs.double()


def movement(first: Tensor, last: Tensor, rounds: int) -> float:
    """How far preactivations go in a round, of their size, as `theory.rounds_needed` means it.

    >>> round(movement(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.3]), 4), 6)
    0.1
    """
    if rounds == 1:
        return 0.0
    alike = float(nn.functional.cosine_similarity(first.flatten(), last.flatten(), dim=0))
    return math.tan(math.acos(min(1.0, max(alike, 1e-6)))) / (rounds - 1)


def samples_right(rows: Rows, name: str = "recovered") -> list[float]:
    """Per cent of all samples that clients have, by batch; no result counts as none."""
    return [100 * (row.metrics.get(name) or 0) / row.settings["b"] for row in rows]


def curve(axes: Axes, x: Sequence[float], groups: Sequence[Rows], **look: Any) -> None:
    """The mean share of samples right over all batches, with a bar from the worst to the best."""
    places = [(at, samples_right(rows)) for at, rows in zip(x, groups, strict=True) if rows]
    if not places:
        return
    at, means = [at for at, _ in places], [statistics.fmean(shares) for _, shares in places]
    low = [mean - min(shares) for mean, (_, shares) in zip(means, places, strict=True)]
    high = [max(shares) - mean for mean, (_, shares) in zip(means, places, strict=True)]
    axes.errorbar(at, means, yerr=(low, high), **{"marker": "o", "elinewidth": 0.8, **look})


def rounds_axis(axes: Axes, ticks: Sequence[int]) -> None:
    """Rounds, on a logarithmic scale with these ticks."""
    axes.set(xscale="log", xlabel="rounds seen")
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()


def foreseen(rows: Rows) -> int | None:
    """`theory.rounds_needed` at the movement that the rows have on average; None if unknown."""
    moved = [value for value in metric(rows, "movement") if value > 0]
    if not moved:
        return None
    b, m = rows[0].settings["b"], rows[0].settings["m"]
    return theory.rounds_needed(b, m, movement=statistics.fmean(moved))


def enough(rows: Rows) -> int | None:
    """The fewest rounds from which on every batch is right to the last sample; None if never."""
    last = None
    for rounds in sorted({row.settings["rounds"] for row in rows}, reverse=True):
        own = [row for row in rows if row.settings["rounds"] == rounds]
        if min(samples_right(own)) < 100:
            break
        last = rounds
    return last


def time_given(seconds: float) -> str:
    """A note on what a search could not do for lack of time."""
    return (
        f"A batch has {seconds:g} seconds, of which the search may take seven tenths. What it has not "
        "found by then counts as not recovered; more time may find more."
    )
