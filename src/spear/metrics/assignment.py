"""Which recovered sample is which true one: the assignment of least total cost."""

from __future__ import annotations

from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

from spear.errors import InvalidOption


@dataclass(frozen=True, eq=False)
class Assignment:
    """Pairs of a recovered and a true sample, in the order of the recovered ones."""

    found: Tensor  # (p,) int64, ascending: recovered samples
    truth: Tensor  # (p,) int64: the true sample of each
    missing: int  # true samples without a recovered one
    surplus: int  # recovered samples without a true one

    def __len__(self) -> int:
        return len(self.found)


def assign(recovered: Tensor, truth: Tensor) -> Assignment:
    """Pair recovered samples (k, ...) with true ones (b, ...) by least total squared distance.

    Neither argument is changed or reordered. A recovered sample with NaN or infinite entries gets
    a true one that nobody else wants.

    >>> x = torch.eye(3)
    >>> pairs = assign(x[[2, 0]], x)
    >>> pairs.truth.tolist(), pairs.missing, pairs.surplus
    ([2, 0], 1, 0)
    """
    found, true = comparable(recovered, truth)
    cost = found.square().sum(1)[:, None] + true.square().sum(1) - 2 * found @ true.T  # (k, b)
    return least_cost(cost)


def least_cost(cost: Tensor) -> Assignment:
    """The assignment of least total cost, from costs (k, b). Rows that are not finite come last."""
    k, b = cost.shape
    usable = cost.isfinite().all(1).nonzero().flatten()
    # Left out rather than given a high cost: one huge cost would drown the others' differences.
    rows, columns = scipy.optimize.linear_sum_assignment(cost[usable].numpy())
    pairs = dict(zip(usable[rows].tolist(), columns.tolist(), strict=True))
    left = [column for column in range(b) if column not in set(pairs.values())]
    broken = [row for row in range(k) if not bool(cost[row].isfinite().all())]
    pairs.update(zip(broken, left, strict=False))
    found = sorted(pairs)
    return Assignment(
        torch.tensor(found, dtype=torch.int64),
        torch.tensor([pairs[row] for row in found], dtype=torch.int64),
        missing=b - len(found),
        surplus=k - len(found),
    )


def comparable(recovered: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 rows on the CPU, (k, n) and (b, n); raises if they do not fit together."""
    problems = []
    if recovered.ndim < 2 or recovered.shape[1:] != truth.shape[1:]:
        problems.append(
            f"expected samples of shape (k, {_shape(truth)}), got "
            f"{tuple(recovered.shape)}: reshape them to the truth's"
        )
    if not bool(truth.isfinite().all()):
        problems.append("expected a finite truth, got NaN or infinite entries")
    if problems:
        raise InvalidOption("; ".join(problems))
    return as_rows(recovered), as_rows(truth)


def as_rows(samples: Tensor) -> Tensor:
    """Samples (k, ...) as rows (k, n), float64, on the CPU, without a graph."""
    return samples.detach().flatten(1).double().cpu()


def _shape(truth: Tensor) -> str:
    return ", ".join(str(size) for size in truth.shape[1:])
