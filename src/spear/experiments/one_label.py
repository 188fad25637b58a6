"""Table 8: batches of one class. PSNR, SSIM, MSE, LPIPS and accuracy."""

from __future__ import annotations

from collections.abc import Mapping

from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.batches import images, inverted, lpips, private_batch
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import mean, metric, rate, seconds, verdicts, where
from spear.trials import Measured

# PSNR, SSIM, MSE, LPIPS and accuracy, from the paper, which gives no time.
PAPER = ("127.7", "0.999717", "4.80 × 10⁻⁶", "10.36 × 10⁻⁵", "98 %")
CELL = {"data": "tiny_imagenet", "b": 20, "m": 200, "max_seconds": 120}


def measure(case: Case) -> Measured:
    labels = images(case.data, case["data"]).labels
    same = (labels == case.seed % (int(labels.max()) + 1)).nonzero().flatten()
    return inverted(case, private_batch(case, among=same), lpips=lpips(case.data)).measured()


def draw(rows: Mapping[str, Rows]) -> Section:
    own = where(rows["one_label"], **CELL)
    digits = {"psnr": 1, "ssim": 6, "mse": 1, "lpips": 1}
    ours = [mean(metric(own, name), len(own), places) for name, places in digits.items()]
    columns = ["TinyImageNet", "PSNR", "SSIM", "MSE", "LPIPS", "Acc", "Time (CPU)"]
    lines = [["paper", *PAPER, "–"], ["ours", *ours, rate(own), seconds(own)]]
    classes = (
        "The class of a batch is its seed modulo 200, its images are drawn among the class's 50."
    )
    return Section([table(columns, lines)], notes=[classes, verdicts(own)])


EXPERIMENT = Experiment(
    place="Table 8",
    title="Batches of one class: TinyImageNet, b = 20",
    batches=100,
    cells=[CELL],
    measure=measure,
    draw=draw,
)
