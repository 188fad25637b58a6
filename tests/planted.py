"""Updates whose answer is known: plant inputs and labels, take the real gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import spear
from spear.federated import fedsgd, mlp


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


def worst_error(recovered: Tensor, truth: Tensor) -> float:
    """Largest error of any entry after the best assignment; infinite if a sample is missing."""
    if len(recovered) != len(truth):
        return float("inf")
    distance = torch.cdist(recovered.double(), truth.detach().double(), p=float("inf"))
    nearest = distance.argmin(1)
    if len(set(nearest.tolist())) < len(truth):
        return float("inf")
    return float(distance.min(1).values.max())
