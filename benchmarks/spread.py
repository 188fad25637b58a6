"""One large inversion in one process, over two, and over Ray: the same batch in turns.

    python benchmarks/spread.py --data ../shared/data --rows benchmarks/rows/spread.jsonl

Each line of the rows is one inversion: seconds, by stage too, and how many cores other programs kept
busy meanwhile. Where that is much above 0, the seconds say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from operator import truediv
from pathlib import Path
from typing import Any

import psutil
import torch

import spear
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Case
from spear.experiments.frontier import cell
from spear.integrations.ray import RayExecutor
from spear.search.parallel import one_thread

CASES = {
    "cascade 200/1000": ("tiny_imagenet:200x1000", "cascade"),
    "cascade 256/2000": ("tiny_imagenet:256x2000", "cascade"),
    "sampling 20/200": ("cifar10:20x200", spear.SamplingFinder(max_samples=16_000_000)),
}


def busy_seconds() -> float:
    """Processor time of the whole machine so far (Linux)."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor time of this process and of all that it started, so far."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(
    case: str, root: Path, seed: int, repeats: int, arms: Mapping[str, Executor | None]
) -> Any:
    """A row for every repeat and arm."""
    setting, finder = CASES[case]
    batch = private_batch(Case(cell(setting), seed, root, lambda words, share: None))
    view, first = batch.view(), None
    for repeat in range(repeats):
        for arm, executor in arms.items():
            others, began = busy_seconds() - own_seconds(), time.monotonic()
            result = spear.invert(
                view,
                model=batch.model,
                finder=finder,
                generator=torch.Generator().manual_seed(seed),
                executor=executor,
            )
            seconds = time.monotonic() - began
            others = (busy_seconds() - own_seconds() - others) / seconds
            first = first or result
            yield {
                **{"case": case, "arm": arm, "repeat": repeat, "seconds": round(seconds, 3)},
                "stages": {k: round(v, 3) for k, v in result.stats.items() if isinstance(v, float)},
                "others": round(max(0.0, others), 2),
                "outcome": result.outcome.name,
                "same_bits": torch.equal(result.inputs, first.inputs),
                "torch": torch.__version__,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEAR_DATA", "."))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    parser.add_argument("--rows", type=Path, help="append a line of JSON per inversion here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with spear.workers(2) as executor, RayExecutor(workers=2) as ray:
        for each in (executor, ray):
            for future in [each.submit(one_thread) for _ in range(2)]:
                future.result()
        time.sleep(1)  # the second may still be importing
        arms = {"one process": None, "two processes": executor, "Ray": ray}
        for case in args.only or CASES:
            rows = list(measure(case, Path(args.data), args.seed, args.repeats, arms))
            alone, *spread = ([r["seconds"] for r in rows if r["arm"] == arm] for arm in arms)
            faster = [statistics.median(map(truediv, alone, each)) for each in spread]
            same = all(row["same_bits"] for row in rows)
            print(f"{case}: {alone} s, {faster} times faster, same bits: {same}", flush=True)
            if args.rows:
                with args.rows.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
