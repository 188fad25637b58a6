"""Rows and columns of the layer, what stands behind it, and numbers an adversary would try."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor, nn

from verdict_cases.base import Case, Sent, drawn, first_linear, generator, names_of, party, rounded

# Rows and columns of the layer, and of the batch: masked, frozen, tied, zero, dependent.


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


# Networks, numbers and mixtures that an adversary would try.


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
