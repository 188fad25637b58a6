"""Updates whose answer is known: plant inputs and labels, take the real gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import spear
from spear.directions import unit
from spear.factors import Factors, factorise
from spear.federated import fedsgd, mlp
from spear.patterns import Halves, both_halves


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
        training=view.training,
        samples=view.samples,
    )


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
    whole: Halves
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
    return Truth(factors, both_halves(factors), Q, torch.linalg.inv(Q), (D == 0)[live], Z[live])
