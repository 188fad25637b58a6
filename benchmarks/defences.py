"""What the usual defences leave of an attack, as rows of a Markdown table.

SPEAR_DATA=... python benchmarks/defences.py --batch 8 --dataset tiny_imagenet
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

import spear
from spear import data
from spear.federated import defences, fedsgd, mlp
from spear.metrics import score

Update = dict[str, Tensor]

DEFENCES: dict[str, Callable[[Update], Update]] = {
    "none": lambda u: u,
    "clip to 0.01": lambda u: defences.clip(u, 1e-2),
    "float16": defences.half,
    "bfloat16": lambda u: defences.half(u, torch.bfloat16),
    "16 bits": lambda u: defences.quantise(u, 16),
    "12 bits": lambda u: defences.quantise(u, 12),
    "8 bits": lambda u: defences.quantise(u, 8),
    "prune 1 %": lambda u: defences.prune(u, 0.01),
    "prune 10 %": lambda u: defences.prune(u, 0.1),
    "prune 50 %": lambda u: defences.prune(u, 0.5),
    "prune 90 %": lambda u: defences.prune(u, 0.9),
    "noise 1e-6": lambda u: defences.add_noise(u, 1e-6),
    "noise 1e-5": lambda u: defences.add_noise(u, 1e-5),
    "noise 1e-4": lambda u: defences.add_noise(u, 1e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="tiny_imagenet")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=20)
    options = parser.parse_args()
    images = getattr(data, options.dataset)(os.environ["SPEAR_DATA"])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    x, y = images.batch(order[: options.batch].tolist())
    model = mlp(x.shape[1], images.classes, width=200, depth=6, seed=options.seed)
    update = fedsgd(model, x, y)
    print("| defence | outcome | certified | worst PSNR | mean PSNR | seconds |")
    print("|---|---|---|---|---|---|")
    for name, defend in DEFENCES.items():
        began = time.perf_counter()
        result = spear.invert(
            spear.observe(model, defend(update)), model=model, max_seconds=options.max_seconds
        )
        seconds = time.perf_counter() - began
        quality = "- | -"
        if len(result.inputs):
            found = score(images.to_pixels(result.inputs), images.to_pixels(x))
            quality = f"{found.worst:.1f} | {found.mean:.1f}"
        count = f"{int(result.certified.sum())} of {options.batch}"
        print(
            f"| {name} | {result.outcome.name} | {count} | {quality} | {seconds:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
