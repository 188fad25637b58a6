"""Beyond the paper: for how many rounds secure aggregation hides the clients' samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from spear.experiments.common import Case, Experiment, Plot, Section, table
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import per_point, rate, seconds, verdicts, where
from spear.experiments.common.several_rounds import (
    cell,
    curve,
    enough,
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

Groups = dict[tuple[int, int], tuple[int, ...]]
EACH, M, LR, SECONDS = 20, 50, 0.1, 90  # samples of a client, neurons
# By clients in all, and those of them in a round: the rounds that are tried.
FIXED: Groups = {
    (2, 2): (1, 2, 3, 4, 6, 10),
    (3, 3): (1, 3, 4, 6, 10),
    (5, 5): (1, 6, 8, 10, 14, 20),
    (7, 7): (1, 10, 14, 20, 30),
    (10, 10): (1, 15, 20, 30, 40),
}
CHANGING: Groups = {
    (4, 2): (1, 4, 6, 10, 14, 20),
    (6, 3): (1, 6, 10, 14, 20, 30),
    (10, 5): (1, 10, 15, 20, 30, 40),
}


def settings(clients: int, present: int, rounds: int) -> Settings:
    groups = {"clients": clients, "present": present}
    return cell(clients * EACH, M, rounds, LR, SECONDS, **groups)


CELLS = [
    settings(*group, rounds) for group, tried in (FIXED | CHANGING).items() for rounds in tried
]


def present(case: Case) -> list[list[int]]:
    """The clients of each round, drawn at random unless all are present."""
    draw = torch.Generator().manual_seed(case.seed + 10**6)  # independent of the weights' bits
    drawn = [torch.randperm(case["clients"], generator=draw) for _ in range(case["rounds"])]
    return [sorted(order[: case["present"]].tolist()) for order in drawn]


def measure(case: Case) -> Measured:
    """The server sees the mean of the clients' gradients, round after round."""
    batch, rounds = private_batch(case), present(case)
    samples = torch.arange(case["b"]).view(case["clients"], -1)  # of each client
    clients = [(batch.inputs[own], batch.labels[own]) for own in samples]
    played = play_rounds(
        batch.model,
        [[clients[i] for i in own] for own in rounds],
        Protocol(clients=case["present"]),
        server_lr=case["lr"],
        generator=case.generator(),
    )
    return measured(case, sent_of(batch, samples[sorted(set().union(*rounds))]), played)


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(7.0, 3.4)
    both = drawn.subplots(1, 2, sharey=True)
    titles = "all clients in every round", "half of the clients, drawn anew each round"
    for axes, groups, title in zip(both, (FIXED, CHANGING), titles, strict=True):
        colours = plots.shades(len(groups))
        for ((clients, present), tried), colour in zip(groups.items(), colours, strict=True):
            own = where(rows, clients=clients, present=present)
            label = f"{present} of {clients} clients" if present < clients else f"{clients} clients"
            points = [where(own, rounds=rounds) for rounds in tried]
            curve(axes, tried, points, color=colour, label=f"{label}, {clients * EACH} samples")
        axes.set(title=title, ylim=(-4, 104))
        rounds_axis(axes, (1, 2, 3, 5, 10, 20, 40))
        if rows:
            axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.2), ncols=1)
    both[0].set_ylabel("samples recovered (%)")
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds_aggregation"]
    lines = []
    for clients, present in FIXED | CHANGING:
        group = where(own, clients=clients, present=present)
        first = enough(group)
        shown = where(group, rounds=first)
        words = "–" if first is None else str(first)
        sizes = [str(clients), str(present), str(clients * EACH)]
        lines.append([*sizes, words, rate(shown), seconds(shown)])
    caption = (
        "Samples right to 60 dB, of those of all clients, against the rounds seen. Each client has "
        f"{EACH} images of CIFAR-10, and the server sees only the mean of gradients; {M} neurons, "
        f"three layers, FedSGD at a learning rate of {LR:g}; {per_point(own)}, bars from worst to best."
    )
    note = (
        "*Enough* are the fewest of the rounds tried from which on every sample of every client is "
        f"right. {time_given(SECONDS)}"
    )
    columns = "clients, in a round, samples, rounds enough, Acc there, Time there (CPU)"
    plot = Plot("clients", lambda: figure(own), caption)
    return Section([table(columns, lines)], [plot], notes=[note, verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="For how many rounds secure aggregation hides samples",
    batches=2,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
