"""When exhaustive sampling must miss a direction: by ranks, and by looking at every submatrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, islice

import torch
from torch import Tensor

from spear import theory
from spear.directions import unit

# Values below this, relative to the largest, are zero. Float64 leaves 1e-15 times the condition of a
# submatrix; ranks of such small random matrices are decided by patterns of zeros, not by numbers.
_ZERO = 1e-10
_AT_ONCE = 1 << 14  # submatrices


def needed_zeros(b: int, m: int, p_fr: float) -> int:
    """Zeros that the sparsity filter demands; b-1 come for free with every kernel."""
    return round(theory.sparsity_threshold(m, p_fr) * m) if b > 1 else 0


def missed_by_rank(D: Tensor, p_fr: float) -> Tensor:
    """Which of the matrices dL/dZ (N, m, b) hide a direction from exhaustive sampling, (N,) bool.

    With L Q = dL/dZ, rows S of L have the kernel Q ker(dL/dZ_S). So a submatrix gives exactly
    direction i, the i-th column of Q, if and only if ker(dL/dZ_S) is the line along e_i: column i is
    zero on S, and dL/dZ_S has rank b-1. All such S lie in Z_i, the rows in which column i is zero. If
    dL/dZ on Z_i has rank b-1, some b-1 of its rows are independent and are such an S; if it has less,
    no subset has more. (More than b-1 it cannot have: its column i is zero.) So direction i is missed
    if and only if rank(dL/dZ[Z_i]) < b-1, or the filter rejects it: |Z_i| < tau m.
    """
    _, m, b = D.shape
    zeros = D == 0  # (N, m, b)
    missed = (zeros.sum(1) < needed_zeros(b, m, p_fr)).any(1)
    for i in range(b):
        rows = D * zeros[:, :, i : i + 1]  # other rows as zeros: they add no rank
        values = torch.linalg.svdvals(rows)  # (N, min(m, b))
        missed |= (values > _ZERO * values[:, :1]).sum(1) < b - 1
    return missed


def missed_by_looking(D: Tensor, p_fr: float, generator: torch.Generator) -> bool:
    """Does a dL/dZ (m, b) hide a direction? By the kernels of all its (b-1)-row submatrices.

    L is dL/dZ in a random basis, as a server has it. Kernels of rank b-1 whose L q has enough zeros
    are candidates; each of the b columns of Q must be among them, up to sign.
    """
    m, b = D.shape
    Q = torch.linalg.qr(torch.randn(b, b, generator=generator, dtype=D.dtype)).Q
    L = D @ Q.T  # so that L Q = dL/dZ
    missing = Q.T.clone()  # (k, b) directions not found yet
    for rows in _all_rows(m, b - 1):
        _, values, kernels = torch.linalg.svd(L[rows])  # (n, b-1), (n, b, b)
        q = kernels[values[:, -1] > _ZERO * values[:, 0], -1]  # (n', b)
        enough = ((q @ L.T).abs() <= _ZERO * L.abs().max()).sum(1) >= needed_zeros(b, m, p_fr)
        found = ((unit(missing) @ q[enough].T).abs() > 1 - _ZERO).any(1)
        missing = missing[~found]
    return len(missing) > 0


def _all_rows(m: int, size: int) -> Iterator[Tensor]:
    """Indices (n, size) of all submatrices, a few thousand at a time."""
    choices = combinations(range(m), size)
    while part := list(islice(choices, _AT_ONCE)):
        yield torch.tensor(part)


def submatrices(b: int, m: int) -> int:
    """How many submatrices there are to look at."""
    return math.comb(m, b - 1)
