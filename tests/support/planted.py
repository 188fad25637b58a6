"""Updates whose answer is known: plant inputs and labels, take the real gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.factors import Factors, Side, factorise
from spear.federated import fedsgd, mlp
from spear.federated.defences import add_noise
from spear.judge.fit import Fit
from spear.judge.fitting import fit_losses
from spear.judge.layer import Recovered
from spear.judge.selection import Selection, _Matching
from spear.search.directions import Directions
from spear.search.dual import DualProblem, dual_problem
from spear.search.kernels import unit


@dataclass(frozen=True, eq=False)
class Planted:
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    gradients: dict[str, Tensor]

    @property
    def view(self) -> spear.LayerUpdate:
        return spear.observe(self.model, self.gradients)

    def layer(self, name: str) -> spear.LayerUpdate:
        return spear.observe(self.model, self.gradients, layer=name)


def plant(
    b: int,
    *,
    m: int = 60,
    n: int = 50,
    depth: int = 3,
    classes: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    loss=nn.functional.cross_entropy,
) -> Planted:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, generator=generator, dtype=dtype) if inputs is None else inputs
    y = torch.randint(classes, (len(x),), generator=generator) if labels is None else labels
    model = mlp(x.shape[1], classes, width=m, depth=depth, seed=seed).to(dtype)
    return Planted(model, x, y, fedsgd(model, x, y, loss))


def bare(view: spear.LayerUpdate) -> spear.LayerUpdate:
    """The attacked layer alone, without the model and the gradients that `observe` was given."""
    return spear.LayerUpdate(
        weight=view.weight,
        bias=view.bias,
        weight_grad=view.weight_grad,
        bias_grad=view.bias_grad,
        relu=view.relu,
        protocol=view.protocol,
    )


def with_noise(
    gradients: dict[str, Tensor], share: float, *, like: str = "0.weight", seed: int = 7
) -> dict[str, Tensor]:
    """Gaussian noise on every gradient: a share of the usual entry of one of them."""
    sigma = share * float(gradients[like].square().mean().sqrt())
    return add_noise(gradients, sigma, seeded(seed))


def uncentred(b: int = 16, m: int = 200, n: int = 120, seed: int = 0) -> Planted:
    """A batch around a mean that is far from zero, as pictures have one."""
    generator = seeded(seed)
    x = torch.rand(b, n, generator=generator) * 0.5 + torch.rand(n, generator=generator) * 0.5
    return plant(b, m=m, inputs=x, seed=seed)


def worst_error(recovered: Tensor, truth: Tensor) -> float:
    """Largest error of any entry after the best assignment; infinite if a sample is missing."""
    if len(recovered) != len(truth):
        return float("inf")
    distance = torch.cdist(recovered.double(), truth.detach().double(), p=float("inf"))
    nearest = distance.argmin(1)
    if len(set(nearest.tolist())) < len(truth):
        return float("inf")
    return float(distance.min(1).values.max())


@dataclass(frozen=True, eq=False)
class Truth:
    """Both halves of every planted sample, in the whitened coordinates of the update."""

    factors: Factors
    whole: DualProblem
    Q: Tensor  # (b, b): D = U Q
    C: Tensor  # (b, b) = Q^-1
    off: Tensor  # (rows, b) bool: zeros of dL/dZ in the live rows
    Z: Tensor  # (rows, b)

    @property
    def q(self) -> Tensor:
        """Unit directions, one a row."""
        return unit(self.Q.T)


def truth(planted: Planted) -> Truth:
    """The answer to both halves, from the planted batch itself."""
    factors = factorise(planted.view)
    layer = dict(planted.model.named_modules())[planted.view.layer]
    seen = []
    hook = layer.register_forward_hook(lambda *args: seen.append(args[2]))
    loss = nn.functional.cross_entropy(planted.model(planted.inputs), planted.labels)
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, seen[0])
    live, left = factors.live_rows, factors.left
    D, Z = gradient.T.to(left), seen[0].detach().T.to(left)  # (m, b)
    Q = left.T @ D
    return Truth(factors, dual_problem(factors), Q, torch.linalg.inv(Q), (D == 0)[live], Z[live])


# Gradients without a model: dL/dW = D X, and dL/db the sum over the samples.


def low_rank(
    m: int, n: int, b: int, seed: int = 0, decay: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """D (m, b), half of it zeros and each sample fainter than the one before, and X (b, n)."""
    generator = seeded(seed)
    D = torch.randn(m, b, generator=generator, dtype=torch.float64)
    D *= torch.rand(m, b, generator=generator) < 0.5
    D *= torch.logspace(0, -decay, b, dtype=torch.float64)
    X = torch.randn(b, n, generator=generator, dtype=torch.float64)
    return D.to(dtype), X.to(dtype)


def view_of(weight_grad: Tensor, bias_grad: Tensor) -> spear.LayerUpdate:
    """A layer whose weights are zero, with these gradients."""
    m, n = weight_grad.shape
    return spear.LayerUpdate(
        weight=torch.zeros(m, n, dtype=weight_grad.dtype),
        bias=torch.zeros(m, dtype=weight_grad.dtype),
        weight_grad=weight_grad,
        bias_grad=bias_grad,
    )


# Small clients.


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(b: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(b, n, generator=seeded(seed))


def net(
    n: int, outputs: int, *, width: int = 120, depth: int = 2, seed: int = 0, zero: bool = False
) -> nn.Sequential:
    """A network at its initialisation, its biases zero if asked for."""
    model = mlp(n, outputs, width=width, depth=depth, seed=seed)
    for name, parameter in model.named_parameters():
        if zero and name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def module(forward: Callable[..., Tensor], **layers: nn.Module | Tensor) -> nn.Module:
    """A module with these layers and this forward pass."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    for name, layer in layers.items():
        if isinstance(layer, nn.Module):
            setattr(made, name, layer)
        else:
            made.register_buffer(name, layer)
    return made


def labels(b: int, classes: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(classes, (b,), generator=seeded(seed))


def client(
    b: int = 5, n: int = 60, outputs: int = 10, seed: int = 0, **options
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network at its initialisation, Gaussian inputs and labels."""
    return net(n, outputs, seed=seed, **options), gaussian(b, n, seed), labels(b, outputs, seed)


def small_batch(
    b: int = 6, n: int = 30, m: int = 50, classes: int = 5, seed: int = 0, depth: int = 3
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with random inputs and labels."""
    generator = seeded(seed)
    x = torch.randn(b, n, generator=generator)
    y = torch.randint(classes, (b,), generator=generator)
    return mlp(n, classes, width=m, depth=depth, seed=seed), x, y


def real_batch(
    root, name="tiny_imagenet", b=20, m=200, seed=0, *, depth=6, among=None, normalise=True
):
    """Images, a model at initialisation and a batch of real images with labels."""
    images = getattr(data, name)(root)
    pool = torch.arange(len(images)) if among is None else among(images)
    order = torch.randperm(len(pool), generator=seeded(seed))
    x, y = images.batch(pool[order[:b]].tolist(), normalise=normalise)
    return images, mlp(x.shape[1], images.classes, width=m, depth=depth, seed=seed), x, y


def weighed(weights: Tensor, *, total: bool = False):
    """Cross-entropy with a weight for each sample: the mean, or the sum."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        each = weights * nn.functional.cross_entropy(outputs, targets, reduction="none")
        return each.sum() if total else each.mean()

    return loss


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, share: float) -> dict[str, Tensor]:
    """Per-sample gradients, clipped to a share of their median norm over all parameters, averaged."""
    parts = [fedsgd(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    norms = torch.stack([sum(g.square().sum() for g in part.values()).sqrt() for part in parts])
    factors = (share * norms.median() / norms).clamp_max(1)
    return {
        name: sum(part[name] * c for part, c in zip(parts, factors, strict=True)) / len(x)
        for name in parts[0]
    }


# What a finder would hand to the judge.


def true_directions(planted: Planted, factors: Factors) -> tuple[Tensor, Tensor]:
    """Q (b, b) in the scale of the samples, one a column, and their zeros in the live rows."""
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T)
    zeros = (planted.model[0](planted.inputs) <= 0).T[factors.live_rows]
    return Q, zeros


def pool_of(
    factors: Factors, vectors: Tensor, zeros: Tensor, side: Side | None = None
) -> Directions:
    """Directions (b, c) of any length, of the outputs' side unless told, held by many zeros."""
    redundancy = torch.full((vectors.shape[1],), 2)
    return Directions(side or factors.outputs, unit(vectors, 0), zeros, redundancy)


def inputs_problem() -> tuple[Factors, Tensor, Tensor, Tensor]:
    """The last layer: its inputs h come out of a ReLU, and each direction is one of them."""
    planted = plant(4, m=60, depth=3, classes=20)
    factors = factorise(planted.layer("4"))
    with torch.no_grad():
        hidden = planted.model[:4](planted.inputs).double()
    R = factors.combine(torch.diag(1 / factors.singular_values))
    C = hidden @ R.T
    vectors = unit((C / factors.singular_values).T, 0)
    zeros = (hidden == 0).T[factors.live_columns]
    return factors, hidden, vectors, zeros


def selection_of(planted: Planted, factors: Factors, mixing: Tensor | None = None) -> Selection:
    """True directions in the order of the samples, or some of them mixed by (b, b)."""
    Q, _ = true_directions(planted, factors)
    Q = unit(Q if mixing is None else Q @ mixing, 0)
    zeros = (factors.outputs.basis @ Q).abs() <= factors.zero
    return _Matching(factors, pool_of(factors, Q, zeros)).selection(list(range(Q.shape[1])))


def recovered(
    planted: Planted, mixing: Tensor | None = None, view: spear.LayerUpdate | None = None
) -> Recovered:
    """What the judge sees of a planted batch, in the order of the samples."""
    factors = factorise(planted.view if view is None else view)
    return Recovered(factors, selection_of(planted, factors, mixing))


def fit_of(found: Recovered, loss=None) -> Fit:
    """The first loss that explains it."""
    assert found.view.model is not None
    fit = fit_losses(found, loss, generator=seeded(0))
    assert isinstance(fit, Fit), fit
    return fit


def with_model(found: Recovered, model: nn.Module) -> Recovered:
    """The same, with another model to replay."""
    factors = dataclasses.replace(found.factors, view=found.view.with_model(model))
    return Recovered(factors, found.selection)
