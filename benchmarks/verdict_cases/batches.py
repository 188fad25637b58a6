"""What is in the batch: ordinary samples, twins, vanishing ones, several in one cell of the ReLUs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

import spear
from verdict_cases.base import (
    Case,
    Client,
    Loss,
    backward,
    client,
    cross_entropy,
    drawn,
    generator,
    normal,
    party,
    rounded,
    small,
)

# Honest updates.


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


# Batches that hide something.


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
    told = {"how": how, "epsilon": rounded(epsilon), "pairs": count, "same_label": same_label}
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


# Samples in one cell of the ReLUs: with one output, or two classes, they leave one trace.

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
