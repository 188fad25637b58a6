"""The networks of the paper's experiments."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def mlp(
    inputs: int,
    classes: int,
    *,
    width: int = 200,
    depth: int = 6,
    seed: int | None = None,
) -> nn.Sequential:
    """A fully connected ReLU network of `depth` linear layers at PyTorch's default initialisation.

    With a seed the weights depend on it alone, and the global random state stays as it was.

    >>> [m.out_features for m in mlp(12, 3, width=5, depth=3) if isinstance(m, nn.Linear)]
    [5, 5, 3]
    """
    if min(inputs, classes, width) < 1 or depth < 2:
        raise ValueError(
            f"expected sizes >= 1 and depth >= 2, got {inputs}, {classes}, {width}, {depth}"
        )
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        sizes = [inputs, *[width] * (depth - 1), classes]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(sizes)):
            layers.append(nn.Linear(before, after))
            if i < depth - 1:
                layers.append(nn.ReLU())
    return nn.Sequential(*layers)
