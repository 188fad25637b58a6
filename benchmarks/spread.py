"""One large inversion on one process, on two, and on one with two threads: the same batch in turns.

    python benchmarks/spread.py --data ../shared/data --rows benchmarks/rows/spread.jsonl

Each line of the rows is one inversion: seconds per stage, and the processor time of this process and of
each worker. Where others use the machine as well, seconds say little; `free` does: processor time of
this process plus the mean of its workers, which is what it takes where each has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import spear
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Case
from spear.experiments.frontier import cell
from spear.search.parallel import one_thread
from spear.trials import Batch

SAMPLES = 16_000_000
CASES = {
    "cascade 200/1000": ("tiny_imagenet:200x1000", "cascade"),
    "cascade 256/2000": ("tiny_imagenet:256x2000", "cascade"),
    "sampling 20/200": ("cifar10:20x200", spear.SamplingFinder(max_samples=SAMPLES)),
}
ARMS = ("one process", "two processes", "two threads")
STAGES = ("factorise", "seek", "settle", "round", "read", "search", "select", "certify")


@dataclass(frozen=True)
class Run:
    """One inversion, timed."""

    case: str
    arm: str
    repeat: int
    seconds: float
    stages: dict[str, float]
    cpu_here: float
    cpu_workers: list[float]
    others: float | None  # cores that others kept busy meanwhile: much above 0 spoils seconds
    outcome: str
    same_bits: bool | None  # as the first run of one process; two threads round differently

    def row(self) -> str:
        """One line of JSON."""
        common = {"free": round(self.free, 2), "torch": torch.__version__}
        return json.dumps({**asdict(self), **common})

    @property
    def free(self) -> float:
        """Seconds on free cores, where workers share out evenly; of two threads it says nothing."""
        return self.cpu_here + (statistics.mean(self.cpu_workers) if self.cpu_workers else 0.0)


def cpu_seconds(executor: ProcessPoolExecutor) -> list[float]:
    """Processor time of each worker so far (Linux); nothing elsewhere."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = []
    for pid in executor._processes or {}:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            fields = stat.read_text().rsplit(")", 1)[1].split()
            seconds.append((int(fields[11]) + int(fields[12])) / ticks)
    return seconds


def busy_seconds() -> float | None:
    """Processor time of the whole machine so far (Linux)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system = stat.read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def timed(
    case: str, arm: str, batch: Batch, seed: int, executor: ProcessPoolExecutor
) -> tuple[Any, Any]:
    """The result, and what it took: the middle fields of a `Run`."""
    view = batch.view()
    torch.set_num_threads(2 if arm == "two threads" else 1)
    busy, workers = busy_seconds(), cpu_seconds(executor)
    here, began = time.process_time(), time.monotonic()
    result = spear.invert(
        view,
        model=batch.model,
        finder=CASES[case][1],
        generator=torch.Generator().manual_seed(seed),
        executor=executor if arm == "two processes" else None,
    )
    seconds, here = time.monotonic() - began, time.process_time() - here
    workers = [b - a for a, b in zip(workers, cpu_seconds(executor), strict=True)]
    now, others = busy_seconds(), None
    if busy is not None and now is not None:
        others = round(max(0.0, (now - busy - here - sum(workers)) / seconds), 2)
    stages = {k: round(v, 3) for k, v in result.stats.items() if k in STAGES}
    used = [round(w, 2) for w in workers] if arm == "two processes" else []
    return result, (round(seconds, 3), stages, round(here, 3), used, others)


def measure(case: str, args: argparse.Namespace, executor: ProcessPoolExecutor) -> list[Run]:
    drawn = Case(cell(CASES[case][0]), args.seed, Path(args.data), lambda words, share: None)
    batch = private_batch(drawn)
    runs: list[Run] = []
    first = None
    for repeat in range(args.repeats):
        for arm in args.arms:
            result, took = timed(case, arm, batch, args.seed, executor)
            first = result if first is None else first
            same = None if arm == "two threads" else torch.equal(result.inputs, first.inputs)
            runs.append(Run(case, arm, repeat, *took, result.outcome.name, same))
            print(runs[-1].row(), flush=True)
    return runs


def table(case: str, runs: list[Run]) -> None:
    """Medians per stage, and how many times faster than one process, taken repeat by repeat."""
    print(f"\n{case}")
    by_arm = {arm: [r for r in runs if r.arm == arm] for arm in ARMS}
    by_arm = {arm: own for arm, own in by_arm.items() if own}
    for arm, own in by_arm.items():
        stages = {s: statistics.median(r.stages.get(s, 0.0) for r in own) for s in STAGES}
        spent = ", ".join(f"{s} {t:.1f}" for s, t in stages.items() if t >= 0.05)
        pairs = list(zip(by_arm[ARMS[0]], own, strict=True))
        faster = statistics.median(a.seconds / b.seconds for a, b in pairs)
        shorter = statistics.median(a.free / b.free for a, b in pairs)
        path = "" if arm == "two threads" else f", {shorter:.2f}x by processor time"
        middle = statistics.median(r.seconds for r in own)
        others = max((r.others or 0.0 for r in own), default=0.0)
        print(f"  {arm}: {middle:.1f} s, {faster:.2f}x{path} ({spent}); others used {others} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEAR_DATA"), required=False)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(CASES), action="append")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=ARMS, help="one process first")
    parser.add_argument("--rows", type=Path, help="append a line of JSON per inversion here")
    args = parser.parse_args()
    if args.data is None:
        parser.error("expected --data, the folder with CIFAR-10 and TinyImageNet, or SPEAR_DATA")
    with spear.workers(2) as executor:
        began = time.monotonic()
        for future in [executor.submit(one_thread) for _ in range(2)]:
            future.result()
        time.sleep(1)  # the second may still be importing
        print(f"workers up after {time.monotonic() - began - 1:.1f} s")
        for case in args.only or CASES:
            runs = measure(case, args, executor)
            table(case, runs)
            if args.rows:
                with args.rows.open("a", encoding="utf-8") as file:
                    file.writelines(run.row() + "\n" for run in runs)


if __name__ == "__main__":
    main()
