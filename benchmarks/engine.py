"""Inversions in units of the machine: seconds by those of ten products of 2000 x 2000 in the same run.

    python benchmarks/engine.py tiny_imagenet:256x2000 mnist:64x1000:raw --seeds 3 --rows rows.jsonl

Each case is data:BxM or data:BxM:raw, through the paper's six layers unless --depth says otherwise.
Each line of the rows is one inversion. The unit is the lesser of what the products take before and
after it, in float32, with as many threads as the inversion. For small layers the row also has the
time in singular value decompositions of the same gradient in float64 (`svds`), the least of three.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Case
from spear.experiments.frontier import cell, oracle, peak, reset_peak
from spear.trials import attack, compare

LARGEST_SVD = 1 << 20  # entries: a tenth of a second


def unit() -> float:
    """Seconds of ten products of 2000 x 2000."""
    a = torch.ones(2000, 2000)
    began = time.monotonic()
    for _ in range(10):
        a @ a
    return time.monotonic() - began


def svd_seconds(gradient: torch.Tensor) -> float:
    """Seconds of the gradient's singular value decomposition, the least of three."""
    G, seconds = gradient.double(), []
    for _ in range(3):
        began = time.monotonic()
        torch.linalg.svd(G, full_matrices=False)
        seconds.append(time.monotonic() - began)
    return min(seconds)


def measure(setting: str, depth: int, seed: int, options: argparse.Namespace) -> dict[str, object]:
    settings = {**cell(setting), "depth": depth}
    batch = private_batch(Case(settings, seed, Path(options.data), lambda words, share: None))
    view = batch.view()
    before, memory = unit(), reset_peak()
    generator = torch.Generator().manual_seed(seed)
    done = attack(view, batch.model, generator=generator, max_seconds=options.max_seconds)
    extra = None if memory is None else (peak() - memory) / 1e9
    units = done.seconds / min(before, unit())
    small = view.weight_grad.numel() <= LARGEST_SVD
    svds = done.seconds / svd_seconds(view.weight_grad) if small else None
    found = compare(batch, done)
    best = oracle(batch, view) if options.oracle else None
    return {
        **{"case": setting, "depth": depth, "seed": seed, "threads": torch.get_num_threads()},
        **{
            "seconds": round(done.seconds, 3),
            "units": round(units, 2),
            "svds": svds and round(svds, 2),
            "outcome": done.result.outcome.name,
        },
        **{k: found.metrics[k] for k in ("found", "psnr", "worst") if k in found.metrics},
        **{"oracle": best, "gigabytes": extra and round(extra, 2)},
        "stages": {k: round(v, 3) for k, v in done.stages.items()},
        "counts": done.counts,
        "details": list(done.result.details),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEAR_DATA", "."))
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument(
        "--oracle", action="store_true", help="compare with one who knows all patterns"
    )
    parser.add_argument("--rows", type=Path, help="append a line of JSON per inversion here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    unit()
    for case in options.cases:
        for seed in range(options.first, options.first + options.seeds):
            row = measure(case, options.depth, seed, options)
            print(json.dumps(row), flush=True)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
