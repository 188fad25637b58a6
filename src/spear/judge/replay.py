"""Runs recovered samples through the model again: which loss explains the update, and how well.

A column of dL/dZ is d = J^T s, with J the Jacobian of the network behind the layer at the recovered z,
and s the loss's gradient at the outputs. If the loss has labels, s is known up to label and weight. If
its targets are free numbers, s is whatever solves d = J^T s; with far fewer outputs than neurons that
says nearly as much. The s found must then reproduce the gradients of all later layers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from spear.errors import Declined
from spear.judge.layer import Part, Recovered
from spear.judge.losses import (
    Criterion,
    Loss,
    Outputs,
    UserCodeFailed,
    compares_numbers,
    gradients_of,
    in_double,
    is_binary,
    is_squared_error,
    logits_of,
    negative_probability,
    users_code,
    usual_loss,
)
from spear.judge.relu_boundary import MOST_FLIPS, smallest_steps
from spear.tolerances import (
    LATER_NOISE,
    LATER_NOISE_LIMIT,
    MARGIN,
    REPLAY_LIMIT,
    ROUNDINGS,
    UNDECIDED,
    ZERO_DEVIATIONS,
)

T = TypeVar("T")

# Neighbours within the error of a recovered sample at which the replay is tried again: a neuron whose
# preactivation is zero to rounding may have been on the other side for the client.
_NEIGHBOURS = 16
_NEIGHBOUR_ERRORS = 20.0  # how many errors away the last one is: still well inside the tolerance
_NEAR_THRESHOLD = 1e-4  # of a typical preactivation: float32 rounds to 1e-6 of it
_ROWS_AT_ONCE = 1 << 14
_FAR_OFF = 4.0  # times the largest preactivation: a dropped neuron stays off at half its scale
_DIFFERENCE_STEP = 1e-6  # of z, for differences of gradients in float64
_ASKED_FIRST = 16  # samples, where one may answer for all
_NEURONS_PER_OUTPUT = 4  # neurons per output from which a gradient at the outputs can be solved for
_PARALLEL = 1e-12  # how far apart gradients at the outputs are that differ by a factor, in float64
_FEWEST_CLASSES = 6  # from which a straight line through all but two says something
_MOST_RANKED = 64  # outputs up to which the rank of a Jacobian is computed


@contextmanager
def replaying() -> Iterator[None]:
    """Gradients work, whatever the caller switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


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
        if outputs > _MOST_RANKED:
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
        h = _DIFFERENCE_STEP * replay.Z.norm(dim=1) / steps.norm(dim=1).clamp_min(1e-300)
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


class Replay:
    """The network behind the layer, in float64, at the recovered preactivations."""

    def __init__(
        self,
        found: Recovered,
        network: nn.Module,
        loss: Loss | None,
        relative_error: Tensor,
        part: Part,
    ) -> None:
        factors, selection = found.factors, found.selection
        self.factors, self.part = factors, part
        rows, some = part.rows, part.samples
        self.bias = factors.bias[rows]
        self.Z = found.Z[some][:, rows].clone()  # (b, m)
        if found.view.dropout:
            # A dropped neuron acts like one that is off: here far off, at any scale that is tried.
            farthest = torch.maximum(self.Z.abs().amax(), self.bias.abs().amax())
            dropped = ~found.kept[some][:, rows]
            self.Z = torch.where(dropped, self.bias - _FAR_OFF * farthest, self.Z)
        D = factors.output_gradients(selection.Q[:, some])[rows].T  # (b, m)
        self.D = D / part.factor
        # Frozen or masked neurons have no gradient, whatever the samples do.
        self.sent = None if selection.frozen is None else ~selection.frozen[rows]
        noise = factors.client_noise * selection.Q[:, some].norm(dim=0) * D.shape[1] ** 0.5
        noise = noise / D.norm(dim=1)
        relative_error = relative_error[some]
        self.unscaled = selection.unscaled is not None
        self.rounding = ROUNDINGS * part.eps
        self.sample_error = relative_error
        self.sample_tolerance = MARGIN * (noise + relative_error)  # (b,)
        self.relative_error = relative_error.clamp_min(part.eps)
        self.loss = usual_loss if loss is None else loss
        self._on_logits = loss is None
        self._forward: tuple[Tensor, Tensor] | None = None  # Z and outputs, with the graph between
        self._version = -1  # of Z, when it was last seen to be where these outputs are of
        self._backward: tuple[Tensor, Tensor, Tensor] | None = None  # Z, slopes and gradient
        with torch.no_grad(), users_code():
            two = network(self.Z[:1].repeat(2, 1))
        try:
            told = self.loss not in (usual_loss, negative_probability)
            self._read_outputs(network, two, whole=told)
        except UserCodeFailed:  # a loss that was told may take the main tensor only
            if isinstance(two, Tensor):
                raise
            self._read_outputs(network, two, whole=False)
        if factors.row_factors is not None:
            self._leave_out_drowned(selection.Q[:, some], factors.row_factors[rows])

    def _leave_out_drowned(self, Q: Tensor, row_factors: Tensor) -> None:
        """Make entries of D unknown (NaN) that louder samples drown, as far as others are enough.

        A faint sample's entries in rows of loud ones are rounding of these, and compared with the rest
        of its column they would hide it. They are known if their noise is no more than what a replay
        allows for the client's own rounding.
        """
        noise = self.factors.noise * Q.norm(dim=0)[:, None] / row_factors  # (b, m)
        shows = self.D.abs() > UNDECIDED * ZERO_DEVIATIONS * noise
        usual = self.D.abs().masked_fill(~shows, torch.nan).nanmedian(1, keepdim=True).values
        known = noise <= self.rounding * usual  # nowhere if nothing shows
        enough = (known & shows).sum(1) >= _NEURONS_PER_OUTPUT * self.outputs  # (b,)
        known |= ~enough[:, None]
        self.D = torch.where(known, self.D, torch.nan)
        left = noise.masked_fill(~known, 0.0).norm(dim=1) / self.D.nan_to_num(0.0).norm(dim=1)
        self.sample_tolerance = MARGIN * (left + self.sample_error)

    @staticmethod
    def prepare(
        found: Recovered, loss: Loss | None, relative_error: Tensor, part: Part | None = None
    ) -> Replay | Declined:
        device = found.factors.left.device
        part = found.parts[0] if part is None else part
        behind = found.view.network_behind() if part.round is None else part.round.behind
        if isinstance(behind, Declined):
            return behind
        for module in behind.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                return Declined(
                    "batch norm behind the layer is in train mode and couples the samples"
                )
        with users_code():
            network = copy.deepcopy(behind).to(device).to(torch.float64).requires_grad_(True)
            loss = None if loss is None else in_double(loss, device)
        return Replay(found, network, loss, relative_error, part)

    @staticmethod
    def attempt(
        found: Recovered,
        loss: Loss | None,
        *,
        relative_error: Tensor,
        use: Callable[[Replay], T],
        part: Part | None = None,
    ) -> T | Declined:
        """What `use` makes of the replay; or why there is none, if the user's model or loss fails."""
        with replaying():
            try:
                replay = Replay.prepare(found, loss, relative_error, part)
                return replay if isinstance(replay, Declined) else use(replay)
            except UserCodeFailed as failed:
                return declined(failed)

    @property
    def is_precise(self) -> bool:
        """Is the update precise enough for a replay to tell?"""
        return float((self.rounding / ROUNDINGS + self.sample_tolerance).median()) <= REPLAY_LIMIT

    # The network.

    @property
    def compared(self) -> bool:
        """Are there gradients of later layers to compare with, from these samples alone?"""
        return self.has_later and not (self.factors.zero_input or self.unscaled)

    @property
    def has_later(self) -> bool:
        """Are there gradients of later layers at all?"""
        return any(n in self.part.others for n, _ in self.network.named_parameters())

    def _read_outputs(self, network: nn.Module, two: object, *, whole: bool) -> None:
        """See what the network returns, and count a sigmoid or softmax at its end to the loss.

        Up to the logits, outputs are linear in z within a ReLU pattern. Cross-entropy is one of logits,
        whether or not the model turns them into probabilities.
        """
        with users_code():
            self.structure = Outputs(two, whole=whole)
        self.network, self.squash = logits_of(network, self._a_few_outputs)
        few = self._a_few_outputs(self.network)
        squash = None if self._on_logits else self.squash
        self.criterion = Criterion(self.loss, self.structure, squash, few)
        if not self.criterion.takes_every_label(few):  # the loss may be on another tensor
            others = self.structure.with_each_as_main()
            tried = (Criterion(self.loss, other, squash, few) for other in others)
            fitting = (each for each in tried if each.takes_every_label(few))
            self.criterion = next(fitting, self.criterion)
            self.structure = self.criterion.outputs
        self.outputs, self.classes = few.shape[1], max(2, self.structure.main_size)

    def _a_few_outputs(self, network: nn.Module) -> Tensor:
        """A network's outputs (k, outputs) at the first sample, nearer and nearer to the bias."""
        scale = 1 / torch.arange(1, self.structure.a_few + 1).to(self.Z)
        with torch.no_grad():
            return self.forward(network, (self.Z[:1] - self.bias) * scale[:, None] + self.bias)

    def run(self, Z: Tensor) -> Tensor:
        """The network's outputs (k, outputs)."""
        return self.forward(self.network, Z)

    def outputs_at(self, Z: Tensor) -> Tensor:
        """The outputs (k, outputs), from what is known of this replay's own Z."""
        return self.outputs_here() if Z is self.Z else self.run(Z)

    @torch.enable_grad()
    def outputs_here(self) -> Tensor:
        """The outputs (b, outputs) at Z, with their graph.

        Samples do not act on each other: of those known before, only what has moved since is run.
        """
        if self._forward is None:
            leaf = self.Z.clone().requires_grad_()
            self._forward = leaf, self.run(leaf)
        leaf, outputs = self._forward
        if self._version == self.Z._version:
            return outputs
        moved = (leaf.detach() != self.Z).any(1).nonzero().flatten()
        if not len(moved):
            self._version = self.Z._version
            return outputs
        if 2 * len(moved) > len(self.Z):
            self._forward = None
            return self.outputs_here()
        return outputs.index_copy(0, moved, self.run(self.Z[moved]))

    def forward(self, network: nn.Module, Z: Tensor) -> Tensor:
        """The outputs (k, outputs) of a network like this one."""
        with users_code():
            return self.structure.matrix(network(Z), len(Z))

    def scaled(self, scale: Tensor) -> Tensor:
        """Preactivations (b, m) of inputs this much larger (b,)."""
        return (self.Z - self.bias) * scale[:, None] + self.bias

    def jacobians(self, Z: Tensor) -> Tensor:
        """Jacobians of the outputs at every z, (k, outputs, m), in neurons that sent a gradient."""
        with torch.enable_grad():
            leaf = Z.detach().requires_grad_()
            if len(Z) == 1:  # all outputs in one pass, each of a copy
                leaf = Z.detach().repeat(self.outputs, 1).requires_grad_()
                J = gradients_of(self.run(leaf).trace(), leaf)[0][None]
                return J if self.sent is None else J * self.sent
            outputs = self.run(leaf).sum(0)  # samples do not act on each other
            rows = []
            for output in outputs:
                self.factors.check_time()
                rows.append(gradients_of(output, leaf, retain_graph=True)[0])
        J = torch.stack(rows, 1)
        return J if self.sent is None else J * self.sent

    def at_outputs(self, Z: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients at the outputs (k, outputs), and how far J^T of them is from D, relative (k,)."""
        J = self.jacobians(Z).transpose(1, 2)  # (k, m, outputs)
        J, D = in_known_rows(J.mT, D[:, None])
        J, D = J.mT, D[:, 0]
        # By QR, with scaled columns: a vanishing column of J takes nothing.
        lengths = J.norm(dim=1, keepdim=True).clamp_min(1e-300)
        Q, R = torch.linalg.qr(J / lengths)
        small = R.diagonal(dim1=1, dim2=2).abs() <= 1e-10
        R = R + torch.diag_embed(small.to(R))
        y = torch.where(small[:, :, None], 0.0, Q.transpose(1, 2) @ D[:, :, None])
        slopes = torch.linalg.solve_triangular(R, y, upper=True) / lengths.transpose(1, 2)
        rest = (J @ slopes)[:, :, 0] - D
        return slopes[:, :, 0], rest.norm(dim=1) / D.norm(dim=1)

    def slope_change(self, moved: Tensor, fit: Fit) -> Tensor:
        """How gradients at the outputs change as these move (b, outputs), where targets are free.

        Soft or several labels give a weight, and with it the curvature. Squared error, if told, has its
        own up to a factor of the whole update that nothing shows; it is taken to be smaller where
        outputs would be closer to their targets than they are large. Any other loss may have none.
        """
        assert fit.slopes is not None
        outputs = self.outputs_here().detach()
        slope_change: Tensor
        if fit.loss is LossKind.SOFT_LABELS and fit.weights is not None:
            p = outputs.softmax(1)
            slope_change = p * moved - p * (p * moved).sum(1, keepdim=True)
            return slope_change * fit.weights[:, None] / len(p)
        if fit.loss is LossKind.SEVERAL_LABELS and fit.weights is not None:
            sigma = outputs.sigmoid()
            slope_change = sigma * (1 - sigma) * moved
            return slope_change * fit.weights[:, None] / sigma.numel()
        if self.squash is not None or not is_squared_error(self.loss):
            return torch.zeros_like(moved)
        leaf = (outputs + moved).requires_grad_()
        with users_code():
            loss = self.loss(leaf, outputs).sum()
        (slope_change,) = gradients_of(loss, leaf)
        rate = slope_change.norm() / moved.norm().clamp_min(1e-300)
        away = fit.slopes.norm(dim=1) / rate  # from the targets, (b,)
        share: Tensor = (away / outputs.norm(dim=1)).clamp_max(1.0)
        return slope_change * share[:, None]

    # Losses, one after the other.

    def labelled(self, kind: LossKind, told: bool, generator: torch.Generator | None) -> Fit:
        """How the loss with labels explains the samples."""
        labels, matched = self.match_labels(generator)
        if self.outputs == 1:
            labels = torch.where(matched, self._labels_by_weight(labels), labels)
        weights = self.joint_weights(self.Z, self.D, labels)
        fit = Fit(self, kind, told, labels, matched, (), weights=weights)
        return self._with_disagreements(fit)

    def with_free_targets(self, kind: LossKind, told: bool) -> Fit | None:
        """How a loss with any gradient at the outputs explains them; None where that says nothing."""
        if _NEURONS_PER_OUTPUT * self.outputs > int((self.D.nan_to_num(0.0) != 0).any(0).sum()):
            return None
        slopes, off = self.at_outputs(self.Z, self.D)
        matched = off <= self.free_target_tolerance
        fit = Fit(self, kind, told, None, matched, (), slopes=slopes)
        if not compares_numbers(self.loss):
            fit = self._several_labels(fit)
        return self._with_disagreements(fit if told or fit.weights is not None else self._soft(fit))

    def _several_labels(self, fit: Fit) -> Fit:
        """The same with weights, if every output has its own label, zero or one.

        s = w (sigma - y), sigma the logistic function: y is one where s is negative, and w is the same
        for all outputs.
        """
        assert fit.slopes is not None
        s = fit.slopes
        sigma = self.outputs_here().detach().sigmoid()
        each = s / (sigma - (s < 0).to(s))  # (b, outputs)
        weights = each.median(1).values
        error = (self.rounding + self.sample_tolerance).clamp_max(REPLAY_LIMIT)
        rounding = error[:, None] * s.norm(dim=1, keepdim=True) / s.abs()
        same = ((each / weights[:, None] - 1).abs() <= rounding).all(1) & (weights > 0)
        if self.outputs < 2 or not bool(same[fit.matched].all()):
            return fit
        weights = weights * s.numel()
        return dataclasses.replace(
            fit, loss=LossKind.SEVERAL_LABELS, weights=weights, soft_error=2 * error
        )

    def _soft(self, fit: Fit) -> Fit:
        """The same with weights, if targets are those of cross-entropy with smoothed or mixed labels.

        s = w (p - t), p the softmax, and t is one number except for at most two classes, those that
        s pulls up most. So p = t + s / w is a straight line over all other classes, and its slope
        gives w.
        """
        assert fit.slopes is not None
        s = fit.slopes
        if self.outputs < _FEWEST_CLASSES:
            return fit
        p = self.outputs_here().detach().softmax(1)
        others = torch.ones_like(s, dtype=torch.bool).scatter_(1, s.argsort(1)[:, :2], False)
        p, s = p[others].view(len(s), -1), s[others].view(len(s), -1)
        p, s = p - p.mean(1, keepdim=True), s - s.mean(1, keepdim=True)
        per_weight = (p * s).sum(1) / s.square().sum(1)  # 1 / w
        rounding = (self.rounding + self.sample_tolerance).clamp_max(REPLAY_LIMIT)
        rounding = rounding * fit.slopes.norm(dim=1)
        off = (p - per_weight[:, None] * s).norm(dim=1)
        straight = off <= rounding * per_weight.abs() + self.rounding
        if not bool((straight & (per_weight > 0))[fit.matched].all()):
            return fit
        error = rounding / s.norm(dim=1)
        weights = len(s) / per_weight
        return dataclasses.replace(
            fit, loss=LossKind.SOFT_LABELS, weights=weights, soft_error=error
        )

    def _with_disagreements(self, fit: Fit) -> Fit:
        """The same with the parts of the update that disagree, if all samples match."""
        if not fit.compared:
            return fit
        off = fit._off(fit._total(self.Z, self.D), True)
        words = tuple(
            f"the replayed gradient of {name!r} is off by {share:.1e} of its norm"
            for name, excess, share in off
            if not excess <= 1
        )
        return dataclasses.replace(fit, disagreements=words)

    # Labels.

    def match_labels(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The label of each sample, and whether its gradient is the recovered one."""
        labels, residual = self.nearest_labels(self.Z)
        for i in (residual > self.tolerance(labels)).nonzero().flatten().tolist():
            self.Z[i], residual[i] = self.across_thresholds(i, labels[i], residual[i])
        recovered = self.Z.clone()
        for growth in torch.linspace(0, 1, _NEIGHBOURS).tolist():
            self.factors.check_time()
            open_ = residual > self.tolerance(labels)
            if not bool(open_.any()):
                break
            size = self.relative_error[open_, None] * _NEIGHBOUR_ERRORS**growth
            size = size * recovered.abs().mean()
            step = torch.randn(len(size), self.Z.shape[1], generator=generator).to(self.Z)
            neighbours = recovered[open_] + size * step
            tried, distance = self.nearest_labels(neighbours, self.D[open_])
            better = distance < residual[open_]
            labels[open_] = torch.where(better, tried, labels[open_])
            residual[open_] = torch.minimum(distance, residual[open_])
            self.Z[open_] = torch.where(better[:, None], neighbours, self.Z[open_])
        matched = (residual <= self.tolerance(labels)) & residual.isfinite()
        return self._within_rounding(labels, matched)

    def _labels_by_weight(self, labels: Tensor) -> Tensor:
        """Labels (b,) with which samples weigh most nearly one, where both have the right sign.

        One output beyond both labels is pulled the same way by either, as squared errors do.
        """
        each = torch.stack([torch.zeros_like(labels), torch.ones_like(labels)])  # (2, b)
        weights = torch.stack([self.joint_weights(self.Z, self.D, some) for some in each])
        away = weights.clamp_min(0).log().abs()  # infinite for the wrong sign
        return torch.where(away[0] == away[1], labels, away.argmin(0))

    def _within_rounding(self, labels: Tensor, matched: Tensor) -> tuple[Tensor, Tensor]:
        """Match samples that the network is sure of, whose gradient is little more than rounding.

        With 1 - p = 1e-6, float32 computes p - 1 to one digit, and dL/dz = J^T (p - e) points elsewhere
        than in an exact replay. But it is J^T of something, and that is p - e up to a rounding of one,
        once divided by the factor of the other samples.
        """
        open_ = (~matched).nonzero().flatten().tolist()
        solvable = _NEURONS_PER_OUTPUT * self.outputs <= self.D.shape[1]
        if not open_ or not bool(matched.any()) or not solvable:
            return labels, matched
        common = float(self.single_weights(labels)[matched].median())
        at_outputs, off = self.at_outputs(self.Z[open_], self.D[open_])
        for k, i in enumerate(open_):
            self.factors.check_time()
            outputs = self.run(self.Z[i : i + 1]).detach()
            slopes = self._slopes(outputs, single=True)
            label = (at_outputs[k] / common - slopes).abs().amax(1).argmin()
            rounding = (at_outputs[k] / common - slopes[label]).abs().max()
            if float(off[k]) <= REPLAY_LIMIT and float(rounding) <= self.rounding:
                labels[i], matched[i] = label, True
        return labels, matched

    def _slopes(self, outputs: Tensor, *, single: bool = False) -> Tensor:
        """The loss's gradient (k * labels, outputs) for every label, at samples' outputs (k, outputs).

        Up to a common factor, unless each is to be a batch of its own.
        """
        leaf = outputs.repeat_interleave(self.classes, 0).detach().requires_grad_()
        every = torch.arange(self.classes, device=outputs.device).repeat(len(outputs))
        with torch.enable_grad():
            loss = (self.single_losses if single else self.criterion)(leaf, every).sum()
            (slopes,) = gradients_of(loss, leaf)
        return slopes

    @cached_property
    def label_dimensions(self) -> int:
        """Dimensions of the gradients at the outputs that labels can have."""
        if self.outputs > _MOST_RANKED:
            return self.classes - 1
        slopes = torch.cat([self._slopes(row[None]) for row in self._a_few_outputs(self.network)])
        slopes = slopes / slopes.norm(dim=1, keepdim=True).clamp_min(1e-300)
        return int(torch.linalg.matrix_rank(slopes, rtol=REPLAY_LIMIT))

    def across_thresholds(self, i: int, label: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A neighbour of sample i, with hidden neurons where the client's rounding put them.

        Each neuron whose preactivation is zero to rounding is tried on its other side, by the smallest
        step of z that gets there; what brings the gradient closer is kept.
        """
        z, target = self.Z[i : i + 1], self.D[i : i + 1]
        reach = max(_NEAR_THRESHOLD, _NEIGHBOUR_ERRORS * float(self.relative_error[i]))
        for _ in range(MOST_FLIPS):
            self.factors.check_time()
            steps = smallest_steps(self.network, z, reach)
            if not len(steps):
                break
            count = len(steps)
            near = self.distance(z + steps, target.expand(count, -1), label.expand(count, 1))[:, 0]
            best = int(near.argmin())
            if not float(near[best]) < float(residual):
                break
            z, residual = z + steps[best], near[best]
        return z[0], residual

    def tolerance(self, labels: Tensor) -> Tensor:
        """How far a true sample's replayed gradient may be off (b,), relative to its length."""
        with torch.enable_grad():
            outputs = self.outputs_here().detach().requires_grad_()
            loss = self.single_losses(outputs, labels).sum()
            gradient = gradients_of(loss, outputs)[0]
        size = gradient.norm(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        tolerance: Tensor = self.rounding * (1 + 1 / size) + self.sample_tolerance
        return tolerance.clamp_max(REPLAY_LIMIT)

    @property
    def free_target_tolerance(self) -> Tensor:
        """The same (b,) where targets are free: rounding is a share of the gradient."""
        tolerance: Tensor = (2 * self.rounding + self.sample_tolerance).clamp_max(REPLAY_LIMIT)
        return tolerance

    def nearest_labels(self, Z: Tensor, D: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For rows of Z (k, m): the label whose gradient points along D, and how far off it is.

        The likeliest label is tried first; if its gradient is not the recovered one, all are.
        """
        D = self.D if D is None else D
        labels = self._likeliest(Z, D)
        residuals = self.distance(Z, D, labels[:, None])[:, 0]
        level = self.tolerance(labels) if Z is self.Z else self.rounding
        far = (residuals > level).nonzero().flatten()
        step = max(1, _ROWS_AT_ONCE // self.classes)
        for some in torch.split(far, step) if len(far) else ():
            self.factors.check_time()
            every = torch.arange(self.classes, device=Z.device).expand(len(some), -1)
            nearest = self.distance(Z[some], D[some], every).min(1)
            labels[some], residuals[some] = nearest.indices, nearest.values
        return labels, residuals

    def _likeliest(self, Z: Tensor, D: Tensor) -> Tensor:
        """The label whose loss gradient at the outputs lies along J d, J the network's Jacobian.

        d = J^T (dL/doutput) up to scale, so J d = J J^T (dL/doutput), which is closest to it. J d is
        how outputs move with a small step along d.
        """
        D = D.nan_to_num(0.0)
        with torch.no_grad():
            outputs = self.outputs_here().detach() if Z is self.Z else self.run(Z)
            h = _DIFFERENCE_STEP * Z.norm(dim=1) / D.norm(dim=1).clamp_min(1e-300)
            moved = self.run(Z + h[:, None] * D) - outputs
        labels = []
        at_once = max(1, _ROWS_AT_ONCE // self.classes)
        for some, w in zip(*(torch.split(t, at_once) for t in (outputs, moved)), strict=True):
            self.factors.check_time()
            slope = self._slopes(some).view(len(some), self.classes, -1)
            along = (slope @ w[:, :, None])[:, :, 0] / slope.norm(dim=2)
            labels.append(along.nan_to_num(-torch.inf).argmax(1))
        return torch.cat(labels)

    def distance(self, Z: Tensor, D: Tensor, labels: Tensor) -> Tensor:
        """How far D is from the gradient of each label (k, l), up to one positive factor."""
        k, count = labels.shape
        each = Z if count == 1 else Z.repeat_interleave(count, 0)
        s = self.gradient(each, labels.flatten()).view(k, count, -1)
        return relative_distance(s, D[:, None])

    def gradient(self, Z: Tensor, labels: Tensor) -> Tensor:
        """dL/dz of each row (the loss is a sum or mean over rows), up to a common factor."""
        return self._pulled_back(Z, lambda outputs: self.criterion(outputs, labels))

    @torch.enable_grad()
    def _pulled_back(self, Z: Tensor, losses: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient (k, m) of losses of the outputs with respect to Z (k, m)."""
        leaf = Z.detach().requires_grad_()
        outputs = self.outputs_here() if Z is self.Z else self.run(leaf)
        at_outputs = outputs.detach().requires_grad_()
        (slopes,) = gradients_of(losses(at_outputs).sum(), at_outputs)
        gradient = self._gradient_here(slopes) if Z is self.Z else _pull_back(outputs, slopes, leaf)
        return gradient if self.sent is None else gradient * self.sent

    def _gradient_here(self, slopes: Tensor) -> Tensor:
        """The gradient (b, m) at Z of slopes (b, outputs) at the outputs.

        Losses of the same samples mostly have parallel gradients there: these are multiples of what was
        computed before, and only samples that have moved, or turned, are run again.
        """
        if self._backward is None:
            assert self._forward is not None
            leaf, outputs = self._forward
            gradient = _pull_back(outputs, slopes, leaf, again=True)
            self._backward = leaf.detach(), slopes, gradient
        Z, known, gradient = self._backward
        factor = (slopes * known).sum(1) / known.square().sum(1)  # NaN where a slope vanishes
        off = (slopes - factor[:, None] * known).norm(dim=1)
        same = (off <= _PARALLEL * slopes.norm(dim=1)) & (self.Z == Z).all(1)
        rows = (~same).nonzero().flatten()
        if not len(rows):
            return factor[:, None] * gradient
        leaf = self.Z[rows].requires_grad_()
        gradient = gradient.index_copy(0, rows, _pull_back(self.run(leaf), slopes[rows], leaf))
        known = known.index_copy(0, rows, slopes[rows])
        self._backward = self.Z.clone(), known, gradient
        return torch.where(same, factor, 1.0)[:, None] * gradient

    def total(self, network: nn.Module, Z: Tensor, labels: Tensor) -> Tensor:
        """The loss of a network like this one, a sum or mean over the rows of Z."""
        return self.criterion(self.forward(network, Z), labels)

    def single_weights(self, labels: Tensor) -> Tensor:
        """What each sample's gradient was multiplied by (b,): 1/b for a mean, or less by clipping."""
        s = self.single_gradients(self.Z, labels)
        return weight_along(s, self.D)

    def joint_weights(self, Z: Tensor, D: Tensor, labels: Tensor) -> Tensor:
        """The same (b,) in units of what the loss of all samples as one batch gives each.

        All ones: the batch holds these samples and no others. Class weights are divided out.
        """
        s = self.gradient(Z, labels)
        return weight_along(s, D)

    def single_gradients(self, Z: Tensor, labels: Tensor) -> Tensor:
        """dL/dz (b, m) of every sample, each in a batch of its own."""
        return self._pulled_back(Z, lambda outputs: self.single_losses(outputs, labels))

    def single_losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of every sample (b,) in a batch of its own, so that a mean divides by one.

        The network ran all samples at once: one by one, its weights would pass through memory b times.
        """
        return self.criterion.each(outputs, labels)

    # Later layers.

    def compare(
        self, total: Tensor, limit: float, *, biases: bool = True
    ) -> list[tuple[str, float, float]]:
        """Parameters behind the layer: name, error in units of what is allowed, and of its norm."""
        others = self.part.others
        parameters = {
            n: p
            for n, p in self.network.named_parameters()
            if n in others and (biases or p.ndim > 1)
        }
        if not parameters:
            return []
        replayed = gradients_of(
            total, list(parameters.values()), materialize_grads=True, retain_graph=True
        )
        norms = []
        for name, computed in zip(parameters, replayed, strict=True):
            seen = others[name].to(computed)
            norms += [(computed - seen).norm(), seen.norm(), computed.norm()]
        lengths, found = torch.stack(norms).view(-1, 3).tolist(), []
        for (name, parameter), (distance, *sizes) in zip(parameters.items(), lengths, strict=True):
            size = max(sizes)
            rounded = (
                torch.finfo(others[name].dtype).eps * size
            )  # coarser than the layer's, perhaps
            allowed = limit * size + rounded + self._unexplained(parameter, size)
            found.append((name, distance / max(allowed, 1e-300), distance / max(size, 1e-300)))
        return found

    def _unexplained(self, parameter: Tensor, size: float) -> float:
        """What noise, and the rounding of subtracted weights, add to a gradient's error."""
        noise = LATER_NOISE * self.factors.client_noise / self.part.factor
        noise = noise * math.sqrt(parameter.numel())
        noise = min(noise, LATER_NOISE_LIMIT * size)
        if self.part.round is not None:
            return noise + self.part.rounding * float(parameter.detach().norm())
        view = self.factors.view
        if not view.trained:
            return noise
        eps = torch.finfo(view.precision).eps
        return noise + eps * float(parameter.detach().norm()) / view.protocol.rate


def declined(failed: UserCodeFailed) -> Declined:
    """Why there is no replay."""
    return Declined(f"running the model and loss on one sample per label failed ({failed})")


def _pull_back(outputs: Tensor, slopes: Tensor, leaf: Tensor, again: bool = False) -> Tensor:
    """J^T of slopes (k, outputs) at outputs that were computed from a leaf (k, m)."""
    # As a number: torch takes half a second to import what it needs for anything else.
    (gradient,) = gradients_of((outputs * slopes).sum(), leaf, retain_graph=again)
    return gradient


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


@replaying()
def fit_losses(
    found: Recovered,
    loss: Loss | None,
    *,
    generator: torch.Generator | None,
    part: Part | None = None,
) -> Fit | Declined:
    """The first loss that explains the update: the one told, cross-entropy, or any with free targets.

    Losses on probabilities have gradients parallel to those on logits, with other weights: of losses
    that nobody told, one that weighs all samples alike comes before others that explain the update. If
    none explains all of it, the one that matches most samples. If the model cannot be run, why.
    """
    tried: list[Fit] = []
    declined: list[Declined] = []
    for known, kind, free in _hypotheses(loss):
        found.factors.check_time()
        if kind is LossKind.ANY and any(map(_explains, tried)):
            break
        if kind in _OF_PROBABILITIES and not any(fit.replay.squash for fit in tried):
            continue

        def explain(replay: Replay, kind: LossKind = kind, free: bool = free) -> Fit | None:
            if kind is LossKind.TOLD and free and not _may_be_free(loss, replay.outputs):
                return None
            if free:
                return replay.with_free_targets(kind, kind is LossKind.TOLD)
            return replay.labelled(kind, kind is LossKind.TOLD, generator)

        error = found.error / found.sizes
        fit = Replay.attempt(found, known, relative_error=error, use=explain, part=part)
        if isinstance(fit, Declined):
            declined.append(fit)
            continue
        if fit is None:
            continue
        # With one output all targets have parallel gradients: only weights tell numbers from labels.
        unsure = not free and _may_be_free(known, fit.replay.outputs)
        if unsure and not (_explains(fit) and fit.weighs_evenly):
            continue
        tried.append(fit)
        # What was told is believed: without its class weights, say, merged samples might weigh alike.
        if _explains(fit) and (fit.told or fit.labels is None or fit.weighs_evenly):
            return fit
    if not tried:
        too_many = Declined("the network has too many outputs to solve for gradients")
        return declined[0] if declined else too_many
    return max(tried, key=_worth)


_OF_PROBABILITIES = (LossKind.ON_PROBABILITIES, LossKind.NEGATIVE_PROBABILITY)


def _may_be_free(loss: Loss | None, outputs: int) -> bool:
    """May targets be something else than one label for each sample?"""
    return compares_numbers(loss) or (is_binary(loss) and outputs > 1)


def _hypotheses(loss: Loss | None) -> Iterator[tuple[Loss | None, LossKind, bool]]:
    """Losses, what they are, and whether their targets are free."""
    if loss is not None:
        yield loss, LossKind.TOLD, False
    if _may_be_free(loss, outputs=2):
        yield loss, LossKind.TOLD, True
    yield None, LossKind.CROSS_ENTROPY, False
    yield usual_loss, LossKind.ON_PROBABILITIES, False
    yield negative_probability, LossKind.NEGATIVE_PROBABILITY, False
    yield None, LossKind.ANY, True


def _explains(fit: Fit) -> bool:
    """Does it explain all that can be compared?"""
    return fit.agrees or (fit.usable and not fit.compared and fit.labels is not None)


def _worth(fit: Fit) -> tuple[bool, int, bool, int]:
    labelled = fit.labels is not None
    return not fit.disagreements, int(fit.matched.sum()), labelled, fit.weighing_alike
