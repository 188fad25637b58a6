"""What the order of mini-batches cannot explain: a client among simulated ones.

Nobody knows the order in which a client took its samples. But clients that train on the recovered
samples in orders of their own can be simulated, and if these samples are right, the client is one of
them. What its order adds to the mean of all orders lies where other orders lead, too. So the weight of
a part of the update, what was sent = (1 + w) mean + what an order adds, is estimated by generalised
least squares, with the covariance of the last term from half of the simulated clients. The other half
goes through the same estimate. Their w is zero, so what comes out says how far the client's may be off:
whatever the covariance missed is in there.

The samples' columns, weights of later layers and biases of later layers weigh as simulated if inputs
are right and all parameters moved at the rate that was told. A rival says that some moved faster, and
that inputs have another scale: simulated as well, it shows how far these three weights would be off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.tolerances import DEVIATIONS_TO_SPARE, TRAINING_CLOSELY

_RIDGE = 1e-2  # of the largest variance that orders make; 1e-1 to 1e-4 gave much the same errors


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the update: one sample's column, or a parameter of a later layer."""

    clients: Tensor  # (k, entries): of simulated clients
    sent: Tensor  # (entries,): of the client
    rivals: Tensor  # (r, q, entries): of the last q clients, if a rival were true

    @property
    def shown(self) -> int:
        """How many clients show the covariance; the others show what is wrong with it."""
        return len(self.clients) // 2

    def weights(self) -> Tensor:
        """Less one, of the other clients, and the client's (k / 2 + 1,)."""
        return self._weights(
            torch.cat([self.clients[self.shown :], self.sent.to(self.clients)[None]])
        )

    def slopes(self) -> Tensor:
        """How much heavier it would be if a rival were true (r,)."""
        last = self.clients[-self.rivals.shape[1] :]
        return (self._weights(self.rivals) - self._weights(last)).mean(1)

    def _weights(self, seen: Tensor) -> Tensor:
        mean, weighted = self._estimate
        weights: Tensor = (seen.to(mean) - mean) @ weighted / (mean @ weighted)
        return weights

    @cached_property
    def _estimate(self) -> tuple[Tensor, Tensor]:
        """The mean (entries,), and the mean times the inverse covariance, up to a factor."""
        shown = self.clients[: self.shown].double()
        mean = shown.mean(0)
        noise = (shown - mean) / math.sqrt(self.shown - 1)  # its square is the covariance
        gram = noise @ noise.T
        ridge = _RIDGE * torch.linalg.matrix_norm(gram, 2)
        factor = torch.linalg.cholesky(gram + ridge * torch.eye(self.shown).to(gram))
        explained = torch.cholesky_solve((noise @ mean)[:, None], factor)[:, 0]
        return mean, mean - noise.T @ explained  # by Woodbury


@dataclass(frozen=True, eq=False)
class Comparison:
    """The client among simulated ones."""

    weight: Tensor  # (groups,): of groups of parts, less one
    covariance: Tensor  # (groups, groups): of that
    slopes: Tensor  # (r, groups): by how true a rival is

    @property
    def distance(self) -> float:
        """How far from simulated clients, in standard deviations of these."""
        return float(self._whitened(self.weight[None]).norm())

    @property
    def worst(self) -> tuple[float, float]:
        """Of the rival that may be truest: how true it is, and the standard deviation of that."""
        slopes, weight = self._whitened(self.slopes), self._whitened(self.weight[None])[0]
        shares, errors = slopes @ weight / slopes.square().sum(1), 1 / slopes.norm(dim=1)  # (r,)
        worst = int((shares.abs() + DEVIATIONS_TO_SPARE * errors).argmax())
        return float(shares[worst]), float(errors[worst])

    def _whitened(self, rows: Tensor) -> Tensor:
        """Rows (r, groups) in units of the covariance."""
        factor = torch.linalg.cholesky(self.covariance)
        white: Tensor = torch.linalg.solve_triangular(factor, rows.T, upper=False).T
        return white


def compare(groups: Sequence[Sequence[Part]]) -> Comparison:
    """The weights of groups of parts, which count by how little simulated clients differ in them."""
    weights, slopes = [], []
    for parts in groups:
        each = torch.stack([part.weights() for part in parts])  # (parts, k / 2 + 1)
        trust = 1 / each[:, :-1].var(1)
        trust = trust / trust.sum()
        weights.append(trust @ each)
        slopes.append(trust @ torch.stack([part.slopes() for part in parts]))
    *others, own = torch.stack(
        weights, 1
    )  # (groups,) each: of simulated clients, and of the client
    alike = torch.stack(others)
    covariance = torch.cov(alike.T).reshape(len(groups), -1) * (1 + 1 / len(others))
    rounding = TRAINING_CLOSELY**2 * torch.eye(len(groups)).to(own)
    return Comparison(own - alike.mean(0), covariance + rounding, torch.stack(slopes, 1))
