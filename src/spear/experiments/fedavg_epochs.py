"""Table 10: FedAvg updates by the number of local epochs, and with mini-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.batches import attack, private_batch
from spear.experiments.common.figures import mean, metric, rate, seconds, verdicts
from spear.federated import fedavg
from spear.inversion import Outcome
from spear.trials import Measured, Row, compare
from spear.update import observe

# By learning rate, epochs, samples per local step, momentum: PSNR and accuracy, from the paper.
PAPER = {
    (0.01, 1, 20, 0.0): ("97.8", "97 %"),
    (0.01, 5, 20, 0.0): ("103.9", "100 %"),
    (0.01, 10, 20, 0.0): ("106.7", "99 %"),
    (0.01, 20, 20, 0.0): ("108.90", "98 %"),
    (0.01, 50, 20, 0.0): ("104.9", "90 %"),
    (0.01, 20, 5, 0.0): ("106.7", "97 %"),
}
OURS = {(0.01, 5, 20, 0.9): ("–", "–")}  # with momentum, which the paper does not have
B = 20
_COLUMNS = "η, E, b mini, PSNR paper, PSNR ours, Acc paper, Acc ours, Proved ours, Time ours (CPU)"
_NOTE = (
    "A batch counts as accurate where every sample is right, whatever the verdict. Proved is the "
    "verdict EXACT: for it the server recomputes the client's local steps, whose rounding grows with "
    "their number."
)


def cell(lr: float, epochs: int, mini: int, momentum: float) -> dict[str, Any]:
    """A row of the tables: learning rate, epochs, samples per local step, momentum."""
    how = {"lr": lr, "epochs": epochs, "mini": mini} | ({"momentum": momentum} if momentum else {})
    return {"data": "tiny_imagenet", "b": B, "m": 200, **how, "max_seconds": 60}


def measure(case: Case) -> Measured:
    """The client trains on its batch and sends its weights; they are inverted and judged."""
    batch = private_batch(case)
    how = {
        "lr": case["lr"],
        "epochs": case["epochs"],
        "batch_size": case["mini"] if case["mini"] < case["b"] else None,
        "momentum": case.settings.get("momentum", 0.0),
    }
    after = fedavg(batch.model, batch.inputs, batch.labels, generator=case.generator(), **how)
    attacked = attack(case, observe(batch.model, after=after, **how), batch.model)
    proved = attacked.result.outcome is Outcome.EXACT
    return attacked.measured({**compare(batch, attacked).metrics, "proved": proved})


def draw(
    paper: Mapping[tuple[float, int, int, float], tuple[str, str]], rows: Iterable[Row]
) -> Section:
    """The paper's PSNR and accuracy by learning rate, epochs and mini-batch, and ours beside them."""
    rows = list(rows)
    lines, shown = [], []
    for how, (psnr, accuracy) in paper.items():
        (lr, steps, mini, momentum), settings = how, cell(*how)
        own = [row for row in rows if row.settings == settings]
        shown += own
        ours = mean(metric(own, "psnr"), len(own))
        epochs = f"{steps}, momentum {momentum}" if momentum else str(steps)
        line = [f"{lr:g}", epochs, str(mini), psnr, ours, accuracy]
        lines.append([*line, rate(own), rate(own, "proved"), seconds(own)])
    return Section([table(_COLUMNS, lines)], notes=[_NOTE, verdicts(shown)])


EXPERIMENT = Experiment(
    place="Table 10",
    title="FedAvg: local epochs and mini-batches, TinyImageNet, b = 20",
    batches=100,
    cells=[cell(*how) for how in (*PAPER, *OURS)],
    measure=measure,
    draw=lambda rows: draw(PAPER | OURS, rows["fedavg_epochs"]),
)
