"""Batches of UCI ADULT out of their gradients: how many are exact, how wrong the numbers are, how fast.

    SPEAR_DATA=... python benchmarks/tabular.py --batches 100 --rows benchmarks/rows/tabular.jsonl

Every batch is one line of JSON; the table below them is drawn from these lines alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import spear
from spear.data import TabularData, adult
from spear.federated import fedsgd, mlp
from spear.metrics import Rate, score_table


def trial(data: TabularData, b: int, m: int, seed: int, max_seconds: float) -> dict[str, Any]:
    """One batch, drawn by its seed, inverted and judged."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    x, y = data.batch(order[:b].tolist())
    model = mlp(data.inputs, data.classes, width=m, seed=seed)
    view = spear.observe(model, fedsgd(model, x, y))
    began = time.monotonic()
    result = spear.invert(view, model=model, max_seconds=max_seconds)
    seconds = time.monotonic() - began
    found = score_table(result.inputs, x, data)
    labels = None if result.labels is None else result.labels[found.pairs.found]
    return {
        "b": b,
        "m": m,
        "seed": seed,
        "outcome": result.outcome.name,
        "exact": found.exact,
        "certified": int(result.certified.sum()),
        "certified_wrong": int((result.certified[found.pairs.found] & ~found.exact_rows).sum()),
        "missing": found.pairs.missing,
        "discrete": found.discrete_accuracy.value,
        "continuous": found.continuous_error.value,
        "accuracy": found.accuracy.value,
        "labels_right": labels is not None and torch.equal(labels, y[found.pairs.truth]),
        "distinct": len(x.unique(dim=0)),
        "rank": int(torch.linalg.matrix_rank(x.double())),
        "seconds": round(seconds, 4),
        "reason": result.reason,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line a setting. Only categories and MAE leave batches out: those with a row missing."""
    lines = [
        "| b | m | exact batches | rows dependent | false EXACT / certified wrong | whole batches "
        "| categories right | MAE of numbers | median | slowest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for b, m in dict.fromkeys((row["b"], row["m"]) for row in rows):
        group = [row for row in rows if (row["b"], row["m"]) == (b, m)]
        whole = [row for row in group if row["missing"] == 0]
        seconds = [row["seconds"] for row in group]
        wrong = sum(row["outcome"] == "EXACT" and not row["exact"] for row in group)
        certified = sum(row["certified_wrong"] for row in group)
        dependent = sum(row["rank"] < b for row in group)
        discrete = f"{100 * statistics.mean(r['discrete'] for r in whole):.2f} %" if whole else ""
        continuous = f"{statistics.mean(r['continuous'] for r in whole):.2g}" if whole else ""
        rate = Rate(sum(row["exact"] for row in group), len(group))
        lines.append(
            f"| {b} | {m} | {rate} | {dependent} | {wrong} / {certified} | {len(whole)} "
            f"| {discrete} | {continuous} "
            f"| {statistics.median(seconds):.2f} s | {max(seconds):.2f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", action="append", help="BxM, may be repeated")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = adult(Path(os.environ["SPEAR_DATA"]))
    trial(data, 16, 200, -1 % 2**31, args.max_seconds)  # the first call of a process pays for all
    rows = []
    for setting in args.setting or ["16x200"]:
        b, m = map(int, setting.split("x"))
        for seed in range(args.seed, args.seed + args.batches):
            rows.append(trial(data, b, m, seed, args.max_seconds))
            if not rows[-1]["exact"]:
                print(json.dumps(rows[-1]), flush=True)
    if args.rows:
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
