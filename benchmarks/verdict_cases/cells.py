"""Samples in one cell of the ReLUs: with one output, or two classes, they leave one trace."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

from verdict_cases.base import (
    Case,
    Client,
    Loss,
    cross_entropy,
    drawn,
    generator,
    normal,
    party,
)

BINARY = ("bce", "bce", "two classes", "mse")


def binary(one: Client, kind: str, rng: Random) -> tuple[Loss, Tensor]:
    """A loss for one output or two classes, and its targets."""
    if kind == "two classes":
        return cross_entropy, one.y
    if kind == "bce":
        return nn.BCEWithLogitsLoss(), one.y[:, None].to(one.x)
    if rng.random() < 0.5:  # regression
        return nn.MSELoss(), normal(rng, len(one.x), 1).to(one.x)
    return nn.MSELoss(), one.y[:, None].to(one.x)


def told(rng: Random, loss: Loss) -> Loss | None:
    """Losses other than cross-entropy are told, mostly."""
    return loss if rng.random() < 0.75 else None


def moved(one: Client, x: Tensor) -> Client:
    """The client with other inputs, whose range is their own."""
    span = float(x.max() - x.min())
    return replace(one, x=x, span=span, pixels=lambda t: t.double())


def one_cell(rng: Random) -> Case:
    loss_kind = rng.choice(BINARY)
    kind = rng.choice(["adult raw", "adult raw", "300", "a column of 1e6", "0.6 x", "plain"])
    source = {"adult raw": "adult raw", "plain": None, "0.6 x": None}.get(kind, "gauss")
    one = party(
        rng,
        outputs=2 if loss_kind == "two classes" else 1,
        source=source,
        b=rng.choice([2, 3, 4, 8]),
        width=rng.choice([30, 60, 120, 200]),
        biases="zero" if kind == "0.6 x" else None,
    )
    if kind == "300":
        one = moved(one, one.x + rng.choice([30, 300, 3000]))
    elif kind == "a column of 1e6":
        x = one.x.clone()
        x[:, rng.randrange(x.shape[1])] *= rng.choice([1e4, 1e6])
        if rng.random() < 0.5:
            x = x.abs()
        one = moved(one, x)
    elif kind == "0.6 x":
        factor = rng.choice([0.6, 0.6, 0.3, 0.9])
        y = one.y if rng.random() < 0.7 else 1 - one.y
        one = one.with_batch(torch.cat([one.x, factor * one.x[:1]]), torch.cat([one.y, y[:1]]))
    loss, targets = binary(one, loss_kind, rng)
    sent = one.sent(loss, targets)
    return one.case(sent, told=told(rng, loss), kind=kind, loss=loss_kind)


def cancellation(rng: Random) -> Case:
    """One output and few neurons: d_i / s_i - d_j / s_j vanishes where both samples are on."""
    loss_kind = rng.choice(BINARY)
    one = party(
        rng,
        outputs=2 if loss_kind == "two classes" else 1,
        b=rng.choice([3, 4, 5, 6, 8, 10]),
        width=rng.choice([24, 32, 40, 60, 80, 120]),
        hidden=rng.choice([1, 1, 1, 2]),
        source=rng.choice(["gauss", "gauss", "cifar10", "mnist", "adult"]),
        biases="default",
    )
    alike = rng.choice([0.0, 0.0, 0.1, 0.3, 0.5])
    if alike:  # samples that share most of their cell with another
        fresh = drawn(one.source, len(one.x), rng)[0].to(one.x)
        more = one.x + alike * (fresh - one.x)
        count = len(more) // 2
        one = one.with_batch(torch.cat([one.x, more[:count]]), torch.cat([one.y, one.y[:count]]))
    loss, targets = binary(one, loss_kind, rng)
    return one.case(one.sent(loss, targets), told=told(rng, loss), loss=loss_kind, alike=alike)


def opposite_labels(rng: Random) -> Case:
    """Two classes, x and c x of opposite labels: the merged sample may be the lightest."""
    one = party(rng, outputs=2, b=rng.choice([1, 2, 4, 6]), hidden=rng.choice([1, 1, 2, 3]))
    count = min(len(one.x), rng.choice([1, 1, 2]))
    factor = rng.choice([0.5, 0.9, 0.97, 0.99, 1.02, 1.3])
    one = one.with_batch(
        torch.cat([one.x, factor * one.x[:count]]), torch.cat([one.y, 1 - one.y[:count]])
    )
    return one.case(one.sent(), factor=factor, pairs=count)


def small_features(rng: Random) -> Case:
    """Features so small that the biases alone decide the cell; ten classes, one or several."""
    one = party(rng, biases="default", source=rng.choice(["gauss", "cifar10", "mnist", "adult"]))
    scale = rng.choice([1e-5, 1e-5, 1e-4, 1e-3, 1e-2])
    one = moved(one, scale * one.x)
    if rng.random() < 0.6:
        one = replace(one, y=torch.full_like(one.y, rng.randrange(10)))
    else:
        one = replace(one, y=torch.randint(10, one.y.shape, generator=generator(rng)))
    return one.case(one.sent(), scale=scale, classes=len(one.y.unique()))
