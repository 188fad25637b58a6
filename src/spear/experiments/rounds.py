"""Beyond the paper: how many rounds give away a batch that is larger than the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spear.experiments.common import Case, Experiment, Plot, Section, table
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import per_point, rate, seconds, verdicts, where
from spear.experiments.common.several_rounds import (
    cell,
    curve,
    enough,
    foreseen,
    measured,
    rounds_axis,
    time_given,
)
from spear.federated import play_rounds
from spear.report import plots
from spear.trials import Measured
from spear.update import Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

M, LR, SECONDS = 50, 0.1, 90
# By samples per neuron: the rounds that are tried, around what the theory asks for.
ROUNDS = {
    0.5: (1, 2, 3, 4, 6, 10),
    1.0: (1, 2, 3, 4, 6, 10),
    2.0: (1, 4, 6, 7, 8, 10, 14, 20),
    3.0: (1, 5, 10, 12, 15, 20, 30),
    4.0: (1, 10, 15, 20, 30, 40),
}
CELLS = [
    cell(int(ratio * M), M, rounds, LR, SECONDS)
    for ratio, tried in ROUNDS.items()
    for rounds in tried
]


def measure(case: Case) -> Measured:
    """One client sends the gradient of the same batch round after round."""
    batch = private_batch(case)
    cohorts = [[(batch.inputs, batch.labels)]] * case["rounds"]
    played = play_rounds(
        batch.model, cohorts, Protocol(), server_lr=case["lr"], generator=case.generator()
    )
    return measured(case, batch, played)


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(5.2, 3.1)
    axes = drawn.subplots()
    for ratio, colour in zip(ROUNDS, plots.shades(len(ROUNDS)), strict=True):
        b, tried = int(ratio * M), ROUNDS[ratio]
        own = where(rows, b=b)
        groups = [where(own, rounds=rounds) for rounds in tried]
        curve(axes, tried, groups, color=colour, label=f"{b} samples ($b/m$ = {ratio:g})")
        limit = foreseen(own)
        if limit is not None:
            axes.axvline(limit, color=colour, linestyle=":", linewidth=1)
    axes.set(
        title=f"A layer of {M} neurons, the same batch every round",
        ylabel="samples recovered (%)",
        ylim=(-4, 104),
    )
    rounds_axis(axes, (1, 2, 3, 5, 7, 10, 15, 20, 30, 40))
    if rows:
        axes.plot([], [], ":", color=plots.GREY, label="what the theory asks for")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds"]
    lines = []
    for ratio in ROUNDS:
        b = int(ratio * M)
        group = where(own, b=b)
        first = enough(group)
        limit = foreseen(group) if group else None
        shown = where(group, rounds=first)
        lines.append(
            [
                *(f"{b}", f"{ratio:g}", "–" if limit is None else str(limit)),
                *("–" if first is None else str(first), rate(shown), seconds(shown)),
            ]
        )
    caption = (
        f"Samples right to 60 dB, of all samples, against the rounds seen: CIFAR-10, normalised, {M} "
        f"neurons, three layers, FedSGD at a learning rate of {LR:g}; {per_point(own)}, bars from "
        "worst to best. Dotted: the rounds that `theory.rounds_needed` asks for."
    )
    note = (
        "*Enough* are the fewest of the rounds tried from which on every sample of every batch is "
        f"right. {time_given(SECONDS)}"
    )
    columns = "b, b/m, rounds by theory, rounds enough, Acc there, Time there (CPU)"
    plot = Plot("rounds", lambda: figure(own), caption)
    return Section([table(columns, lines)], [plot], notes=[note, verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="How many rounds give away a batch larger than the layer",
    batches=3,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
