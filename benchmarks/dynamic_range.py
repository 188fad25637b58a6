"""Batches whose gradients span many orders of magnitude: how many samples come back, beside LT codes.

    SPEAR_DATA=../shared/data python benchmarks/dynamic_range.py --seeds 3 --rows rows.jsonl

The network is input -> 1000 -> ReLU -> 10 in float64 with cross-entropy (a mean), pixels in [0, 1], biases
of zero and weights of N(0, 0.5^2) in the first layer. The second has the same (`both`), where the softmax
saturates and the gradient of what it gets right vanishes: "show" counts the samples whose share of the
update is above its rounding, eps times the loudest singular value. Or it has PyTorch's spread, N(0, 1 /
(3 * 1000)) (`first`), where all of them show. A sample counts as recovered from 60 dB PSNR on, against the
truth after the best assignment, not clipped.

LT codes: what Shariati and Meybodi report for peeling neurons with a single active sample, with 1000
neurons. Which second layer they took is not known to us; peeling depends on the first only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.metrics import EXACT_DB, assign

LT_CODES = {
    ("cifar10", 64): 0.994,
    ("cifar10", 128): 0.666,
    ("cifar10", 256): 0.215,
    ("mnist", 64): 0.484,
    ("mnist", 128): 0.017,
    ("mnist", 256): 0.002,
}
WIDTH, CLASSES, SPREAD = 1000, 10, 0.5
SECOND = {"both": SPREAD, "first": (3 * WIDTH) ** -0.5}


def network(inputs: int, second: str, generator: torch.Generator) -> nn.Sequential:
    """Gaussian weights and zero biases."""
    model = nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).double()
    for layer, spread in ((model[0], SPREAD), (model[2], SECOND[second])):
        drawn = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
        layer.weight.data.copy_(spread * drawn)
        layer.bias.data.zero_()
    return model


def shares_of_update(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """Length (b,) of each sample's own part of the first layer's gradient."""
    z = model[0](x)
    loss = nn.functional.cross_entropy(model[2](z.relu()), y)
    (d,) = torch.autograd.grad(loss, z)
    return d.norm(dim=1) * x.norm(dim=1)


def measure(images: data.ImageData, b: int, second: str, seed: int) -> dict[str, Any]:
    """One batch, inverted."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(images), generator=generator)[:b].tolist()
    x, y = images.batch(chosen, normalise=False)
    x = x.flatten(1).double()
    model = network(x.shape[1], second, generator)
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    loudest = float(torch.linalg.matrix_norm(gradients[0], 2))
    began = time.monotonic()
    result = spear.invert(spear.observe(model, gradients), generator=generator)
    seconds = time.monotonic() - began
    pairs = assign(result.inputs, x)
    error = (result.inputs[pairs.found] - x[pairs.truth]).square().mean(1)
    exact = -10 * torch.log10(error.clamp_min(1e-30)) >= EXACT_DB
    shown = shares_of_update(model, x, y) > torch.finfo(torch.float64).eps * loudest
    return {
        "b": b,
        "second": second,
        "seed": seed,
        "recovered": int(exact.sum()) / b,
        "show": int(shown.sum()) / b,
        "batch_size": result.batch_size,
        "outcome": result.outcome.name,
        "certified": int(result.certified.sum()),
        "certified_wrong": int((result.certified[pairs.found] & ~exact).sum()),
        "seconds": round(seconds, 1),
    }


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in arguments.data:
        images = getattr(data, name)(arguments.root)
        for second in arguments.second:
            for b in arguments.sizes:
                for seed in range(arguments.seeds):
                    yield {"data": name, **measure(images, b, second, seed)}


def table(found: list[dict[str, Any]]) -> str:
    """Means over the seeds, one line per setting."""
    lines = [
        "| data | N(0, 0.5^2) | b | recovered | show | LT codes | outcomes | wrong | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((row["data"], row["second"], row["b"]) for row in found):
        some = [row for row in found if (row["data"], row["second"], row["b"]) == key]
        mean = {
            name: sum(row[name] for row in some) / len(some)
            for name in ("recovered", "show", "seconds")
        }
        outcomes = Counter(row["outcome"] for row in some)
        said = ", ".join(f"{count} {name}" for name, count in outcomes.items())
        wrong = sum(row["certified_wrong"] for row in some)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {mean['recovered']:.3f} | {mean['show']:.3f} | "
            f"{LT_CODES[key[0], key[2]]:.3f} | {said} | {wrong} | {mean['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=os.environ.get("SPEAR_DATA", "."))
    parser.add_argument("--data", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--second", nargs="+", default=list(SECOND), choices=list(SECOND))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=Path, help="append each batch's row to this file")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments):
        found.append(row)
        print(json.dumps(row), flush=True)
        if arguments.rows is not None:
            with arguments.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
