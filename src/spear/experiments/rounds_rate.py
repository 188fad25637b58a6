"""Beyond the paper: what several rounds give away by the learning rate between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spear.experiments.common import Experiment, Plot, Section
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import metric, per_point, verdicts, where
from spear.experiments.common.several_rounds import cell, curve, samples_right, time_given
from spear.experiments.rounds import measure
from spear.report import plots
from spear.theory import rounds_needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

B, M, SECONDS = 100, 50, 60
ROUNDS = (8, 12, 20)
RATES = (0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3)
CELLS = [cell(B, M, rounds, lr, SECONDS) for rounds in ROUNDS for lr in RATES]
# Colour, marker and width: lines that coincide are seen one inside the other.
LOOKS = {8: (plots.BLUE, "o", 5.0), 12: (plots.ORANGE, "s", 2.6), 20: (plots.GREEN, "D", 1.0)}


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(7.0, 3.1)
    left, right = drawn.subplots(1, 2, sharey=True)
    for rounds, (colour, marker, width) in LOOKS.items():
        own = where(rows, rounds=rounds)
        groups = [where(own, lr=lr) for lr in RATES]
        look = {"color": colour, "marker": marker}
        size = {"linewidth": width, "markersize": 3 + width}
        curve(left, RATES, groups, **look, **size, label=f"{rounds} rounds")
        moved(right, own, rounds, **look)
    left.set(xscale="log", xlabel="learning rate", ylabel="samples recovered (%)", ylim=(-4, 104))
    right.set(xscale="log", xlabel="movement in a round, of the preactivations' size")
    left.set_title(f"{B} samples through {M} neurons")
    right.set_title("the same batches, by movement of the weights")
    if rows:
        left.plot([], [], ":", color=plots.GREY, label="least movement, by theory (right)")
        handles = left.get_legend_handles_labels()
        drawn.legend(*handles, loc="outside lower center", ncols=len(ROUNDS) + 1)
    return drawn


def moved(axes: Axes, rows: Rows, rounds: int, color: str, marker: str) -> None:
    """Each batch by its own movement; a line at the least movement with which the theory is content."""
    known = [row for row in rows if "movement" in row.metrics]
    axes.plot(metric(known, "movement"), samples_right(known), marker, color=color, alpha=0.6)
    least = least_movement(rounds)
    if least is not None:
        axes.axvline(least, color=color, linestyle=":", linewidth=1)


def least_movement(rounds: int) -> float | None:
    """The least movement at which the theory asks for no more than this many rounds."""
    for step in range(-80, 1):  # twenty a decade
        needed = rounds_needed(B, M, movement=10 ** (step / 20))
        if needed is not None and needed <= rounds:
            return float(10 ** (step / 20))
    return None


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds_rate"]
    caption = (
        f"Samples right to 60 dB, of {B}, against the learning rate (left; {per_point(own)}, bars from "
        "worst to best) and against how far preactivations moved in a round (right; one "
        f"point a batch): CIFAR-10, normalised, {M} neurons, three layers, FedSGD, the same batch each "
        "round. Dotted: the least movement at which `theory.rounds_needed` asks for no more rounds."
    )
    plot = Plot("rates", lambda: figure(own), caption)
    return Section(plots=[plot], notes=[time_given(SECONDS), verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="Several rounds by the learning rate and the movement of the weights",
    batches=3,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
