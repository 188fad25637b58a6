"""Figure 13: a batch that was not fully recovered, and the part that was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from spear.experiments.common import Case, Experiment, Section
from spear.experiments.common.batches import inverted, private_batch
from spear.experiments.common.drawing import Picture
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import NOT_RUN, where
from spear.experiments.common.galleries import Strip, Tile, gallery, judged, plain
from spear.search import SamplingFinder
from spear.trials import Measured, Row, Status, Trial

SHOWN = 20  # images of a larger batch
# If no batch of Table 3 failed: settings beyond what can be recovered, by the kind of failure.
STAGED = {
    "budget": {"b": 20, "m": 200, "finder": "sampling", "max_samples": 3_000_000},
    "narrow": {"b": 20, "m": 70, "finder": "sampling", "max_samples": 3_000_000},
    "large": {"b": 66, "m": 200, "finder": "cascade", "max_samples": None},
}
WORDS = {
    "main": "A batch of Table 3 that was not recovered",
    "budget": "Staged: the paper's finder with a budget too small for the batch",
    "narrow": "Staged: the paper's finder on a layer too narrow for the batch",
    "large": "Staged: the cascade on a batch too large for the layer",
}


def failed(rows: Rows) -> list[Row]:
    """The TinyImageNet batches of Table 3 that are not exact; the default finder's first."""
    bad = [
        row
        for row in rows
        if row.settings["data"] == "tiny_imagenet"
        and row.status is Status.DONE
        and not row.metrics["exact"]
    ]
    return sorted(bad, key=lambda row: (row.settings["finder"] != "cascade", row.seed))


def picked(rows: Rows) -> list[Trial]:
    """A failed batch of Table 3, run again; if none failed, the staged failures."""
    for row in failed(rows)[:1]:
        return [
            Trial("failed_batch", {**row.settings, "kind": "main", "max_samples": None}, row.seed)
        ]
    common = {"data": "tiny_imagenet", "max_seconds": 600}
    return [
        Trial("failed_batch", {**common, **settings, "kind": kind}, seed=0)
        for kind, settings in STAGED.items()
    ]


def measure(case: Case) -> Measured:
    batch = private_batch(case)
    budget = case["max_samples"]
    finder = case["finder"] if budget is None else SamplingFinder(max_samples=budget)
    found = inverted(case, batch, finder)
    returned = len(found.attacked.result.inputs)
    picture = framed(judged(found), batch.pixels(batch.inputs))
    return found.measured({"returned": returned}, {"batch": picture})


def framed(tiles: Sequence[Tile], originals: Tensor) -> bytes:
    """Recovered images above their originals: certified, uncertified, missing ones; the first 20."""
    order = sorted(range(len(tiles)), key=lambda i: tiles[i].rank)[:SHOWN]
    return gallery(
        [
            Strip("SPEAR", [tiles[i] for i in order]),
            Strip("Ground truth", plain([originals[i] for i in order])),
        ]
    )


def draw(rows: Mapping[str, Rows]) -> Section:
    own = {row.key: row for row in rows["failed_batch"] if "batch" in row.pictures}
    drawn = [own[trial.key] for trial in picked(rows["main"]) if trial.key in own]
    if not drawn:
        return Section(notes=[NOT_RUN])
    tiny = where(rows["main"], data="tiny_imagenet", finder="cascade")
    lost = [row for row in tiny if row.status is not Status.DONE]  # these have nothing to show
    notes = [
        "A green frame is a sample that the attack certifies, a red one it returns without a proof; "
        "an empty frame is one that it does not return. In the paper one batch of 100 failed, with two "
        "wrong directions of 20 and a mean PSNR of 91.2 dB."
    ]
    if not failed(rows["main"]):
        words = f"Of the {len(tiny)} TinyImageNet batches of Table 3 none failed here"
        notes.append(f"{words}, but {len(lost)} ended without a result." if lost else f"{words}.")
    pictures = [Picture(row.settings["kind"], row.pictures["batch"], caption(row)) for row in drawn]
    return Section(pictures=pictures, notes=notes)


def caption(row: Row) -> str:
    b, metrics = row.settings["b"], row.metrics
    budget = row.settings["max_samples"]
    limits = f"b = {b}, m = {row.settings['m']}" + (f", {budget:,} submatrices" if budget else "")
    right = f"{metrics['recovered']} of them right to 60 dB, {metrics['certified']} certified"
    mean = "" if metrics["psnr"] is None else f", mean PSNR {metrics['psnr']:.1f} dB"
    part = f"; {SHOWN} of the {b} are shown" if b > SHOWN else ""
    return (
        f"{WORDS[row.settings['kind']]} ({limits}; seed {row.seed}): {metrics['returned']} of {b} "
        f"images returned, {right}{mean}{part}."
    )


EXPERIMENT = Experiment(
    place="Figure 13",
    title="A batch that was not recovered",
    batches=1,
    plan=lambda plan: picked(plan.rows["main"]),
    measure=measure,
    draw=draw,
    after=("main",),
)
