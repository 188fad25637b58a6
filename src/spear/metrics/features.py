"""Compare recovered features with the true ones, by the angle between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spear.metrics.assignment import comparable, least_cost
from spear.metrics.summaries import Average


@dataclass(frozen=True, eq=False)
class FeatureScore:
    """Cosine similarities of recovered features, each with the true ones assigned to it."""

    cosine: Tensor  # (p,) in the order of the recovered samples; NaN where one of the two is zero
    truth: Tensor  # (p,) int64
    missing: int
    surplus: int

    @property
    def average(self) -> Average:
        return Average.of(self.cosine, self.missing)


def score_features(recovered: Tensor, truth: Tensor) -> FeatureScore:
    """Assign recovered features (k, ...) to true ones (b, ...) by the greatest total cosine.

    The length does not count, the sign does. Neither argument is changed or reordered.

    >>> import torch
    >>> x = torch.eye(3)
    >>> print(score_features(5 * x[[1, 0]], x).average)
    1 over 2 of 3 samples
    """
    found, true = comparable(recovered, truth)
    cosines = _unit(found) @ _unit(true).T  # (k, b)
    # A true zero has no direction: all recovered samples are equally close to it.
    pairs = least_cost(-cosines.where(true.any(1), 0.0))
    of_pairs = cosines[pairs.found, pairs.truth]
    return FeatureScore(of_pairs, pairs.truth, pairs.missing, pairs.surplus)


def _unit(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(
        1, keepdim=True
    )  # scale first: the squares of tiny entries would vanish
    scaled = rows / largest
    return scaled / scaled.square().sum(1, keepdim=True).sqrt()
