"""The method's overview, from left to right, drawn from the row of one small batch."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spear.paper import plots
from spear.paper.plots import BLUE, GREEN, GREY, ORANGE, RED
from spear.trials import Row

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
                spine.set_color(GREY)
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
        self.text(x, _BOTTOM + _TALL / 2, "➜", 13, color=GREY, family="DejaVu Sans")


def _gradient(sheet: _Sheet, row: Row) -> None:
    sheet.title(0.6, "i", "Gradient")
    axes = sheet.axes(0.1, _BOTTOM, 1.0, _TALL)
    axes.imshow(_decoded(row.metrics["gradient"])[..., 0], cmap=_SIGNED, aspect="auto")
    sheet.text(0.6, _BOTTOM + _TALL + 0.1, r"$\partial\mathcal{L}/\partial W$", 8)
    m, n = row.settings["m"], row.metrics["inputs"]
    sheet.text(0.6, 0.3, f"{m} × {n:,}", _SMALL)
    sheet.text(0.6, 0.17, f"(every {max(1, n // 128)}th input)", _TINY, color=GREY)


def _factors(sheet: _Sheet, row: Row) -> None:
    sheet.title(1.83, "ii", "Low rank")
    b, m = row.settings["b"], row.settings["m"]
    L = np.array(row.metrics["L"])
    axes = sheet.axes(1.4, _BOTTOM, 0.32, _TALL)
    axes.imshow(L, cmap=_SIGNED, aspect="auto", vmin=-_reach(L), vmax=_reach(L))
    for name, colour in (("right", GREEN), ("wrong", RED)):
        for line in row.metrics["examples"][name]["rows"]:
            axes.plot([-0.5, b - 0.5], [line, line], color=colour, lw=1.1)
    sheet.text(1.56, _BOTTOM + _TALL + 0.1, r"$L$", 8)
    sheet.text(1.8, _BOTTOM + _TALL / 2, r"$\cdot$", 12)
    side = sheet.column(1.87, row.metrics["R"])
    sheet.text(1.87 + side / 2, _BOTTOM + _TALL + 0.1, r"$R$", 8)
    sheet.text(1.56, 0.3, f"{m} × {b}")
    sheet.text(1.87 + side / 2, 0.3, "mixes")
    sheet.text(1.79, 0.17, f"lines: {b - 1} sampled rows", _TINY, color=GREY)


def _proposals(sheet: _Sheet, row: Row) -> None:
    sheet.title(3.22, "iii", "Sample")
    found = row.metrics
    needed = math.ceil(found["tau"] * row.settings["m"])
    styles = (("right", GREEN, 1.79), ("wrong", RED, 1.16))
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
    colours = [ORANGE if count >= needed else RED for count in zeros]
    axes.bar(zeros, wrong, width=1.0, color=colours)
    axes.bar(zeros, right, width=1.0, color=GREEN, bottom=wrong)
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
    colours[patterns > 0.5] = _rgb(ORANGE, 0.6)
    for column in found["chosen"]:
        colours[patterns[:, column] > 0.5, column] = _rgb(GREEN)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    sheet.text(left + wide / 2, _BOTTOM + _TALL + 0.1, r"$L q \neq 0$", 7.5)
    sheet.text(left + wide / 2, 0.3, rf"$c$ = {count}")
    sheet.text(left + wide / 2, 0.17, f"of {found['sparse']:,} sparse", _TINY, color=GREY)
    sheet.text(left + wide + 0.09, _BOTTOM + _TALL / 2, "➜", 9, color=GREY, family="DejaVu Sans")
    gradient = np.array(found["gradient_z"])
    axes = sheet.axes(left + wide + 0.2, _BOTTOM, 0.32, _TALL)
    axes.imshow(
        gradient, cmap=_SIGNED, aspect="auto", vmin=-_reach(gradient), vmax=_reach(gradient)
    )
    middle = left + wide + 0.36
    sheet.text(middle, _BOTTOM + _TALL + 0.1, r"$\partial\mathcal{L}/\partial Z$", 7.5)
    sheet.text(middle, 0.3, rf"$b$ = {b}")
    sheet.text(middle, 0.17, rf"$\lambda$ = {found['match']:.2f}", _SMALL, color=BLUE)


def _images(sheet: _Sheet, row: Row) -> None:
    sheet.title(6.37, "v", "Scale, invert")
    b = row.settings["b"]
    for left, name in ((5.92, "recovered"), (6.48, "originals")):
        side = sheet.column(left, row.metrics[name])
        sheet.text(left + side / 2, _BOTTOM + _TALL + 0.1, name, _SMALL)
    psnr = row.metrics["psnr"]
    words = f"PSNR {psnr:.1f} dB" if psnr is not None else "nothing recovered"
    sheet.text(6.37, 0.3, words)
    sheet.text(6.37, 0.17, f"{row.metrics['certified']} of {b} certified", _TINY, color=GREY)


def _reach(values: NDArray[np.float64]) -> float:
    """What all but a few entries stay below."""
    return float(np.quantile(np.abs(values), 0.97)) or 1.0


def _rgb(colour: str, strength: float = 1.0) -> NDArray[np.float64]:
    from matplotlib.colors import to_rgb

    return 1 - strength * (1 - np.array(to_rgb(colour)))


def _decoded(uri: str) -> NDArray[np.float64]:
    """A PNG data URI as (H, W, 3) in [0, 1]."""
    from matplotlib.image import imread

    content = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    return np.asarray(imread(io.BytesIO(content), format="png"), dtype=np.float64)
