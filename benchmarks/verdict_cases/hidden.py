"""Batches that hide something."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from verdict_cases.base import Case, client, cross_entropy, generator, rounded, small


def near_duplicates(rng: Random) -> Case:
    one = small(rng, b=rng.choice([3, 5, 8]))
    how = rng.choice(["noise", "brightness", "shift", "same"])
    epsilon = 0.0 if how == "same" else 10 ** rng.uniform(-5, -0.5)
    count = rng.choice([1, 1, 2, len(one.x) - 1, len(one.x)])
    x, g = one.x[:count], generator(rng)
    if how == "noise":
        twin = x + epsilon * torch.randn(x.shape, generator=g, dtype=x.dtype)
    elif how == "brightness":
        twin = x * (1 + epsilon)
    else:
        twin = (1 - epsilon) * x + epsilon * x.roll(1, 1)
    same_label = rng.random() < 0.8
    y = one.y[:count] if same_label else (one.y[:count] + 1) % 10
    both = one.with_batch(torch.cat([one.x, twin]), torch.cat([one.y, y]))
    told = {
        "how": how,
        "epsilon": rounded(epsilon),
        "pairs": count,
        "same_label": same_label,
    }
    return both.case(both.sent(), **told)


def large_batch(rng: Random) -> Case:
    """b >= m, or nearly: the layer is too narrow."""
    width = rng.choice([10, 16, 24, 40])
    b = rng.choice([width - 1, width, width + 1, 2 * width, 4 * width])
    one = client(rng, b=b, width=width)
    return one.case(one.sent())


def vanishing(rng: Random) -> Case:
    """Samples whose gradient (nearly) vanishes: the network is sure of them."""
    one = small(rng, b=rng.choice([4, 8]), source="cifar10", steps=1000, depth=2)
    weight = 10 ** rng.uniform(-9, -1)
    weights = torch.ones(len(one.x)).to(one.x)
    weights[: rng.choice([1, 2])] = weight

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (weights * cross_entropy(outputs, targets, reduction="none")).mean()

    return one.case(one.sent(loss), weight=rounded(weight))
