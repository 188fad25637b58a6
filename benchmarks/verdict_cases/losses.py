"""Losses that people train with, told or not: none of them is a reason to refuse what is right."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

from verdict_cases.base import Case, Client, Loss, cross_entropy, generator, party
from verdict_cases.weights import twin

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
