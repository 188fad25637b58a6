"""Table 2: rows of UCI ADULT, at the paper's b = 16 and at more. Categories, numbers, and time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from spear.data import TabularData, adult
from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.batches import attack
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, metric, rate, seconds, verdicts, where
from spear.federated import fedsgd, mlp
from spear.metrics import score_table
from spear.trials import Measured, claims
from spear.update import observe

# Discrete accuracy in per cent, continuous MAE and minutes per batch, from the paper.
PAPER = {"Tableak": ("97", "4922.7", "2.6 min"), "SPEAR": ("100", "20.4", "0.4 min")}
SIZES = (16, 24, 32)
NOTES = (
    "Numbers are compared in their own units (years, dollars, census weights), unrounded, as the "
    "paper's MAE must be to be as large as it is. Exact: every category right, every number within "
    "0.001 standard deviations. Means leave out rows of the table that did not come back; a batch "
    "that lacks one is not exact.",
    "Dependent rows: batches whose rows are linearly dependent. They cannot come back whole, however "
    "wide the layer.",
    "Tableak is not run here: no code of ours. The paper does not say how many batches its figures "
    "are of.",
)


def cell(b: int) -> Settings:
    return {"data": "adult", "b": b, "m": 200, "max_seconds": 60}


@cache
def people(root: Path) -> TabularData:
    return adult(root)


def measure(case: Case) -> Measured:
    table = people(case.data)
    order = torch.randperm(len(table), generator=case.generator())
    x, y = table.batch(order[: case["b"]].tolist())
    model = mlp(table.inputs, table.classes, width=case["m"], seed=case.seed)
    attacked = attack(case, observe(model, fedsgd(model, x, y)), model)
    score = score_table(attacked.result.inputs, x, table)
    metrics = {
        **claims(attacked.result, score.pairs, score.exact_rows, score.exact, y),
        "discrete": score.discrete_accuracy.value,
        "continuous": score.continuous_error.value,
        "missing": score.pairs.missing,
        "rank": int(torch.linalg.matrix_rank(x.double())),  # below b no batch comes back whole
    }
    return attacked.measured(metrics)


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = [
        [f"{name}, paper", "16", *values[:2], "–", "–", values[2]] for name, values in PAPER.items()
    ]
    for b in SIZES:
        own = where(rows["tabular"], **cell(b))
        discrete = [100 * value for value in metric(own, "discrete")]
        ours = [mean(discrete, len(own), 2), mean(metric(own, "continuous"), len(own)), rate(own)]
        ranks = metric(own, "rank")
        dependent = f"{sum(r < b for r in ranks)} of {len(own)}" if ranks else "–"
        lines.append(["SPEAR, ours", str(b), *ours, dependent, f"{seconds(own)} (CPU)"])
    columns = "Method, b, Discrete acc (%), Continuous MAE, Exact batches, Dependent rows, Time"
    return Section([table(columns, lines)], notes=[*NOTES, verdicts(rows["tabular"])])


EXPERIMENT = Experiment(
    place="Table 2",
    title="Tables: UCI ADULT",
    batches=100,
    cells=[cell(b) for b in SIZES],
    measure=measure,
    draw=draw,
    needs=("ADULT",),
)
