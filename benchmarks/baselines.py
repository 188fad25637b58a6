"""Rival attacks on the same batches: mean PSNR after the best assignment, de-normalised to [0, 1].

    SPEAR_DATA=... python benchmarks/baselines.py --seeds 1 2 3 --threads 1

A six-layer network of width 200 on 32 x 32 images: CIFAR-10, the demo's crops of photos (scaled down,
so full of detail), and tiles cut from the photos as they are (smooth). Geiping et al. are given the
labels, the cocktail party attack and SPEAR are not. One JSON line a run goes to --out as it is
measured, and a table to the terminal in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import spear
from spear import data
from spear.baselines import Attack, Bounds, CocktailPartyAttack, GeipingAttack, pixel_bounds
from spear.data import PHOTOS, photo_crops
from spear.federated import fedsgd, mlp
from spear.metrics import score

SHAPE = (3, 32, 32)
CLASSES = 10


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: Tensor  # (b, n)
    labels: Tensor  # (b,)
    bounds: Bounds
    to_pixels: Callable[[Tensor], Tensor]


def cifar10(b: int, seed: int) -> Batch:
    images = data.cifar10(Path(os.environ["SPEAR_DATA"]))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(order[:b].tolist())
    return Batch(x, y, pixel_bounds(images.mean, images.std), images.to_pixels)


def photos(b: int, seed: int) -> Batch:
    crops, _ = photo_crops(b, SHAPE[-1], seed)
    return normalised(crops, seed)


def tiles(b: int, seed: int) -> Batch:
    """Squares of 32 x 32 pixels at random places of four photos, in turns."""
    from skimage import data as skimage_data

    generator = torch.Generator().manual_seed(seed)
    cut = []
    for i in range(b):
        photo = getattr(skimage_data, PHOTOS[i % 4])()  # (H, W, 3)
        top, left = (
            int(torch.randint(size - SHAPE[-1], (1,), generator=generator))
            for size in photo.shape[:2]
        )
        square = torch.tensor(photo[top : top + SHAPE[1], left : left + SHAPE[2]])
        cut.append(square.permute(2, 0, 1).float() / 255)
    return normalised(torch.stack(cut), seed)


def normalised(pixels: Tensor, seed: int, mean: float = 0.5, std: float = 0.25) -> Batch:
    y = torch.randint(CLASSES, (len(pixels),), generator=torch.Generator().manual_seed(seed))
    bounds = pixel_bounds([mean] * 3, [std] * 3)
    return Batch(((pixels - mean) / std).flatten(1), y, bounds, lambda z: z.double() * std + mean)


DATA = {"cifar10": cifar10, "photos": photos, "tiles": tiles}


def attacks(iterations: int) -> dict[str, Attack | None]:
    """Rivals by name; None stands for SPEAR itself."""
    weights = {"0.1": 1e-1, "0.001": 1e-3, "0.0001": 1e-4}
    optimisation = {
        f"Geiping, TV {name}": GeipingAttack(iterations=iterations, total_variation=weight)
        for name, weight in weights.items()
    }
    return {**optimisation, "cocktail party": CocktailPartyAttack(), "SPEAR": None}


def measure(attack: Attack | None, batch: Batch, seed: int) -> dict[str, float | str | None]:
    model = mlp(batch.inputs.shape[1], CLASSES, width=200, seed=seed)
    view = spear.observe(model, fedsgd(model, batch.inputs, batch.labels))
    began = time.monotonic()
    if attack is None:
        result = spear.invert(view, model=model)
    else:
        result = attack.invert(
            view, model=model, labels=batch.labels, shape=SHAPE, bounds=batch.bounds
        )
    seconds = time.monotonic() - began
    found = score(batch.to_pixels(result.inputs), batch.to_pixels(batch.inputs))
    return {
        "psnr": found.mean,
        "worst": found.worst,
        "seconds": round(seconds, 2),
        "loss": result.stats.get("loss"),
        "outcome": result.outcome.name,
        "threads": torch.get_num_threads(),
    }


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| data | attack | b | batches | mean PSNR | range over batches | mean seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    groups: dict[tuple[object, object, object], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["attack"], row["b"]), []).append(row)
    for (name, attack, b), group in groups.items():
        psnr = [float(str(row["psnr"])) for row in group]
        seconds = statistics.mean(float(str(row["seconds"])) for row in group)
        lines.append(
            f"| {name} | {attack} | {b} | {len(group)} | {statistics.mean(psnr):.1f} dB | "
            f"{min(psnr):.1f} to {max(psnr):.1f} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=sorted(DATA), default=sorted(DATA))
    parser.add_argument("--attacks", nargs="+", choices=list(attacks(1)), help="all unless given")
    parser.add_argument("--b", type=int, nargs="+", default=[4, 8, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=2000, help="of the optimisation attack")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="raw rows, one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, object]] = []
    for name in args.data:
        for attack_name, attack in attacks(args.iterations).items():
            if args.attacks and attack_name not in args.attacks:
                continue
            for b in args.b:
                for seed in args.seeds:
                    measured = measure(attack, DATA[name](b, seed), seed)
                    row = {"data": name, "attack": attack_name, "b": b, "seed": seed, **measured}
                    rows.append(row)
                    if args.out:
                        with args.out.open("a", encoding="utf-8") as out:
                            out.write(json.dumps(row) + "\n")
    print(f"seeds {args.seeds}, {args.iterations} iterations, {args.threads} thread(s)\n")
    print(table(rows))


if __name__ == "__main__":
    main()
