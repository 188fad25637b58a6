"""How one loss explains recovered samples, and what their gradients would be at another scale."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spear.tolerances import REPLAY_LIMIT

if TYPE_CHECKING:
    from spear.judge.replay import Replay

_ASKED_FIRST = 16  # samples, where one may answer for all
DIFFERENCE_STEP = 1e-6  # of z, for differences of gradients in float64
MOST_RANKED = 64  # outputs up to which the rank of a Jacobian is computed


class LossKind(Enum):
    """The losses that may explain an update, in words."""

    TOLD = "the loss that was told"
    CROSS_ENTROPY = "cross-entropy"
    ON_PROBABILITIES = "cross-entropy on outputs that are probabilities already"
    NEGATIVE_PROBABILITY = "the negative probability of the label (NLLLoss without a logarithm)"
    SOFT_LABELS = "cross-entropy with soft labels"
    SEVERAL_LABELS = "binary cross-entropy with several labels"
    ANY = "some loss"  # whose gradient at the outputs can be anything


@dataclass(frozen=True, eq=False)
class Fit:
    """How one loss explains the recovered columns of dL/dZ."""

    replay: Replay
    loss: LossKind
    told: bool  # is it the loss that was told?
    labels: Tensor | None  # (b,) int64: the nearest label; None where targets are free
    matched: Tensor  # (b,) bool: is the sample's gradient the recovered one?
    disagreements: tuple[str, ...]  # parts of the update that disagree; compared only if all match
    slopes: Tensor | None = None  # (b, outputs): gradients at the outputs, where targets are free
    weights: Tensor | None = None  # (b,): of gradients, in units of their weight in a batch of b
    soft_error: Tensor | None = None  # (b,): relative error of soft labels' weights

    @property
    def whole(self) -> bool:
        """Does `replay` hold every sample?"""
        return True

    @property
    def has_later(self) -> bool:
        """Are there gradients of later layers at all?"""
        return self.replay.has_later

    @property
    def can_compare(self) -> bool:
        """Are there gradients of later layers to compare with, from these samples alone?"""
        return self.replay.compared

    @property
    def is_precise(self) -> bool:
        """Is the update precise enough for a replay to tell?"""
        return self.replay.is_precise

    @property
    def compared(self) -> bool:
        """Was the whole update compared, later layers included?"""
        return self.can_compare and bool(self.matched.all())

    @property
    def agrees(self) -> bool:
        """Does the whole update agree?"""
        return self.compared and not self.disagreements

    @property
    def usable(self) -> bool:
        """Does it explain most samples, with nothing in the update that disagrees?"""
        most = 2 * int(self.matched.sum()) > len(self.matched)
        return most and not self.disagreements

    @cached_property
    def dimensions(self) -> int:
        """Dimensions of the gradients that samples with one ReLU pattern can have."""
        outputs = self.replay.outputs
        if self.slopes is not None:
            balanced = self.slopes.sum(1).abs() <= REPLAY_LIMIT * self.slopes.norm(dim=1)
            varied = 1 if outputs == 2 and bool(balanced.all()) else outputs
        else:
            varied = self.replay.label_dimensions
        if outputs > MOST_RANKED:
            return varied
        J = self.replay.jacobians(self.replay.Z[:1])[0]  # (outputs, m)
        return min(varied, int(torch.linalg.matrix_rank(J, rtol=REPLAY_LIMIT)))

    @cached_property
    def tolerance(self) -> Tensor:
        """How far a true sample's gradient may be off (b,), relative to its length."""
        if self.labels is None:
            return self.replay.free_target_tolerance
        return self.replay.tolerance(self.labels)

    @property
    def weight_error(self) -> Tensor:
        """Relative error of `weights` (b,), for both sides of a comparison."""
        return 2 * self.tolerance if self.soft_error is None else self.soft_error

    @cached_property
    def weighing_alike(self) -> int:
        """How many samples weigh as much as the usual one; two count only if they weigh one."""
        if self.weights is None or not bool(self.matched.any()):
            return 0
        known, error = self.weights[self.matched], self.weight_error[self.matched]
        ones = int(((known - 1).abs() <= error).sum())
        alike = int(((known / known.median() - 1).abs() <= error).sum())
        return max(ones, alike if alike > 2 else 0)

    @property
    def weighs_evenly(self) -> bool:
        """Do all samples that match weigh alike?"""
        return self.weighing_alike == int(self.matched.sum())

    @cached_property
    def single_gradients(self) -> Tensor:
        """dL/dz (b, m) of every sample with its label, each in a batch of its own."""
        assert self.labels is not None
        return self.replay.single_gradients(self.replay.Z, self.labels)

    def curvature(self, steps: Tensor) -> Tensor:
        """How fast each column of dL/dZ leaves the span of all (b,), for a step (b, m) of every z.

        What stays in the span only changes weights or mixes samples, which shows elsewhere.
        """
        turned, factors = self.turned(steps), self.replay.factors
        left = factors.left
        if factors.row_factors is not None:
            turned = turned * factors.row_factors
        rate: Tensor = (turned - (turned @ left) @ left.T).norm(dim=1)
        return rate

    def turned(self, steps: Tensor) -> Tensor:
        """How each column of dL/dZ changes (b, m), per length of a step (b, m) of every z."""
        replay = self.replay
        if self.labels is None:
            J = replay.jacobians(replay.Z)
            moved = (J @ steps[:, :, None])[:, :, 0]  # (b, outputs)
            return (replay.slope_change(moved, self)[:, None] @ J)[:, 0]
        h = DIFFERENCE_STEP * replay.Z.norm(dim=1) / steps.norm(dim=1).clamp_min(1e-300)
        there = replay.single_gradients(replay.Z + h[:, None] * steps, self.labels)
        here = self.single_gradients
        weight = weight_along(here, replay.D)
        turned: Tensor = (there - here) / h[:, None] * weight[:, None].abs()
        return turned

    # The same samples at another scale: x t, and so d / t.

    def off_at(self, scale: Tensor) -> Tensor:
        """How far columns are off (b,), in units of their tolerance, with inputs this much larger."""
        if self.labels is None:
            return torch.zeros_like(scale)  # a free gradient adapts
        return relative_distance(self._gradient_at(scale), self.replay.D) / self.tolerance

    def breaks_at(self, scale: Tensor) -> bool:
        """Is any column that matches off by more than its tolerance, with inputs this much larger?

        A few are asked first, those that are known most closely.
        """
        if self.labels is None or not bool(self.matched.any()):
            return False
        few = self.tolerance.masked_fill(~self.matched, torch.inf).argsort()[:_ASKED_FIRST]
        Z, D = self.replay.scaled(scale)[few], self.replay.D[few]
        off = relative_distance(self.replay.gradient(Z, self.labels[few]), D)
        if bool((off > self.tolerance[few])[self.matched[few]].any()):
            return True
        return bool((self.off_at(scale) > 1)[self.matched].any())

    def weights_at(self, scale: Tensor) -> Tensor | None:
        """`weights` (b,) with inputs this much larger (b,)."""
        if self.labels is None:
            return None
        return weight_along(self._gradient_at(scale), self.replay.D / scale[:, None])

    def _gradient_at(self, scale: Tensor) -> Tensor:
        """dL/dz (b, m), up to a common factor, with inputs this much larger (b,)."""
        assert self.labels is not None
        for known, gradient in self._scaled:
            if torch.equal(known, scale):
                return gradient
        gradient = self.replay.gradient(self.replay.scaled(scale), self.labels)
        self._scaled.append((scale, gradient))
        return gradient

    @cached_property
    def _scaled(self) -> list[tuple[Tensor, Tensor]]:
        """Scales that were asked about, and the gradients there."""
        return []

    def update_off_at(self, scale: Tensor, *, biases: bool) -> float:
        """How far later layers are off, in units of what is allowed, with inputs this much larger."""
        replay = self.replay
        if not replay.compared:
            return 0.0
        total = self._total(replay.scaled(scale), replay.D / scale[:, None])
        return max((off for _, off, _ in self._off(total, biases)), default=0.0)

    def alone_off_at(self, scale: Tensor, which: Tensor) -> Tensor:
        """The same (b,) with one sample at another scale and the others as they are.

        For some samples (b,) bool: each takes a pass through the network. Zero for the others.
        """
        replay = self.replay
        here = self._totals(replay.Z, replay.D)
        there = self._totals(replay.scaled(scale), replay.D / scale[:, None])
        whole, off = here.sum(), torch.zeros_like(scale)
        for i in which.nonzero().flatten().tolist():
            replay.factors.check_time()
            alone = self._off(whole - here[i] + there[i], True)
            off[i] = max((o for _, o, _ in alone), default=0.0)
        return off

    def _totals(self, Z: Tensor, D: Tensor) -> Tensor:
        """The loss of every sample (b,), weighted so that its gradient is D."""
        replay = self.replay
        if self.labels is None:
            slopes, _ = replay.at_outputs(Z, D)
            weighed: Tensor = (replay.outputs_at(Z) * slopes).sum(1)
            return weighed
        single = replay.single_gradients(Z, self.labels)
        factor = weight_along(single, D)
        return factor * replay.single_losses(replay.outputs_at(Z), self.labels)

    def _total(self, Z: Tensor, D: Tensor) -> Tensor:
        return self._totals(Z, D).sum()

    def _off(self, total: Tensor, biases: bool) -> list[tuple[str, float, float]]:
        return self.replay.compare(total, float(self.tolerance.max()), biases=biases)


def in_known_rows(s: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients s (..., m) and D (..., m) without the entries in which D is not known (NaN)."""
    unknown = D.isnan()
    if not bool(unknown.any()):
        return s, D
    return torch.where(unknown, 0.0, s), torch.where(unknown, 0.0, D)


def weight_along(s: Tensor, D: Tensor) -> Tensor:
    """What gradients s (..., m) are multiplied by in D (..., m), by least squares."""
    s, D = in_known_rows(s, D)
    weight: Tensor = (s * D).sum(-1) / s.square().sum(-1)
    return weight


def relative_distance(s: Tensor, D: Tensor) -> Tensor:
    """How far D (..., m) is from gradients s (..., m), up to one positive factor, relative to it."""
    s, D = in_known_rows(s, D)
    along = (s * D).sum(-1).clamp_min(0) / s.square().sum(-1)
    distance: Tensor = (D - along[..., None] * s).norm(dim=-1) / D.norm(dim=-1)
    return distance.nan_to_num(torch.inf)
