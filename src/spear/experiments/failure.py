"""Figure 3: the probability that even exhaustive sampling misses a direction. Theory only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from spear import theory
from spear.experiments.common import Experiment, Plot, Section
from spear.experiments.common.experiment import Rows
from spear.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FALSE_REJECTION = 1e-9
BATCH_SIZES = (5, 10, 20, 50, 100)
WIDTHS = range(2, 401, 2)
CURVES = {
    "--": theory.failure_bound,
    "-": theory.failure_approximation,
    ":": theory.failure_bound_by_columns,
}


def figure() -> Figure:
    drawn = plots.figure(4.2, 2.7)
    axes = drawn.subplots()
    for b, colour in zip(BATCH_SIZES, plots.shades(len(BATCH_SIZES)), strict=True):
        widths = [m for m in WIDTHS if m >= b]
        for style, curve in CURVES.items():
            p = [curve(b, m, FALSE_REJECTION) for m in widths]
            label = f"$b = {b}$" if style == "-" else None
            axes.plot(widths, p, style, color=colour, label=label, linewidth=1.1)
    axes.set(
        xlabel="width $m$",
        ylabel="failure probability",
        yscale="log",
        xlim=(0, WIDTHS[-1]),
        ylim=(1e-9, 1.5),
        yticks=np.logspace(-9, 0, 4),
    )
    drawn.legend(loc="outside right center")
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    caption = (
        "Failure probability despite all submatrices, against the width m: the upper bound "
        "(dashed) and the approximation (solid) of the paper, for p_fr = 10⁻⁹. Both take "
        "submatrices to be singular independently of one another; the dotted bound does not, and "
        "holds (Figure 8). Closed forms, no batches. Every curve ends on 1 - (1 - p_fr)ᵇ, what "
        "the sparsity filter rejects."
    )
    return Section(plots=[Plot("probability", figure, caption)])


EXPERIMENT = Experiment(
    place="Figure 3",
    title="Failure probability by batch size and width",
    batches=1,
    draw=draw,
)
