"""Figure 2: the method from left to right, drawn from an attack on one small batch."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spear import theory
from spear.experiments.common import Case, Experiment, Plot, Section
from spear.experiments.common.batches import attack, private_batch
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import NOT_RUN, decimal
from spear.experiments.common.galleries import aligned
from spear.factors import Factors
from spear.judge import Selection, select
from spear.report import pictures, plots
from spear.search import CandidatePool, Directions, Watch, unit, zero_margin
from spear.trials import Compared, Measured, Row, Trial, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 7.0, 2.75  # inches
_BOTTOM, _TALL = 0.42, 1.85  # of what stands in a panel
_GAP = 0.03
_SMALL, _TINY = 6.5, 5.5  # points
_SIGNED = "RdBu_r"  # white is zero


def overview(row: Row) -> Figure:
    """Five panels: gradient, factors, proposals, candidates, images; all of them from the row."""
    drawn = plots.figure(_WIDTH, _HEIGHT)
    drawn.set_layout_engine("none")
    sheet = _Sheet(drawn)
    _gradient(sheet, row)
    _factors(sheet, row)
    _proposals(sheet, row)
    _candidates(sheet, row)
    _images(sheet, row)
    for x in (1.22, 2.36, 4.09, 5.61):
        sheet.arrow(x)
    return drawn


class _Sheet:
    """A page measured in inches."""

    def __init__(self, drawn: Figure) -> None:
        self.drawn = drawn

    def axes(self, x: float, y: float, width: float, height: float, *, bare: bool = True) -> Axes:
        place = (x / _WIDTH, y / _HEIGHT, width / _WIDTH, height / _HEIGHT)
        axes = self.drawn.add_axes(place)
        axes.grid(False)
        if bare:
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(True)
                spine.set_linewidth(0.5)
                spine.set_color(plots.GREY)
        return axes

    def text(self, x: float, y: float, words: str, size: float = _SMALL, **style: Any) -> None:
        style = {"ha": "center", "va": "center", **style}
        self.drawn.text(x / _WIDTH, y / _HEIGHT, words, fontsize=size, **style)

    def title(self, x: float, number: str, words: str) -> None:
        self.text(x, _HEIGHT - 0.15, f"({number}) {words}", 7.5, fontweight="bold")

    def column(self, x: float, tiles: Sequence[str | None]) -> float:
        """Square images under one another, as tall as a panel; their side in inches."""
        step = (_TALL + _GAP) / len(tiles)
        for k, tile in enumerate(tiles):
            y = _BOTTOM + _TALL + _GAP - (k + 1) * step
            axes = self.axes(x, y, step - _GAP, step - _GAP)
            if tile is not None:
                axes.imshow(_decoded(tile), aspect="auto")
        return step - _GAP

    def arrow(self, x: float) -> None:
        self.text(x, _BOTTOM + _TALL / 2, "➜", 13, color=plots.GREY, family="DejaVu Sans")


def _gradient(sheet: _Sheet, row: Row) -> None:
    sheet.title(0.6, "i", "Gradient")
    axes = sheet.axes(0.1, _BOTTOM, 1.0, _TALL)
    axes.imshow(_decoded(row.metrics["gradient"])[..., 0], cmap=_SIGNED, aspect="auto")
    sheet.text(0.6, _BOTTOM + _TALL + 0.1, r"$\partial\mathcal{L}/\partial W$", 8)
    m, n = row.settings["m"], row.metrics["inputs"]
    sheet.text(0.6, 0.3, f"{m} × {n:,}", _SMALL)
    sheet.text(0.6, 0.17, f"(every {max(1, n // 128)}th input)", _TINY, color=plots.GREY)


def _factors(sheet: _Sheet, row: Row) -> None:
    sheet.title(1.83, "ii", "Low rank")
    b, m = row.settings["b"], row.settings["m"]
    L = np.array(row.metrics["L"])
    axes = sheet.axes(1.4, _BOTTOM, 0.32, _TALL)
    axes.imshow(L, cmap=_SIGNED, aspect="auto", vmin=-_reach(L), vmax=_reach(L))
    for name, colour in (("right", plots.GREEN), ("wrong", plots.RED)):
        for line in row.metrics["examples"][name]["rows"]:
            axes.plot([-0.5, b - 0.5], [line, line], color=colour, lw=1.1)
    sheet.text(1.56, _BOTTOM + _TALL + 0.1, r"$L$", 8)
    sheet.text(1.8, _BOTTOM + _TALL / 2, r"$\cdot$", 12)
    side = sheet.column(1.87, row.metrics["R"])
    sheet.text(1.87 + side / 2, _BOTTOM + _TALL + 0.1, r"$R$", 8)
    sheet.text(1.56, 0.3, f"{m} × {b}")
    sheet.text(1.87 + side / 2, 0.3, "mixes")
    sheet.text(1.79, 0.17, f"lines: {b - 1} sampled rows", _TINY, color=plots.GREY)


def _proposals(sheet: _Sheet, row: Row) -> None:
    sheet.title(3.22, "iii", "Sample")
    found = row.metrics
    needed = math.ceil(found["tau"] * row.settings["m"])
    styles = (("right", plots.GREEN, 1.79), ("wrong", plots.RED, 1.16))
    for name, colour, y in styles:
        example = found["examples"][name]
        axes = sheet.axes(2.56, y, 1.36, 0.4)
        axes.bar(range(len(example["values"])), example["values"], width=1.0, color=colour)
        axes.set_ylim(0, max(example["values"]) * 1.05)
        axes.set_xlim(-1, len(example["values"]))
        words = f"{name}: {example['zeros']} of {row.settings['m']} zeros"
        sheet.text(3.24, y + 0.48, rf"$|L q|$, {words}", _SMALL, color=colour)
    axes = sheet.axes(2.7, _BOTTOM + 0.02, 1.22, 0.5, bare=False)
    wrong, right = np.array(found["zeros_wrong"]), np.array(found["zeros_right"])
    zeros = np.arange(len(wrong))
    colours = [plots.ORANGE if count >= needed else plots.RED for count in zeros]
    axes.bar(zeros, wrong, width=1.0, color=colours)
    axes.bar(zeros, right, width=1.0, color=plots.GREEN, bottom=wrong)
    axes.set_yscale("log")
    axes.set_ylim(0.7, 3 * wrong.max())
    axes.minorticks_off()
    axes.axvline(needed - 0.5, color="black", lw=0.8, ls=(0, (3, 2)))
    axes.text(needed + 1, 2 * wrong.max(), r"$\tau m$", fontsize=_SMALL, va="top")
    axes.set_xlim(0, 1.1 * int(np.nonzero(right)[0].max()))
    axes.tick_params(labelsize=_TINY, length=2, pad=1, width=0.5)
    sheet.text(3.3, 0.17, f"zeros of {found['submatrices']:,} proposals", _SMALL)


def _candidates(sheet: _Sheet, row: Row) -> None:
    sheet.title(4.83, "iv", "Filter, choose")
    found, b, left, wide = row.metrics, row.settings["b"], 4.3, 0.66
    patterns = _decoded(found["patterns"])[..., 0]  # (m, c)
    count = patterns.shape[1]
    axes = sheet.axes(left, _BOTTOM, wide, _TALL)
    colours = np.ones((*patterns.shape, 3))
    colours[patterns > 0.5] = _rgb(plots.ORANGE, 0.6)
    for column in found["chosen"]:
        colours[patterns[:, column] > 0.5, column] = _rgb(plots.GREEN)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    sheet.text(left + wide / 2, _BOTTOM + _TALL + 0.1, r"$L q \neq 0$", 7.5)
    sheet.text(left + wide / 2, 0.3, rf"$c$ = {count}")
    sheet.text(left + wide / 2, 0.17, f"of {found['sparse']:,} sparse", _TINY, color=plots.GREY)
    sheet.text(
        left + wide + 0.09, _BOTTOM + _TALL / 2, "➜", 9, color=plots.GREY, family="DejaVu Sans"
    )
    gradient = np.array(found["gradient_z"])
    axes = sheet.axes(left + wide + 0.2, _BOTTOM, 0.32, _TALL)
    axes.imshow(
        gradient, cmap=_SIGNED, aspect="auto", vmin=-_reach(gradient), vmax=_reach(gradient)
    )
    middle = left + wide + 0.36
    sheet.text(middle, _BOTTOM + _TALL + 0.1, r"$\partial\mathcal{L}/\partial Z$", 7.5)
    sheet.text(middle, 0.3, rf"$b$ = {b}")
    sheet.text(middle, 0.17, rf"$\lambda$ = {found['match']:.2f}", _SMALL, color=plots.BLUE)


def _images(sheet: _Sheet, row: Row) -> None:
    sheet.title(6.37, "v", "Scale, invert")
    b = row.settings["b"]
    for left, name in ((5.92, "recovered"), (6.48, "originals")):
        side = sheet.column(left, row.metrics[name])
        sheet.text(left + side / 2, _BOTTOM + _TALL + 0.1, name, _SMALL)
    psnr = row.metrics["psnr"]
    words = f"PSNR {psnr:.1f} dB" if psnr is not None else "nothing recovered"
    sheet.text(6.37, 0.3, words)
    sheet.text(6.37, 0.17, f"{row.metrics['certified']} of {b} certified", _TINY, color=plots.GREY)


def _reach(values: NDArray[np.float64]) -> float:
    """A value that all but a few entries stay below."""
    return float(np.quantile(np.abs(values), 0.97)) or 1.0


def _rgb(colour: str, strength: float = 1.0) -> NDArray[np.float64]:
    from matplotlib.colors import to_rgb

    return 1 - strength * (1 - np.array(to_rgb(colour)))


def _decoded(uri: str) -> NDArray[np.float64]:
    """A PNG data URI as (H, W, 3) in [0, 1]."""
    from matplotlib.image import imread

    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    return np.asarray(imread(io.BytesIO(content), format="png"), dtype=np.float64)


SETTINGS = {
    "data": "tiny_imagenet",
    "b": 5,
    "m": 100,
    "submatrices": 2000,
    "false_rejection": 1e-5,
    "max_seconds": 120,
}


class Traced:
    """Algorithm 1 with a fixed number of draws, as in the paper, keeping its intermediate results."""

    def __init__(self, submatrices: int, false_rejection: float) -> None:
        self.submatrices, self.false_rejection = submatrices, false_rejection

    def search(
        self, factors: Factors, *, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        self.factors, side = factors, factors.outputs
        self.tau = theory.sparsity_threshold(side.size, self.false_rejection)
        keys = torch.rand(self.submatrices, len(side.white), generator=generator)
        self.rows = keys.argsort(1)[:, : factors.b - 1]  # (N, b-1)
        kernels = torch.linalg.svd(side.white[self.rows], full_matrices=True).Vh[:, -1]  # (N, b)
        self.q = unit(kernels / side.scales)
        self.values = (self.q @ side.basis.T).abs()  # (N, rows)
        zero = zero_margin(side) * side.zero
        self.zeros = (self.values <= zero).sum(1) + side.empty_rows  # (N,)
        watch.count("submatrices", self.submatrices)
        sparse = self.zeros >= self.tau * side.size
        self.pool = CandidatePool(side, self.tau, watch).rounded(kernels[sparse])
        watch.count("sparse", int(sparse.sum()))
        watch.count("candidates", len(self.pool))
        yield self.pool

    def satisfied(self, factors: Factors, match: float) -> bool:
        return True


def measure(case: Case) -> Measured:
    batch = private_batch(case)
    view = batch.view()
    traced = Traced(case["submatrices"], case["false_rejection"])
    attacked = attack(case, view, batch.model, traced)
    found = compare(batch, attacked)
    chosen = select(traced.factors, traced.pool, Watch())  # as the attack has done
    assert chosen is not None
    return found.measured(
        proposals(traced, chosen) | candidates(traced, chosen) | tiles(found, traced)
    )


def proposals(traced: Traced, chosen: Selection) -> dict[str, Any]:
    """The sparsity of every proposal, and |L q| of a right and of a wrong one."""
    side, live = traced.factors.outputs, traced.factors.live_rows.nonzero().flatten()
    right = ((traced.q @ chosen.directions.vectors).abs() > 1 - 1e-6).any(1)  # (N,)
    full = traced.values.new_zeros(len(traced.q), side.size)
    full[:, live] = traced.values
    good, bad = int(right.nonzero()[0]), int((~right).nonzero()[0])
    return {
        "tau": traced.tau,
        "right": int(right.sum()),
        "zeros_right": torch.bincount(traced.zeros[right], minlength=side.size + 1).tolist(),
        "zeros_wrong": torch.bincount(traced.zeros[~right], minlength=side.size + 1).tolist(),
        "examples": {
            name: {
                "values": _rounded(full[i]),
                "rows": live[traced.rows[i]].tolist(),
                "zeros": int(traced.zeros[i]),
            }
            for name, i in (("right", good), ("wrong", bad))
        },
    }


def candidates(traced: Traced, chosen: Selection) -> dict[str, Any]:
    """L, where L q vanishes for each candidate, sparsest first, and dL/dZ of those chosen."""
    live, pool = traced.factors.live_rows, traced.pool
    nonzero = torch.zeros(len(live), len(pool))
    nonzero[live] = (~pool.zeros).float()  # (m, c)
    order = torch.argsort(pool.sparsity, descending=True, stable=True)
    match = (pool.vectors[:, order].T @ chosen.directions.vectors).abs() > 1 - 1e-6  # (c, b)
    gradient = traced.factors.output_gradients(chosen.Q)
    gradient[live] = gradient[live].masked_fill(chosen.directions.zeros, 0.0)
    parts = (chosen.C @ pool.vectors).abs()  # (b, c): how much of each sample is in a candidate
    return {
        "mixes": (parts > 1e-6 * parts.amax(0)).sum(0).tolist(),
        "L": [_rounded(row) for row in traced.factors.L],
        "patterns": pictures.data_uri(nonzero[:, order][None]),
        "chosen": match.any(1).nonzero().flatten().tolist(),
        "gradient_z": [_rounded(row) for row in gradient],
    }


def tiles(compared: Compared, traced: Traced) -> dict[str, Any]:
    """Images as PNG: a part of the gradient, the rows of R, the originals, what was recovered."""
    batch, view = compared.batch, compared.attacked.view
    gradient = view.weight_grad.double()
    one = torch.eye(traced.factors.b, dtype=gradient.dtype, device=gradient.device)
    L = traced.factors.output_gradients(one)  # (m, b)
    R = torch.linalg.lstsq(L, gradient).solution  # (b, n)
    originals, recovered = batch.pixels(batch.inputs), aligned(compared)
    mixes = R.view(-1, *originals.shape[1:])[:, :, ::2, ::2]
    return {
        "gradient": pictures.data_uri(_grey(gradient[:, :: max(1, view.inputs // 128)])[None]),
        "R": [pictures.data_uri(_grey(mix)) for mix in mixes],
        "recovered": [None if image is None else pictures.data_uri(image) for image in recovered],
        "originals": [pictures.data_uri(image) for image in originals],
        "inputs": view.inputs,
    }


def _grey(values: Tensor) -> Tensor:
    """Around 0.5, so that the largest values nearly reach 0 and 1."""
    return 0.5 + 0.5 * values / (3 * values.std())


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in values.tolist()]


def draw(rows: Mapping[str, Rows]) -> Section:
    drawn = [row for row in rows["overview"] if "examples" in row.metrics]
    if not drawn:
        return Section(notes=[NOT_RUN])
    row = drawn[-1]
    b, m, metrics = row.settings["b"], row.settings["m"], row.metrics
    caption = (
        f"SPEAR on a real batch of {b} TinyImageNet images, a layer of {m} neurons. The gradient (i) "
        f"is the product of thin factors (ii). {metrics['submatrices']:,} samples of {b - 1} rows give "
        f"a proposal each; right ones (green) make L q sparse (iii). {metrics['sparse']:,} have "
        f"the {math.ceil(metrics['tau'] * m)} zeros that the threshold asks for. These are "
        f"{metrics['candidates']} candidates (iv): {metrics['mixes'].count(1)} samples, "
        f"{metrics['mixes'].count(2)} mixes of two, {sum(k > 2 for k in metrics['mixes'])} of more "
        f"(orange); the greedy choice keeps {b}. The bias gradient gives their scale, and with it the "
        f"inputs (v), at {decimal(metrics['psnr'])} dB."
    )
    return Section(plots=[Plot("method", lambda: overview(row), caption)])


EXPERIMENT = Experiment(
    place="Figure 2",
    title="Overview of the method, on a real batch",
    batches=1,
    plan=lambda plan: [Trial("overview", SETTINGS, plan.seed)],
    measure=measure,
    draw=draw,
)
