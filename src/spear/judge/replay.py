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
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from spear.errors import Declined
from spear.judge.fit import (
    DIFFERENCE_STEP,
    MOST_RANKED,
    Fit,
    LossKind,
    in_known_rows,
    relative_distance,
    weight_along,
)
from spear.judge.layer import Part, Recovered
from spear.judge.losses import (
    Criterion,
    Loss,
    Outputs,
    UserCodeFailed,
    compares_numbers,
    gradients_of,
    in_double,
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
_NEURONS_PER_OUTPUT = 4  # neurons per output from which a gradient at the outputs can be solved for
_PARALLEL = 1e-12  # how far apart gradients at the outputs are that differ by a factor, in float64
_FEWEST_CLASSES = 6  # from which a straight line through all but two says something


@contextmanager
def replaying() -> Iterator[None]:
    """Gradients work, whatever the caller switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


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
        if self.outputs > MOST_RANKED:
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
            h = DIFFERENCE_STEP * Z.norm(dim=1) / D.norm(dim=1).clamp_min(1e-300)
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
