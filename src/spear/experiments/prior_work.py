"""Table 1: attacks on ImageNet photos of 256 × 256 pixels, b = 20; and on CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spear.experiments.common import Case, Experiment, Plan, Section, table
from spear.experiments.common.baselines import RIVALS, guessed
from spear.experiments.common.batches import inverted, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, metric, rate, seconds, verdicts, where
from spear.report import Table
from spear.trials import Measured, Trial

# By attack: PSNR and time per batch on a GPU, from the paper.
PAPER = {
    "CI-Net, Sigmoid": ("38.0", "1.6 hrs"),
    "CI-Net, ReLU": ("15.6", "1.6 hrs"),
    "Geiping et al.": ("19.6", "18.0 min"),
    "Cocktail party": ("–", "–"),
    "SPEAR": ("124.2", "2.0 min"),
}
AT_MOST = 3  # batches of the rivals, which take minutes each


def cell(attack: str, data: str = "imagenet256", b: int = 20, **budget: float) -> Settings:
    return {"data": data, "b": b, "m": 200, "attack": attack, **budget}


CELLS = {
    "Geiping et al.": cell("geiping", iterations=1000, total_variation=1e-3),
    "Cocktail party": cell("cocktail", iterations=1000, total_variation=1.0),
    "SPEAR": cell("spear", max_seconds=120),
}
# Our addition: small pictures and batches, with the usual weights of total variation (TV).
SMALL = {
    f"Geiping et al., TV {weight}": ("geiping", {"iterations": 2000, "total_variation": weight})
    for weight in (0.1, 0.001, 0.0001)
} | {
    "Cocktail party": ("cocktail", {"iterations": 1000, "total_variation": 1.0}),
    "SPEAR": ("spear", {"max_seconds": 120}),
}
SIZES = (4, 8, 20)
NOTES = (
    "CI-Net is not run here: no code of ours. Geiping et al. are given the true labels, the shape and "
    "the range of the pixels, the cocktail party attack shape and range; SPEAR is given none of these.",
    f"Both rivals ran for {CELLS['Geiping et al.']['iterations']:,} iterations on at most {AT_MOST} "
    "batches, with our own code and one thread; the paper ran the "
    "`breaching` library's Geiping et al. on a GPU.",
)


def small(name: str) -> list[Settings]:
    attack, budget = SMALL[name]
    return [cell(attack, "cifar10", b, **budget) for b in SIZES]


def plan(wanted: Plan) -> Iterator[Trial]:
    cells = [*CELLS.values(), *(settings for name in SMALL for settings in small(name))]
    rivals = [settings for settings in cells if settings["attack"] in RIVALS]
    yield from wanted.each([s for s in cells if s not in rivals], "prior_work")
    yield from wanted.each(rivals, "prior_work", at_most=AT_MOST)


def measure(case: Case) -> Measured:
    batch = private_batch(case)
    if case["attack"] == "spear":
        return inverted(case, batch).measured()
    return guessed(case, batch, case["attack"])


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for name, (psnr, time) in PAPER.items():
        if name not in CELLS:
            lines.append([name, psnr, "–", "–", time, "–"])
            continue
        own = where(rows["prior_work"], **CELLS[name])
        ours = [mean(metric(own, "psnr"), len(own)), rate(own)]
        lines.append([name, psnr, *ours, time, seconds(own)])
    columns = "Attack, PSNR paper, PSNR ours, Exact ours, Time paper (GPU), Time ours (CPU)"
    tables = [table(columns, lines), smaller(rows["prior_work"])]
    return Section(tables, notes=[*NOTES, verdicts(rows["prior_work"])])


def smaller(rows: Rows) -> Table:
    lines = []
    for name in SMALL:
        groups = [where(rows, **settings) for settings in small(name)]
        quality = [mean(metric(own, "psnr"), len(own)) for own in groups]
        lines.append([name, *quality, seconds([row for own in groups for row in own])])
    columns = ["CIFAR-10", *(f"PSNR ours, b = {b}" for b in SIZES), "Time ours (CPU)"]
    caption = (
        "The same network on CIFAR-10. Geiping et al. ran for 2,000 iterations with three weights of "
        "total variation (TV). Times are means over all batch sizes, on a busy machine."
    )
    return table(columns, lines, caption)


EXPERIMENT = Experiment(
    place="Table 1",
    title="Prior work: ImageNet 256 × 256, b = 20",
    batches=10,
    plan=plan,
    measure=measure,
    draw=draw,
)
