"""Local training: which batches come back, and which are proved.

The paper's rows (TinyImageNet, 20 samples, 200 neurons, six layers), and clients that move far: the
frontier of steps, learning rate and batch size. A batch counts as right if every input is, to 1e-3 of
the range.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/training.py --rows paper,far --seeds 10 --from 0
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

import spear
from spear import data
from spear.federated import fedavg, mlp
from spear.metrics import assign
from spear.tolerances import EXACT_ERROR


class Row(NamedTuple):
    data: str
    b: int
    m: int
    lr: float
    epochs: int
    size: int | None = None  # samples in a step; all of them if None
    momentum: float = 0.0
    depth: int = 2
    normalised: bool = True

    def __str__(self) -> str:
        pixels = "" if self.normalised else " in [0, 1]"
        steps = "full batch" if self.size is None else f"batches of {self.size}"
        momentum = f", momentum {self.momentum}" if self.momentum else ""
        return (
            f"{self.data}{pixels}, {self.b} of {self.m}, {self.depth} layers, lr {self.lr}, "
            f"{self.epochs} epochs, {steps}{momentum}"
        )


def _paper(lr: float, epochs: int, size: int | None = None, momentum: float = 0.0) -> Row:
    return Row("tiny_imagenet", 20, 200, lr, epochs, size, momentum, depth=6)


ROWS = {
    "paper": [
        *(_paper(0.01, epochs) for epochs in (1, 5, 10, 20, 50)),
        _paper(0.01, 20, 5),
        *(_paper(lr, 5) for lr in (0.1, 0.001)),
        _paper(0.01, 5, momentum=0.9),
    ],
    "far": [
        *(Row("cifar10", b, 200, 0.1, 1, 10) for b in (30, 40, 50)),
        *(Row("cifar10", 30, 200, 0.1, epochs) for epochs in (5, 20)),
        _paper(0.1, 20),
        Row("cifar10", 30, 200, 0.1, 20, 10),
        *(Row("mnist", 20, 400, 0.1, epochs, 5, normalised=False) for epochs in (1, 5)),
    ],
    "orders": [
        Row("cifar10", b, 200, lr, epochs, 5)
        for b in (10, 20, 30)
        for lr in (0.01, 0.03)
        for epochs in (2, 3)
    ],
    "frontier": [
        Row("cifar10", b, 200, lr, epochs, size)
        for b in (10, 20, 30)
        for lr in (0.01, 0.03, 0.1)
        for epochs, size in ((1, 5), (5, 5), (5, None), (20, None))
    ],
}


def measure(row: Row, seed: int, seconds: float) -> tuple[bool, str, int, float]:
    """Were all inputs right, the outcome, certified ones that are wrong, seconds."""
    images = getattr(data, row.data)(Path(os.environ["SPEAR_DATA"]))
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(drawn[: row.b].tolist(), normalise=row.normalised)
    net = mlp(x.shape[1], images.classes, width=row.m, depth=row.depth, seed=seed)
    told = {"lr": row.lr, "epochs": row.epochs, "batch_size": row.size, "momentum": row.momentum}
    order = torch.Generator().manual_seed(seed + 1)
    view = spear.observe(net, after=fedavg(net, x, y, generator=order, **told), **told)
    began = time.monotonic()
    result = spear.invert(view, max_seconds=seconds)
    took = time.monotonic() - began
    right = wrong = 0
    if len(result.inputs):
        pairs = assign(result.inputs, x)
        error = (result.inputs[pairs.found] - x[pairs.truth]).square().mean(1).sqrt()
        exact = error <= EXACT_ERROR * float((x.amax(1) - x.amin(1)).median())
        right, wrong = int(exact.sum()), int((result.certified[pairs.found] & ~exact).sum())
    return right == row.b, result.outcome.name, wrong, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="paper,far")
    parser.add_argument("--only", default="", help="rows whose words hold this")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    options = parser.parse_args()
    for name in options.rows.split(","):
        for row in [row for row in ROWS[name] if options.only in str(row)]:
            trials = [
                measure(row, seed, options.max_seconds)
                for seed in range(options.first, options.first + options.seeds)
            ]
            outcomes = Counter(outcome for _, outcome, _, _ in trials)
            print(
                f"{row}: right {sum(t[0] for t in trials)} of {len(trials)}, "
                f"{', '.join(f'{k} {n}' for k, n in sorted(outcomes.items()))}, "
                f"wrong certified {sum(t[2] for t in trials)}, "
                f"{statistics.median(t[3] for t in trials):.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
