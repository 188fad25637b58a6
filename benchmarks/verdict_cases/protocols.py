"""How the update came about: local training, aggregation, precision, weights that are stale."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import spear
from spear.federated import fedavg
from verdict_cases.base import (
    Case,
    Client,
    Update,
    backward,
    cross_entropy,
    excess,
    generator,
    names_of,
    overall,
    party,
    rounded,
    summed,
)


def returned(one: Client, after: Update, told: dict[str, Any], **more: Any) -> Case:
    """The case of weights that a client sends back."""
    case = one.case(one.sent(), **more)
    view = spear.observe(one.model, after=after, **told)
    return replace(case, view=view)


def wrong_rate(rng: Random) -> Case:
    """Several epochs, and a learning rate told that is slightly another; or the right one."""
    one = party(rng, dtype=torch.float32)
    lr, epochs = rng.choice([0.1, 0.03, 0.01]), rng.choice([2, 3, 5, 10])
    momentum = rng.choice([0.0, 0.0, 0.9])
    lie = rng.choice([1.0, 1.001, 1.003, 1.01, 1.03, 1.1, 0.99])
    options = {"lr": lr, "epochs": epochs, "momentum": momentum}
    after = fedavg(one.model, one.x, one.y, **options)
    case = returned(one, after, {**options, "lr": lr * lie}, **options, lie=lie)
    return case if lie == 1 else replace(case, noise_label="FedAvg, told wrongly")


def autocast(rng: Random) -> Case:
    """A client in torch.autocast: sums in float32 of products in bfloat16."""
    one = party(rng, dtype=torch.float32, b=rng.choice([1, 2, 3, 4, 6]))
    clean = one.gradients()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.float(), targets)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sent = one.sent(loss)
    weight, _ = names_of(one.model)
    noise = excess(sent.update[weight], clean[weight])
    columns = sent.columns.float()
    case = one.case(replace(sent, columns=columns))
    return replace(case, noise=noise, noise_label="autocast bfloat16")


def aggregates(rng: Random) -> Case:
    """Micro-batches accumulated, clients averaged, or the whole times a factor."""
    kind = rng.choice(["micro-batches", "weighted", "unweighted", "factor", "factor"])
    one = party(rng, b=rng.choice([3, 5, 6, 8, 10]))
    if kind == "factor":
        factor = rng.choice([0.5, 3.7, 1e-3, 1 / 3, 1000.0, -1.0])
        return one.case(one.sent().times(factor), kind=kind, factor=rounded(factor))
    b = len(one.x)
    cut = rng.randrange(1, b)
    ends = [0, cut, b]
    if kind == "micro-batches":
        size = rng.choice([2, 3, 4])
        ends = [*range(0, b, size), b]
    pieces = list(itertools.pairwise(ends))
    parts = [backward(one.model, one.x[i:j], one.y[i:j]) for i, j in pieces]
    shares = [1 / len(parts)] * len(parts)
    if kind == "weighted":
        shares = [(j - i) / b for i, j in pieces]
    total = summed(part.times(share) for part, share in zip(parts, shares, strict=True))
    return one.case(total, kind=kind, sizes=[j - i for i, j in pieces])


def stale(rng: Random) -> Case:
    """The client's weights are not quite those that the server believes."""
    one = party(rng)
    change = 10 ** rng.uniform(-6, -2)
    client_model = copy.deepcopy(one.model)
    g = generator(rng)
    with torch.no_grad():
        for p in client_model.parameters():
            step = torch.randn(p.shape, generator=g).to(p)
            p.add_(change * (p.abs().mean() + 1e-12) * step)
    case = one.case(backward(client_model, one.x, one.y), change=rounded(change))
    return replace(case, noise_label="other weights")


def odd_optimisers(rng: Random) -> Case:
    """One step, or the gradient, after what optimisers and servers do, told or not."""
    kind = rng.choice(
        ["global clip", "weight decay", "momentum", "adam", "server rate", "two steps", "proximal"]
    )
    one = party(rng, dtype=torch.float32)
    if kind == "global clip":
        sent = one.sent()
        limit = overall(sent) * rng.choice([0.1, 0.7])
        return one.case(sent.times(limit / overall(sent)), kind=kind)
    lr = rng.choice([0.1, 0.01])
    local = copy.deepcopy(one.model)
    told: dict[str, Any] = {"lr": lr, "epochs": 1}
    if kind == "adam":
        optimiser: Any = torch.optim.Adam(local.parameters(), lr=lr)
    elif kind == "weight decay":
        optimiser = torch.optim.SGD(local.parameters(), lr=lr, weight_decay=0.01)
    elif kind == "momentum":
        optimiser = torch.optim.SGD(local.parameters(), lr=lr, momentum=0.9)
    else:
        optimiser = torch.optim.SGD(local.parameters(), lr=lr)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        cross_entropy(local(x), y).backward()
        optimiser.step()

    if kind == "momentum":  # carried over from a round before: the buffer holds other data
        other = one.x.roll(1, 1) * 0.5
        step(other, one.y)
        local.load_state_dict(one.model.state_dict())
    step(one.x, one.y)
    if kind == "two steps":
        step(one.x, one.y)
    if kind == "proximal":
        optimiser.zero_grad()
        pull = sum(
            (p - q.detach()).square().sum()
            for p, q in zip(local.parameters(), one.model.parameters(), strict=True)
        )
        (cross_entropy(local(one.x), one.y) + 0.5 * pull).backward()
        optimiser.step()
        told["epochs"] = 2
    after = {name: t.detach().clone() for name, t in local.state_dict().items()}
    if kind == "server rate":
        before = one.model.state_dict()
        after = {name: before[name] + 0.5 * (t - before[name]) for name, t in after.items()}
    case = returned(one, after, told, kind=kind, lr=lr)
    case = replace(case, noise_label="FedAvg, told wrongly")
    if kind == "momentum":  # the other round's samples are in it, too
        rest = 0.9 * backward(one.model, other, one.y).columns
        both = {"truth": torch.cat([one.x, other]), "columns": torch.cat([case.columns, rest])}
        case = replace(case, **both)
    return case


def mixed_precisions(rng: Random) -> Case:
    """Some tensors of the update in float16 or bfloat16, the others in float32."""
    one = party(rng, dtype=torch.float32, b=rng.choice([2, 3, 4, 6]))
    sent = one.sent()
    weight, bias = names_of(one.model)
    kind = rng.choice(["weight", "weights", "all but the layer", "biases"])
    dtype = rng.choice([torch.float16, torch.float16, torch.bfloat16])
    chosen = {
        "weight": [weight],
        "weights": [name for name in sent.update if name.endswith("weight")],
        "all but the layer": [name for name in sent.update if name not in (weight, bias)],
        "biases": [name for name in sent.update if name.endswith("bias")],
    }[kind]
    update = {name: t.to(dtype) if name in chosen else t for name, t in sent.update.items()}
    noise = excess(update[weight].float(), sent.update[weight])
    label = f"{kind} {str(dtype)[6:]}"
    case = one.case(replace(sent, update=update), kind=kind, precision=str(dtype)[6:])
    return replace(case, noise=noise, noise_label=label)
