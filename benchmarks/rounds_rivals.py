"""What one round cannot tell apart, and several can: scales, one output, near-duplicates.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/rounds_rivals.py ROWS.jsonl [--seeds 5]
    python benchmarks/rounds_rivals.py ROWS.jsonl --draw

A client of 20 CIFAR-10 images, 100 neurons, three layers, FedSGD at a learning rate of 0.1. A sample
counts as told apart if the client's own sample was certified. What is called EXACT or certified and is
right to less than 60 dB is counted as wrong. Rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.federated import mlp
from spear.metrics import EXACT_DB, assign

Row = dict[str, Any]
B, M, LR = 20, 100, 0.1


@dataclass(frozen=True)
class Case:
    """A client that one round cannot settle."""

    name: str
    outputs: int = 10
    zero_biases: bool = False  # at the start, so that the network is homogeneous
    nearest: float | None = None  # two of the images are this far apart, in every pixel


CASES = [
    Case("ten classes"),
    Case("biases start at zero", zero_biases=True),
    Case("two classes", outputs=2),
    Case("one output", outputs=1),
    *(Case(f"two images {d} apart", nearest=d) for d in (0.3, 0.1, 0.03, 0.01, 0.001)),
]
ROUNDS = (1, 2, 5, 10)


def client(case: Case, seed: int) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """The first model, inputs (b, n), targets, and the loss."""
    draw = torch.Generator().manual_seed(seed)
    loaded = data.cifar10(Path(os.environ["SPEAR_DATA"]))
    order = torch.randperm(len(loaded), generator=draw)[:B].tolist()
    x, y = loaded.batch(order)
    x = x.flatten(1)
    if case.nearest is not None:
        x[1] = x[0] + case.nearest * torch.randn(x.shape[1], generator=draw)
        y[1] = y[0]
    model = mlp(x.shape[1], case.outputs, width=M, depth=3, seed=seed)
    if case.zero_biases:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
    if case.outputs == 1:
        return model, x, (y % 2).float()[:, None], nn.functional.binary_cross_entropy_with_logits
    return model, x, y % case.outputs, nn.functional.cross_entropy


def measure(case: Case, rounds: int, seed: int) -> Row:
    """One client, seen for so many rounds."""
    model, x, y, loss = client(case, seed)
    views = []
    for _ in range(rounds):
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss(model(x), y), parameters)
        views.append(spear.observe(copy.deepcopy(model), dict(zip(names, gradients, strict=True))))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(LR * gradient)
    view = spear.combine(views) if rounds > 1 else views[0]
    result = spear.invert(view, loss=loss, max_seconds=300)
    sure = result.inputs[result.certified].double()
    pairs = assign(sure, x.double()) if len(sure) else None
    right = 0
    if pairs is not None:
        error = (sure[pairs.found] - x[pairs.truth].double()).square().mean(1)
        extent = float(x.max() - x.min())
        right = int((error <= extent**2 * 10 ** (-EXACT_DB / 10)).sum())
    return {
        **asdict(case),
        "rounds": rounds,
        "seed": seed,
        "outcome": result.outcome.name,
        "batch_size": result.batch_size,
        "certified": len(sure),
        "right": right,
        "wrong_exact": result.outcome.name == "EXACT" and right < B and case.nearest is None,
        "cause": result.cause.name,
        "reason": result.reason,
    }


def draw(rows: list[Row]) -> str:
    """The table: samples certified and right, of all; wrong ones after it if there are any."""
    lines = ["| | " + " | ".join(f"{r} rounds" if r > 1 else "one round" for r in ROUNDS) + " |"]
    lines.append("|---" * (len(ROUNDS) + 1) + "|")
    for case in CASES:
        cells = []
        for rounds in ROUNDS:
            own = [row for row in rows if (row["name"], row["rounds"]) == (case.name, rounds)]
            right, wrong = (sum(row[key] for row in own) for key in ("right", "certified"))
            cell = f"{100 * right / (B * len(own)):.0f} %" if own else ""
            cells.append(cell + (f", {wrong - right} wrong" if wrong > right else ""))
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--from", type=int, default=51_000, dest="first")
    parser.add_argument("--draw", action="store_true")
    told = parser.parse_args()
    text = told.rows.read_text() if told.rows.exists() else ""
    rows: list[Row] = [json.loads(line) for line in text.splitlines()]
    done = {(row["name"], row["rounds"], row["seed"]) for row in rows}
    for case in CASES if not told.draw else ():
        for rounds in ROUNDS:
            for seed in range(told.first, told.first + told.seeds):
                if (case.name, rounds, seed) not in done:
                    rows.append(measure(case, rounds, seed))
                    with told.rows.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(draw(rows))


if __name__ == "__main__":
    main()
