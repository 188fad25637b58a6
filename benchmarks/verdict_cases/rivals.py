"""What a layer alone cannot see: other inputs that give it the same gradients, to rounding.

Proof. The layer shows G = sum_i d_i (x_i, 1)^T and nothing else. An honest client could have had any
inputs z_j with any columns e_j that vanish where z_j switches a neuron off, and would have sent
sum_j e_j (z_j, 1)^T. Where such z differ from x and the two sums are the same to rounding, no
method that is given the layer alone tells them apart. Two kinds are looked for here:

- merge: the part of G that a group of samples makes is one rank-one matrix, to rounding, so one
  sample at its row explains the group (samples in one cell whose columns are parallel, or twins);
- scale: weight and bias gradient were not scaled alike, or not all of it was sent, so that G is
  exactly what other inputs, `Case.seen`, would have given with the same columns.

In both the rival must be on wherever its column is not zero; otherwise the layer speaks against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from verdict_cases.base import Case


@dataclass(frozen=True)
class Rival:
    """Another input that the layer cannot tell from these samples."""

    kind: str
    x: Tensor  # (n,)
    samples: tuple[int, ...]


def rivals(case: Case) -> list[Rival]:
    if case.truth is None or case.columns is None or len(case.columns) != len(case.truth):
        return []
    D = case.columns.double()
    shown = case.truth if case.seen is None else case.seen
    X = torch.cat([shown.double(), torch.ones(len(shown), 1, dtype=torch.float64)], 1)
    found = []
    if case.seen is not None:
        found = [Rival("scale", X[i, :-1], (i,)) for i in range(len(X)) if _on(case, X[i], D[i])]
    if case.view.samples is None:  # a number that was told speaks against a merge
        found += [rival for group in _groups(case, D, X) for rival in _merged(case, D, X, group)]
    return found


def _groups(case: Case, D: Tensor, X: Tensor) -> list[tuple[int, ...]]:
    """Samples that hang together by pairs which are one sample, to rounding."""
    head = list(range(len(D)))
    for i, j in combinations(range(len(D)), 2):
        if head[i] != head[j] and _second(D[[i, j]], X[[i, j]]) <= case.rounding:
            old, new = head[j], head[i]
            head = [new if h == old else h for h in head]
    groups = [tuple(i for i, h in enumerate(head) if h == own) for own in set(head)]
    return [group for group in groups if len(group) > 1]


def _merged(case: Case, D: Tensor, X: Tensor, group: tuple[int, ...]) -> list[Rival]:
    part = D[list(group)].T @ X[list(group)]
    if _second(D[list(group)], X[list(group)]) > case.rounding:
        return []
    u, s, v = torch.linalg.svd(part, full_matrices=False)
    if abs(float(v[0, -1])) < 1e-12:
        return []
    row = v[0] / v[0, -1]
    column = u[:, 0] * s[0] * v[0, -1]
    return [Rival("merge", row[:-1], group)] if _on(case, row, column) else []


def _second(D: Tensor, X: Tensor) -> float:
    """The second singular value of D^T X, or zero if it is no more than float64 leaves of the first."""
    product = torch.linalg.qr(D.T).R @ torch.linalg.qr(X.T).R.T
    first, second = torch.linalg.svdvals(product)[:2]
    return float(second) if second > _left(first) else 0.0


def _left(size: Tensor) -> float:
    """What float64 leaves of zero in a product of this size."""
    return 10 * torch.finfo(torch.float64).eps * float(size)


def _on(case: Case, row: Tensor, column: Tensor) -> bool:
    """Is the neuron on wherever the column is not zero, to rounding?"""
    weight, bias = case.view.weight.double(), case.view.bias.double()
    z = weight @ row[:-1] + bias
    slack = 1e-5 * float(z.abs().max())
    live = column.abs() * float(row.norm()) > max(case.rounding, _left(column.norm() * row.norm()))
    return bool((z[live] > -slack).all())
