"""Figure 7: the attack during training on MNIST, on images the network has and has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spear.experiments.common import Case, Experiment, Plot, Section
from spear.experiments.common.batches import images, inverted, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import (
    band,
    counts,
    metric,
    per_point,
    quantile,
    rates,
    unfinished,
    where,
)
from spear.experiments.common.searching import Zeros, counted
from spear.federated import mlp, train
from spear.report import plots
from spear.trials import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = (0, 100, 200, 500, 1000, 2000, 3000, 5000)
PARTS = {"seen": range(5000), "unseen": range(5000, 10_000)}  # halves of MNIST's test images
TRAINING: dict[str, Any] = {"lr": 0.01, "batch_size": 32}
LOW = 0.15  # a threshold below every column that was seen
FINDERS: dict[str, Settings] = {
    "cascade": {"finder": "cascade"},
    "sampling": {"finder": "overlapping", "threshold": None},
    f"sampling, $\\tau = {LOW}$": {"finder": "overlapping", "threshold": LOW},
}
LOOKS = {"cascade": (plots.GREEN, "s"), "sampling": (plots.GREY, "x")}


def cell(steps: int, part: str, finder: str) -> Settings:
    settings = {"b": 10, "m": 200, "steps": steps, "part": part, **TRAINING, "max_seconds": 60}
    budget = {} if finder == "cascade" else {"max_samples": 2 * 10**7}
    return {**settings, **FINDERS[finder], **budget}


@cache
def network(root: Path, steps: int) -> nn.Module:
    """The network after `steps` steps, trained on from the next earlier one."""
    source = images(root, "mnist")
    x, y = source.batch(PARTS["seen"])
    if steps == 0:
        return mlp(x.shape[1], source.classes, seed=0)
    before = {later: earlier for earlier, later in pairwise(STEPS)}[steps]
    generator = torch.Generator().manual_seed(steps)
    return train(network(root, before), x, y, steps=steps - before, generator=generator, **TRAINING)


def measure(case: Case) -> Measured:
    among, model = torch.tensor(PARTS[case["part"]]), network(case.data, case["steps"])
    batch = private_batch(case, data="mnist", among=among, model=model)
    if case["finder"] != "cascade":
        return counted(case, batch)
    with torch.no_grad():
        faintest = 1 - model(batch.inputs).double().softmax(1)[range(case["b"]), batch.labels]
    metrics = {"sparsity": Zeros.of(batch).sparsity, "faintest": float(faintest.min())}
    return inverted(case, batch).measured(metrics)


def column(axes: Sequence[Axes], rows: Rows, part: str) -> None:
    """Accuracy, submatrices and sparsity of one half, from top to bottom."""
    groups = {
        label: [where(rows, part=part, steps=steps, **finder) for steps in STEPS]
        for label, finder in FINDERS.items()
    }
    for label, own in groups.items():
        colour, marker = LOOKS.get(label, (plots.BLUE, "o"))
        rates(axes[0], STEPS, own, color=colour, marker=marker, label=label)
        if label != "cascade":
            band(axes[1], STEPS, list(map(counts, own)), color=colour, marker=marker, label=label)
    sparsity = [[100 * v for v in metric(group, "sparsity")] for group in groups["cascade"]]
    places = [(at, values) for at, values in zip(STEPS, sparsity, strict=True) if values]
    for name, p, style in (("lowest", 0.0, ":"), ("median", 0.5, "-")):
        line = [quantile(values, p) for _, values in places]
        axes[2].plot([at for at, _ in places], line, style, color=plots.ORANGE, label=name)
    for shown in axes:
        shown.set_xscale("symlog", linthresh=100)
    axes[0].set(ylim=(-4, 106), title=f"{part} images")
    axes[1].set(yscale="log")
    axes[2].set(ylim=(0, 60), xlabel="training steps")
    axes[2].set_xticks((0, 100, 1000, 5000), labels=("0", "100", "1,000", "5,000"))
    axes[2].minorticks_off()


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(5.6, 4.6)
    grid = drawn.subplots(3, 2, sharex=True, sharey="row")
    for axes, part in zip(grid.T, PARTS, strict=True):
        column(list(axes), rows, part)
    labels = ("accuracy (%)", "submatrices", "least sparse column\n(% zeros)")
    for axes, label in zip(grid[:, 0], labels, strict=True):
        axes.set_ylabel(label)
    if rows:
        handles = grid[0, 0].get_legend_handles_labels()
        drawn.legend(*handles, loc="outside lower center", ncols=3)
        grid[2, 1].legend(loc="lower left")
    return drawn


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["training"]
    caption = (
        "Accuracy with its 95 % Clopper-Pearson interval, number of submatrices (median, 10th to "
        "90th percentile shaded) and zeros of the least sparse column of dL/dZ (the median and "
        "the lowest over batches) while a network is trained on MNIST; b = 10, m = 200, "
        f"{per_point(own)}.{unfinished(where(own, finder='overlapping'))}"
    )
    note = (
        "MNIST's 10,000 test images are what is at hand: the network is trained on their first "
        "half (SGD, learning rate 0.01, mini-batches of 32) and attacked on that half and on the "
        "other. A column with fewer zeros than the sparsity filter demands (35 % at m = 200 for "
        "p_fr = 10⁻⁵) is never found by sampling (grey): after training the threshold has to be "
        f"lower (blue, {LOW}). The cascade does not filter. A network that is trained longer or "
        "faster gets sure of samples: their gradient vanishes in float32, and a batch with one of "
        "them is not exact. The learning rate and the lower threshold were chosen after a first look: "
        "at 0.05 most gradients vanish from 1,000 steps on."
    )
    plot = Plot("training", lambda: figure(own), caption)
    return Section(plots=[plot], notes=[note])


EXPERIMENT = Experiment(
    place="Figure 7",
    title="Effect of training",
    batches=20,
    needs=("MNIST",),
    cells=[cell(steps, part, finder) for steps in STEPS for part in PARTS for finder in FINDERS],
    measure=measure,
    draw=draw,
)
