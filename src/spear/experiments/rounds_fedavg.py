"""Beyond the paper: several rounds of clients that train locally, by epochs and mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from spear.experiments.common import Case, Experiment, Plot, Section
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import per_point, verdicts, where
from spear.experiments.common.several_rounds import cell, curve, measured, rounds_axis, time_given
from spear.federated import play_rounds, split
from spear.report import plots
from spear.trials import Measured
from spear.update import Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

B, M, LR, SECONDS, CLIENTS = 50, 50, 0.02, 60, 5
EPOCHS = (1, 2, 5)
MINI = (50, 25, 10)  # samples in a local step; 50 are all
ROUNDS = (2, 4, 8, 16)
CELLS = [
    cell(B, M, rounds, LR, SECONDS, epochs=epochs, mini=mini, clients=CLIENTS)
    for mini in MINI
    for epochs in EPOCHS
    for rounds in ROUNDS
]
# Colour and width: lines that coincide are seen one inside the other.
LOOKS = dict(zip(EPOCHS, ((plots.BLUE, 5.0), (plots.ORANGE, 2.6), (plots.GREEN, 1.0)), strict=True))


def measure(case: Case) -> Measured:
    """One client's own weights are seen; the model goes on from the mean of all clients' weights."""
    b = case["b"]
    drawn = private_batch(replace(case, settings={**case.settings, "b": b * case["clients"]}))
    own, *others = split(drawn.inputs, drawn.labels, Protocol(samples=b))
    batch = replace(drawn, inputs=own[0], labels=own[1])
    protocol = Protocol(
        sends="weights",
        lr=case["lr"],
        epochs=case["epochs"],
        local_batch_size=case["mini"] if case["mini"] < b else None,
    )
    played = play_rounds(
        batch.model,
        [[own]] * case["rounds"],
        protocol,
        server_lr=1.0,
        others=others,
        generator=case.generator(),
    )
    return measured(case, batch, played)


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(7.0, 2.7)
    panels = drawn.subplots(1, len(MINI), sharey=True)
    for axes, mini in zip(panels, MINI, strict=True):
        for epochs, (colour, width) in LOOKS.items():
            own = where(rows, mini=mini, epochs=epochs)
            steps = epochs * B // mini
            label = f"{epochs} epoch{'s' * (epochs > 1)}, {steps} step{'s' * (steps > 1)}"
            groups = [where(own, rounds=rounds) for rounds in ROUNDS]
            look = {"color": colour, "linewidth": width, "markersize": 3 + width}
            curve(axes, ROUNDS, groups, **look, label=label)
        title = f"mini-batches of {mini}" if mini < B else "whole batches"
        axes.set(title=title, ylim=(-4, 104))
        rounds_axis(axes, ROUNDS)
        if rows:
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.22))
    panels[0].set_ylabel("samples recovered (%)")
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds_fedavg"]
    caption = (
        f"Samples right to 60 dB, of a client's {B}, against the rounds seen, by local epochs and "
        f"samples in a local step: CIFAR-10, normalised, {M} neurons, three layers, learning rate "
        f"{LR:g}. The client's own weights are seen; the model goes on from the mean of {CLIENTS} "
        f"clients; {per_point(own)}, bars from worst to best."
    )
    note = (
        "Right is not proved here: local steps of several rounds are not repeated, so the verdict is "
        "at best APPROXIMATE, except where one step explains every round. What is counted is the truth."
    )
    plot = Plot("training", lambda: figure(own), caption)
    return Section(plots=[plot], notes=[note, time_given(SECONDS), verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="Several rounds of FedAvg, by local epochs and mini-batches",
    batches=2,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
