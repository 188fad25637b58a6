"""The same update inverted with 1, 2 and 4 threads: the same verdicts? How far apart are the inputs?

    python benchmarks/repeatability.py --seeds 15      # 8 kinds of updates, 120 of them, 360 inversions

Prints one line a kind: how many updates, how many gave the same bits, the same verdict (outcome, proof,
batch size, labels and certified samples), and the largest distance between two recoveries of an input,
relative to the update's mean input, of samples that were certified and of all others.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "4")  # as many as are asked for below

import torch

import spear
from spear.federated import defences, fedavg, fedsgd, mlp

THREADS = (1, 2, 4)


def drawn(seed: int, b: int, n: int, m: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, generator=generator, dtype=dtype)
    y = torch.randint(10, (b,), generator=generator)
    return mlp(n, 10, width=m, depth=3, seed=seed).to(dtype), x, y


def gradient(seed, b, n, m, *, dtype=torch.float32, defence=None):
    model, x, y = drawn(seed, b, n, m, dtype)
    update = fedsgd(model, x, y)
    return model, spear.observe(model, defence(update) if defence else update)


def weights(seed, b, lr, epochs):
    model, x, y = drawn(seed, b, 80, 120)
    after = fedavg(model, x, y, lr=lr, epochs=epochs)
    return model, spear.observe(model, after=after, lr=lr, epochs=epochs)


def tabular(seed):
    model, x, y = drawn(seed, 8, 40, 120)
    x[:, 10:] = (x[:, 10:] > 1).float()
    return model, spear.observe(model, fedsgd(model, x, y % 2))


def noise(seed):
    generator = torch.Generator().manual_seed(seed)
    return gradient(seed, 6, 80, 150, defence=lambda u: defences.add_noise(u, 1e-4, generator))


KINDS = {
    "fedsgd_small": lambda seed: gradient(seed, 1 + seed % 8, 80, 100),
    "fedsgd_large": lambda seed: gradient(seed, (20, 32, 48, 64)[seed % 4], 300, 400),
    "fedsgd_float64": lambda seed: gradient(seed, 12, 80, 150, dtype=torch.float64),
    "fedavg_one": lambda seed: weights(seed, 8, 0.05, 1),
    "fedavg_five": lambda seed: weights(seed, 6, 0.01, 5),
    "noise": noise,
    "half": lambda seed: gradient(seed, 6, 80, 150, defence=defences.half),
    "tabular": tabular,
}


def verdict(result: spear.Inversion):
    """What is said of the samples, whatever their order."""
    labels = [] if result.labels is None else result.labels.tolist()
    pairs = sorted(zip(labels, result.certified.tolist(), strict=False))
    count = int(result.certified.sum())
    return result.outcome, result.proof, result.batch_size, len(result.inputs), count, pairs


def distances(one: spear.Inversion, other: spear.Inversion) -> tuple[float, float]:
    """The largest distance of an input of a certified sample, and of any other."""
    if not len(one.inputs) or len(one.inputs) != len(other.inputs):
        return 0.0, 0.0
    apart = torch.cdist(one.inputs.double(), other.inputs.double(), p=float("inf")).min(1).values
    apart = apart / one.inputs.double().abs().mean()
    sure = one.certified & ~one.approximate
    largest = [float(apart[chosen].max()) if chosen.any() else 0.0 for chosen in (sure, ~sure)]
    return largest[0], largest[1]


def measure(kind: str, seeds: int) -> None:
    bits = verdicts = 0
    worst = (0.0, 0.0)
    outcomes: dict[str, int] = {}
    for seed in range(seeds):
        model, view = KINDS[kind](seed)
        found = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            found.append(spear.invert(view, model=model, max_seconds=900))
        first = found[0]
        outcomes[first.outcome.name] = outcomes.get(first.outcome.name, 0) + 1
        bits += all(torch.equal(first.inputs, other.inputs) for other in found[1:])
        same = all(verdict(first) == verdict(other) for other in found[1:])
        verdicts += same
        if not same:
            print(f"  {kind} seed {seed}: {[r.reason for r in found]}")
        for other in found[1:]:
            near = distances(first, other)
            worst = (max(worst[0], near[0]), max(worst[1], near[1]))
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    cells = [kind, seeds, told, bits, verdicts, f"{worst[0]:.1e}", f"{worst[1]:.1e}"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=15)
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    given = options.parse_args()
    print(
        "| update | updates | outcomes | same bits | same verdict | certified apart | others apart |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in given.kinds:
        measure(kind, given.seeds)
