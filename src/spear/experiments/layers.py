"""Table 4: inputs of the layers 1 to 5 of a network of width 400, and of layer 5 after training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn

from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.batches import attack, compare_activations, images, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, metric, rate, seconds, verdicts, where
from spear.federated import fedsgd, mlp, train
from spear.metrics import mae
from spear.trials import Batch, Measured, compare
from spear.update import observe

# By layer and training steps: MAE, accuracy and minutes per batch on a GPU, from the paper.
PAPER = {
    (1, 0): ("1.06 × 10⁻⁶", "100 %", "2.3 min"),
    (2, 0): ("1.33 × 10⁻⁶", "100 %", "2.2 min"),
    (3, 0): ("1.67 × 10⁻⁶", "100 %", "5.6 min"),
    (4, 0): ("2.80 × 10⁻⁶", "99 %", "19 min"),
    (5, 0): ("3.04 × 10⁻⁶", "83 %", "70 min"),
    (5, 5000): ("–", "> 95 %", "< 1 min"),
}
WIDTH, SEEN = 400, 5000  # of the 10,000 images, the first are trained on and the others attacked
NOTES = (
    "MAE is that of the layer's own inputs: normalised pixels for layer 1, activations behind it. "
    "Accuracy of activations: 60 dB with the largest of the batch as the peak.",
    f"The trained network saw {SEEN:,} other images, 32 a step at a learning rate of 0.01; the paper "
    "does not say how it trained.",
)


def cell(layer: int, steps: int) -> Settings:
    attacked = {"data": "tiny_imagenet", "b": 20, "m": WIDTH, "layer": layer, "max_seconds": 60}
    return {**attacked, "steps": steps} | ({"lr": 0.01, "mini": 32} if steps else {})


@cache
def trained(root: Path, name: str, steps: int, lr: float, mini: int) -> nn.Module:
    """The trained network, once per process: training takes minutes."""
    x, y = images(root, name).batch(range(SEEN))
    start = mlp(x.shape[1], images(root, name).classes, width=WIDTH, seed=0)
    order = torch.Generator().manual_seed(0)
    return train(start, x, y, steps=steps, lr=lr, batch_size=mini, generator=order)


def drawn(case: Case) -> Batch:
    if not case["steps"]:
        return private_batch(case)
    case.report("training", None)
    model = trained(case.data, case["data"], case["steps"], case["lr"], case["mini"])
    unseen = torch.arange(SEEN, len(images(case.data, case["data"])))
    return private_batch(case, among=unseen, model=model)


def measure(case: Case) -> Measured:
    batch, place = drawn(case), 2 * (case["layer"] - 1)  # a ReLU behind each linear layer
    assert isinstance(batch.model, nn.Sequential)
    with torch.no_grad():
        truth = batch.model[:place](batch.inputs)  # (b, n)
    update = fedsgd(batch.model, batch.inputs, batch.labels)
    attacked = attack(case, observe(batch.model, update, layer=str(place)), batch.model)
    found = compare_activations(batch, attacked, truth) if place else compare(batch, attacked)
    pairs = found.score.pairs
    error = mae(attacked.result.inputs[pairs.found], truth[pairs.truth])  # (p,)
    return found.measured({"mae": float(error.mean()) if len(error) else None})


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for (layer, steps), (error, accuracy, minutes) in PAPER.items():
        own = where(rows["layers"], **cell(layer, steps))
        name = f"{layer}, after {steps:,} steps" if steps else str(layer)
        ours = mean(metric(own, "mae"), len(own))
        lines.append([name, error, ours, accuracy, rate(own), minutes, seconds(own)])
    columns = "Layer, MAE paper, MAE ours, Acc paper, Acc ours, Time paper (GPU), Time ours (CPU)"
    return Section([table(columns, lines)], notes=[*NOTES, verdicts(rows["layers"])])


EXPERIMENT = Experiment(
    place="Table 4",
    title="Any layer: inputs of the layers 1 to 5, TinyImageNet, b = 20, m = 400",
    batches=100,
    cells=[cell(*key) for key in PAPER],
    measure=measure,
    draw=draw,
)
