"""Beyond the paper: how large a batch comes back exactly, from how wide a layer, in what time.

`spear bench` runs it for any dataset, batch size and width, and other finders and attacks beside ours.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spear.errors import InvalidOption
from spear.experiments.common import Case, Experiment, Plan, Plot, Section, table
from spear.experiments.common.additions import Addition
from spear.experiments.common.baselines import attacked
from spear.experiments.common.batches import NAMES, attack, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import metric, share_of, time_of, verdicts, where
from spear.factors import factorise
from spear.metrics import score
from spear.report import Table, plots
from spear.trials import Batch, Measured, Row, Status, Trial, compare
from spear.update import LayerUpdate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAW = "_raw"  # at the end of a dataset's name: pixels in [0, 1] instead of the usual normalisation
DATASETS = tuple(name for name in NAMES if f"{name}{RAW}" in NAMES)
BAR = (
    *("cifar10:20x200", "tiny_imagenet:20x200", "mnist:20x200"),
    *("cifar10:20x200:raw", "mnist:20x200:raw"),
    *("cifar10:24x200", "cifar10:32x200", "cifar10:40x200"),
    *("cifar10:50x400", "tiny_imagenet:50x400", "cifar10:64x400:raw"),
    *("tiny_imagenet:100x1000", "tiny_imagenet:128x1000:raw"),
    *("tiny_imagenet:150x1000", "tiny_imagenet:200x1000"),
    *("tiny_imagenet:256x2000", "imagenet:20x200"),
)
# What `spear bench` runs unless told otherwise, with the seconds that a trial took (its row's `took`):
# one process on a core that others used too, spear bench SETTINGS --batches 5 --workers 1.
SMALL = {
    "mnist:20x200": 1.12,
    "cifar10:20x200": 0.85,
    "cifar10:40x200": 0.81,
    "cifar10:50x400": 1.75,
}
# Batches of TinyImageNet near the most that a layer can tell apart, and beyond: b x m.
EDGE = (
    *("30x100", "38x100", "40x100", "42x100", "60x200", "76x200", "80x200", "84x200"),
    *("120x400", "152x400", "160x400", "168x400"),
    *("10x100:raw", "20x100:raw", "30x100:raw", "30x200:raw", "50x200:raw", "60x200:raw"),
    *("80x400:raw", "100x400:raw", "120x400:raw"),
)
LARGE = ("380x1000", "400x1000", "512x2000", "512x4000", "256x1000:raw", "512x2000:raw")
LARGE_SHARE = 10  # one batch in so many: they take a minute or more
COMPARED = "cifar10:20x200"  # with the paper's finder
AT_MOST = 2  # batches of it, which take a hundred times as long
# Width and size of other attacks' exact batches, not run by us: the paper's Tables 3 and 5; SPEAR++
# (arXiv 2510.24200) as we were told.
OTHERS = {"the paper (GPU)": [(200, 20), (400, 50)], "SPEAR++, as told": [(1000, 65)]}
STAGES = ("factorise", "seek", "settle", "round", "vouch", "read", "sample", "select", "certify")
COLUMNS = (
    "data, inputs, b, m, exact batches, 95 % interval, median, 90th pct., mean PSNR, worst sample, "
    "to oracle, sampling/cascade"
)


ARMS = (
    "data b/m, finder or attack, code, exact batches, samples certified, mean PSNR, worst sample, "
    "median, times ours, failed or out of time"
)


def cell(setting: str, finder: str = "cascade", max_seconds: float = 600) -> Settings:
    """The settings of `cifar10:20x200` or `cifar10:20x200:raw`.

    >>> cell("mnist:20x200:raw")["data"]
    'mnist_raw'
    """
    name, *rest = setting.split(":")
    sizes = rest[0].split("x") if rest else []
    known = len(rest) == 1 or (len(rest) == 2 and rest[1] == "raw")
    if not known or len(sizes) != 2 or not all(size.isdigit() for size in sizes):
        raise InvalidOption(f"expected data:BxM or data:BxM:raw, got {setting!r}")
    b, m = map(int, sizes)
    if name not in DATASETS:
        raise InvalidOption(f"expected data to be one of {', '.join(DATASETS)}, got {name!r}")
    if b < 1 or m < 1:
        raise InvalidOption(f"expected b >= 1 and m >= 1, got {b} and {m}")
    data = name + RAW * (len(rest) == 2)
    return {"data": data, "b": b, "m": m, "finder": finder, "max_seconds": max_seconds}


def expected(trials: Iterable[Trial]) -> float:
    """Seconds that those of SMALL take in one process; rivals and other finders are not counted."""
    keys = ("data", "b", "m", "finder")
    known = {tuple(cell(name)[key] for key in keys): seconds for name, seconds in SMALL.items()}
    return sum(known.get(tuple(trial.settings.get(key) for key in keys), 0.0) for trial in trials)


def beside(ours: Settings, addition: Addition) -> Settings:
    """The settings of a finder or an attack on the batches of ours."""
    if addition.kind == "attack":
        ours = {name: value for name, value in ours.items() if name != "finder"}
    if addition.code is None:  # one of ours needs no digest: rows have the version
        return {**ours, addition.kind: addition.name}
    return {**ours, **addition.settings}


def plan(wanted: Plan) -> Iterator[Trial]:
    yield from wanted.each([cell(setting) for setting in BAR], "frontier")
    yield from wanted.each([cell(f"tiny_imagenet:{sizes}") for sizes in EDGE], "frontier")
    large = [cell(f"tiny_imagenet:{sizes}") for sizes in LARGE]
    few = math.ceil(wanted.batches / LARGE_SHARE)
    yield from wanted.each(large, "frontier", at_most=few)
    yield from wanted.each([cell(COMPARED, "sampling")], "frontier", at_most=AT_MOST)


def measure(case: Case) -> Measured:
    batch = private_batch(case)
    if "attack" in case.settings:
        return attacked(case, batch)
    view = batch.view()
    before = reset_peak()
    found = compare(batch, attack(case, view, batch.model, case["finder"]))
    extra = None if before is None else max(0, peak() - before)
    ours = case["finder"] == "cascade"
    best = oracle(batch, view) if ours else None
    least = int(rows_off(batch, view).sum(1).min())
    return found.measured({"extra_bytes": extra, "oracle": best, "least_off": least})


def rows_off(batch: Batch, view: LayerUpdate) -> Tensor:
    """(b, m) bool: the neurons that are off for each sample."""
    return batch.inputs.double() @ view.weight.double().T + view.bias.double() <= 0


def oracle(batch: Batch, view: LayerUpdate) -> float | None:
    """Mean PSNR of an oracle that knows every ReLU pattern: kernels of all true zeros, in float64."""
    factors = factorise(view)
    if factors.batch_size != len(batch.inputs):
        return None
    off = rows_off(batch, view)[:, factors.live_rows]  # (b, rows)
    kernels = [torch.linalg.svd(factors.outputs.basis[zero]).Vh[-1] for zero in off]
    C = torch.linalg.inv(torch.stack(kernels, 1))
    C = C / (C @ factors.bias_coordinates)[:, None]
    return score(batch.pixels(factors.reconstruct(C)), batch.pixels(batch.inputs)).mean


def reset_peak() -> int | None:
    """Reset the process's peak memory and return its present use in bytes; None except on Linux."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return peak()
    except OSError:
        return None


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def sizes(rows: Rows) -> list[tuple[str, int, int]]:
    """Datasets, batch sizes and widths, in the order of the rows."""
    own = [row.settings for row in where(rows, finder="cascade")]
    return list(dict.fromkeys((s["data"], s["b"], s["m"]) for s in own))


def group(rows: Rows, size: tuple[str, int, int], finder: str = "cascade") -> list[Row]:
    return where(rows, **dict(zip(("data", "b", "m"), size, strict=True)), finder=finder)


def frontier_table(rows: Rows) -> Table:
    """One line per dataset, batch size and width."""
    lines = []
    for size in sizes(rows):
        own, (data, b, m) = group(rows, size), size
        exact = [row for row in own if row.metrics.get("exact")]
        rate, times = share_of(own), sorted(map(time_of, own))
        low, high = rate.interval()
        known = [row.metrics for row in exact if row.metrics.get("oracle") is not None]
        psnr, worst = metric(exact, "psnr"), metric(exact, "worst")
        gaps = [found["oracle"] - found["psnr"] for found in known]
        lines.append(
            [
                NAMES[data.removesuffix(RAW)],
                "[0, 1]" if data.endswith(RAW) else "normalised",
                *map(str, (b, m)),
                f"{rate.count} of {rate.trials}",
                f"{100 * low:.1f}-{100 * high:.1f} %",
                f"{statistics.median(times):.2f} s",
                f"{times[min(len(times) - 1, int(0.9 * len(times)))]:.2f} s",
                decibels(statistics.mean(psnr) if psnr else None),
                decibels(min(worst, default=None)),
                decibels(max(gaps, default=None)),
                times_faster(own, group(rows, size, "sampling")),
            ]
        )
    return table(COLUMNS, lines)


def decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


def times_faster(cascade: Rows, sampling: Rows) -> str:
    """How many times longer sampling takes than the cascade, on the same batches."""
    own = {row.seed: time_of(row) for row in cascade}
    others = [row for row in sampling if row.seed in own]
    if not others:
        return ""
    unfinished = any(not row.metrics.get("exact") for row in others)
    ratio = sum(map(time_of, others)) / (sum(own[row.seed] for row in others) or 1e-4)
    return f"{'> ' * unfinished}{ratio:,.0f}"


def stages_table(rows: Rows) -> Table:
    """Where the time goes, the memory it takes, and what was refused."""
    lines = []
    for size in sizes(rows):
        own = group(rows, size)
        memory = max(metric(own, "extra_bytes"), default=None)
        spent = [statistics.median(row.stages.get(stage, 0.0) for row in own) for stage in STAGES]
        lines.append(
            [
                _setting(size),
                *(f"{seconds:.3f} s" for seconds in spent),
                "" if memory is None else f"{memory / 1e6:,.0f} MB",
                f"{sum(metric(own, 'refused')):.0f}",
            ]
        )
    columns = ["data, b/m", *STAGES, "peak extra memory", "right, not certified"]
    return table(columns, lines, "Median seconds by stage; the largest extra memory of any batch.")


def comparison_table(rows: Rows) -> Table | None:
    """Finders and attacks beside ours, on the batches that ours inverted; None if there are none."""
    lines, compared = [], list[Row]()
    for size in sizes(rows):
        (data, b, m), ours = size, {row.seed: row for row in group(rows, size)}
        arms: dict[tuple[str, ...], list[Row]] = {}
        for row in where(rows, data=data, b=b, m=m):
            if row.seed in ours:
                arms.setdefault(_arm(row), []).append(row)
        ordered = sorted(arms.items(), key=lambda arm: arm[0][0] != "cascade")  # ours first
        for arm, found in ordered if len(arms) > 1 else ():
            lines.append([_setting(size), *arm, *_beside(found, ours)])
            compared += found
    if not lines:
        return None
    errors = Counter(f"{_arm(row)[0]}: {row.error}" for row in compared if row.error)
    told = [f"{count} × {error}." for error, count in errors.most_common(5)]
    return table(ARMS, lines, " ".join([verdicts(compared), *told]))


def _arm(row: Row) -> tuple[str, str]:
    """What was run, and which code of the user's that was."""
    kind = "attack" if "attack" in row.settings else "finder"
    return row.settings[kind], row.settings.get(f"{kind}_code", "")


def _setting(size: tuple[str, int, int]) -> str:
    data, b, m = size
    return f"{NAMES[data.removesuffix(RAW)]}{' [0, 1]' * data.endswith(RAW)} {b}/{m}"


def _beside(found: Rows, ours: Mapping[int, Row]) -> list[str]:
    rate, psnr, worst = share_of(found), metric(found, "psnr"), metric(found, "worst")
    ran = [row for row in found if row.status is not Status.FAILED]  # an exception has no time
    spent = [time_of(row) for row in ran]
    ratio = sum(spent) / (sum(time_of(ours[row.seed]) for row in ran) or 1e-4)
    return [
        f"{rate.count} of {rate.trials}",
        f"{sum(metric(found, 'certified')):.0f}",
        decibels(statistics.mean(psnr) if psnr else None),
        decibels(min(worst, default=None)),
        f"{statistics.median(spent):.2f} s" if ran else "",
        f"{ratio:.3g}" if ran else "",
        str(sum(row.cut_short for row in found) or ""),
    ]


def figure(rows: Rows) -> Figure:
    from matplotlib.ticker import LogLocator, NullLocator

    drawn = plots.figure(7.0, 2.9)
    left, right = drawn.subplots(1, 2)
    for raw, colour, name in ((False, plots.BLUE, "normalised"), (True, plots.ORANGE, "[0, 1]")):
        good = [
            size
            for size in sizes(rows)
            if size[0].endswith(RAW) is raw and (share_of(group(rows, size)).share or 0) >= 0.95
        ]
        widths = sorted({m for _, _, m in good})
        largest = [max(b for _, b, width in good if width == m) for m in widths]
        left.plot(widths, largest, "o-", color=colour, label=f"cascade, {name} pixels")
        left.plot(*limit(rows, raw), ":", color=colour)
        for m in widths:
            clock(right, rows, [size for size in good if size[2] == m], colour)
    for marker, (name, points) in zip("s^", OTHERS.items(), strict=True):
        left.plot(*zip(*points, strict=True), marker, color=plots.GREY, label=name)
    left.set(xlabel="width $m$", ylabel="largest $b$ tried with 95 % exact")
    right.set(xlabel="batch size $b$", ylabel="median seconds (CPU)")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    left.legend()
    return drawn


def limit(rows: Rows, raw: bool) -> tuple[list[int], list[float]]:
    """By width, the largest batch whose samples have rows enough in which they are off: b - 1 each."""
    least: dict[int, list[float]] = {}
    for row in rows:
        if row.settings["data"].endswith(RAW) is raw and "least_off" in row.metrics:
            least.setdefault(row.settings["m"], []).append(row.metrics["least_off"])
    widths = sorted(least)
    return widths, [1 + statistics.median(least[m]) for m in widths]


def clock(axes: Axes, rows: Rows, sizes: list[tuple[str, int, int]], colour: str) -> None:
    """Median seconds by batch size at one width, of the slowest dataset."""
    times: dict[int, float] = {}
    for data, b, m in sizes:
        if not data.startswith("imagenet"):  # there the many inputs dominate the time
            middle = statistics.median(map(time_of, group(rows, (data, b, m))))
            times[b] = max(times.get(b, 0.0), middle)
    own = sorted(times.items())
    if own:
        axes.plot(*zip(*own, strict=True), "o-", color=colour, alpha=0.85)
        label = f"$m = {sizes[0][2]}$"
        axes.annotate(label, own[-1], textcoords="offset points", xytext=(5, -3), size=7)


def draw(rows: Mapping[str, Rows]) -> Section:
    own = rows["frontier"]
    caption = (
        "Left: the largest batch of those tried that comes back exactly in 95 % of the runs, by the "
        "layer's width. Dotted: the largest of which every sample has b - 1 neurons that are off, the "
        "fewest that tell it from the others (median over batches). Right: the median time it takes."
    )
    note = (
        "Exact: every sample at 60 dB or more. To oracle: how far the mean PSNR of a batch lies at "
        "most below that of one who knows every ReLU pattern. The last column compares the time of "
        "both finders on the same batches. `spear bench` takes other settings, and also shows the time "
        "by stage and the memory."
    )
    plot = Plot("frontier", lambda: figure(own), caption)
    return Section([frontier_table(own)], [plot], notes=[note, verdicts(own)])


EXPERIMENT = Experiment(
    place="Beyond the paper",
    title="How large a batch comes back, from how wide a layer",
    batches=20,
    plan=plan,
    measure=measure,
    draw=draw,
)
