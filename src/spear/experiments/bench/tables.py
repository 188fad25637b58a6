"""Tables and plots of the frontier, from rows that were run before. Nothing is computed again."""

from __future__ import annotations

import io
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spear.errors import DataError, MissingExtra
from spear.experiments.bench.frontier import NAMES, Row, Setting
from spear.files import (
    LARGEST_ROWS,
    bytes_of,
    is_count,
    is_number,
    kind,
    mapping,
    maybe,
    write_private,
)
from spear.metrics import Rate

STAGES = ["factorise", "seek", "settle", "round", "vouch", "read", "sample", "select", "certify"]
# Where the paper reports 99 % and more exact batches, on a GPU: (m, b).
PAPER = (200, 20)

_OPTIONAL = ("extra_bytes", "psnr", "worst", "oracle")
_FIELDS = {
    "data": lambda value: isinstance(value, str) and value in NAMES,
    "b": lambda value: is_count(value) and value > 0,
    "m": lambda value: is_count(value) and value > 0,
    **dict.fromkeys(("raw", "exact"), kind(bool)),
    "seed": kind(int),
    "finder": kind(str),
    "seconds": is_number,
    "extra_bytes": maybe(is_number),
    **dict.fromkeys(("psnr", "worst", "oracle"), maybe(is_number)),
    **dict.fromkeys(("certified_wrong", "refused"), is_count),
    "false_exact": kind(bool),
    "stats": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
}


@dataclass(frozen=True)
class Summary:
    """What the rows of one setting and finder come to."""

    setting: Setting
    finder: str
    batches: int
    exact: int
    interval: tuple[float, float]  # 95 % Clopper-Pearson
    median: float
    p90: float
    stages: dict[str, float]  # median seconds
    extra_bytes: float | None  # largest
    psnr: float | None  # mean over exact batches
    worst: float | None  # worst sample of an exact batch
    below_oracle: float | None  # largest distance to the oracle, dB
    false_exact: int
    certified_wrong: int
    refused: int
    faster: float | None  # seconds of sampling over seconds of the cascade, on the same batches
    unfinished: int  # sampling runs that did not end exact: their ratios are lower bounds


def summarise(rows: list[Row]) -> list[Summary]:
    """One summary per setting, in the order of the rows."""
    groups: dict[Setting, list[Row]] = {}
    for row in rows:
        groups.setdefault(Setting(row["data"], row["b"], row["m"], row["raw"]), []).append(row)
    measured = {
        setting: group
        for setting, group in groups.items()
        if any(row["finder"] == "cascade" for row in group)
    }
    return [_summary(setting, group) for setting, group in measured.items()]


def _summary(setting: Setting, group: list[Row]) -> Summary:
    rows = [row for row in group if row["finder"] == "cascade"]
    exact = [row for row in rows if row["exact"]]
    seconds = sorted(row["seconds"] for row in rows)
    mine = {row["seed"]: row for row in rows}
    others = [row for row in group if row["finder"] == "sampling" and row["seed"] in mine]
    own = sum(mine[row["seed"]]["seconds"] for row in others) or 1e-4  # as rows round it
    extra = _known(rows, "extra_bytes")
    gaps = [
        row["oracle"] - row["psnr"]
        for row in exact
        if row.get("oracle") is not None and row.get("psnr") is not None
    ]
    decibels = _known(exact, "psnr")
    return Summary(
        setting=setting,
        finder="cascade",
        batches=len(rows),
        exact=len(exact),
        interval=Rate(len(exact), len(rows)).interval(),
        median=statistics.median(seconds),
        p90=seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        stages={
            name: statistics.median(row["stats"].get(name, 0.0) for row in rows) for name in STAGES
        },
        extra_bytes=max(extra, default=None),
        psnr=statistics.mean(decibels) if decibels else None,
        worst=min(_known(exact, "worst"), default=None),
        below_oracle=max(gaps, default=None),
        false_exact=sum(row["false_exact"] for row in group),
        certified_wrong=sum(row["certified_wrong"] for row in group),
        refused=sum(row["refused"] for row in rows),
        faster=sum(row["seconds"] for row in others) / own if others else None,
        unfinished=sum(not row["exact"] for row in others),
    )


def _known(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def table(rows: list[Row]) -> str:
    """A Markdown table of the summaries."""
    lines = [
        "| data | inputs | b | m | exact batches | 95 % interval | median | 90th pct. | mean PSNR | "
        "worst sample | to oracle | sampling/cascade |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in summarise(rows):
        more = "> " if s.unfinished else ""
        lines.append(
            f"| {NAMES[s.setting.data]} | {'[0, 1]' if s.setting.raw else 'normalised'} "
            f"| {s.setting.b} | {s.setting.m} | {s.exact} of {s.batches} "
            f"| {100 * s.interval[0]:.1f}-{100 * s.interval[1]:.1f} % "
            f"| {s.median:.2f} s | {s.p90:.2f} s "
            f"| {_db(s.psnr)} | {_db(s.worst)} | {_db(s.below_oracle)} "
            f"| {'' if s.faster is None else f'{more}{s.faster:,.0f}'} |"
        )
    return "\n".join(lines)


def stages(rows: list[Row]) -> str:
    """A Markdown table of where the time goes, the memory it takes, and every wrong verdict."""
    lines = [
        f"| row | {' | '.join(STAGES)} | peak extra memory | false EXACT | certified wrong | refused |",
        "|---" * (len(STAGES) + 5) + "|",
    ]
    for s in summarise(rows):
        memory = "" if s.extra_bytes is None else f"{s.extra_bytes / 1e6:,.0f} MB"
        lines.append(
            f"| {NAMES[s.setting.data]}{' [0, 1]' if s.setting.raw else ''} "
            f"{s.setting.b}/{s.setting.m} "
            f"| {' | '.join(f'{s.stages[name]:.3f} s' for name in STAGES)} "
            f"| {memory} | {s.false_exact} | {s.certified_wrong} | {s.refused} |"
        )
    return "\n".join(lines)


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"


def load(path: Path) -> list[Row]:
    """Rows as `spear bench` wrote them, a line each; a last line that was cut off is none."""
    rows: list[Row] = []
    try:
        *lines, torn = bytes_of(path, LARGEST_ROWS).split(b"\n")
        for line in lines:
            rows.append(mapping(line, _FIELDS, _OPTIONAL))
    except ValueError as error:
        raise DataError(
            f"{path}, line {len(rows) + 1}: expected a row of JSON as `spear bench` writes them "
            f"({error}): restore the file, or remove the line"
        ) from error
    with suppress(ValueError):
        rows.append(mapping(torn, _FIELDS, _OPTIONAL))
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Two panels: the largest batch that comes back exactly against the width, and its time."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    frontier, clock = figure.subplots(1, 2)
    for raw, colour, name in [(False, "#1f5fa8", "normalised"), (True, "#c2571a", "[0, 1] pixels")]:
        good = [s for s in summarise(rows) if s.setting.raw is raw and s.exact >= 0.95 * s.batches]
        widths = sorted({s.setting.m for s in good})
        largest = [max(s.setting.b for s in good if s.setting.m == m) for m in widths]
        frontier.plot(widths, largest, "o-", color=colour, label=f"cascade, {name}")
        for m in widths:
            times: dict[int, float] = {}
            for s in good:
                if s.setting.m == m and s.setting.data != "imagenet":  # its inputs set the time
                    times[s.setting.b] = max(times.get(s.setting.b, 0.0), s.median)
            own = sorted(times.items())
            clock.plot(*zip(*own, strict=True), "o-", color=colour, alpha=0.85)
            clock.annotate(f"m = {m}", own[-1], textcoords="offset points", xytext=(5, -3), size=8)
    frontier.plot(*PAPER, "s", color="#888888", label="the paper, normalised (GPU)")
    frontier.set(
        xlabel="width m", ylabel="largest b tried with 95 % exact", xscale="log", yscale="log"
    )
    clock.set(xlabel="batch size b", ylabel="median seconds (CPU)", xscale="log", yscale="log")
    for axis in (frontier.xaxis, frontier.yaxis, clock.xaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    frontier.legend(frameon=False, fontsize=8)
    for axes in (frontier, clock):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format=path.suffix[1:] or "png")
    write_private(path, drawn.getvalue())
