"""The smallest number of rounds that determines every sample, beside what `spear.theory` foresees.

    SPEAR_DATA=... python benchmarks/rounds_theory.py benchmarks/rows/rounds_theory.jsonl [seeds]

One client, the same b samples in every round, one full-batch step of SGD between rounds. An oracle
knows dL/dZ of every round, and so which rows are zero for a sample. The sample is determined if these
rows have rank b - 1 above the noise: their (b-1)-th singular value is at least ten times that of as
many rows of noise. Everything is computed in float64; the noise of an entry is put in as a number.
Rows that are there already are not measured again; the table is drawn from all of them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spear import data, theory
from spear.federated import fedsgd, mlp, output_gradient

MOST = 40  # rounds
CLEAR = 10.0  # times the noise: the direction is known to a tenth
FIRST_SEED = 10  # theory's two measured constants come from seeds 0 and 1

Row = dict[str, Any]
SHARES = {"all": 1.0, "most": 0.9}  # of the samples, for each column of a row


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    data: str
    b: int
    lr: float
    noise: float = theory.ROUNDING
    m: int = 50
    depth: int = 3


NOISY = [(lr, noise) for lr in (0.1, 0.01) for noise in (1e-5, 1e-4)]
SETTINGS = [
    *(
        Setting(name, b, lr, noise)
        for name in ("cifar10", "mnist")
        for b in (25, 50, 100, 150, 200)
        for lr, noise in (*((lr, theory.ROUNDING) for lr in (0.1, 0.01, 0.003, 0.001)), *NOISY)
    ),
    *(Setting("cifar10", b, lr, m=100) for b in (50, 100, 200, 300) for lr in (0.1, 0.001)),
    *(Setting("cifar10", b, lr, depth=6) for b in (50, 100, 150) for lr in (0.1, 0.01)),
]


@dataclass(frozen=True)
class Rounds:
    """What a client's rounds were made of."""

    D: Tensor  # (MOST, m, b), dL/dZ
    X: Tensor  # (b, n)
    movement: float  # how far preactivations go in a round, of their size, over the first ten


def train(setting: Setting, seed: int) -> Rounds:
    """The rounds of one client on real images."""
    loaded = getattr(data, setting.data)(Path(os.environ["SPEAR_DATA"]))
    order = torch.randperm(len(loaded), generator=torch.Generator().manual_seed(seed))
    x, y = loaded.batch(order[: setting.b].tolist())
    model = mlp(x.shape[1], 10, width=setting.m, depth=setting.depth, seed=seed).double()
    x = x.double()
    D, Z = [], []
    for _ in range(MOST):
        Z.append(model[0](x).detach().flatten())
        D.append(output_gradient(model, x, y, layer="0"))  # (m, b)
        update = fedsgd(model, x, y)
        with torch.no_grad():
            for key, weights in model.named_parameters():
                weights.sub_(setting.lr * update[key])
    alike = float(torch.nn.functional.cosine_similarity(Z[0], Z[9], dim=0))
    return Rounds(torch.stack(D), x, math.tan(math.acos(alike)) / 9)


def enough_zeros(rounds: Rounds, R: int) -> bool:
    """Has every sample b - 1 rows in which it is off and others are not?"""
    D = rounds.D[:R].flatten(0, 1)
    return int((D[(D != 0).any(1)] == 0).sum(0).min()) >= D.shape[1] - 1


def determined(rounds: Rounds, R: int, noise: float, spared: int = 0) -> bool:
    """Are all samples but `spared` determined by their zeros at this noise?"""
    D = rounds.D[:R].flatten(0, 1)
    D = D[(D != 0).any(1)]  # (rows, b)
    rows, b = D.shape
    gradient = D @ torch.linalg.qr(rounds.X.T, mode="r").R.T  # dL/dW in b coordinates
    sigma = noise * float(gradient.norm()) / math.sqrt(rows * rounds.X.shape[1])
    for i in (D == 0).sum(0).argsort().tolist():  # the one with the fewest zeros first
        off = gradient[D[:, i] == 0]
        loudest = sigma * (math.sqrt(len(off)) + math.sqrt(b))
        if len(off) < b - 1 or float(torch.linalg.svdvals(off)[b - 2]) < CLEAR * loudest:
            spared -= 1
        if spared < 0:
            return False
    return True


def smallest(enough: Callable[[int], bool], first: int = 1) -> int | None:
    """The smallest number of rounds, from `first` on, that is enough; None beyond `MOST`."""
    low, high, step = first - 1, first, 1
    while not enough(high):
        if high == MOST:
            return None
        low, high, step = high, min(MOST, high + step), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def measure(rounds: Rounds, setting: Setting, seed: int) -> Row:
    """One row: after how many rounds the zeros of all samples are enough in number and in rank."""
    by_number = smallest(lambda R: enough_zeros(rounds, R))
    by_rank = by_number and smallest(lambda R: determined(rounds, R, setting.noise), by_number)
    most = smallest(lambda R: determined(rounds, R, setting.noise, setting.b // 10))
    never_on = {R: float((rounds.D[:R] == 0).all(0).double().mean()) for R in (2, 5, 10, 20, 40)}
    return {
        **asdict(setting),
        "seed": seed,
        "movement": rounds.movement,
        "by_number": by_number,
        "all": by_rank,
        "most": most,
        "never_on": {R: round(share, 3) for R, share in never_on.items()},
    }


def table(rows: list[Row], column: str) -> str:
    """The smallest numbers of rounds, one a seed, and behind the slash that of the theory."""
    kinds = sorted({_kind(row) for row in rows})
    heads = [f"lr {-lr:g}" + f", noise {n:g}" * (n != theory.ROUNDING) for n, lr in kinds]
    lines = [f"| data | m | layers | b | {' | '.join(heads)} |", "|---" * (4 + len(heads)) + "|"]
    for (depth, m, name, b), group in groupby(sorted(rows, key=_place), key=_place):
        cells = dict.fromkeys(kinds, "")
        for kind, same in groupby(sorted(group, key=_kind), key=_kind):
            seeds = list(same)
            numbers = [*(row[column] for row in seeds), foreseen(seeds, column)]
            *measured, told = (str(n) if n and n <= MOST else f"> {MOST}" for n in numbers)
            cells[kind] = f"{', '.join(measured)} / {told}"
        lines.append(f"| {name} | {m} | {depth} | {b} | {' | '.join(cells.values())} |")
    return "\n".join(lines)


def _place(row: Row) -> tuple[int, int, str, int]:
    return row["depth"], row["m"], row["data"], row["b"]


def _kind(row: Row) -> tuple[float, float]:
    return row["noise"], -row["lr"]


def foreseen(seeds: list[Row], column: str) -> int | None:
    """The rounds that the theory says for what was measured with some seeds."""
    return theory.rounds_needed(
        seeds[0]["b"],
        seeds[0]["m"],
        movement=statistics.median(row["movement"] for row in seeds),
        noise=seeds[0]["noise"],
        share=SHARES[column],
    )


def main() -> None:
    torch.set_num_threads(1)
    path, seeds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(*(row[name] for name in asdict(SETTINGS[0])), row["seed"]) for row in rows}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        rounds: dict[Setting, Rounds] = {}  # the last one trained
        for setting in SETTINGS:
            if (*asdict(setting).values(), seed) in done:
                continue
            trained = replace(setting, noise=0.0)
            if trained not in rounds:
                rounds = {trained: train(setting, seed)}
            rows.append(measure(rounds[trained], setting, seed))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(f"all samples\n\n{table(rows, 'all')}\n\nnine in ten\n\n{table(rows, 'most')}")


if __name__ == "__main__":
    main()
