"""Figure 5: accuracy and number of submatrices by the network's width and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spear.experiments.common import Case, Experiment, Plot, Section
from spear.experiments.common.batches import DEPTH, images, inverted, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import band, counts, per_point, rates, unfinished, where
from spear.experiments.common.searching import counted
from spear.federated import mlp
from spear.report import plots
from spear.trials import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = (100, 200, 400, 800, 1600)
DEPTHS = (2, 3, 4, 6, 8, 10)
SMALL = 12  # a batch size whose submatrices can be counted at every width
WIDE = (400, 800, 1600)  # where b = 20 takes seconds, not minutes
BUDGET = 2 * 10**9


def cell(b: int, m: int, depth: int, finder: str) -> Settings:
    settings = {"data": "cifar10", "b": b, "m": m, "depth": depth, "finder": finder}
    if finder == "cascade":
        return {**settings, "max_seconds": 120}
    return {**settings, "max_samples": BUDGET, "max_seconds": 900}


def networks() -> list[tuple[int, int]]:
    shapes = [(m, DEPTH) for m in WIDTHS] + [(200, depth) for depth in DEPTHS]
    return list(dict.fromkeys(shapes))


def measure(case: Case) -> Measured:
    # The pattern of zeros depends on the first layer alone: with the same weights there, counts
    # would not vary with depth. So networks of different depth get different weights.
    source, seed = images(case.data, case["data"]), 1000 * case["depth"] + case.seed
    model = mlp(
        math.prod(source.shape), source.classes, width=case["m"], depth=case["depth"], seed=seed
    )
    batch = private_batch(case, model=model)
    return inverted(case, batch).measured() if case["finder"] == "cascade" else counted(case, batch)


def panel(axes: Axes, rows: Rows, name: str, values: Sequence[int], fixed: Settings) -> Axes:
    """Accuracy on the left axis, submatrices on the right one."""
    other = axes.twinx()
    groups = [where(rows, **{name: v}, **fixed, finder="cascade") for v in values]
    rates(axes, values, groups, color=plots.GREEN, marker="s", label="accuracy, $b = 20$")
    for b, style in ((20, "--"), (SMALL, "-")):
        found = [
            counts(where(rows, **{name: v}, **fixed, finder="overlapping", b=b)) for v in values
        ]
        label = f"submatrices, $b = {b}$"
        band(other, values, found, color=plots.BLUE, linestyle=style, label=label)
    axes.set(ylim=(0, 105))
    other.set(yscale="log", ylim=(1e3, 1e8))
    axes.tick_params(axis="y", labelcolor=plots.GREEN)
    other.tick_params(axis="y", labelcolor=plots.BLUE)
    other.spines["right"].set_visible(True)
    other.grid(visible=False)
    return other


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(6.6, 2.8)
    left, right = drawn.subplots(1, 2)
    first = panel(left, rows, "m", WIDTHS, {"depth": DEPTH})
    last = panel(right, rows, "depth", DEPTHS, {"m": 200})
    left.set(xlabel="width $m$, six layers", xscale="log", ylabel="accuracy (%)")
    left.set_xticks(WIDTHS, labels=map(str, WIDTHS))
    left.minorticks_off()
    right.set(xlabel="depth $L$, width 200", xticks=DEPTHS)
    last.set_ylabel("submatrices")
    handles = [axes.get_legend_handles_labels() for axes in (left, first)]
    lines = [line for shown, _ in handles for line in shown]
    labels = [label for _, words in handles for label in words]
    if lines:
        drawn.legend(lines, labels, loc="outside lower center", ncols=3)
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["architecture"]
    sampled = where(own, finder="overlapping")
    caption = (
        "Accuracy of the cascade at b = 20 (green, with its 95 % Clopper-Pearson interval) and "
        "median number of submatrices (blue, 10th to 90th percentile shaded) by width at six "
        "layers (left) and by depth at width 200 (right). CIFAR-10, "
        f"{per_point(own)}.{unfinished(sampled)}"
    )
    note = (
        f"The paper counts at b = 20 throughout; here a batch of {SMALL} stands for it, and b = 20 "
        f"is counted where it is affordable, from m = {min(WIDE)}. Counts are of submatrices that "
        "overlap, b of them from b drawn rows: 2b / (b + 1) times those of independent ones "
        "(Figure 4)."
    )
    plot = Plot("architecture", lambda: figure(own), caption)
    return Section(plots=[plot], notes=[note])


EXPERIMENT = Experiment(
    place="Figure 5",
    title="Effect of the network's width and depth",
    batches=20,
    cells=[
        *(cell(20, m, depth, "cascade") for m, depth in networks()),
        *(cell(SMALL, m, depth, "overlapping") for m, depth in networks()),
        *(cell(20, m, DEPTH, "overlapping") for m in WIDE),
    ],
    measure=measure,
    draw=draw,
)
