"""Candidates as the paper collects them: whatever is sparse enough, mixes of samples included."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spear.directions import Watch, unit
from spear.factors import Side
from spear.pool import Pool
from spear.sampling import SamplingFinder


class PlainPool(Pool):
    """Keeps every candidate that passes the sparsity filter, with nothing held against mixes.

    Ours asks besides that a direction is held by more zeros than it was solved for. A mix of samples is
    not, so that hardly any is left for the second stage of the choice to throw out.
    """

    def _add(self, candidates: Tensor) -> None:
        candidates, _ = self._sparse(candidates[~self._firm.holds(candidates)])
        self._take(candidates)

    def _keep(self, q: Tensor, zeros: Tensor) -> Tensor:
        white = unit((q * self.side.scales)[None])
        if int(zeros.sum()) + self.side.silent >= self.threshold * self.side.size:
            self._firm.add(q, zeros, white, 0)  # firmness is not looked at: sparsity alone decides
        return white


@dataclass(frozen=True)
class PlainFinder(SamplingFinder):
    """Algorithm 1 with the paper's filter alone."""

    def _pool(self, side: Side, watch: Watch) -> Pool:
        return PlainPool(side, self._threshold(side), watch)
