"""Figure 9: all images of a batch of one class, from SPEAR, from Geiping et al., and the originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spear.experiments.common import Case, Experiment, Section
from spear.experiments.common.baselines import guess
from spear.experiments.common.batches import images, inverted, private_batch
from spear.experiments.common.drawing import Picture
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import NOT_RUN, decimal
from spear.experiments.common.galleries import Strip, Tile, aligned, gallery, plain
from spear.trials import Measured, Trial, compare

# The best of the options tried for Geiping et al. on seed 0 (16.1 dB): 2,000 iterations with a total
# variation of 0.0001, 0.0003, 0.001, 0.01, 0.1 (15.1, 15.1, 16.0, 14.7, 14.3 dB); with 0.001, steps of
# 0.03 and 0.3 (15.9, 14.9), a uniform start (15.1), four times the iterations (15.9).
SETTINGS = {
    "data": "tiny_imagenet",
    "b": 20,
    "m": 200,
    "iterations": 2000,
    "total_variation": 2e-3,
    "max_seconds": 120,
}


def one_class(case: Case) -> Tensor:
    """The images of a class that the seed draws."""
    source = images(case.data, case["data"])
    generator = case.generator()
    label = int(torch.randint(source.classes, (1,), generator=generator))
    return (source.labels == label).nonzero().flatten()


def spread(psnr: Tensor) -> list[int]:
    """Four images by the rival's PSNR (b,): its best, two from the middle, its worst."""
    order = torch.argsort(psnr, descending=True, stable=True)
    return [int(order[round(share * (len(order) - 1))]) for share in (0, 1 / 3, 2 / 3, 1)]


def measure(case: Case) -> Measured:
    batch = private_batch(case, among=one_class(case))
    truth = batch.pixels(batch.inputs)
    found, guessed = inverted(case, batch), compare(batch, guess(case, batch, "geiping"))
    psnr = torch.empty_like(guessed.score.psnr)
    psnr[guessed.score.pairs.truth] = guessed.score.psnr  # in the order of the originals
    four = spread(psnr)
    rows: list[tuple[str, float | None, Sequence[Tensor | None]]] = [
        ("SPEAR", found.metrics["psnr"], aligned(found)),
        ("Geiping et al.", float(psnr.mean()), aligned(guessed)),
        ("Ground truth", None, list(truth)),
    ]
    strips = [
        Strip(name if mean is None else f"{name}\n{mean:.1f} dB", plain(tiles))
        for name, mean, tiles in rows
    ]
    teaser = [
        Strip(name, [Tile(tiles[i], None, _decibels(name, psnr[i])) for i in four])
        for name, _, tiles in rows
    ]
    measured = found.measured(
        {"label": int(batch.labels[0]), "geiping_psnr": psnr.tolist(), "four": four}
        | {"geiping": float(psnr.mean())},
        {"full": gallery(strips, shades=32), "four": gallery(teaser, columns=4, side=192)},
    )
    return replace(measured, stages={**measured.stages, "geiping": guessed.attacked.seconds})


def _decibels(name: str, psnr: Tensor) -> str:
    return f"{float(psnr):.1f} dB" if name.startswith("Geiping") else ""


def draw(rows: Mapping[str, Rows]) -> Section:
    drawn = [row for row in rows["full_batch"] if "full" in row.pictures]
    if not drawn:
        return Section(notes=[NOT_RUN])
    row = drawn[-1]
    metrics, seconds = row.metrics, row.stages["geiping"]
    caption = (
        f"All {row.settings['b']} images of a TinyImageNet batch of a single class, recovered by "
        f"SPEAR (top, mean PSNR {decimal(metrics['psnr'])} dB, {row.seconds:.1f} s) and by Geiping et "
        f"al. (middle, {metrics['geiping']:.1f} dB, {seconds:.0f} s), and as they are (bottom). "
        f"Geiping et al. are given the labels, SPEAR is not. Seed {row.seed}."
    )
    return Section(pictures=[Picture("full", row.pictures["full"], caption)])


EXPERIMENT = Experiment(
    place="Figure 9",
    title="All images of a batch of one class, beside Geiping et al.",
    batches=1,
    plan=lambda plan: [Trial("full_batch", SETTINGS, plan.seed)],
    measure=measure,
    draw=draw,
)
