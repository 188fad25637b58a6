"""Beyond the paper: several rounds of batches drawn anew from more data, or never seen before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spear.experiments.common import Case, Experiment, Plot, Section
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import per_point, verdicts, where
from spear.experiments.common.several_rounds import (
    cell,
    curve,
    measured,
    rounds_axis,
    sent_of,
    time_given,
)
from spear.federated import play_rounds
from spear.report import plots
from spear.trials import Measured
from spear.update import Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN, M, LR, SECONDS = 25, 50, 0.1, 60  # samples in a round, neurons
POOLS = (25, 50, 100, 200)  # samples that a client draws its batches from
ROUNDS = (1, 2, 4, 8, 16, 32)
FRESH = (1, 2, 4, 8, 16)  # rounds of samples that were never seen before


def settings(pool: int, rounds: int, fresh: bool = False) -> Settings:
    return cell(pool, M, rounds, LR, SECONDS, drawn=DRAWN, fresh=fresh)


CELLS = [
    *(settings(pool, rounds) for pool in POOLS for rounds in ROUNDS),
    *(settings(DRAWN * rounds, rounds, True) for rounds in FRESH),
]


def chosen(case: Case) -> list[Tensor]:
    """Which samples (drawn,) are in each round's batch."""
    count = case["drawn"]
    if case["fresh"]:
        return list(torch.arange(count * case["rounds"]).view(-1, count))
    draw = torch.Generator().manual_seed(case.seed + 10**6)  # independent of the weights' bits
    return [torch.randperm(case["b"], generator=draw)[:count] for _ in range(case["rounds"])]


def measure(case: Case) -> Measured:
    """One client sends the gradient of another part of its data in each round."""
    batch, rounds = private_batch(case), chosen(case)
    cohorts = [[(batch.inputs[own], batch.labels[own])] for own in rounds]
    played = play_rounds(
        batch.model, cohorts, Protocol(), server_lr=case["lr"], generator=case.generator()
    )
    return measured(case, sent_of(batch, torch.cat(rounds)), played)


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(5.4, 3.1)
    axes = drawn.subplots()
    for pool, colour in zip(POOLS, plots.shades(len(POOLS)), strict=True):
        own = where(rows, b=pool, fresh=False)
        groups = [where(own, rounds=rounds) for rounds in ROUNDS]
        words = f"drawn from {pool}" if pool > DRAWN else f"the same {pool}"
        curve(axes, ROUNDS, groups, color=colour, label=words)
    fresh = [where(rows, fresh=True, rounds=rounds) for rounds in FRESH]
    curve(axes, FRESH, fresh, color=plots.RED, marker="x", label="new ones every time")
    axes.set(ylabel="samples recovered (%)", ylim=(-4, 104))
    axes.set_title(f"{DRAWN} samples a round through {M} neurons")
    rounds_axis(axes, ROUNDS)
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds_sampling"]
    caption = (
        "Samples right to 60 dB, of all that the client has, against the rounds seen. Each round takes "
        f"{DRAWN} of them, drawn anew: CIFAR-10, normalised, {M} neurons, three layers, FedSGD at a "
        f"learning rate of {LR:g}; {per_point(own)}, bars from worst to best."
    )
    plot = Plot("sampling", lambda: figure(own), caption)
    return Section(plots=[plot], notes=[time_given(SECONDS), verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="Several rounds of batches drawn from more data",
    batches=2,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
