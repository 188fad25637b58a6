"""Batches whose gradients span many orders of magnitude, beside LT-code peeling (Shariati and Meybodi).

Weights of both layers are drawn from N(0, 0.5²), biases are zero, pixels in [0, 1], float64, 1000
neurons: softmax saturates, and most samples are far fainter than the loudest. Prints the share of all
samples that came back to 60 dB or more.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/dynamic_range.py --sizes 64,128 --seeds 3
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import spear
from spear import data
from spear.metrics import assign

NEURONS, DEVIATION = 1000, 0.5
PEELING = {
    "CIFAR10": {64: 0.994, 128: 0.666, 256: 0.215},
    "MNIST": {64: 0.484, 128: 0.017, 256: 0.002},
}


def client(images: torch.Tensor, seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(images.shape[1], NEURONS), nn.ReLU(), nn.Linear(NEURONS, 10))
    for layer in (net[0], net[2]):
        nn.init.normal_(layer.weight, std=DEVIATION, generator=generator)
        nn.init.zeros_(layer.bias)
    return net.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="CIFAR10,MNIST")
    parser.add_argument("--sizes", default="64,128")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=300.0)
    options = parser.parse_args()
    for name in options.data.split(","):
        images = {"CIFAR10": data.cifar10, "MNIST": data.mnist}[name](
            Path(os.environ["SPEAR_DATA"])
        )
        for b in map(int, options.sizes.split(",")):
            for seed in range(options.first, options.first + options.seeds):
                drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
                x, y = images.batch(drawn[:b].tolist(), normalise=False)
                x = x.double()
                net = client(x, seed)
                loss = nn.functional.cross_entropy(net(x), y)
                view = spear.observe(net, torch.autograd.grad(loss, list(net.parameters())))
                began = time.monotonic()
                result = spear.invert(view, max_seconds=options.max_seconds)
                seconds = time.monotonic() - began
                exact = wrong = 0
                if len(result.inputs):
                    pairs = assign(result.inputs, x)
                    error = (result.inputs[pairs.found].double() - x[pairs.truth]).square().mean(1)
                    exact = int((error <= 1e-6).sum())
                    wrong = int((result.certified[pairs.found] & (error > 1e-6)).sum())
                print(
                    f"{name} b={b} seed={seed}: {exact / b:.3f} of the samples "
                    f"(peeling {PEELING[name][b]}), {result.batch_size} show, "
                    f"{result.outcome.name}, certified {int(result.certified.sum())}, wrong {wrong}, "
                    f"{seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
