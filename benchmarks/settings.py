"""Every setting of the paper on real images: FedAvg, DP-SGD, any layer, trained networks, one class.

    SPEAR_DATA=... python benchmarks/settings.py fedavg dp layers --batches 20 --seed 70000 \
        --rows benchmarks/rows/settings.jsonl

Every batch is one line of JSON; `--table` draws the tables from these lines alone. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.federated import (
    clipping_factors,
    fedavg,
    fedsgd,
    least_squares,
    mlp,
    output_gradient,
    train,
)
from spear.metrics import Rate, score

Row = dict[str, Any]
FEDAVG = [
    (0.01, 1, None),
    (0.01, 5, None),
    (0.01, 10, None),
    (0.01, 20, None),
    (0.01, 50, None),
    (0.01, 20, 5),
    (0.1, 5, None),
    (0.001, 5, None),
]
TRAINED = (0, 100, 300, 1000, 2000, 5000)


@cache
def images(name: str) -> data.ImageData:
    return getattr(data, name)(Path(os.environ["SPEAR_DATA"]))


def batch(name: str, b: int, seed: int, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A batch drawn by its seed, from all images or from some."""
    pool = among if among is not None else torch.arange(len(images(name)))
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    return images(name).batch(pool[order[:b]].tolist())


def judged(view: spear.LayerUpdate, model: nn.Module, x: Tensor, y: Tensor, name: str) -> Row:
    """Invert, and compare with the truth: pixels for images, a relative error for activations."""
    began = time.monotonic()
    result = spear.invert(view, model=model, max_seconds=60)
    seconds = time.monotonic() - began
    pixels = images(name).to_pixels if view.reads_data else (lambda t: t.double() / x.abs().max())
    found = score(pixels(result.inputs), pixels(x))
    certified = result.certified[: len(found.psnr)]
    labels = None if result.labels is None else result.labels[: len(found.psnr)]
    return {
        "outcome": result.outcome.name,
        "proof": result.proof.name,
        "batch_size": result.batch_size,
        "exact": found.exact,
        "certified": int(result.certified.sum()),
        "certified_wrong": int((certified & (found.psnr < 60)).sum()),
        "recovered": int((found.psnr >= 60).sum()),
        "mean": found.mean,
        "worst": found.worst,
        "match": result.match,
        "labels": None if labels is None else int((labels == y[found.truth]).sum()),
        "seconds": round(seconds, 3),
        "reason": result.reason,
    }


def fedavg_rows(seed: int) -> Iterator[Row]:
    """Tables of the paper's appendix: epochs, mini-batches, learning rates; and momentum."""
    x, y = batch("tiny_imagenet", 20, seed)
    model = mlp(x.shape[1], 200, seed=seed)
    for lr, epochs, mini in FEDAVG:
        generator = torch.Generator().manual_seed(seed)
        how: dict[str, Any] = {"lr": lr, "epochs": epochs, "batch_size": mini}
        after = fedavg(model, x, y, generator=generator, **how)
        view = spear.observe(model, after=after, **how)
        yield {"setting": f"lr {lr}, {epochs} epochs, mini-batches of {mini or 20}"} | judged(
            view, model, x, y, "tiny_imagenet"
        )


def dp_rows(seed: int) -> Iterator[Row]:
    """Noise on clipped and unclipped gradients, beside least squares with the true dL/dZ."""
    x, y = batch("tiny_imagenet", 20, seed)
    model = mlp(x.shape[1], 200, seed=seed)
    true = output_gradient(model, x, y, layer="0").double()
    for clip in (None, 2.0, 1.0):
        factors = torch.ones(20) if clip is None else clipping_factors(model, x, y, clip)

        def loss(outputs: Tensor, targets: Tensor, factors: Tensor = factors) -> Tensor:
            return (
                nn.functional.cross_entropy(outputs, targets, reduction="none") * factors
            ).mean()

        clean = fedsgd(model, x, y, loss)
        for sigma in (1e-5, 5e-5, 1e-4):
            generator = torch.Generator().manual_seed(seed + 10**6)  # not the weights' own bits
            noisy = {
                name: g + sigma * torch.randn(g.shape, generator=generator)
                for name, g in clean.items()
            }
            view = spear.observe(model, noisy)
            pixels = images("tiny_imagenet").to_pixels
            best = score(pixels(least_squares(view, true * factors)), pixels(x))
            yield {
                "setting": f"C = {clip or 'none'}, sigma = {sigma:g}",
                "reference": best.mean,
                **judged(view, model, x, y, "tiny_imagenet"),
            }


def layer_rows(seed: int) -> Iterator[Row]:
    """Inputs of every layer of a six-layer network of width 400."""
    x, y = batch("tiny_imagenet", 20, seed)
    yield from _layers(mlp(x.shape[1], 200, width=400, seed=seed), x, y, range(5), "at the start")


def trained_layer_rows(seed: int) -> Iterator[Row]:
    """Layer 5 after 5,000 steps of training on other images."""
    x, y = batch("tiny_imagenet", 20, seed, torch.arange(5000, 10_000))
    yield from _layers(_trained_deep(), x, y, [4], "after 5,000 steps")


@cache
def _trained_deep() -> nn.Module:
    x, y = images("tiny_imagenet").batch(range(5000))
    generator = torch.Generator().manual_seed(0)
    start = mlp(x.shape[1], 200, width=400, seed=0)
    return train(start, x, y, steps=5000, lr=0.01, batch_size=32, generator=generator)


def _layers(model: nn.Module, x: Tensor, y: Tensor, which: Any, when: str) -> Iterator[Row]:
    gradients = fedsgd(model, x, y)
    for i in which:
        with torch.no_grad():
            inputs = model[: 2 * i](x)  # type: ignore[index]
        view = spear.observe(model, gradients, layer=str(2 * i))
        row = judged(view, model, inputs, y, "tiny_imagenet")
        yield {"setting": f"inputs of layer {i + 1} {when}"} | row


def one_class_rows(seed: int) -> Iterator[Row]:
    """All samples of one class."""
    among = (images("tiny_imagenet").labels == seed % 200).nonzero().flatten()
    x, y = batch("tiny_imagenet", 20, seed, among)
    model = mlp(x.shape[1], 200, seed=seed)
    view = spear.observe(model, fedsgd(model, x, y))
    yield {"setting": "one class"} | judged(view, model, x, y, "tiny_imagenet")


def trained_rows(seed: int) -> Iterator[Row]:
    """A whole training run on half of the test set; attacked on images it saw and did not see."""
    for name in ("mnist", "cifar10"):
        for steps in TRAINED:
            model = _trained(name, steps)
            for b in (10, 20):
                for part, first in (("seen", 0), ("unseen", 5000)):
                    x, y = batch(name, b, seed, torch.arange(first, first + 5000))
                    with torch.no_grad():
                        off = (model[0](x) <= 0).double().mean(1)  # type: ignore[index]
                        wrong = 1 - model(x).softmax(1)[torch.arange(b), y]
                    view = spear.observe(model, fedsgd(model, x, y))
                    yield {
                        "setting": f"{name}, b = {b}, {part}, {steps} steps",
                        "sparsity": float(off.min()),
                        "faintest": float(wrong.min()),
                        **judged(view, model, x, y, name),
                    }


@cache
def _trained(name: str, steps: int) -> nn.Module:
    x, y = images(name).batch(range(5000))
    if steps == 0:
        return mlp(x.shape[1], 10, seed=0)
    before = TRAINED[TRAINED.index(steps) - 1]
    generator = torch.Generator().manual_seed(steps)
    return train(
        _trained(name, before),
        x,
        y,
        steps=steps - before,
        lr=0.05,
        batch_size=32,
        generator=generator,
    )


GROUPS: dict[str, Callable[[int], Iterator[Row]]] = {
    "fedavg": fedavg_rows,
    "dp": dp_rows,
    "layers": layer_rows,
    "trained-layer": trained_layer_rows,
    "one-class": one_class_rows,
    "trained": trained_rows,
}


def table(rows: list[Row]) -> str:
    """One line a setting; failed batches count in every column they can."""
    noisy, trained = "reference" in rows[0], "sparsity" in rows[0]
    head = ["setting", "exact batches", "verdicts", "certified wrong", "mean PSNR", "worst sample"]
    head += ["below reference"] if noisy else []
    head += ["samples recovered", "lowest column sparsity", "faintest 1 - p"] if trained else []
    lines = [[*head, "median", "slowest"], ["---"] * (len(head) + 2)]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        group = [row for row in rows if row["setting"] == setting]
        outcomes = [row["outcome"] for row in group]
        seconds = [row["seconds"] for row in group]
        wrong = sum(r["certified_wrong"] for r in group)
        false = sum(r["outcome"] == "EXACT" and not r["exact"] for r in group)
        line = [
            setting,
            str(Rate(sum(r["exact"] for r in group), len(group))),
            ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)),
            f"{wrong}, {false} false EXACT",
            _decibels([r["mean"] for r in group], statistics.mean),
            _decibels([r["worst"] for r in group], min),
        ]
        if noisy:
            gaps = [r["reference"] - (r["mean"] or 0.0) for r in group]
            line.append(f"{statistics.mean(gaps):.2f} dB, at most {max(gaps):.2f}")
        if trained:
            b = int(setting.split("b = ")[1].split(",")[0])
            line.append(f"{sum(r['recovered'] for r in group)} of {b * len(group)}")
            line.append(f"{min(r['sparsity'] for r in group):.2f}")
            line.append(f"{min(r['faintest'] for r in group):.0e}")
        lines.append([*line, f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _decibels(values: list[float | None], combined: Callable[[list[float]], float]) -> str:
    """Of the batches that gave anything; how many did not is said."""
    known = [v for v in values if v is not None]
    words = f"{combined(known):.1f} dB" if known else "-"
    return words if len(known) == len(values) else f"{words} ({len(values) - len(known)} without)"


def tables(rows: list[Row]) -> str:
    """A table a group."""
    groups = dict.fromkeys(row["group"] for row in rows)
    drawn = [f"**{g}**\n\n{table([row for row in rows if row['group'] == g])}" for g in groups]
    return "\n\n".join(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=None)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for group in options.groups:
        for seed in range(options.seed, options.seed + options.batches):
            for row in GROUPS[group](seed):
                rows.append({"group": group, "seed": seed, **row})
                if options.rows:
                    with options.rows.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    if options.table and options.rows:
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    print(tables(rows))


if __name__ == "__main__":
    main()
