"""A thousand inversions in one process: does its memory grow, and do threads give the same bits?

    python benchmarks/load.py --inversions 1000 --threads 4

Prints the resident memory and the number of Python objects every tenth of the way, after a warm-up, and
how many inversions in threads gave other bits than one after the other (Linux).
"""

from __future__ import annotations

import argparse
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import spear
from spear.federated import fedsgd, mlp

BATCHES = 40


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def inverted(number: int) -> bytes:
    seed = number % BATCHES
    generator = torch.Generator().manual_seed(seed)
    b = 1 + seed % 6
    x, y = torch.randn(b, 30, generator=generator), torch.randint(5, (b,), generator=generator)
    model = mlp(30, 5, width=60, depth=3, seed=seed)
    view = spear.observe(model, fedsgd(model, x, y))
    return spear.invert(view, model=model).inputs.numpy().tobytes()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--inversions", type=int, default=1000)
    options.add_argument("--threads", type=int, default=4)
    given = options.parse_args()
    torch.set_num_threads(1)
    expected = [inverted(i) for i in range(BATCHES)]  # and a warm-up
    with ThreadPoolExecutor(given.threads) as pool:
        other = sum(
            bits != expected[i % BATCHES]
            for i, bits in enumerate(pool.map(inverted, range(4 * BATCHES)))
        )
    print(f"{4 * BATCHES} in {given.threads} threads: {other} with other bits")
    gc.collect()
    began, first, objects = time.monotonic(), resident(), len(gc.get_objects())
    print(f"warm: {first:.1f} MB, {objects:,} objects", flush=True)
    for part in range(1, 11):
        for i in range(given.inversions // 10):
            assert inverted(i) == expected[i % BATCHES]
        gc.collect()
        print(
            f"{part * given.inversions // 10}: {resident() - first:+.1f} MB, "
            f"{len(gc.get_objects()) - objects:+,} objects, {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
