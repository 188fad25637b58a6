"""How far inversions go beyond `max_seconds`, and in which stage: one line per case and limit.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/deadline.py [--only NAME] [--limits 2 5 10 20]
        [--rows ROWS.jsonl]

Real images through layers at PyTorch's default initialisation, large enough that the time runs out in
different stages. The allowance is 5 % of the limit or one second, whichever is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.federated import fedavg, fedsgd, mlp
from spear.federated.defences import add_noise

Row = dict[str, Any]
SEED = 31_000
ALLOWANCE = 0.05  # of max_seconds
LEAST_ALLOWANCE = 1.0  # seconds


def batch(name: str, b: int, *, raw: bool = True) -> tuple[Tensor, Tensor]:
    """Images (b, n), raw pixels in [0, 1] or normalised, and their labels."""
    loaded = getattr(data, name)(Path(os.environ["SPEAR_DATA"]))
    order = torch.randperm(len(loaded), generator=torch.Generator().manual_seed(SEED))
    x, y = loaded.batch(order[:b].tolist(), normalise=not raw)
    return x.flatten(1), y


def gradient(
    name: str, b: int, m: int, *, raw: bool = True, depth: int = 3, sigma: float = 0.0
) -> spear.LayerUpdate:
    """FedSGD; noise is in units of a usual entry."""
    x, y = batch(name, b, raw=raw)
    model = mlp(x.shape[1], int(y.max()) + 1, width=m, depth=depth, seed=SEED)
    sent = fedsgd(model, x, y)
    if sigma:
        sigma *= float(sent["0.weight"].square().mean().sqrt())
        sent = add_noise(sent, sigma, torch.Generator().manual_seed(SEED + 1))
    return spear.observe(model, sent)


def large_inputs(b: int, m: int) -> spear.LayerUpdate:
    """Photos blown up to 3 x 224 x 224."""
    x, y = batch("tiny_imagenet", b)
    x = nn.functional.interpolate(x.view(b, 3, 64, 64), size=224, mode="bilinear").flatten(1)
    model = mlp(x.shape[1], 200, width=m, depth=2, seed=SEED)
    return spear.observe(model, fedsgd(model, x, y))


def trained(b: int, m: int, epochs: int, batch_size: int | None) -> spear.LayerUpdate:
    """FedAvg: several local steps."""
    x, y = batch("cifar10", b, raw=False)
    model = mlp(x.shape[1], 10, width=m, depth=3, seed=SEED)
    after = fedavg(model, x, y, lr=0.01, epochs=epochs, batch_size=batch_size)
    told = {} if batch_size is None else {"batch_size": batch_size}
    return spear.observe(model, after=after, lr=0.01, epochs=epochs, **told)


def rounds(b: int, m: int, count: int, sigma: float = 0.0) -> spear.LayerUpdate:
    """Several rounds of the same data."""
    x, y = batch("cifar10", b, raw=False)
    model = mlp(x.shape[1], 10, width=m, depth=3, seed=SEED)
    noise = torch.Generator().manual_seed(SEED + 1)

    def one() -> spear.LayerUpdate:
        sent = add_noise(fedsgd(model, x, y), sigma, noise) if sigma else fedsgd(model, x, y)
        view = spear.observe(model, sent)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                weights.sub_(0.1 * sent[name])
        return view

    return spear.combine(one() for _ in range(count))


CASES: dict[str, Callable[[], spear.LayerUpdate]] = {
    "cifar 128/400": lambda: gradient("cifar10", 128, 400),
    "cifar 256/1000": lambda: gradient("cifar10", 256, 1000),
    "tiny 256/1000": lambda: gradient("tiny_imagenet", 256, 1000),
    "tiny 400/1000": lambda: gradient("tiny_imagenet", 400, 1000),
    "tiny 512/2000": lambda: gradient("tiny_imagenet", 512, 2000),
    "mnist 128/1000": lambda: gradient("mnist", 128, 1000),
    "cifar 64/400, 6 layers": lambda: gradient("cifar10", 64, 400, depth=6),
    "rounds 100/100, 10": lambda: rounds(100, 100, 10),
    "rounds 100/100, 20": lambda: rounds(100, 100, 20),
    "rounds 200/100, 20": lambda: rounds(200, 100, 20),
    "rounds 20/200, 10, noisy": lambda: rounds(20, 200, 10, sigma=1e-4),
    "fedavg 40/400, 20 epochs": lambda: trained(40, 400, 20, None),
    "fedavg 40/400, 20 epochs of 8": lambda: trained(40, 400, 20, 8),
    "noisy 20/400": lambda: gradient("cifar10", 20, 400, raw=False, sigma=0.05),
    "noisy 60/1000": lambda: gradient("cifar10", 60, 1000, raw=False, sigma=0.02),
    "3x224x224, 32/1000": lambda: large_inputs(32, 1000),
    "3x224x224, 200/1000": lambda: large_inputs(200, 1000),
}
_STAGES = (
    *("factorise", "search", "seek", "settle", "round", "vouch", "read", "polish", "refine"),
    *("sample", "repair", "select", "certify", "rescale", "reconstruct"),
)


def measure(name: str, view: spear.LayerUpdate, limit: float) -> Row:
    """One inversion."""
    began = time.monotonic()
    result = spear.invert(view, max_seconds=limit)
    seconds = time.monotonic() - began
    beyond = seconds - limit
    return {
        "case": name,
        "max_seconds": limit,
        "seconds": round(seconds, 2),
        "beyond": round(beyond, 2),
        "kept": beyond <= max(LEAST_ALLOWANCE, ALLOWANCE * limit),
        "outcome": result.outcome.name,
        "cause": result.cause.name,
        "returned": len(result.inputs),
        "certified": int(result.certified.sum()),
        "stages": {s: round(result.stats[s], 2) for s in _STAGES if s in result.stats},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--limits", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--rows", type=Path)
    told = parser.parse_args()
    for name, make in CASES.items():
        if not any(part in name for part in told.only):
            continue
        view = make()
        for limit in told.limits:
            row = measure(name, view, limit)
            mark = " " if row["kept"] else "!"
            print(
                f"{mark} {name:30} {limit:5g} s: {row['seconds']:7.2f} s {row['outcome']:12} "
                f"{row['cause']:8} {row['returned']:4} {row['certified']:4} {row['stages']}",
                flush=True,
            )
            if told.rows is not None:
                with told.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
