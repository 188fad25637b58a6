"""Draws the pictures of how.md from one real batch, with SPEAR's own functions.

    python docs/draw_how.py [FOLDER]

writes PNG files to the folder, docs/images/how unless named. No data and no network are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import spear
from spear.data import photo_crops
from spear.factors import Factors, factorise
from spear.federated import defences, fedsgd, mlp, output_gradient
from spear.judge import Selection, select
from spear.metrics import psnr
from spear.report.plots import BLUE, GREEN, GREY, ORANGE, RED, figure, shades, style
from spear.search import Watch, unit

FOLDER = Path(__file__).parent / "images" / "how"
BATCH, WIDTH, CLASSES, PIXELS = 6, 150, 10, 32
MEAN, STD = 0.5, 0.25
NOISE = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 5e-2)  # standard deviation on every entry


@dataclass(frozen=True, eq=False)
class Scene:
    """One private batch, its update, and what SPEAR makes of it."""

    net: nn.Module
    images: Tensor  # (b, 3, p, p) in [0, 1]
    inputs: Tensor  # (b, n) normalised
    labels: Tensor  # (b,)
    update: dict[str, Tensor]
    factors: Factors
    selection: Selection
    result: spear.Inversion
    order: Tensor  # (b,) which of the recovered samples is each of the originals

    @staticmethod
    def real() -> Scene:
        """Six photos, a layer of 150 neurons, one gradient."""
        images, _ = photo_crops(BATCH, PIXELS)
        inputs = ((images - MEAN) / STD).flatten(1)
        labels = torch.arange(BATCH) % CLASSES
        net = mlp(inputs.shape[1], CLASSES, width=WIDTH, depth=3, seed=0)
        update = fedsgd(net, inputs, labels)
        view = spear.observe(net, update)
        factors = factorise(view)
        search = spear.CascadeFinder().search(
            factors, generator=torch.Generator().manual_seed(0), watch=Watch()
        )
        choices = [select(factors, pool, Watch()) for pool in search]
        selection = next(choice for choice in reversed(choices) if choice is not None)
        result = spear.invert(view, model=net)
        order = torch.cdist(inputs.double(), result.inputs.double()).argmin(1)
        return Scene(net, images, inputs, labels, update, factors, selection, result, order)

    @property
    def gradient_of_outputs(self) -> Tensor:
        """The true dL/dZ (m, b), which nobody but the client has."""
        return output_gradient(self.net, self.inputs, self.labels, layer="0").double()

    def pictures(self, inputs: Tensor) -> Tensor:
        """Inputs (k, n) as pictures (k, p, p, 3) to be drawn."""
        images = inputs.double() * STD + MEAN
        return images.view(-1, 3, PIXELS, PIXELS).permute(0, 2, 3, 1).clamp(0, 1)


def product(scene: Scene) -> Figure:
    """The weight gradient, and the two thin matrices it is the product of."""
    drawn = figure(7.0, 2.6)
    tall, thin, flat = drawn.subplots(1, 3, width_ratios=[5, 0.9, 5])
    columns = slice(1024, 1224)  # of 3072: a stretch of the green channel
    rows = scene.inputs[:, columns].double().repeat_interleave(WIDTH // 30, 0)
    blank = torch.full((WIDTH - len(rows), rows.shape[1]), torch.nan, dtype=torch.float64)
    _matrix(tall, scene.update["0.weight"][:, columns].double(), aspect="auto")
    _matrix(thin, scene.gradient_of_outputs, aspect="auto")
    _matrix(flat, torch.cat([rows, blank]), aspect="auto")
    for side in ("left", "bottom"):
        flat.spines[side].set_visible(False)
    tall.set_title(f"∂L/∂W  ({WIDTH} × 3072, a stretch shown)   =")
    thin.set_title(f"∂L/∂Z  ({WIDTH} × {BATCH})")
    flat.set_title(f"·   Xᵀ  ({BATCH} × 3072), the {BATCH} photos")
    tall.set_ylabel("neurons")
    tall.set_xlabel("inputs (pixels)")
    thin.set_xlabel("samples")
    return drawn


def spectrum(scene: Scene) -> Figure:
    """Singular values on a log scale: the gap shows the batch size."""
    drawn = figure(6.0, 2.5)
    axes = drawn.subplots()
    values = scene.factors.spectrum
    b = scene.factors.b
    rank = torch.arange(1, len(values) + 1)
    axes.semilogy(rank[:b], values[:b], "o", color=BLUE, label="samples")
    axes.semilogy(rank[b:40], values[b:40], "o", color=GREY, label="rounding of float32")
    axes.annotate(
        f"the gap: b = {b}",
        (b + 0.5, float((values[b - 1] * values[b]).sqrt())),
        (b + 5, float((values[b - 1] * values[b]).sqrt())),
        va="center",
        arrowprops={"arrowstyle": "-", "color": GREY},
    )
    axes.set_xlabel("singular value of ∂L/∂W, by rank")
    axes.legend()
    return drawn


def zeros(scene: Scene) -> Figure:
    """Why directions can be found: dL/dZ is half zeros, L is not, L q is for the right q only."""
    drawn = figure(7.0, 5.0)
    parts = drawn.subplots(4, 1, height_ratios=[1, 1, 1.5, 1.5])
    L = scene.factors.L
    _matrix(parts[0], scene.gradient_of_outputs.T, aspect="auto")
    parts[0].set_title(f"∂L/∂Z: {BATCH} samples × {WIDTH} neurons; white is zero (ReLU was off)")
    _matrix(parts[1], L.T, aspect="auto")
    parts[1].set_title(
        f"L from the singular value decomposition: zero only in the {scene.factors.outputs.empty_rows} "
        "neurons that are off for every sample"
    )
    right = scene.selection.directions.vectors[:, 0]
    wrong = unit(torch.randn(BATCH, generator=torch.Generator().manual_seed(1)).double())
    for axes, q, words, colour in (
        (parts[2], right, "L q for a right direction q", GREEN),
        (parts[3], wrong, "L q for a wrong one", RED),
    ):
        values = (L @ q).abs()
        zero = values <= scene.factors.zero
        on, off = torch.nonzero(~zero).flatten(), torch.nonzero(zero).flatten()
        axes.semilogy(on, values[on], "o", color=colour)
        axes.semilogy(off, values[off].clamp_min(1e-11), "o", mfc="none", color=colour)
        axes.axhline(scene.factors.zero, color=GREY, lw=0.8, ls="--")
        axes.set_ylim(1e-12, 3)
        axes.set_xlim(-0.5, WIDTH - 0.5)
        count = int(zero.sum())
        axes.set_title(f"{words}: {count} of {WIDTH} entries are zero (below the line)")
    parts[3].set_xlabel("neurons")
    return drawn


def recovered(scene: Scene) -> Figure:
    """Originals above, recoveries below."""
    drawn = figure(7.0, 2.7)
    parts = drawn.subplots(2, BATCH)
    found = scene.result.inputs[scene.order]
    decibels = psnr((found.double() * STD + MEAN), scene.images.double().flatten(1))
    for row, pictures in zip(parts, (scene.inputs, found), strict=True):
        for axes, image in zip(row, scene.pictures(pictures), strict=True):
            _picture(axes, image)
    for axes, value in zip(parts[1], decibels.tolist(), strict=True):
        axes.set_xlabel(f"{value:.0f} dB")
    parts[0][0].set_ylabel("private")
    parts[1][0].set_ylabel("recovered")
    return drawn


def replay(scene: Scene) -> Figure:
    """What the model computes from the recovered samples, beside what the client sent."""
    assert scene.result.labels is not None
    found, labels = scene.result.inputs.clone(), scene.result.labels.clone()
    slightly = found.clone()
    slightly[0] = 0.99 * found[0] + 0.01 * found[1]
    other = labels.clone()
    other[0] = (other[0] + 1) % CLASSES
    cases = (
        ("the samples and labels that were recovered", found, labels, GREEN),
        ("one sample mixed with 1 % of another", slightly, labels, ORANGE),
        ("one label wrong", found, other, RED),
    )
    drawn = figure(6.4, 2.5)
    axes = drawn.subplots()
    for words, inputs, classes, colour in cases:
        again = fedsgd(scene.net, inputs, classes)
        apart = [float((again[n] - g).norm() / g.norm()) for n, g in scene.update.items()]
        axes.semilogy(list(scene.update), apart, "o-", color=colour, label=words, lw=0.8)
    axes.set_ylim(1e-9, 1e5)
    axes.set_ylabel("relative difference to\nthe gradient received")
    axes.set_xlabel("parameters of the network")
    axes.legend(loc="upper left", ncols=1)
    return drawn


def noise(scene: Scene, levels: Sequence[float] = NOISE) -> Figure:
    """What noise on the update does to the spectrum, and to a photo."""
    drawn = figure(7.0, 3.1)
    left, right = drawn.subfigures(1, 2, width_ratios=[2.9, 4.1])
    axes = left.subplots()
    parts = right.subplots(2, 4).flatten()
    _picture(parts[0], scene.pictures(scene.inputs)[0])
    parts[0].set_xlabel("the photo", fontsize=6.5)
    for sigma, colour, place in zip(levels, shades(len(levels)), parts[1:], strict=False):
        view = spear.observe(scene.net, defences.add_noise(scene.update, sigma))
        values = factorise(view).spectrum[:20]
        words = f"σ = {sigma:g}" if sigma else "no noise"
        axes.semilogy(range(1, len(values) + 1), values, ".-", color=colour, label=words, lw=0.8)
        axes.annotate(words, (20.4, float(values[-1])), color=colour, fontsize=6.5, va="center")
        _noisy(place, scene, spear.invert(view, model=scene.net), words)
    for place in parts[1 + len(levels) :]:
        place.set_visible(False)
    axes.axvline(BATCH + 0.5, color=GREY, lw=0.8, ls="--")
    axes.set_xlim(0, 27)
    axes.set_xticks([1, 6, 10, 20])
    axes.set_xlabel("singular value of ∂L/∂W, by rank")
    return drawn


def _noisy(axes: Axes, scene: Scene, result: spear.Inversion, words: str) -> None:
    """The first photo as it came back, if it did."""
    if not len(result.inputs):
        _picture(axes, torch.full((PIXELS, PIXELS, 3), 0.9))
        axes.set_xlabel(f"{words}\n{result.outcome.name}", fontsize=6.5)
        return
    apart = (result.inputs.double() - scene.inputs[0].double()).norm(dim=1)
    nearest = result.inputs[int(apart.argmin())][None]
    _picture(axes, scene.pictures(nearest)[0])
    value = float(psnr(nearest.double() * STD + MEAN, scene.images[:1].double().flatten(1)))
    axes.set_xlabel(f"{words}\n{result.outcome.name}\n{value:.0f} dB", fontsize=6.5)


def _matrix(axes: Axes, values: Tensor, **options: Any) -> None:
    """Entries in colour, zeros white, the largest few per cent saturated."""
    limit = float(values.abs().flatten().nanquantile(0.97))
    axes.imshow(
        values.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest", **options
    )
    _bare(axes)


def _picture(axes: Axes, image: Tensor) -> None:
    axes.imshow(image.numpy(), interpolation="nearest")
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)


DRAWINGS: dict[str, Callable[[Scene], Figure]] = {
    "product": product,
    "spectrum": spectrum,
    "zeros": zeros,
    "recovered": recovered,
    "replay": replay,
    "noise": noise,
}


def draw(folder: Path, scene: Scene, drawings: Mapping[str, Callable[[Scene], Figure]]) -> None:
    """Pictures of the page, as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        for name, drawing in drawings.items():
            file = folder / f"{name}.png"
            drawing(scene).savefig(file, dpi=170, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, Scene.real(), DRAWINGS)
