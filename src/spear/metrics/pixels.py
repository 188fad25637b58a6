"""Errors sample by sample: PSNR, MSE, MAE, and the verdict "exact".

"Exact" means: every sample at least 60 dB PSNR after the best assignment, de-normalised to [0, 1],
in float64, not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import InvalidOption
from spear.metrics.assignment import as_rows, assign, comparable

EXACT_DB = 60.0
# Reported for bit-for-bit equality, whose PSNR is infinite.
PERFECT_DB = 400.0


@dataclass(frozen=True, eq=False)
class Score:
    """Recovered samples against the true ones."""

    psnr: Tensor  # (k,) dB, in the order of the recovered samples
    truth: Tensor  # (k,) int64: the true sample each recovered one was assigned to
    missing: int  # true samples without a recovered one
    surplus: int = 0  # recovered samples without a true one; they have no PSNR

    @property
    def exact(self) -> bool:
        complete = self.missing == 0 and self.surplus == 0 and len(self.psnr) > 0
        return complete and bool((self.psnr >= EXACT_DB).all())

    @property
    def mean(self) -> float | None:
        """Mean PSNR over the recovered samples; None if there are none."""
        return float(self.psnr.mean()) if len(self.psnr) else None

    @property
    def worst(self) -> float | None:
        return float(self.psnr.min()) if len(self.psnr) else None


def score(recovered: Tensor, truth: Tensor) -> Score:
    """Assign recovered samples (k, n) to true ones (b, n) and measure each pair.

    Both in [0, 1] units. Neither argument is changed or reordered.

    >>> x = torch.rand(3, 10, dtype=torch.float64)
    >>> s = score(x[[2, 0, 1]] + 1e-5, x)
    >>> s.truth.tolist(), round(s.worst), s.exact
    ([2, 0, 1], 100, True)
    """
    found, true = comparable(recovered, truth)
    pairs = assign(found, true)
    return Score(
        psnr(found[pairs.found], true[pairs.truth]), pairs.truth, pairs.missing, pairs.surplus
    )


def mse(recovered: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error of each pair: (k, ...) against (k, ...) to (k,), float64.

    >>> mse(torch.tensor([[0.0, 0.5]]), torch.tensor([[0.0, 0.0]])).tolist()
    [0.125]
    """
    return _difference(recovered, truth).square().mean(1)


def mae(recovered: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error of each pair: (k, ...) against (k, ...) to (k,), float64.

    >>> mae(torch.tensor([[0.0, 0.5]]), torch.tensor([[0.0, 0.0]])).tolist()
    [0.25]
    """
    return _difference(recovered, truth).abs().mean(1)


def psnr(recovered: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each pair in [0, 1] units, in dB: (k, ...) to (k,), float64.

    Equal bits give `PERFECT_DB`; NaN and infinite entries give `-PERFECT_DB`.

    >>> psnr(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]])).tolist()
    [400.0]
    """
    error = mse(recovered, truth)
    decibel = torch.where(error == 0, PERFECT_DB, -10 * error.log10())
    return decibel.nan_to_num(nan=-PERFECT_DB, neginf=-PERFECT_DB)


def _difference(recovered: Tensor, truth: Tensor) -> Tensor:
    check_pairs(recovered, truth)
    return as_rows(recovered) - as_rows(truth)


def check_pairs(recovered: Tensor, truth: Tensor) -> None:
    """Raise unless both hold the same number of samples of one shape."""
    if recovered.shape != truth.shape or recovered.ndim < 2:
        raise InvalidOption(
            f"expected pairs of one shape (k, ...), got {tuple(recovered.shape)} and "
            f"{tuple(truth.shape)}: pair them with spear.metrics.assign first"
        )
