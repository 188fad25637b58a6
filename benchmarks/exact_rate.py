"""How often whole batches come back exactly: fresh batches of real images, judged against the truth.

    SPEAR_DATA=... python benchmarks/exact_rate.py --data cifar10 --b 8 --batches 100

Prints one JSON line per batch and a summary at the end; counts every wrong EXACT verdict and every
certified sample that is wrong. `--table FILE` draws the README's table from a file of summaries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

import spear
from spear import data
from spear.federated import fedsgd, mlp
from spear.metrics import EXACT_DB, score

NAMES = {"cifar10": "CIFAR-10", "mnist": "MNIST", "tiny_imagenet": "TinyImageNet"}


def table(path: Path) -> str:
    """Markdown from a file with one summary a line."""
    lines = [
        "| data | inputs | b | batches | exact | mean PSNR (dB) | worst sample (dB) | median time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in map(json.loads, path.read_text().splitlines()):
        settings = row["settings"]
        inputs = "[0, 1]" if settings["raw"] else "normalised"
        lines.append(
            f"| {NAMES[settings['data']]} | {inputs} | {settings['b']} | {row['batches']} | "
            f"{row['exact']} | {row['mean_psnr']:.1f} | {row['worst_psnr_of_exact']:.1f} | "
            f"{row['median_seconds']:.2f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["cifar10", "mnist", "tiny_imagenet"], default="cifar10")
    parser.add_argument("--b", type=int, default=8)
    parser.add_argument("--m", type=int, default=200)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--raw", action="store_true", help="pixels in [0, 1], not normalised")
    parser.add_argument("--no-model", action="store_true", help="certify by pattern alone")
    parser.add_argument("--max-seconds", type=float, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", type=Path, help="draw summaries of this file, run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    torch.set_num_threads(args.threads)
    images = getattr(data, args.data)(Path(os.environ["SPEAR_DATA"]))

    rows = []
    for seed in range(args.seed, args.seed + args.batches):
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(len(images), generator=generator)[: args.b].tolist()
        x, y = images.batch(indices, normalise=not args.raw)
        model = mlp(x.shape[1], images.classes, width=args.m, depth=args.depth, seed=seed)
        view = spear.observe(model, fedsgd(model, x, y))
        began = time.monotonic()
        result = spear.invert(
            view,
            model=None if args.no_model else model,
            finder="sampling",
            generator=generator,
            max_seconds=args.max_seconds,
        )
        seconds = time.monotonic() - began
        normalised = not args.raw
        found = score(
            images.to_pixels(result.inputs, normalised=normalised),
            images.to_pixels(x, normalised=normalised),
        )
        wrong = int((result.certified & (found.psnr < EXACT_DB)).sum())
        row = {
            "seed": seed,
            "outcome": result.outcome.name,
            "exact": found.exact,
            "batch_size": result.batch_size,
            "match": result.match,
            "certified": int(result.certified.sum()),
            "certified_wrong": wrong,
            "uncertified_right": int((~result.certified & (found.psnr >= EXACT_DB)).sum()),
            "psnr": found.mean,
            "worst": found.worst,
            "seconds": round(seconds, 3),
            "submatrices": result.stats.get("submatrices"),
            "reason": result.reason,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)

    exact = [row for row in rows if row["exact"]]
    called = [row for row in rows if row["outcome"] == "EXACT"]
    psnrs = [row["psnr"] for row in rows if row["psnr"] is not None]
    summary = {
        "settings": vars(args),
        "batches": len(rows),
        "exact": len(exact),
        "called_exact": len(called),
        "called_exact_wrongly": sum(not row["exact"] for row in called),
        "certified_wrong": sum(row["certified_wrong"] for row in rows),
        "right_but_uncertified": sum(row["uncertified_right"] for row in rows),
        "mean_psnr": round(statistics.mean(psnrs), 1) if psnrs else None,
        "worst_psnr_of_exact": min((row["worst"] for row in exact), default=None),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
        "median_submatrices": statistics.median(row["submatrices"] or 0 for row in rows),
        "threads": args.threads,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
