"""Several rounds through layers narrower than the batch: how many batches come back exactly.

    SPEAR_DATA=... OMP_NUM_THREADS=1 python benchmarks/rounds.py ROWS.jsonl [--only NAME] [--seeds 5]
    python benchmarks/rounds.py ROWS.jsonl --draw

One client, or several of whom the server sees the mean, sends FedSGD updates of the same data round
after round; the model moves by them. Real images, a fresh draw and a fresh model for every seed. A
batch is exact if the outcome is EXACT and every sample is right to 60 dB; what is called EXACT or
certified and is not, is counted apart. Rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.factors import Factors, factorise
from spear.federated import mlp, output_gradient, play_rounds
from spear.metrics import EXACT_DB, assign
from spear.search.kernels import scale, smallest_singular
from spear.update import Protocol

Row = dict[str, Any]
MAX_SECONDS = 900.0


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    name: str
    b: int
    m: int
    rounds: int
    lr: float = 0.1
    data: str = "cifar10"
    depth: int = 3
    clients: int = 1  # each with b / clients of the samples, seen as their mean
    sigma: float = 0.0  # of noise in every entry of an update
    raw: bool = False  # pixels in [0, 1]
    seeds: int = 10
    oracle: bool = False


SETTINGS = [
    Setting("40 of 100, 2 rounds", 40, 100, 2, seeds=30),
    Setting("100 of 100, 10 rounds", 100, 100, 10, seeds=20),
    Setting("100 of 100, 10 rounds, lr 0.001", 100, 100, 10, lr=0.001, seeds=20, oracle=True),
    Setting("200 of 100, 20 rounds", 200, 100, 20, seeds=6),
    Setting("5 clients of 40, 100, 8 rounds", 200, 100, 8, clients=5, seeds=8),
    Setting("5 clients of 40, 100, 20 rounds", 200, 100, 20, clients=5, seeds=3),
    Setting("200 MNIST of 100, 20 rounds", 200, 100, 20, data="mnist", seeds=4),
    Setting("200 MNIST in [0, 1] of 100, 20 rounds", 200, 100, 20, data="mnist", raw=True, seeds=4),
    Setting("300 of 100, 20 rounds", 300, 100, 20, seeds=4),
    Setting("400 of 100, 30 rounds", 400, 100, 30, seeds=2),
    Setting("20 TinyImageNet, sigma 1e-4", 20, 200, 10, data="tiny_imagenet", sigma=1e-4, seeds=5),
    Setting("60 of 30, 20 rounds", 60, 30, 20),
    Setting("100 of 30, 40 rounds", 100, 30, 40),
    *(Setting(f"200 of 100, {R} rounds", 200, 100, R, seeds=3) for R in (6, 7)),
    *(
        Setting(f"400 MNIST of 200, {R} rounds", 400, 200, R, data="mnist", seeds=1)
        for R in (20, 10, 8, 6)
    ),
]


@dataclass(frozen=True, eq=False)
class Client:
    """Private samples, and the rounds that a server sees of them."""

    setting: Setting
    inputs: Tensor  # (b, n)
    labels: Tensor  # (b,)
    rounds: list[tuple[nn.Module, dict[str, Tensor]]]  # model and update of each

    @staticmethod
    def of(setting: Setting, seed: int) -> Client:
        loaded = getattr(data, setting.data)(Path(os.environ["SPEAR_DATA"]))
        order = torch.randperm(len(loaded), generator=torch.Generator().manual_seed(seed))
        x, y = loaded.batch(order[: setting.b].tolist(), normalise=not setting.raw)
        x, classes = x.flatten(1), 200 if setting.data == "tiny_imagenet" else 10
        model = mlp(x.shape[1], classes, width=setting.m, depth=setting.depth, seed=seed)
        clients = list(zip(x.chunk(setting.clients), y.chunk(setting.clients), strict=True))
        played = play_rounds(
            model,
            [clients] * setting.rounds,
            Protocol(sigma=setting.sigma or None),
            server_lr=setting.lr,
            generator=torch.Generator().manual_seed(seed + 1),
        )
        rounds = [(copy.deepcopy(moved), sent.update) for moved, sent in played]
        return Client(setting, x, y, rounds)

    def views(self) -> Iterator[spear.LayerUpdate]:
        return (spear.observe(model, update) for model, update in self.rounds)

    @property
    def D(self) -> Tensor:
        """True dL/dZ of all rounds (R m, b)."""
        return torch.cat(
            [
                output_gradient(model, self.inputs, self.labels, layer="0")
                for model, _ in self.rounds
            ]
        )

    def psnr(self, found: Tensor) -> Tensor:
        """PSNR (b,) of every sample; minus infinity where nothing was matched to it."""
        score = torch.full((len(self.inputs),), -math.inf, dtype=torch.float64)
        if len(found):
            extent = float(self.inputs.max() - self.inputs.min())
            pairs = assign(found.double(), self.inputs.double())
            off = found[pairs.found].double() - self.inputs[pairs.truth].double()
            error = off.square().mean(1).clamp_min(1e-300)
            score[pairs.truth] = 10 * (extent**2 / error).log10()
        return score


def measure(setting: Setting, seed: int) -> Row:
    """One batch."""
    client = Client.of(setting, seed)
    began = time.monotonic()
    view = spear.combine(client.views())
    combined = time.monotonic() - began
    result = spear.invert(view, max_seconds=MAX_SECONDS)
    seconds = time.monotonic() - began
    psnr = client.psnr(result.inputs)
    sure = client.psnr(result.inputs[result.certified])
    certified = int(result.certified.sum())
    row: Row = {
        **asdict(setting),
        "seed": seed,
        "outcome": result.outcome.name,
        "exact": result.outcome.name == "EXACT" and bool((psnr >= EXACT_DB).all()),
        "wrong_exact": result.outcome.name == "EXACT" and not bool((psnr >= EXACT_DB).all()),
        "certified": certified,
        "wrong_certified": certified - int((sure >= EXACT_DB).sum()),
        "right": int((psnr >= EXACT_DB).sum()),
        "psnr": float(psnr.median()),
        "seconds": round(seconds, 2),
        "combining": round(combined, 2),
        "threads": torch.get_num_threads(),
        "reason": result.reason,
        "stages": {k: round(v, 2) for k, v in result.stats.items()},
    }
    if setting.sigma:
        row["least_squares"] = float(client.psnr(_least_squares(client)).median())
    if setting.oracle:
        row["oracle"] = bool((client.psnr(_oracle(client, view)) >= EXACT_DB).all())
    return row


def _least_squares(client: Client) -> Tensor:
    """The inputs (b, n) that all rounds give if dL/dZ is known."""
    G = torch.cat([update["0.weight"] for _, update in client.rounds]).double()
    solution: Tensor = torch.linalg.lstsq(client.D.double(), G).solution
    return solution


def _oracle(client: Client, view: spear.LayerUpdate) -> Tensor:
    """The inputs (b, n) from the kernels of all true zeros."""
    factors: Factors = factorise(view)
    side, off = factors.outputs, (client.D == 0)[factors.live_rows]
    kernels = [smallest_singular(side.basis[rows])[0] for rows in off.T]
    C = scale(torch.linalg.inv(torch.stack(kernels, 1)), factors.bias_coordinates)
    return factors.reconstruct(C)


def draw(rows: list[Row]) -> str:
    """The table."""
    lines = [
        "| setting | batches | exact | samples right | wrong EXACT | wrong certified | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        own = [row for row in rows if row["name"] == setting.name]
        if not own:
            continue
        seconds = sorted(row["seconds"] for row in own)[len(own) // 2]
        right = sum(row["right"] for row in own) / (setting.b * len(own))
        wrong = sum(row["wrong_exact"] for row in own), sum(row["wrong_certified"] for row in own)
        cells = [
            setting.name,
            str(len(own)),
            str(sum(row["exact"] for row in own)),
            f"{100 * right:.1f} %",
            *map(str, wrong),
            f"{seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1000, help="at most so many a setting")
    parser.add_argument("--from", type=int, default=31_000, dest="first")
    parser.add_argument("--draw", action="store_true")
    told = parser.parse_args()
    text = told.rows.read_text() if told.rows.exists() else ""
    rows: list[Row] = [json.loads(line) for line in text.splitlines()]
    done = {(row["name"], row["seed"]) for row in rows}
    for setting in SETTINGS if not told.draw else ():
        for seed in range(told.first, told.first + min(setting.seeds, told.seeds)):
            if (setting.name, seed) not in done and told.only in setting.name:
                row = measure(setting, seed)
                rows.append(row)
                with told.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(setting.name, seed, row["outcome"], row["right"], row["seconds"], flush=True)
    print(draw(rows))


if __name__ == "__main__":
    main()
