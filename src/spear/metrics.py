"""How good a recovery is, given the truth. Never imported by an attack.

"Exact" means: every sample at least 60 dB PSNR after the best assignment, de-normalised to [0, 1],
in float64, not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

EXACT_DB = 60.0
# Bit-for-bit equality has no finite PSNR; it is reported as this.
PERFECT_DB = 400.0


@dataclass(frozen=True, eq=False)
class Score:
    """Recovered samples against the true ones."""

    psnr: Tensor  # (k,) dB, in the order of the recovered samples
    truth: Tensor  # (k,) int64: the true sample each recovered one was assigned to
    missing: int  # true samples nothing was assigned to

    @property
    def exact(self) -> bool:
        return self.missing == 0 and len(self.psnr) > 0 and bool((self.psnr >= EXACT_DB).all())

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
    if recovered.shape[1:] != truth.shape[1:]:
        raise ValueError(
            f"expected samples of shape {tuple(truth.shape[1:])}, got {recovered.shape}"
        )
    found = recovered.detach().flatten(1).double().cpu()
    true = truth.detach().flatten(1).double().cpu()
    # Squared distances up to a constant per row decide the assignment; each pair is then exact.
    cost = true.square().sum(1)[None] - 2 * found @ true.T
    rows, columns = linear_sum_assignment(cost.nan_to_num(1e300).numpy())
    pairs = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    matched = [pairs[i] for i in range(len(found)) if i in pairs]
    mse = (found[list(pairs)] - true[matched]).square().mean(1)
    psnr = torch.where(mse == 0, PERFECT_DB, -10 * mse.log10()).nan_to_num(-PERFECT_DB)
    return Score(psnr, torch.tensor(matched, dtype=torch.int64), len(true) - len(matched))
