"""The updates that `verdicts.py` judges: each family draws its settings from a seed.

A case is an update, and what is true about it. Families that are no honest gradient of the model say
what may be certified all the same: the planted inputs, or nothing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.federated import defences, fedavg, fedsgd, mlp, train

Settings = dict[str, Any]
Update = dict[str, Tensor]
cross_entropy = nn.functional.cross_entropy


@dataclass(frozen=True)
class Case:
    """One update as a server sees it."""

    view: spear.LayerUpdate
    model: nn.Module
    truth: Tensor | None  # (b, n): the only inputs that may be certified; None: nothing may
    settings: Settings
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    pixels: Callable[[Tensor], Tensor] = lambda x: x.double()
    span: float = 1.0  # the data's range: 60 dB is an error of 1e-3 of it
    honest: bool = True  # may the replay confirm it?
    provable: bool = False  # clean, and truly told: ought a right recovery to be certified?


@dataclass(frozen=True)
class Client:
    """A model and a private batch."""

    model: nn.Module
    x: Tensor
    y: Tensor
    settings: Settings
    pixels: Callable[[Tensor], Tensor]
    span: float
    source: str = field(default="")

    def gradients(self, loss: Any = cross_entropy) -> Update:
        return fedsgd(self.model, self.x, self.y, loss)

    def case(self, update: Update, **more: Any) -> Case:
        """The update with this client's data as the truth; keyword arguments are settings."""
        view = spear.observe(self.model, update)
        known = {"pixels": self.pixels, "span": self.span, "settings": {**self.settings, **more}}
        return Case(view, self.model, self.x, **known)

    def clean(self, update: Update, **more: Any) -> Case:
        """The same of an update that is the gradient, to rounding."""
        return replace(self.case(update, **more), provable=True)

    def with_batch(self, x: Tensor, y: Tensor) -> Client:
        return replace(self, x=x, y=y, settings={**self.settings, "b": len(x)})


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 31))


@cache
def images(name: str) -> data.ImageData:
    return getattr(data, name)(Path(os.environ["SPEAR_DATA"]))


def drawn(source: str, b: int, rng: Random) -> tuple[Tensor, Tensor, Any, float]:
    """A batch of real images, or Gaussian rows; how to see it in pixels, and its range there."""
    if source == "gauss":
        g = generator(rng)
        x, y = torch.randn(b, 120, generator=g), torch.randint(10, (b,), generator=g)
        return x, y, lambda t: t.double(), float(x.max() - x.min())
    name, raw = source.removesuffix(" raw"), source.endswith(" raw")
    chosen = rng.sample(range(len(images(name))), b)
    x, y = images(name).batch(chosen, normalise=not raw)
    return x, y, (lambda t: t.double()) if raw else images(name).to_pixels, 1.0


@cache
def trained(source: str, width: int, depth: int, steps: int, seed: int) -> nn.Module:
    """A network after some steps of SGD on other images than clients draw from, mostly."""
    x, y, _, _ = drawn(source, 1024, Random(f"train {source} {seed}"))
    net = mlp(x.shape[1], 10, width=width, depth=depth, seed=seed)
    return train(net, x, y, steps=steps, lr=0.05, generator=torch.Generator().manual_seed(seed))


def client(
    rng: Random,
    *,
    b: int | None = None,
    width: int | None = None,
    source: str | None = None,
    dtype: torch.dtype | None = None,
    steps: int = 0,
    depth: int | None = None,
) -> Client:
    """A client of the usual kind; what is not given is drawn."""
    width = width or rng.choice([80, 120, 200, 300])
    b = b or rng.choice([1, 2, 4, 8, 12, 16, max(2, width // 8), width // 6])
    source = source or rng.choice(["cifar10", "cifar10", "mnist", "cifar10 raw", "gauss"])
    depth = depth or rng.choice([2, 3, 6])
    dtype = dtype or rng.choice([torch.float32, torch.float32, torch.float64])
    seed = rng.randrange(1 << 20) if not steps else rng.randrange(3)
    x, y, pixels, span = drawn(source, b, rng)
    if steps:
        model = trained(source, width, depth, steps, seed)
    else:
        model = mlp(x.shape[1], 10, width=width, depth=depth, seed=seed)
    settings = {"data": source, "b": b, "m": width, "depth": depth, "dtype": str(dtype)[6:]}
    if steps:
        settings["steps"] = steps
    model = copy.deepcopy(model).to(dtype)
    return Client(model, x.to(dtype), y, settings, pixels, span, source)


def small(rng: Random, **options: Any) -> Client:
    """A client whose batch is found at once, so that only the verdict is at stake."""
    width = rng.choice([120, 200])
    return client(rng, **{"b": rng.choice([2, 4, 6, 8, 12]), "width": width, **options})


# Honest updates.


def exact(rng: Random) -> Case:
    one = client(rng)
    reduction = rng.choice(["mean", "mean", "sum"])
    loss = nn.CrossEntropyLoss(reduction=reduction)
    case = one.clean(one.gradients(loss), reduction=reduction)
    return replace(case, loss=loss)


def trained_network(rng: Random) -> Case:
    one = client(
        rng,
        b=rng.choice([4, 8, 12, 16]),
        width=rng.choice([120, 200]),
        depth=rng.choice([2, 4]),
        source=rng.choice(["cifar10", "mnist"]),
        steps=rng.choice([50, 200, 1000]),
    )
    return one.clean(one.gradients())


def deeper_layer(rng: Random) -> Case:
    """An inner layer: its inputs are activations, and they are the truth."""
    one = small(rng, depth=6)
    index = rng.choice([2, 4, 6])
    update = one.gradients()
    view = spear.observe(one.model, update, layer=str(index))
    with torch.no_grad():
        inputs = one.model[:index](one.x)
    span = float(inputs.max() - inputs.min())
    settings = {**one.settings, "layer": index}
    return Case(view, one.model, inputs, settings, span=span, provable=True)


def one_class(rng: Random) -> Case:
    one = client(rng, b=rng.choice([4, 8, 12]))
    same = torch.full_like(one.y, rng.randrange(10))
    one = replace(one, y=same)
    return one.clean(one.gradients())


def other_losses(rng: Random) -> Case:
    """Losses that are told: squared error, label smoothing, class weights."""
    one = small(rng)
    kind = rng.choice(["mse", "smoothed", "weighted"])
    if kind == "mse":
        targets = torch.randn(len(one.x), 10, generator=generator(rng)).to(one.x)
        update, loss = fedsgd(one.model, one.x, targets, nn.MSELoss()), nn.MSELoss()
        return replace(one.clean(update, loss=kind), loss=loss)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    if kind == "weighted":
        loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10).to(one.x), reduction="sum")
    return replace(one.clean(one.gradients(loss), loss=kind), loss=loss)


# What clients do to their update.


def noisy(rng: Random) -> Case:
    one = small(rng)
    sigma = 10 ** rng.uniform(-10, -2)
    where = rng.choice(["all", "all", "all", "weights", "biases", "laplace"])
    update, g = one.gradients(), generator(rng)
    for name, tensor in update.items():
        if where == "weights" and name.endswith("bias"):
            continue
        if where == "biases" and name.endswith("weight"):
            continue
        drawn_noise = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        if where == "laplace":
            uniform = torch.rand(tensor.shape, generator=g, dtype=tensor.dtype) - 0.5
            drawn_noise = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.4999))
        update[name] = tensor + sigma * drawn_noise
    return one.case(update, sigma=float(f"{sigma:.1e}"), where=where)


def pruned(rng: Random) -> Case:
    one = small(rng)
    share = rng.choice([0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 0.99])
    how = rng.choice(["smallest", "smallest", "random", "rows"])
    update = one.gradients()
    if how == "smallest":
        return one.case(defences.prune(update, share), share=share, how=how)
    g = generator(rng)
    for name, tensor in update.items():
        shape = tensor.shape[:1] if how == "rows" else tensor.shape
        keep = (torch.rand(shape, generator=g) >= share).to(tensor)
        update[name] = tensor * (keep if keep.ndim == tensor.ndim else keep[:, None])
    return one.case(update, share=share, how=how)


def quantised(rng: Random) -> Case:
    one = small(rng)
    how = rng.choice(["float16", "bfloat16", "4", "6", "8", "10", "12", "14", "16", "sign"])
    update = one.gradients()
    if how in ("float16", "bfloat16"):
        update = defences.half(update, getattr(torch, how))
    elif how == "sign":
        update = {name: tensor.sign() * tensor.abs().mean() for name, tensor in update.items()}
    else:
        update = defences.quantise(update, int(how))
    return one.case(update, how=how)


def local_training(rng: Random) -> Case:
    """FedAvg, told rightly, wrongly, or not at all."""
    one = small(rng, dtype=torch.float32)
    lr, epochs = rng.choice([0.1, 0.03, 0.01, 0.001]), rng.choice([1, 1, 2, 3, 5, 10])
    batch = rng.choice([None, None, None, max(1, len(one.x) // 2)])
    momentum = rng.choice([0.0, 0.0, 0.9])
    after = fedavg(
        one.model,
        one.x,
        one.y,
        lr=lr,
        epochs=epochs,
        batch_size=batch,
        momentum=momentum,
        generator=generator(rng),
    )
    told: Settings = {"lr": lr, "epochs": epochs, "batch_size": batch, "momentum": momentum}
    lie = rng.choice(["", "", "", "", "lr", "epochs", "momentum", "unknown"])
    if lie == "unknown":
        told = {"lr": lr}
    elif lie == "lr":
        told["lr"] = lr * rng.choice([0.5, 1.1, 2.0])
    elif lie == "epochs":
        told["epochs"] = epochs + 1
    elif lie == "momentum":
        told["momentum"] = 0.9 - momentum
    view = spear.observe(one.model, after=after, **told)
    settings = {
        **one.settings,
        "lr": lr,
        "epochs": epochs,
        "minibatch": batch,
        "momentum": momentum,
    }
    settings["lie"] = lie
    told_all = not lie and batch is None
    known = {"pixels": one.pixels, "span": one.span, "provable": told_all}
    return Case(view, one.model, one.x, settings, **known)


def clipped(rng: Random) -> Case:
    """DP-SGD's clipping, sample by sample: over all parameters, or each tensor on its own."""
    one = small(rng)
    apart = rng.random() < 0.5
    total: Update = {}
    norms: list[float] = []
    parts = []
    for i in range(len(one.x)):
        part = fedsgd(one.model, one.x[i : i + 1], one.y[i : i + 1])
        parts.append(part)
        norms.append(float(sum(t.square().sum() for t in part.values()) ** 0.5))
    limit = sorted(norms)[len(norms) // 2] * rng.choice([0.5, 1.0, 1.001])
    for part, norm in zip(parts, norms, strict=True):
        for name, tensor in part.items():
            own = float(tensor.norm()) * 2 if apart else norm
            total[name] = total.get(name, 0) + tensor * min(1.0, limit / max(own, 1e-12))
    return replace(one.case(total, apart=apart, limit=limit), provable=not apart)


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
    told = {
        "how": how,
        "epsilon": float(f"{epsilon:.1e}"),
        "pairs": count,
        "same_label": same_label,
    }
    return both.case(both.gradients(), **told)


def large_batch(rng: Random) -> Case:
    """b >= m, or nearly: the layer is too narrow."""
    width = rng.choice([10, 16, 24, 40])
    b = rng.choice([width - 1, width, width + 1, 2 * width, 4 * width])
    one = client(rng, b=b, width=width)
    return one.case(one.gradients())


def vanishing(rng: Random) -> Case:
    """Samples whose gradient (nearly) vanishes: the network is sure of them."""
    one = small(rng, b=rng.choice([4, 8]), source="cifar10", steps=1000, depth=2)
    weight = 10 ** rng.uniform(-9, -1)
    weights = torch.ones(len(one.x)).to(one.x)
    weights[: rng.choice([1, 2])] = weight

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (weights * cross_entropy(outputs, targets, reduction="none")).mean()

    return one.case(one.gradients(loss), weight=float(f"{weight:.1e}"))


# Updates that are no gradient of this model at its weights.


def random_matrix(rng: Random) -> Case:
    one = small(rng)
    g = generator(rng)
    how = rng.choice(
        ["gauss", "low rank", "low rank positive", "sparse", "integers", "ones", "zeros"]
    )
    update = {}
    rank = rng.choice([1, 2, 5, 10])
    for name, tensor in one.gradients().items():
        fresh = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        if how.startswith("low rank") and tensor.ndim == 2:
            D = torch.randn(len(tensor), rank, generator=g, dtype=tensor.dtype)
            X = torch.randn(rank, tensor.shape[1], generator=g, dtype=tensor.dtype)
            if how.endswith("positive"):
                D, X = D.clamp_min(0), X.abs()
            fresh = D @ X
            update[name.replace("weight", "bias")] = D.sum(1)
        elif how == "sparse":
            fresh = fresh * (fresh > 2)
        elif how == "integers":
            fresh = fresh.round()
        elif how in ("ones", "zeros"):
            fresh = torch.full_like(fresh, float(how == "ones"))
        update.setdefault(name, fresh)
    return replace(one.case(update, how=how, rank=rank), truth=None, honest=False)


def other_model(rng: Random) -> Case:
    """Gradients taken at other weights than the server believes, far or near, or another network."""
    one = small(rng)
    how = rng.choice(["seed", "step", "step", "later layers", "gelu", "leaky", "tanh", "dropout"])
    client_model = copy.deepcopy(one.model)
    settings: Settings = {"how": how}
    if how in ("seed", "later layers"):
        n, m, depth = one.x.shape[1], one.settings["m"], one.settings["depth"]
        other = mlp(n, 10, width=m, depth=depth, seed=rng.randrange(1 << 20)).to(one.x.dtype)
        if how == "later layers":
            other[0].load_state_dict(one.model[0].state_dict())
        client_model = other
    elif how == "step":
        settings["change"] = 10 ** rng.uniform(-7, -1)
        g = generator(rng)
        with torch.no_grad():
            for p in client_model.parameters():
                step = torch.randn(p.shape, generator=g, dtype=p.dtype)
                p.add_(settings["change"] * p.abs().mean() * step)
    else:
        kinds = {"gelu": nn.GELU(), "leaky": nn.LeakyReLU(0.1), "tanh": nn.Tanh()}
        for i, module in enumerate(client_model):
            if isinstance(module, nn.ReLU):
                after = kinds.get(how) or nn.Sequential(nn.ReLU(), nn.Dropout(0.3))
                client_model[i] = after
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 31))
        parameters = list(client_model.parameters())
        gradients = torch.autograd.grad(cross_entropy(client_model(one.x), one.y), parameters)
    names = [name for name, _ in one.model.named_parameters()]
    return one.case(dict(zip(names, gradients, strict=True)), **settings)


def stitched(rng: Random) -> Case:
    """Pieces of the updates of two clients."""
    one = small(rng)
    two = one.with_batch(*drawn(one.source, len(one.x), rng)[:2])
    two = replace(two, x=two.x.to(one.x.dtype))
    a, b = one.gradients(), two.gradients()
    how = rng.choice(["layers", "bias", "rows", "columns", "sum", "weighted", "one entry"])
    mixed = dict(a)
    g = generator(rng)
    for name in a:
        if how == "sum":
            mixed[name] = a[name] + b[name]
        elif how == "weighted":
            mixed[name] = a[name] + 0.3 * b[name]
        elif (how == "layers" and not name.startswith("0.")) or (
            how == "bias" and name == "0.bias"
        ):
            mixed[name] = b[name]
        elif how in ("rows", "columns") and a[name].ndim == 2:
            dim = 0 if how == "rows" else 1
            taken = torch.rand(a[name].shape[dim], generator=g) < 0.5
            taken = taken[:, None] if dim == 0 else taken[None]
            mixed[name] = torch.where(taken, a[name], b[name])
        elif how == "one entry" and name == "0.weight":
            mixed[name] = a[name].clone()
            mixed[name][0] = b[name][0]
    unchanged = all(torch.equal(mixed[name], a[name]) for name in a)  # both neurons were off
    if how == "layers" or unchanged:
        return one.case(mixed, how=how)  # all that the layer shows is the first client's
    return replace(one.case(mixed, how=how), truth=torch.cat([one.x, two.x]))


def adversarial(rng: Random) -> Case:
    """lambda = 1 by construction, and no gradient of the model: must never pass the replay.

    Inputs are made up, and every column of dL/dZ is zero where they switch a neuron off. What is
    not zero is anything but a gradient the network gives.
    """
    one = small(rng, dtype=torch.float64)
    how = rng.choice(["random", "positive", "constant", "swapped labels", "soft labels", "scaled"])
    update = one.gradients()
    layer = one.model[0]
    fake = one.x[torch.randperm(len(one.x), generator=generator(rng))].roll(7, 1)
    with torch.no_grad():
        on = (layer(fake) > 0).to(one.x)  # (b, m)
    g = generator(rng)
    D = torch.randn(on.shape, generator=g, dtype=on.dtype) * on
    if how == "positive":
        D = D.abs()
    elif how == "constant":
        D = on * torch.rand(len(on), 1, generator=g, dtype=on.dtype)
    faked = one.with_batch(fake, one.y)
    truth: Tensor | None = fake
    if how in ("random", "positive", "constant"):
        own = faked.gradients() if rng.random() < 0.5 else update
        update = {**own, "0.weight": D.T @ fake, "0.bias": D.sum(0)}
    elif how == "swapped labels":  # the first layer of one set of labels, the rest of another
        wrong = faked.with_batch(fake, (one.y + 1) % 10).gradients()
        update = {**faked.gradients(), "0.weight": wrong["0.weight"], "0.bias": wrong["0.bias"]}
    elif how == "soft labels":
        soft = torch.rand(len(fake), 10, generator=g, dtype=on.dtype).softmax(1)
        update = fedsgd(one.model, fake, soft)
    else:  # no bias, so that any scale fits the signs; the bias gradient tells another one
        with torch.no_grad():
            layer.bias.zero_()
        update = faked.gradients()
        update["0.bias"] = update["0.bias"] * rng.choice([0.5, 0.99, 1.003, 2.0])
    case = one.case(update, how=how)
    return replace(case, truth=truth, honest=False)


FAMILIES: dict[str, Callable[[Random], Case]] = {
    "exact": exact,
    "trained network": trained_network,
    "deeper layer": deeper_layer,
    "one class": one_class,
    "other losses": other_losses,
    "noisy": noisy,
    "pruned": pruned,
    "quantised": quantised,
    "FedAvg": local_training,
    "clipped": clipped,
    "near-duplicates": near_duplicates,
    "b >= m": large_batch,
    "vanishing samples": vanishing,
    "random matrix": random_matrix,
    "other model": other_model,
    "stitched": stitched,
    "adversarial": adversarial,
}


def case(family: str, seed: int) -> Case:
    """The update of a family that a seed gives, always the same."""
    return FAMILIES[family](Random(f"{family} {seed}"))
