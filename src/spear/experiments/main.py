"""Table 3: five datasets at b = 20, six layers of width 200. Accuracy, PSNR, LPIPS and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from spear.experiments.common import Case, Experiment, Plan, Section, table
from spear.experiments.common.batches import NAMES, inverted, lpips, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, median, metric, rate, seconds, verdicts, where
from spear.trials import Measured, Trial

# By dataset: PSNR, LPIPS, accuracy and minutes per batch on a GPU, from the paper.
PAPER = {
    "mnist": ("99.1", "NaN", "99 %", "2.6 min"),
    "cifar10": ("106.6", "1.16 × 10⁻⁵", "99 %", "1.7 min"),
    "tiny_imagenet": ("110.7", "1.62 × 10⁻⁴", "99 %", "1.4 min"),
    "imagenet224": ("125.4", "1.05 × 10⁻⁵", "99 %", "2.1 min"),
    "imagenet720": ("125.6", "8.08 × 10⁻¹¹", "99 %", "2.6 min"),
}
SAMPLED = ("mnist", "cifar10", "tiny_imagenet")
SHARE = 10  # one batch in ten also goes to the paper's finder, which takes minutes
LARGE = {"imagenet224": 5, "imagenet720": 10}  # one batch in so many: they take up to a minute


def cell(dataset: str, finder: str = "cascade", max_seconds: float = 120) -> Settings:
    return {"data": dataset, "b": 20, "m": 200, "finder": finder, "max_seconds": max_seconds}


CELLS = [cell(dataset) for dataset in PAPER]
SLOW = [cell(dataset, "sampling", 600) for dataset in SAMPLED]


def plan(wanted: Plan) -> Iterator[Trial]:
    yield from wanted.each([cell(dataset) for dataset in PAPER if dataset not in LARGE], "main")
    for dataset, share in LARGE.items():
        yield from wanted.each([cell(dataset)], "main", at_most=math.ceil(wanted.batches / share))
    yield from wanted.each(SLOW, "main", at_most=math.ceil(wanted.batches / SHARE))


def measure(case: Case) -> Measured:
    found = inverted(case, private_batch(case), case["finder"], lpips=lpips(case.data))
    return found.measured()


def draw(rows: Mapping[str, Rows]) -> Section:
    shown = [*CELLS, *SLOW]
    lines = [_line(settings, where(rows["main"], **settings)) for settings in shown]
    columns = "Dataset, Finder, PSNR paper, PSNR ours, LPIPS paper, LPIPS ours, Acc paper, Acc ours"
    times = ["Time paper (GPU)", "Time ours (CPU)", "Submatrices, median"]
    finders = (
        "The finder `cascade` is ours, `sampling` is the paper's Algorithm 1; the paper's figures "
        f"stand beside both. Sampling runs on one batch in {SHARE}, each within 10 minutes; ImageNet "
        f"takes one in {LARGE['imagenet224']} and one in {LARGE['imagenet720']}."
    )
    return Section(
        [table([*columns.split(", "), *times], lines)], notes=[finders, verdicts(rows["main"])]
    )


def _line(settings: Settings, own: Rows) -> list[str]:
    psnr, distance, accuracy, minutes = PAPER[settings["data"]]
    return [
        NAMES[settings["data"]],
        settings["finder"],
        psnr,
        mean(metric(own, "psnr"), len(own)),
        distance,
        mean(metric(own, "lpips"), len(own)),
        accuracy,
        rate(own),
        minutes,
        seconds(own),
        median(own, "submatrices"),
    ]


EXPERIMENT = Experiment(
    place="Table 3",
    title="Main results: reconstruction quality across batches of 20",
    batches=100,
    plan=plan,
    measure=measure,
    draw=draw,
)
