"""Networks, numbers and mixtures that an adversary would try."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

from verdict_cases.base import (
    Case,
    drawn,
    first_linear,
    generator,
    names_of,
    party,
)


class Residual(nn.Module):
    """A block around which its input goes, too."""

    def __init__(self, first: nn.Linear, block: nn.Linear, last: nn.Linear) -> None:
        super().__init__()
        self.first, self.block, self.last = first, block, last

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + torch.relu(self.block(h)))


class Skipping(nn.Module):
    """The data itself goes to the output, beside the hidden layer."""

    def __init__(self, first: nn.Linear, last: nn.Linear, beside: nn.Linear) -> None:
        super().__init__()
        self.first, self.last, self.beside = first, last, beside

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) + self.beside(x)


def architectures(rng: Random) -> Case:
    """What may stand behind the first ReLU."""
    kind = rng.choice(
        ["tanh", "gelu", "sigmoid", "residual", "skip", "batch norm", "layer norm", "dropout"]
    )
    one = party(rng, hidden=1, biases="default")
    n, m = one.x.shape[1], one.settings["m"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 31))
        a, b, c = nn.Linear(n, m), nn.Linear(m, m), nn.Linear(m, 10)
        behind: dict[str, list[nn.Module]] = {
            "tanh": [b, nn.Tanh()],
            "gelu": [b, nn.GELU()],
            "sigmoid": [b, nn.Sigmoid()],
            "batch norm": [nn.BatchNorm1d(m), b, nn.ReLU()],
            "layer norm": [nn.LayerNorm(m), b, nn.ReLU()],
            "dropout": [nn.Dropout(0.3), b, nn.ReLU()],
        }
        model: nn.Module
        if kind == "residual":
            model = Residual(a, b, c)
        elif kind == "skip":
            model = Skipping(a, c, nn.Linear(n, 10))
        else:
            model = nn.Sequential(a, nn.ReLU(), *behind[kind], c)
        model = model.to(one.x.dtype)
        if kind == "batch norm":  # as it is after training, in eval mode
            norm = model[2]
            norm.running_mean.normal_().abs_()
            norm.running_var.uniform_(0.3, 2)
            model.eval()
        one = replace(one, model=model)
        sent = one.sent()  # dropout, if any, in training mode
    if kind == "dropout" and rng.random() < 0.5:
        model.eval()
    return one.case(sent, kind=kind)


def extremes(rng: Random) -> Case:
    """Dead networks, huge outputs, sure ones, inputs of any size."""
    kind = rng.choice(["dead", "huge", "sure", "tiny weights", "large inputs", "small inputs"])
    one = party(rng)
    layer = first_linear(one.model)
    last = [module for module in one.model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        if kind == "dead":  # but for a few neurons
            layer.bias.fill_(-1e3)
            layer.bias[: rng.choice([0, 1, 5, 20])] = 0.1
        elif kind == "huge":
            last.weight.mul_(rng.choice([1e2, 1e4]))
        elif kind == "sure":  # softmax saturates towards the labels of some
            with torch.no_grad():
                right = one.model(one.x).argmax(1)
            last.weight.mul_(rng.choice([10, 30, 100]))
            one = replace(one, y=torch.where(torch.arange(len(one.y)) % 2 == 0, right, one.y))
        elif kind == "tiny weights":
            layer.weight.mul_(1e-4)
    if kind.endswith("inputs"):
        factor = rng.choice([1e2, 1e4, 1e6]) if kind.startswith("large") else 1e-3
        span = factor * float(one.x.max() - one.x.min())
        one = replace(one, x=factor * one.x, span=span, pixels=lambda t: t.double())
    return one.case(one.sent(), kind=kind)


def foreign_rows(rng: Random) -> Case:
    """A few rows, or tensors, of another client's update, or two clients in one."""
    one = party(rng)
    x, y, _, _ = drawn(one.source, len(one.x), rng)
    two = one.with_batch(x.to(one.x), y % 10)
    kind = rng.choice(["row", "rows", "last layer", "faint sum", "column"])
    a, b = one.sent(), two.sent()
    weight, bias = names_of(one.model)
    both = {**one.settings, "kind": kind}
    if kind == "last layer":  # all that the first layer shows is the first client's
        last = list(a.update)[-2:]
        return one.case(a.changed({name: b.update[name] for name in last}), **both)
    mixed = dict(a.update)
    if kind == "faint sum":
        share = 10 ** rng.uniform(-5, -1)
        mixed = {name: t + share * b.update[name] for name, t in a.update.items()}
        columns = torch.cat([a.columns, share * b.columns])
        everyone = one.with_batch(torch.cat([one.x, two.x]), torch.cat([one.y, two.y]))
        return everyone.case(replace(a, update=mixed, columns=columns), kind=kind, share=share)
    if kind == "column":
        taken = torch.zeros(one.x.shape[1], dtype=torch.bool)
        taken[rng.randrange(one.x.shape[1])] = True
        mixed[weight] = torch.where(taken[None], b.update[weight], a.update[weight])
    else:
        count = 1 if kind == "row" else len(mixed[bias]) // 8
        rows = torch.randperm(len(mixed[bias]), generator=generator(rng))[:count]
        for name in (weight, bias):
            mixed[name] = mixed[name].clone()
            mixed[name][rows] = b.update[name][rows]
    # whoever finds a sample of either has found a true one; the batch as a whole is nobody's
    truth = torch.cat([one.x, two.x])
    changed = any(not torch.equal(mixed[name], a.update[name]) for name in (weight, bias))
    if not changed:  # both were off there
        return one.case(a, kind=kind)
    columns = torch.cat([a.columns, torch.zeros_like(b.columns)])
    known = {"truth": truth, "columns": columns, "noise_label": "two clients"}
    return replace(one.case(a.changed(mixed), kind=kind), **known)


def wrong_number(rng: Random) -> Case:
    """A number of samples that is not true: more than there are, or fewer."""
    one = party(rng, b=rng.choice([2, 4, 6, 8]), biases=rng.choice(["default", "default", "zero"]))
    b = len(one.x)
    told = rng.choice([b + 1, b + 3, 2 * b, 1, b - 1])
    case = one.case(one.sent(), samples=told)
    return replace(case, view=case.view.told(samples=told), never_exact=told > b)
