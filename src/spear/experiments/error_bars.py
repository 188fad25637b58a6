"""Table 7: Table 3 with error bars, for the mean and for a single batch. Runs nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

from spear.experiments.common import Experiment, Section, table
from spear.experiments.common.batches import NAMES
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import mean, metric, rate, seconds, spread, where

# By dataset: PSNR, LPIPS, accuracy and minutes per batch on a GPU, from the paper.
PAPER = {
    "mnist": ("99.1 ± 13.2", "NaN", "99 %", "2.6 min"),
    "cifar10": ("106.6 ± 15.1", "1.16 × 10⁻⁵ ± 2.26 × 10⁻⁴", "99 %", "1.7 min"),
    "tiny_imagenet": ("110.7 ± 12.8", "1.62 × 10⁻⁴ ± 3.22 × 10⁻³", "99 %", "1.4 min"),
    "imagenet224": ("125.4 ± 11.2", "1.05 × 10⁻⁵ ± 9.50 × 10⁻⁴", "99 %", "2.1 min"),
    "imagenet720": ("125.6 ± 8.1", "8.08 × 10⁻¹¹ ± 3.05 × 10⁻³", "99 %", "2.6 min"),
}
NOTE = (
    "The paper calls its ± a 95 % confidence interval; by its size it seems to be the spread of single "
    "batches (1.96 standard deviations), not that of the mean. Ours are given both ways. The "
    "rows are those of Table 3 with the finder `cascade`."
)


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for dataset, (psnr, lpips, accuracy, minutes) in PAPER.items():
        own = where(rows["main"], data=dataset, finder="cascade")
        ours = [
            bar(metric(own, name), len(own)) for name in ("psnr", "lpips") for bar in (mean, spread)
        ]
        lines.append([NAMES[dataset], psnr, *ours[:2], lpips, *ours[2:]])
        lines[-1] += [accuracy, rate(own), minutes, seconds(own)]
    bars = ["paper", "ours, ± of the mean", "ours, ± 1.96 deviations"]
    columns = [f"{name} {bar}" for name in ("PSNR", "LPIPS") for bar in bars]
    rest = ["Acc paper", "Acc ours", "Time paper (GPU)", "Time ours (CPU)"]
    return Section([table(["Dataset", *columns, *rest], lines)], notes=[NOTE])


EXPERIMENT = Experiment(
    place="Table 7",
    title="Main results with error bars",
    batches=100,
    draw=draw,
    after=("main",),
)
