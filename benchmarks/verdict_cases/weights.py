"""Samples that do not weigh alike, twins among them, and biases that learn at another rate."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

from verdict_cases.base import (
    Case,
    Client,
    Loss,
    Sent,
    backward,
    cross_entropy,
    generator,
    normal,
    overall,
    party,
    rounded,
    summed,
)


def bias_rate(rng: Random) -> Case:
    """All bias gradients times a factor: without biases any scale of the inputs explains that."""
    kind = rng.choice(["ten classes", "ten classes", "one output", "mse"])
    one = party(
        rng,
        outputs=1 if kind == "one output" else 10,
        biases=rng.choice(["zero", "zero", "default"]),
        width=rng.choice([40, 80, 120, 200]),
        b=rng.choice([1, 2, 3, 4, 6]),
    )
    factor = rng.choice([2.0, 1.1, 1.002, 0.5, 0.998])
    loss: Loss = cross_entropy
    targets = one.y
    if kind == "one output":
        loss, targets = nn.BCEWithLogitsLoss(), one.y[:, None].to(one.x)
    elif kind == "mse":
        loss, targets = nn.MSELoss(), normal(rng, len(one.x), 10).to(one.x)
    sent = one.sent(loss, targets)
    biases = {name: t * factor for name, t in sent.update.items() if name.endswith("bias")}
    sent = Sent({**sent.update, **biases}, sent.columns * factor)
    case = one.case(sent, told=loss, factor=factor, loss=kind)
    return replace(case, seen=one.x / factor)


def twin(one: Client, rng: Random) -> tuple[Client, str]:
    """The client with a near-duplicate of its first sample: darker, or with noise."""
    share = 10 ** rng.uniform(-3, -1)
    x = one.x[:1]
    if rng.random() < 0.6:
        other, words = (1 - share) * x, f"darker by {share:.1%}"
    else:
        noise = torch.randn(x.shape, generator=generator(rng)).to(x)
        other, words = x + share * x.std() * noise, f"noise of {share:.1%}"
    y = one.y[:1] if rng.random() < 0.8 else (one.y[:1] + 1) % one.settings["outputs"]
    return one.with_batch(torch.cat([one.x, other]), torch.cat([one.y, y])), words


def uneven(rng: Random) -> Case:
    """Class weights, sample weights or clipping, with a near-duplicate and without."""
    one = party(rng, outputs=rng.choice([10, 10, 10, 3]), b=rng.choice([2, 3, 4, 6, 8]))
    words = ""
    if rng.random() < 0.7:
        one, words = twin(one, rng)
    kind = rng.choice(["class weights told", "class weights", "sample weights", "clipping"])
    more = {"kind": kind, "twin": words}
    if kind.startswith("class"):
        weights = torch.rand(one.settings["outputs"], generator=generator(rng)).to(one.x) * 3 + 0.2
        loss = nn.CrossEntropyLoss(weight=weights, reduction=rng.choice(["mean", "mean", "sum"]))
        return one.case(one.sent(loss), told=loss if kind.endswith("told") else None, **more)
    if kind == "sample weights":
        weights = torch.rand(len(one.x), generator=generator(rng)).to(one.x) + 0.2

        def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
            return (weights * cross_entropy(outputs, targets, reduction="none")).mean()

        return one.case(one.sent(weighted), **more)
    return one.case(clipped_sum(one, rng), **more)


def clipped_sum(one: Client, rng: Random) -> Sent:
    """Per-sample gradients, clipped by their norm over all parameters, as Opacus sums them."""
    parts = [backward(one.model, one.x[i : i + 1], one.y[i : i + 1]) for i in range(len(one.x))]
    norms = sorted(overall(part) for part in parts)
    limit = rng.choice([norms[len(norms) // 2], norms[0] * 0.5, norms[-1] * 0.9])
    scale = rng.choice([1.0, 1 / len(parts)])
    return summed(part.times(scale * min(1.0, limit / overall(part))) for part in parts)


def pairs(rng: Random) -> Case:
    """Near-duplicates of one sample, some or all: under a squared error nothing tells, but rank."""
    kind = rng.choice(["mse", "mse", "mse one output", "cross-entropy", "bce"])
    one = party(
        rng,
        outputs=1 if kind in ("mse one output", "bce") else 10,
        b=rng.choice([1, 2, 3, 5]),
        source=rng.choice(["cifar10", "mnist", "cifar10 raw", "gauss", "adult"]),
        biases="default",
    )
    apart = rng.uniform(0.002, 0.03)
    count = rng.choice([1, len(one.x), len(one.x)])
    if rng.random() < 0.5:
        other = (1 - apart) * one.x[:count]
    else:
        noise = torch.randn(one.x[:count].shape, generator=generator(rng)).to(one.x)
        other = one.x[:count] + apart * one.span * noise
    one = one.with_batch(torch.cat([one.x, other]), torch.cat([one.y, one.y[:count]]))
    more = {"loss": kind, "apart": rounded(apart), "pairs": count}
    if kind == "cross-entropy":
        return one.case(one.sent(), **more)
    loss: Loss = nn.BCEWithLogitsLoss() if kind == "bce" else nn.MSELoss()
    if kind == "bce":
        targets = one.y[:, None].to(one.x)
    elif rng.random() < 0.5:
        shape = (len(one.x) - count, one.settings["outputs"])
        targets = normal(rng, *shape).to(one.x)
        targets = torch.cat([targets, targets[:count]])
    else:
        classes = max(2, one.settings["outputs"])
        targets = torch.nn.functional.one_hot(one.y, classes).to(one.x)
        targets = targets[:, : one.settings["outputs"]]
    return one.case(one.sent(loss, targets), told=loss, **more)
