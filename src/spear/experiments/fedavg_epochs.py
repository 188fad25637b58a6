"""Table 10: FedAvg updates by the number of local epochs, and with mini-batches."""

from __future__ import annotations

from spear.experiments.common import Experiment
from spear.experiments.common.averaging import cell, draw, measure

# Learning rate, epochs, samples a local step, momentum: PSNR and accuracy, as the paper has them.
PAPER = {
    (0.01, 1, 20, 0.0): ("97.8", "97 %"),
    (0.01, 5, 20, 0.0): ("103.9", "100 %"),
    (0.01, 10, 20, 0.0): ("106.7", "99 %"),
    (0.01, 20, 20, 0.0): ("108.90", "98 %"),
    (0.01, 50, 20, 0.0): ("104.9", "90 %"),
    (0.01, 20, 5, 0.0): ("106.7", "97 %"),
}
OURS = {(0.01, 5, 20, 0.9): ("–", "–")}  # with momentum, which the paper does not have

EXPERIMENT = Experiment(
    place="Table 10",
    title="FedAvg: local epochs and mini-batches, TinyImageNet, b = 20",
    batches=100,
    cells=[cell(*how) for how in (*PAPER, *OURS)],
    measure=measure,
    draw=lambda rows: draw(PAPER | OURS, rows["fedavg_epochs"]),
)
