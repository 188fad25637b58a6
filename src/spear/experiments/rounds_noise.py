"""Beyond the paper: what rounds take away from DP-SGD's noise, beside the epsilon they add up to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spear.experiments.common import Case, Experiment, Plot, Section, table
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import decimal, metric, per_point, verdicts, where
from spear.experiments.common.several_rounds import Played, cell, compared, rounds_axis
from spear.federated import (
    Sent,
    clipping_factors,
    epsilon,
    output_gradient,
    play_rounds,
    resolved,
)
from spear.metrics import psnr
from spear.report import plots
from spear.trials import Batch, Compared, Measured
from spear.update import Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

B, M, LR, SECONDS, CLIP, DELTA = 20, 100, 0.1, 60, 1.0, 1e-5
MULTIPLIERS = (0.0002, 0.002, 0.02, 0.2, 1.0)  # noise, in Opacus' unit: sigma b / C
ROUNDS = (1, 2, 4, 8, 16, 32)
GAPS = ("median_psnr", "up_to_scale")
CLEAR_DB = 20.0  # a picture whose error is a tenth of the range from black to white
CELLS = [
    cell(B, M, rounds, LR, SECONDS, clip=CLIP, multiplier=z, delta=DELTA)
    for z in MULTIPLIERS
    for rounds in ROUNDS
]


def measure(case: Case) -> Measured:
    """Each sample's gradient is clipped, noise is added in each round, and all rounds are attacked."""
    batch = private_batch(case)
    sigma = case["multiplier"] * case["clip"] / case["b"]
    protocol = resolved(Protocol(samples=case["b"], clip=case["clip"]), sigma)
    cohorts = [[(batch.inputs, batch.labels)]] * case["rounds"]
    played = play_rounds(
        batch.model, cohorts, protocol, server_lr=case["lr"], generator=case.generator()
    )
    known: list[tuple[Tensor, Tensor]] = []  # true dL/dZ and noisy dL/dW of each round
    found, moved = compared(case, batch, _kept(case, batch, played, known))
    spent = epsilon([(case["multiplier"], 1.0, case["rounds"])], case["delta"])
    best = psnr(batch.pixels(_least_squares(known)), batch.pixels(batch.inputs))  # (b,)
    more = {"movement": moved, "epsilon": spent, "reference": float(best.median())}
    return found.measured({**more, **quality(found)})


def _kept(
    case: Case, batch: Batch, played: Played, known: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[nn.Module, Sent]]:
    """The same rounds, with what an oracle knows of each put aside."""
    x, y = batch.inputs, batch.labels
    for model, sent in played:
        factors = clipping_factors(model, x, y, case["clip"])  # (b,)
        D = output_gradient(model, x, y, layer="0") * factors  # (m, b)
        known.append((D.double(), sent.update["0.weight"].double()))
        yield model, sent


def _least_squares(known: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The inputs (b, n) that all rounds give if dL/dZ is known: the best that the noise leaves."""
    D, G = (torch.cat(parts) for parts in zip(*known, strict=True))
    solution: Tensor = torch.linalg.lstsq(D, G).solution
    return solution


def quality(found: Compared) -> dict[str, Any]:
    """Over all samples of the batch; one that did not come back counts as 0 dB."""
    every, scaled = torch.zeros(2, len(found.truth), dtype=torch.float64)
    pairs = found.score.pairs
    every[pairs.truth] = found.score.psnr.double().clamp_min(0)
    X, truth = found.attacked.result.inputs[pairs.found].double(), found.truth[pairs.truth].double()
    factors = (X * truth).sum(1, keepdim=True) / X.square().sum(1, keepdim=True)  # the best ones
    pixels = found.batch.pixels
    scaled[pairs.truth] = psnr(pixels(factors * X), pixels(truth)).clamp_min(0)
    return {
        "median_psnr": float(every.median()),
        "up_to_scale": float(scaled.median()),
        "clear": int((every >= CLEAR_DB).sum()),
    }


def figure(rows: Rows) -> Figure:
    drawn = plots.figure(7.0, 3.0)
    left, right = drawn.subplots(1, 2)
    for z, colour in zip(MULTIPLIERS, plots.shades(len(MULTIPLIERS)), strict=True):
        own = where(rows, multiplier=z)
        line(left, own, "median_psnr", color=colour, marker="o", label=f"z = {z:g}")
        line(left, own, "reference", color=colour, linestyle=":")
        line(right, own, "epsilon", color=colour, marker="o", label=f"z = {z:g}")
    left.axhline(CLEAR_DB, color=plots.GREY, linewidth=0.8)
    left.text(3, CLEAR_DB + 1, "recognisable above", size=7, color=plots.GREY)
    left.set(ylabel="median PSNR of all samples (dB)", title="what comes back")
    right.set(ylabel=r"$\varepsilon$ of all rounds", yscale="log")
    right.set_title(f"what the accountant says, $\\delta$ = {DELTA:g}")
    for axes in (left, right):
        rounds_axis(axes, ROUNDS)
    if rows:
        left.plot([], [], ":", color=plots.GREY, label="best that the noise leaves")
        handles = left.get_legend_handles_labels()
        drawn.legend(*handles, loc="outside lower center", ncols=3, title="noise multiplier")
    return drawn


def line(axes: Axes, rows: Rows, name: str, **look: Any) -> None:
    """A metric's mean over batches by rounds; a batch without a result has 0 dB."""
    places = [(rounds, where(rows, rounds=rounds)) for rounds in ROUNDS]
    values = [
        (rounds, metric(own, name) if name != "median_psnr" else decibels(own))
        for rounds, own in places
        if own
    ]
    known = [(rounds, statistics.fmean(found)) for rounds, found in values if found]
    if known:
        axes.plot(*zip(*known, strict=True), **look)


def decibels(rows: Rows) -> list[float]:
    return [float(row.metrics.get("median_psnr") or 0.0) for row in rows]


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["rounds_noise"]
    lines = []
    for z in MULTIPLIERS:
        line = [f"{z:g}"]
        for rounds in ROUNDS:
            group = where(own, multiplier=z, rounds=rounds)
            spent = next(iter(metric(group, "epsilon")), None)
            clear = sum(int(row.metrics.get("clear") or 0) for row in group)
            share = f"{100 * clear / (B * len(group)):.0f} %" if group else "not run"
            line.append(f"{share}, ε = {decimal(spent)}")
        lines.append(line)
    caption = (
        "Left: median PSNR of all samples, recovered or not, against the rounds seen; one that did "
        "not come back counts as 0 dB. Dotted: least squares with the true gradients of the layer's "
        "outputs, the best that the noise leaves. Right: the ε of all rounds together, by Opacus' "
        f"accountant. CIFAR-10, b = {B}, {M} neurons, three layers, FedSGD at a learning rate of "
        f"{LR:g}, each sample clipped to C = {CLIP:g}, noise of σ = z C / b on every entry, anew in "
        f"each round; {per_point(own)}."
    )
    note = (
        f"The table has the share of samples with {CLEAR_DB:.0f} dB or more, and ε. The client's batch "
        "is all its data, so nothing is gained by sampling."
    )
    seen = [row.metrics for row in own if (row.metrics.get("median_psnr") or 0) >= CLEAR_DB]
    if seen:
        lost = [max(at["reference"] - at[name] for at in seen) for name in GAPS]
        note += (
            f" Batches with a median of {CLEAR_DB:.0f} dB or more are up to {lost[0]:.1f} dB below the "
            f"dotted line, and up to {lost[1]:.1f} dB if each sample is scaled by its best factor: "
            "what noise takes first is a sample's scale."
        )
    columns = ["z", *(f"{rounds} round{'s' * (rounds > 1)}" for rounds in ROUNDS)]
    plot = Plot("noise", lambda: figure(own), caption)
    return Section([table(columns, lines)], [plot], notes=[note, verdicts(own, means=False)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="Rounds against the noise of DP-SGD, beside ε",
    batches=3,
    cells=CELLS,
    measure=measure,
    draw=draw,
)
