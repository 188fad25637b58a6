"""Losses that people train with, told or not, and samples that do not weigh alike."""

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

# Losses that people train with, told or not: none of them is a reason to refuse what is right.

functional = nn.functional


def soft_targets(rng: Random) -> Case:
    kind = rng.choice(["smoothing", "multi-label", "distillation", "mixup", "cutmix"])
    one = party(rng, biases=rng.choice(["default", "default", "default", "zero"]))
    g = generator(rng)
    loss: Loss = cross_entropy
    targets = one.y
    if kind == "smoothing":
        loss = nn.CrossEntropyLoss(label_smoothing=rng.choice([0.05, 0.1, 0.3]))
    elif kind == "multi-label":
        loss = nn.BCEWithLogitsLoss()
        targets = (torch.rand(len(one.x), 10, generator=g) < 0.3).to(one.x)
    elif kind == "distillation":
        temperature = rng.choice([1.0, 2.0, 4.0])
        teacher = 3 * torch.randn(len(one.x), 10, generator=g)
        targets = (teacher / temperature).softmax(1).to(one.x)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return temperature**2 * cross_entropy(outputs / temperature, targets)
    else:
        one, targets = mixed(one, kind, rng)
    tell = rng.random() < 0.5
    return one.case(one.sent(loss, targets), told=loss if tell else None, kind=kind, tell=tell)


def mixed(one: Client, kind: str, rng: Random) -> tuple[Client, Tensor]:
    """Each sample with a part of the next one in the batch, and its label likewise."""
    share = rng.uniform(0.1, 0.9)
    x, labels = one.x, functional.one_hot(one.y, 10).to(one.x)
    if kind == "mixup":
        x = share * x + (1 - share) * x.roll(1, 0)
    else:  # a stretch of the row, as a patch is of an image
        cut = int((1 - share) * x.shape[1])
        start = rng.randrange(x.shape[1] - cut + 1)
        x = x.clone()
        x[:, start : start + cut] = one.x.roll(1, 0)[:, start : start + cut]
        share = 1 - cut / x.shape[1]
    return one.with_batch(x, one.y), share * labels + (1 - share) * labels.roll(1, 0)


def penalties(rng: Random) -> Case:
    """L1 or L2 in the loss: over all parameters, or over weights."""
    one = party(rng, biases=rng.choice(["default", "default", "zero"]))
    kind, over = rng.choice(["l1", "l2"]), rng.choice(["all", "weights"])
    strength = 10 ** rng.uniform(-5, -2)
    chosen = [p for p in one.model.parameters() if over == "all" or p.ndim > 1]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes = (p.abs().sum() if kind == "l1" else p.square().sum() for p in chosen)
        return cross_entropy(outputs, targets) + strength * sum(sizes)

    tell = rng.random() < 0.5
    more = {"kind": kind, "over": over, "strength": float(f"{strength:.0e}"), "tell": tell}
    case = one.case(one.sent(loss), told=loss if tell else None, **more)
    return replace(case, noise_label="penalties")


def class_weights(rng: Random) -> Case:
    """Class weights, told: no reason to refuse."""
    one = party(rng, biases=rng.choice(["default", "default", "zero"]))
    weights = torch.rand(10, generator=generator(rng)).to(one.x) * 3 + 0.2
    loss = nn.CrossEntropyLoss(weight=weights, reduction=rng.choice(["mean", "mean", "sum"]))
    return one.case(one.sent(loss), told=loss)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    surprise = cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-surprise)) ** 2 * surprise).mean()


def odd_losses(rng: Random) -> Case:
    kind = rng.choice(["focal", "pos_weight", "hinge", "huber", "kl", "entropy bonus"])
    one = party(rng)
    if rng.random() < 0.3:
        one, _ = twin(one, rng)
    loss: Loss = focal
    targets = one.y
    if kind == "pos_weight":
        loss = nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.5, 5, 10).to(one.x))
        targets = (torch.rand(len(one.x), 10, generator=generator(rng)) < 0.3).to(one.x)
    elif kind == "hinge":
        loss = nn.MultiMarginLoss()
    elif kind == "huber":
        loss, targets = nn.SmoothL1Loss(), 2 * functional.one_hot(one.y, 10).to(one.x)
    elif kind == "kl":
        targets = torch.rand(len(one.x), 10, generator=generator(rng)).softmax(1).to(one.x)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")
    elif kind == "entropy bonus":

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            p = outputs.softmax(1)
            bonus = (p * p.clamp_min(1e-9).log()).sum(1).mean()
            return cross_entropy(outputs, targets) + 0.1 * bonus

    tell = rng.random() < 0.5
    return one.case(one.sent(loss, targets), told=loss if tell else None, kind=kind, tell=tell)


# Samples that do not weigh alike, twins among them, and biases that learn at another rate.


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
