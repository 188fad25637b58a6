"""Table 3: five datasets at b = 20, six layers of width 200. Accuracy, PSNR, LPIPS and time."""

from spear.paper import Drawing, Experiment, Table
from spear.paper.batches import NAMES, Batch, inverted
from spear.paper.figures import mean, metric, rate, seconds

# Dataset: PSNR, LPIPS, accuracy and minutes a batch on a GPU, as the paper has them.
PAPER = {
    "mnist": ("99.1", "NaN", "99 %", "2.6 min"),
    "cifar10": ("106.6", "1.16 × 10⁻⁵", "99 %", "1.7 min"),
    "tiny_imagenet": ("110.7", "1.62 × 10⁻⁴", "99 %", "1.4 min"),
    "imagenet224": ("125.4", "1.05 × 10⁻⁵", "99 %", "2.1 min"),
    "imagenet720": ("125.6", "8.08 × 10⁻¹¹", "99 %", "2.6 min"),
}


def cell(dataset):
    return {"data": dataset, "b": 20, "m": 200, "finder": "cascade", "max_seconds": 120}


def measure(case):
    batch = Batch.draw(case, case["data"], case["b"], width=case["m"])
    return inverted(case, batch, case["finder"], perceptual=True)


def draw(rows):
    lines = []
    for dataset, (psnr, lpips, accuracy, minutes) in PAPER.items():
        own = [row for row in rows["main"] if row.settings["data"] == dataset]
        lines.append(
            [
                NAMES[dataset],
                psnr,
                mean(metric(own, "psnr"), len(own)),
                lpips,
                mean(metric(own, "lpips"), len(own)),
                accuracy,
                rate(own),
                minutes,
                seconds(own),
            ]
        )
    columns = "Dataset, PSNR paper, PSNR ours, LPIPS paper, LPIPS ours, Acc paper, Acc ours"
    return Drawing([Table([*columns.split(", "), "Time paper (GPU)", "Time ours (CPU)"], lines)])


EXPERIMENT = Experiment(
    place="Table 3",
    title="Main results: reconstruction quality across batches of 20",
    batches=100,
    cells=[cell(dataset) for dataset in PAPER],
    measure=measure,
    draw=draw,
)
