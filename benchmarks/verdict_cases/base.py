"""What a case is, and what it is drawn from: data, networks, and a client's backward pass."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.federated import mlp, train

Settings = dict[str, Any]
Update = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
cross_entropy = nn.functional.cross_entropy
VISIBLE = 10  # roundings of the update: a sample whose share is less need not be found
VANISHED = 1e-30  # no rounding is compared with what is smaller


@dataclass(frozen=True)
class Case:
    """One update as a server sees it, and what is true about it."""

    view: spear.LayerUpdate
    model: nn.Module
    truth: Tensor | None  # (b, n): the only inputs that may be certified; None: nothing may
    settings: Settings
    loss: Loss | None = None  # as it was told
    pixels: Callable[[Tensor], Tensor] = lambda x: x.double()
    span: float = 1.0  # the data's range: 60 dB is an error of 1e-3 of it
    honest: bool = True  # may the replay confirm it?
    never_exact: bool = False  # whatever comes back: what was told contradicts the update
    columns: Tensor | None = None  # (b, m): each sample's dL/dz as it went into the update
    seen: Tensor | None = None  # (b, n): what the layer's gradients say the inputs are, if not x
    noise: float = 0.0  # of the update, beside its rounding: the largest singular value
    noise_label: str = ""  # for the table of predicted errors

    @property
    def error_label(self) -> str:
        """The kind of errors that are to be expected: noise, or something no noise tells."""
        if self.seen is not None:
            return "another scale"
        if self.noise_label or not self.view.trained:
            return self.noise_label or str(self.view.weight.dtype)[6:]
        return "FedAvg, one step" if self.view.protocol.one_step else "FedAvg, several steps"

    @property
    def bare(self) -> spear.LayerUpdate:
        """The layer without the network, and what was told of the number of samples."""
        names = ("weight", "bias", "weight_grad", "bias_grad", "relu")
        told = spear.Protocol(samples=self.view.samples)
        return spear.LayerUpdate(
            **{name: getattr(self.view, name) for name in names}, protocol=told
        )

    @property
    def rounding(self) -> float:
        """The norm of the update's rounding, about, and of whatever noise is known."""
        view, found = self.view, 0.0
        for grad, value in ((view.weight_grad, view.weight), (view.bias_grad, view.bias)):
            found += torch.finfo(grad.dtype).eps * float(grad.double().norm())
            if view.trained:
                found += torch.finfo(grad.dtype).eps * float(value.norm()) / view.protocol.rate
        return found + self.noise

    @property
    def expected_visible(self) -> Tensor:
        """(b,) bool: which samples' share of the update is above its noise."""
        assert self.truth is not None
        if self.columns is None or not self.view.protocol.one_step:
            return self._in_the_rows()
        sizes = torch.cat([self.truth, torch.ones_like(self.truth[:, :1])], 1).double().norm(dim=1)
        shares = self.columns.double().norm(dim=1) * sizes
        return (shares > VISIBLE * self.rounding) & (shares > VANISHED)

    def _in_the_rows(self) -> Tensor:
        """(b,) bool: which samples left a trace after several steps: those that rows are made of."""
        assert self.truth is not None
        _, s, Vt = torch.linalg.svd(self.view.weight_grad.double(), full_matrices=False)
        rows = Vt[s > VISIBLE * torch.finfo(self.view.weight_grad.dtype).eps * s[0]]
        x = self.truth.detach().double()
        return (x - (x @ rows.T) @ rows).norm(dim=1) < 0.5 * x.norm(dim=1)


@dataclass(frozen=True)
class Sent:
    """A client's update, and the part of each sample in it."""

    update: Update
    columns: Tensor  # (b, m)

    def times(self, factor: float) -> Sent:
        return Sent({k: t * factor for k, t in self.update.items()}, self.columns * factor)

    def changed(self, tensors: Update) -> Sent:
        """With other tensors of these names."""
        return replace(self, update={**self.update, **tensors})


def summed(parts: Iterable[Sent]) -> Sent:
    """One update of several batches, their samples one after the other."""
    parts = list(parts)
    names = parts[0].update
    total = {name: sum(part.update[name] for part in parts) for name in names}
    return Sent(total, torch.cat([part.columns for part in parts]))  # type: ignore[arg-type]


def overall(sent: Sent) -> float:
    """The norm over all parameters."""
    return float(sum(t.double().square().sum() for t in sent.update.values()) ** 0.5)


def first_linear(model: nn.Module) -> nn.Linear:
    return next(module for module in model.modules() if isinstance(module, nn.Linear))


def names_of(model: nn.Module) -> tuple[str, str]:
    """The names of the first layer's weight and bias."""
    own = first_linear(model)
    name = next(name for name, module in model.named_modules() if module is own)
    return f"{name}.weight", f"{name}.bias"


def backward(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss = cross_entropy, layer: str | None = None
) -> Sent:
    """The gradient by parameter name, and dL/dz of a layer: the first, unless it is named."""
    kept: list[Tensor] = []
    module = first_linear(model) if layer is None else model.get_submodule(layer)
    hook = module.register_forward_hook(lambda _, __, z: kept.append(z))
    try:
        value = loss(model(x), y)
    finally:
        hook.remove()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, [*named.values(), kept[0]], allow_unused=True)
    grads = [
        torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=False)
    ]
    columns = found[-1] if found[-1] is not None else torch.zeros_like(kept[0])
    return Sent(dict(zip(named, grads, strict=True)), columns.detach())


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

    def sent(self, loss: Loss = cross_entropy, y: Tensor | None = None) -> Sent:
        return backward(self.model, self.x, self.y if y is None else y, loss)

    def gradients(self, loss: Loss = cross_entropy) -> Update:
        return self.sent(loss).update

    def case(self, update: Update | Sent, told: Loss | None = None, **more: Any) -> Case:
        """The update with this client's data as the truth; keyword arguments are settings."""
        sent = update if isinstance(update, Sent) else Sent(update, self.sent().columns)
        return Case(
            spear.observe(self.model, sent.update),
            self.model,
            self.x,
            {**self.settings, **more},
            loss=told,
            pixels=self.pixels,
            span=self.span,
            columns=sent.columns,
        )

    def with_batch(self, x: Tensor, y: Tensor) -> Client:
        return replace(self, x=x, y=y, settings={**self.settings, "b": len(x)})


def excess(sent: Tensor, clean: Tensor) -> float:
    """The largest singular value of what was added to a gradient."""
    return float(torch.linalg.matrix_norm((sent - clean).double(), 2))


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 31))


def normal(rng: Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(rng))


def rounded(value: float) -> float:
    return float(f"{value:.1e}")


@cache
def images(name: str) -> data.ImageData:
    return getattr(data, name)(Path(os.environ["SPEAR_DATA"]))


@cache
def people() -> data.TabularData:
    return data.adult(Path(os.environ["SPEAR_DATA"]))


def adult(source: str, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """People: standardised; with their raw numbers; or 14 columns, a category being its index."""
    x, y = people().batch(chosen)
    values = people().values[chosen].float()  # (b, 14)
    if source == "adult numbers":
        return values, y
    if source == "adult raw":
        at = 0
        for i, column in enumerate(people().columns):
            if not column.discrete:
                x[:, at] = values[:, i]
            at += column.width
    return x, y


def drawn(source: str, b: int, rng: Random) -> tuple[Tensor, Tensor, Any, float]:
    """A batch of real images or people, or Gaussian rows; how to see it, and its range there."""
    if source.startswith("gauss"):
        n = int(source.removeprefix("gauss") or 120)
        g = generator(rng)
        x, y = torch.randn(b, n, generator=g), torch.randint(10, (b,), generator=g)
        return x, y, lambda t: t.double(), float(x.max() - x.min())
    if source.startswith("adult"):
        x, y = adult(source, rng.sample(range(len(people())), b))
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


class Functional(nn.Module):
    """Linear layers with the ReLUs in the forward pass."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def network(
    rng: Random, sizes: list[int], *, kind: str = "sequential", biases: str = "default"
) -> nn.Module:
    """Linear layers and ReLUs, at torch's default initialisation; biases may be zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 31))
        linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    if biases == "zero":
        for layer in linear:
            nn.init.zeros_(layer.bias)
    if kind == "functional":
        return Functional(linear)
    layers: list[nn.Module] = [linear[0]]
    for layer in linear[1:]:
        layers += [nn.ReLU(), layer]
    return nn.Sequential(*layers)


SOURCES = ("cifar10", "mnist", "cifar10 raw", "gauss", "adult")


def party(
    rng: Random,
    *,
    b: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    outputs: int = 10,
    source: str | None = None,
    kind: str | None = None,
    biases: str | None = None,
    dtype: torch.dtype | None = None,
) -> Client:
    """A client that is inverted at once; what is not given is drawn."""
    source = source or rng.choice(SOURCES)
    b = b or rng.choice([2, 3, 4, 6, 8, 10])
    width = width or rng.choice([80, 120, 160, 200])
    hidden = hidden or rng.choice([1, 1, 2, 3, 5])
    kind = kind or rng.choice(["sequential", "functional"])
    biases = biases or rng.choice(["default", "default", "zero"])
    dtype = dtype or rng.choice([torch.float32] * 3 + [torch.float64])
    x, y, pixels, span = drawn(source, b, rng)
    if source.startswith("adult") and outputs > 2:  # two labels would leave most classes unused
        y = torch.randint(outputs, (b,), generator=generator(rng))
    behind = [rng.choice([width, max(20, width // 2)]) for _ in range(hidden - 1)]
    model = network(rng, [x.shape[1], width, *behind, outputs], kind=kind, biases=biases)
    settings = {"data": source, "b": b, "m": width, "hidden": hidden, "outputs": outputs}
    settings |= {"forward": kind, "biases": biases, "dtype": str(dtype)[6:]}
    y = y % outputs if outputs > 1 else y % 2
    return Client(model.to(dtype), x.to(dtype), y, settings, pixels, span, source)


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
