"""Rows and columns of the layer, and of the batch: masked, frozen, tied, zero, dependent."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from verdict_cases.base import Case, Sent, first_linear, generator, names_of, party, rounded


def masks(rng: Random) -> Case:
    """A mask over input columns (features that are not sent) or rows (neurons that are not)."""
    one = party(rng)
    weight, bias = names_of(one.model)
    kind = rng.choice(["columns", "columns", "rows", "rows of the weight"])
    share = rng.choice([0.01, 0.05, 0.2, 0.5])
    sent = one.sent()
    m, n = sent.update[weight].shape
    size = n if kind == "columns" else m
    keep = (torch.rand(size, generator=generator(rng)) >= share).to(one.x)
    more = {"kind": kind, "share": share}
    if kind == "columns":
        case = one.case(sent.changed({weight: sent.update[weight] * keep}), **more)
        return replace(case, seen=one.x * keep)
    changed = {weight: sent.update[weight] * keep[:, None]}
    if kind == "rows":
        changed[bias] = sent.update[bias] * keep
    return one.case(Sent({**sent.update, **changed}, sent.columns * keep), **more)


def dependent(rng: Random) -> Case:
    """One row of zeros, a sum of others, a multiple, a copy of another label: in the batch."""
    kind = rng.choice(["zeros", "sum", "mean", "multiple", "copy", "constant", "blends"])
    if kind == "blends":
        return blends(rng)
    one = party(rng, b=rng.choice([2, 3, 4, 6, 8]))
    x, y = one.x, (one.y[:1] + rng.randrange(1, 10)) % 10
    more: Tensor = {
        "zeros": torch.zeros_like(x[:1]),
        "sum": x[:1] + x[1:2],
        "mean": 0.5 * (x[:1] + x[1:2]),
        "multiple": rng.choice([0.5, 2.0]) * x[:1],
        "copy": x[:1],
        "constant": torch.full_like(x[:1], float(x.mean())),
    }[kind]
    if rng.random() < 0.3 and kind != "copy":
        y = one.y[:1]
    one = one.with_batch(torch.cat([x, more]), torch.cat([one.y, y]))
    return one.case(one.sent(), kind=kind)


def blends(rng: Random) -> Case:
    """Half as many more, each a blend of two of the batch: they add nothing to the rank."""
    one = party(rng, b=rng.choice([3, 4, 6, 8]), outputs=rng.choice([2, 2, 10]), hidden=1)
    alike, count = rng.choice([0.1, 0.3, 0.5]), len(one.x) // 2
    more = (one.x + alike * (one.x.roll(1, 0) - one.x))[:count]
    one = one.with_batch(torch.cat([one.x, more]), torch.cat([one.y, one.y[:count]]))
    return one.case(one.sent(), kind="blends", alike=alike)


def broken_rows(rng: Random) -> Case:
    """Neurons that are frozen, masked, tied, dead, or send little."""
    kind = rng.choice(
        ["frozen", "tied", "tied", "dead", "always on", "zero weights", "scaled rows"]
    )
    one = party(rng)
    layer = first_linear(one.model)
    count = rng.choice([1, 2, len(layer.weight) // 10, len(layer.weight) // 3])
    rows = torch.randperm(len(layer.weight), generator=generator(rng))[:count]
    with torch.no_grad():
        if kind == "tied":
            other = rng.randrange(len(layer.weight))
            layer.weight[rows] = layer.weight[other].clone()
            layer.bias[rows] = layer.bias[other].clone()
        elif kind in ("dead", "always on"):
            layer.bias[rows] = -1e3 if kind == "dead" else 1e3
        elif kind == "zero weights":
            layer.weight[rows] = 0.0
    sent = one.sent()
    weight, bias = names_of(one.model)
    if kind in ("frozen", "scaled rows"):
        factors = torch.ones(len(layer.weight)).to(one.x)
        factors[rows] = 0.0 if kind == "frozen" else 1e-3
        changed = {
            weight: sent.update[weight] * factors[:, None],
            bias: sent.update[bias] * factors,
        }
        sent = Sent({**sent.update, **changed}, sent.columns * factors)
    return one.case(sent, kind=kind, rows=count)


def as_many_as_inputs(rng: Random) -> Case:
    """As many samples as inputs, or nearly: the inputs span everything."""
    source = rng.choice(["adult numbers", "gauss8", "gauss12", "gauss14"])
    n = 14 if source == "adult numbers" else int(source.removeprefix("gauss"))
    b = max(1, n + rng.choice([-6, -2, -1, 0, 0, 0]))
    one = party(
        rng, source=source, b=b, width=rng.choice([60, 120, 200]), hidden=rng.choice([1, 2])
    )
    if source == "adult numbers":
        scale = one.x.abs().amax(0).clamp_min(1)
        x = one.x / scale
        one = replace(one, x=x, span=float(x.max() - x.min()))
    return one.case(one.sent(), n=n, span=rounded(one.span))
