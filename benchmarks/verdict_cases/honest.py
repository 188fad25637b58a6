"""Honest updates."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import nn

import spear
from verdict_cases.base import Case, backward, client, generator, small


def exact(rng: Random) -> Case:
    one = client(rng)
    reduction = rng.choice(["mean", "mean", "sum"])
    loss = nn.CrossEntropyLoss(reduction=reduction)
    return one.case(one.sent(loss), told=loss, reduction=reduction)


def trained_network(rng: Random) -> Case:
    one = client(
        rng,
        b=rng.choice([4, 8, 12, 16]),
        width=rng.choice([120, 200]),
        depth=rng.choice([2, 4]),
        source=rng.choice(["cifar10", "mnist"]),
        steps=rng.choice([50, 200, 1000]),
    )
    return one.case(one.sent())


def deeper_layer(rng: Random) -> Case:
    """An inner layer: its inputs are activations, and they are the truth."""
    one = small(rng, depth=6)
    index = rng.choice([2, 4, 6])
    sent = backward(one.model, one.x, one.y, layer=str(index))
    view = spear.observe(one.model, sent.update, layer=str(index))
    with torch.no_grad():
        inputs = one.model[:index](one.x)
    span = float(inputs.max() - inputs.min())
    settings = {**one.settings, "layer": index}
    return Case(view, one.model, inputs, settings, span=span, columns=sent.columns)


def one_class(rng: Random) -> Case:
    one = client(rng, b=rng.choice([4, 8, 12]))
    same = torch.full_like(one.y, rng.randrange(10))
    one = replace(one, y=same)
    return one.case(one.sent())


def other_losses(rng: Random) -> Case:
    """Losses that are told: squared error, label smoothing, class weights."""
    one = small(rng)
    kind = rng.choice(["mse", "smoothed", "weighted"])
    if kind == "mse":
        targets = torch.randn(len(one.x), 10, generator=generator(rng)).to(one.x)
        return one.case(one.sent(nn.MSELoss(), targets), told=nn.MSELoss(), loss=kind)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    if kind == "weighted":
        loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10).to(one.x), reduction="sum")
    return one.case(one.sent(loss), told=loss, loss=kind)
