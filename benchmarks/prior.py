"""The paper's combination: an optimisation attack as prior for the sampling, timed end to end.

    SPEAR_DATA=... python benchmarks/prior.py tiny_imagenet:50x400 --iterations 2000 --seeds 0

Per batch: the attack's PSNR; how pure its groups of 3b rows are (share of them that are off in the true
sample), as the paper takes them and after `prior_from` moved the guesses into the gradient's span;
then sampling with the prior, and (--alone) without, each stopped after --max-seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor

import spear
from spear import data
from spear.baselines import GeipingAttack, negative_rows, pixel_bounds, prior_from
from spear.federated import fedsgd, mlp
from spear.metrics import score


def purity(view: spear.LayerUpdate, guesses: Tensor, truth: Tensor, b: int) -> float:
    """Share of each guess's 3b most negative neurons that are off in the true sample."""
    rows = negative_rows(view, guesses, min(3 * b, view.outputs))  # (b, 3b)
    Z = truth @ view.weight.T + view.bias  # (b, m)
    return float((Z.gather(1, rows) <= 0).float().mean())


def measure(name: str, b: int, m: int, seed: int, args: argparse.Namespace) -> dict[str, object]:
    images = getattr(data, name)(Path(os.environ["SPEAR_DATA"]))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(order[:b].tolist())
    model = mlp(x.shape[1], images.classes, width=m, seed=seed)
    view = spear.observe(model, fedsgd(model, x, y))
    attack = GeipingAttack(iterations=args.iterations, total_variation=args.total_variation)
    began = time.monotonic()
    guess = attack.invert(
        view,
        model=model,
        labels=y,
        shape=images.shape,
        bounds=pixel_bounds(images.mean, images.std),
    )
    row: dict[str, object] = {"data": name, "b": b, "m": m, "seed": seed}
    row |= {"iterations": args.iterations, "total_variation": args.total_variation}
    found = score(images.to_pixels(guess.inputs), images.to_pixels(x))
    row["attack_psnr"] = round(found.mean or 0.0, 1)
    row["attack_seconds"] = round(time.monotonic() - began, 1)
    guesses = {
        "paper": prior_from(view, guess.inputs, project=False),
        "projected": prior_from(view, guess.inputs),
    }
    for kind, prior in guesses.items():
        row[f"{kind}_purity"] = round(purity(view, prior, x[found.truth], b), 4)
    runs = {kind: spear.SamplingFinder(prior=prior) for kind, prior in guesses.items()}
    if args.alone:
        runs["alone"] = spear.SamplingFinder()
    for kind, finder in runs.items():
        if args.only and kind not in args.only:
            continue
        began = time.monotonic()
        result = spear.invert(view, model=model, finder=finder, max_seconds=args.max_seconds)
        row[f"{kind}_seconds"] = round(time.monotonic() - began, 1)
        row[f"{kind}_outcome"] = result.outcome.name
        row[f"{kind}_submatrices"] = int(result.stats.get("submatrices", 0))
        recovered = score(images.to_pixels(result.inputs), images.to_pixels(x))
        row[f"{kind}_psnr"] = round(recovered.mean, 1) if recovered.mean is not None else None
        row[f"{kind}_exact_samples"] = int((recovered.psnr >= 60).sum())
    row["threads"] = torch.get_num_threads()
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["cifar10:20x200"], help="data:bxm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--total-variation", type=float, default=1e-3)
    parser.add_argument("--max-seconds", type=float, default=120)
    parser.add_argument("--alone", action="store_true", help="sample without a prior too")
    parser.add_argument("--only", nargs="+", choices=["paper", "projected", "alone"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for case in arguments.cases:
        dataset, sizes = case.split(":")
        batch, width = (int(size) for size in sizes.split("x"))
        for number in arguments.seeds:
            print(json.dumps(measure(dataset, batch, width, number, arguments)), flush=True)
