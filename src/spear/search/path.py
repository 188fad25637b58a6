"""One pass over mini-batches: every sample has the signs of its own step.

The first batch saw the weights that were sent out, so its signs are known. What is found of it says
what weights the second batch saw, and so on: a sample's step takes d x^T off the weights, and d and x
are what is being found. With x = c S V^T in the coordinates of dual.py,

    z of a sample c falls by  lr d (c_j S^2 + h) . c   for every sample j of an earlier step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors
from spear.search.candidates import CandidatePool
from spear.search.dual import SIGN_AGREEMENT, DualProblem, deflate, dual_problem, read_samples
from spear.search.kernels import sparsest_independent
from spear.search.watch import Watch


@dataclass(frozen=True, eq=False)
class OnePass:
    """What is known of the weights between the mini-batches of one epoch."""

    whole: DualProblem  # with the signs at the start
    metric: Tensor  # (b,): x_i . x_j = c_i metric c_j
    rate: float  # that a gradient is multiplied by when it is taken off the weights
    size: int  # samples in a step
    nearly: float  # share of signs that must agree where weights are known in part

    @staticmethod
    def of(factors: Factors) -> OnePass | None:
        """None unless the client went once through its samples, a few at a time."""
        protocol = factors.protocol
        size = protocol.local_batch_size
        once = protocol.epochs == 1 and not (protocol.momentum or protocol.lr is None)
        if not (factors.trained and once and size is not None and size < factors.b):
            return None
        whole = dual_problem(factors)
        start = dataclasses.replace(whole, H=whole.H[:1], least_agreement=SIGN_AGREEMENT)
        metric = factors.singular_values.square()
        return OnePass(start, metric, protocol.rate, size, whole.least_agreement)

    def missing(self, pool: CandidatePool, turn: int, watch: Watch) -> DualProblem:
        """What the samples found leave, with the signs of a step that is not complete.

        Args:
            pool: the directions found.
            turn: which of these steps: the first, the second, and so on, then the first again.
            watch: with the workers, if there are any.
        """
        q, off = pool.overdetermined()
        chosen = sparsest_independent(q.T, off.sum(1).double())
        q, off = q[chosen], off[chosen]
        at, c = self.whole, torch.zeros_like(q)
        open_ = torch.ones(len(q), dtype=torch.bool, device=q.device)
        incomplete: list[tuple[DualProblem, Tensor, Tensor]] = []
        while True:
            read, share = read_samples(at, q, off, watch)
            best = share.masked_fill(~open_, -1.0).argsort(descending=True)[: self.size]
            best = best[open_[best] & (share[best] >= at.least_agreement)]
            if len(best) < self.size:
                incomplete.append((at, read, share))
            if not len(best):
                break
            c[best], open_[best] = read[best], False
            at = self._after(at, q[best], c[best])
        # What was read from weights that are known in part agrees less: each where it agrees best.
        share, step = torch.stack([share for _, _, share in incomplete]).max(0)
        reads = torch.stack([read for _, read, _ in incomplete])  # (steps, k, b)
        nearly = open_ & (share >= self.nearly)
        c[nearly] = reads[step[nearly], nearly.nonzero().flatten()]
        known = ~open_ | nearly
        return deflate(incomplete[turn % len(incomplete)][0], q[known], c[known])

    def _after(self, at: DualProblem, q: Tensor, c: Tensor) -> DualProblem:
        """The problem with the signs after a step of these samples (k, b)."""
        t = c @ at.h  # (k,): c / t is of the sample's own size, and so is q t
        moved = (at.U @ (q * t[:, None]).T) @ (c / t[:, None] * self.metric + at.h)  # (rows, b)
        return dataclasses.replace(at, H=at.H - self.rate * moved)
