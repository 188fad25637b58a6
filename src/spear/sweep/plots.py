"""The leakage frontier as plots: leakage, the best recovery and utility along each axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spear.metrics import EXACT_DB
from spear.report import Drawing, plots
from spear.sweep.grid import AXES, Axis
from spear.sweep.leakage import Leakage, along, named
from spear.sweep.plan import Sweep
from spear.sweep.setting import Setting
from spear.sweep.trial import OTHER_DB, PICTURE_DB
from spear.update import NOISE_UNITS

Points = Sequence[tuple[Any, Leakage]]  # an axis' values and what was found there
_SHOWN_DB = 120.0  # beyond that, only rounding differs
_ONE_LINE = 28  # letters; more names stand aslant
_OFFSET = 0.012  # share of the axis


def drawings(sweep: Sweep, found: Sequence[Leakage]) -> tuple[Drawing, ...]:
    """For each axis what leaked, how well, and what training lost; a map if axes were crossed.

    Each is a drawing of its own, as wide as a phone, so that a narrow page stacks them.
    """
    measured = {leakage.setting for leakage in found if leakage.done}
    axes = [axis for axis in sweep.grid.axes if measured & {s for _, s in axis.points}]
    drawn = [drawing for axis in axes for drawing in _axis(sweep, axis, found)]
    if sweep.grid.cross and len(axes) > 1:
        drawn.insert(0, _map(sweep, found))
    return tuple(drawn)


def _axis(sweep: Sweep, axis: Axis, found: Sequence[Leakage]) -> Iterator[Drawing]:
    points = [(value, leakage) for value, leakage in along(axis, found) if leakage.done]
    data, x = sweep.subject.samples(), _positions(axis, points)
    joined = axis.name != "precision"  # its values have no order
    pictures, classes = data.image_format is not None, data.classes is not None

    def drawn(title: str, caption: str, draw: Callable[[Any], None]) -> Drawing:
        with plots.style(page=True):
            figure = plots.figure(plots.PAGE_WIDTH, 2.5)
            panel = figure.subplots()
            draw(panel)
            _ticks(panel, axis, x, points)
            svg = plots.for_page(figure, f"{axis.name} {title}")
            return Drawing(f"{title} by {axis.title}", svg, caption)

    yield drawn(
        "Leakage",
        "Leaks: anything of a batch came back; exact: all of it. With 95 % intervals.",
        lambda panel: _leakage(panel, x, points, joined=joined),
    )
    yield drawn(
        "Best recovery",
        "PSNR of a batch's best sample, median over batches"
        + (f", shown up to {_SHOWN_DB:.0f} dB" if pictures else "")
        + "; a cross where none came back.",
        lambda panel: _quality(panel, x, points, pictures=pictures),
    )
    if any(leakage.utility for _, leakage in points):
        yield drawn(
            "Accuracy" if classes else "Loss",
            "Held out, after training under the same setting, ± over runs.",
            lambda panel: _utility(panel, x, points, classes=classes),
        )


def _positions(axis: Axis, points: Points) -> list[float]:
    """Noise on a log scale, with no noise a step left of the least; other values evenly spaced."""
    if axis.name != "noise":
        return [float(i) for i in range(len(points))]
    logs = [math.log10(a.noise.sigma) if a.noise.sigma else None for _, a in points]
    least = min((value for value in logs if value is not None), default=0.0)
    return [least - 1.0 if value is None else value for value in logs]


def _ticks(panel: Any, axis: Axis, x: Sequence[float], points: Points) -> None:
    """The values in the words of the tables."""
    names = [named(axis, value, leakage) for value, leakage in points]
    if sum(map(len, names)) > _ONE_LINE:
        panel.set_xticks(x, names, rotation=40, ha="right", rotation_mode="anchor")
    else:
        panel.set_xticks(x, names)
    panel.set_xlabel(axis.title)
    if axis.name != "noise":
        panel.set_xlim(-0.4, len(x) - 0.6)


def _leakage(panel: Any, x: Sequence[float], points: Points, *, joined: bool) -> None:
    styles = (
        ("leaks", plots.ORANGE, "o", "-", [a.leaked for _, a in points]),
        ("exact", plots.BLUE, "s", "--", [a.exact for _, a in points]),
    )
    apart = _OFFSET * (max(x) - min(x) or 1.0)  # so that the intervals do not hide each other
    for side, (label, colour, marker, line, rates) in zip((-apart, apart), styles, strict=True):
        shares = [100 * (rate.share or 0.0) for rate in rates]
        bounds = [[100 * bound for bound in rate.interval()] for rate in rates]
        low = [max(0.0, s - b[0]) for s, b in zip(shares, bounds, strict=True)]
        high = [max(0.0, b[1] - s) for s, b in zip(shares, bounds, strict=True)]
        panel.errorbar(
            [i + side for i in x],
            shares,
            [low, high],
            color=colour,
            marker=marker,
            ls=line if joined else "none",
            label=label,
            capsize=2,
            elinewidth=0.7,
        )
    panel.set_ylim(-4, 104)
    panel.set_ylabel("batches, %")
    panel.figure.legend(loc="outside lower center", ncols=2)  # over no interval


def _quality(panel: Any, x: Sequence[float], points: Points, *, pictures: bool) -> None:
    known = [(i, a.usual_best) for i, (_, a) in zip(x, points, strict=True)]
    shown = [(i, min(best, _SHOWN_DB)) for i, best in known if best is not None]
    panel.plot([i for i, _ in shown], [best for _, best in shown], color=plots.BLUE, marker="o")
    empty = [i for i, best in known if best is None]
    if empty:
        panel.plot(empty, [2.0] * len(empty), color=plots.BLUE, marker="x", ls="none")
    for level, words in (
        (EXACT_DB, "exact"),
        (PICTURE_DB if pictures else OTHER_DB, "recognisable"),
    ):
        panel.axhline(level, color=plots.GREY, lw=0.8, ls=":")
        panel.text(
            0.99, level, words, color=plots.PAGE_GREY, ha="right", va="bottom",
            transform=panel.get_yaxis_transform(),
        )  # fmt: skip
    panel.set_ylim(0, _SHOWN_DB + 5)
    panel.set_ylabel("best, dB")


def _utility(panel: Any, x: Sequence[float], points: Points, *, classes: bool) -> None:
    unit = 100 if classes else 1
    known = [(i, a.utility) for i, (_, a) in zip(x, points, strict=True) if a.utility]
    where = [i for i, _ in known]
    panel.errorbar(
        where,
        [unit * gain.quality for _, gain in known],
        [unit * (gain.spread or 0.0) for _, gain in known],
        color=plots.GREEN,
        marker="D",
        capsize=2,
        elinewidth=0.7,
        label="as set",
    )
    plain = [
        unit * (gain.quality + (1 if classes else -1) * (gain.cost or 0.0)) for _, gain in known
    ]
    panel.plot(where, plain, color=plots.GREY, ls=":", marker=".", label="without defence")
    panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    panel.set_ylabel("accuracy, %" if classes else "held-out loss")
    panel.figure.legend(loc="outside lower center", ncols=2)


def _map(sweep: Sweep, found: Sequence[Leakage]) -> Drawing:
    """Two axes against each other, the others at the base: batches that leak, and that come whole."""
    down, across = sorted(sweep.grid.axes, key=lambda a: len(a.points), reverse=True)[:2]
    by_setting = {leakage.setting: leakage for leakage in found}
    rows = along(down, found)
    columns = along(across, found)
    with plots.style(page=True):
        drawn = plots.figure(1.6 + 0.75 * len(columns), 1.3 + 0.42 * len(rows))
        panel: Any = drawn.subplots()
        shares = [[float("nan")] * len(columns) for _ in rows]
        for i, (_, one) in enumerate(rows):
            for j, (_, two) in enumerate(columns):
                leakage = by_setting.get(_both(one, two, across))
                if leakage is None or not leakage.done:
                    continue
                shares[i][j] = 100 * (leakage.leaked.share or 0.0)
                words = f"{leakage.exact.count} / {leakage.leaked.count}"
                ink = "white" if shares[i][j] < 55 else "#111111"
                panel.text(j, i, words, ha="center", va="center", color=ink)
        image = panel.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        panel.set_xticks(range(len(columns)), [named(across, v, a) for v, a in columns])
        panel.set_yticks(range(len(rows)), [named(down, v, a) for v, a in rows])
        panel.set_xlabel(AXES[across.name])
        panel.set_ylabel(AXES[down.name])
        panel.grid(visible=False)
        drawn.colorbar(image, ax=panel, label="leaks, %")
        svg = plots.for_page(drawn, "map")
    caption = f"In each field: batches exact / batches leaking, of {sweep.repeats}."
    return Drawing(f"Leakage by {down.title} and {across.title}", svg, caption)


def _both(one: Leakage, two: Leakage, across: Axis) -> Setting:
    """The first setting with the second's value of an axis."""
    names = {"noise": (*NOISE_UNITS, "clip"), "epochs": ("sends", "epochs", "lr")}
    fields = names.get(across.name, (across.name,))
    return dataclasses.replace(one.setting, **{f: getattr(two.setting, f) for f in fields})
