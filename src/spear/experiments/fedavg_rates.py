"""Table 11: FedAvg updates by the local learning rate. The row of 0.01 is Table 10's."""

from __future__ import annotations

from spear.experiments.common import Experiment
from spear.experiments.fedavg_epochs import cell, draw, measure

# By learning rate, epochs, samples per local step, momentum: PSNR and accuracy, from the paper.
PAPER = {
    (0.1, 5, 20, 0.0): ("119.3", "95 %"),
    (0.01, 5, 20, 0.0): ("103.9", "100 %"),
    (0.001, 5, 20, 0.0): ("85.5", "100 %"),
}
SHARED = (0.01, 5, 20, 0.0)

EXPERIMENT = Experiment(
    place="Table 11",
    title="FedAvg: local learning rates, TinyImageNet, b = 20",
    batches=100,
    cells=[cell(*how) for how in PAPER if how != SHARED],
    measure=measure,
    draw=lambda rows: draw(PAPER, [*rows["fedavg_rates"], *rows["fedavg_epochs"]]),
    after=("fedavg_epochs",),
)
