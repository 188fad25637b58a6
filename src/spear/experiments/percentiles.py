"""Figures 10 to 12: TinyImageNet batches at the 10th, 50th and 90th percentile of PSNR."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from spear.experiments.common import Case, Experiment, Section
from spear.experiments.common.batches import inverted, private_batch
from spear.experiments.common.drawing import Picture
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import NOT_RUN
from spear.experiments.common.galleries import recovered_above_originals
from spear.trials import Measured, Row, Trial

PERCENTILES = (10, 50, 90)


def ranked(rows: Rows) -> list[Row]:
    """The TinyImageNet batches of Table 3 from the worst to the best; ties by seed."""
    wanted = ("tiny_imagenet", "cascade")
    tiny = [row for row in rows if (row.settings["data"], row.settings["finder"]) == wanted]
    return sorted(tiny, key=lambda row: (_psnr(row), row.seed))


def picked(batches: Rows) -> Iterator[Trial]:
    """Trials that repeat the batches at the percentiles (nearest rank)."""
    for percentile in PERCENTILES if batches else ():
        row = batches[math.ceil(percentile / 100 * len(batches)) - 1]
        repeated = {"percentile": percentile, "main_psnr": row.metrics.get("psnr")}
        yield Trial("percentiles", {**row.settings, **repeated}, row.seed)


def _psnr(row: Row) -> float:
    """Sort key: a batch without any recovered image is worse than any other."""
    value = row.metrics.get("psnr")
    return -math.inf if value is None else value


def measure(case: Case) -> Measured:
    found = inverted(case, private_batch(case), case["finder"])
    same = found.metrics["psnr"] == case["main_psnr"]
    return found.measured({"same_as_main": same}, {"batch": recovered_above_originals(found)})


def draw(rows: Mapping[str, Rows]) -> Section:
    own = {row.key: row for row in rows["percentiles"] if "batch" in row.pictures}
    batches, pictures = ranked(rows["main"]), []
    for trial in picked(batches):
        if trial.key not in own:
            continue
        row, percentile = own[trial.key], trial.settings["percentile"]
        caption = (
            f"The batch at the {percentile}th percentile of {len(batches)} TinyImageNet batches (Table "
            f"3), by mean PSNR ({_decibels(row)}; seed {row.seed}): recovered above, originals below."
        )
        if not row.metrics["same_as_main"]:
            caption += f" In Table 3 it had {trial.settings['main_psnr']} dB."
        pictures.append(Picture(f"{percentile}th", row.pictures["batch"], caption))
    return Section(pictures=pictures, notes=[] if pictures else [NOT_RUN])


def _decibels(row: Row) -> str:
    psnr = row.metrics["psnr"]
    return "nothing recovered" if psnr is None else f"{psnr:.1f} dB"


EXPERIMENT = Experiment(
    place="Figures 10–12",
    title="Batches at the 10th, 50th and 90th percentile of PSNR",
    batches=1,
    plan=lambda plan: picked(ranked(plan.rows["main"])),
    measure=measure,
    draw=draw,
    after=("main",),
)
