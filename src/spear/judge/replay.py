"""Running recovered samples through the model again: labels, and whether the gradients agree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from spear.factors import UNDECIDED, Factors
from spear.judge.precautions import Precautions
from spear.judge.relu_boundary import FLIPS, smallest_steps
from spear.judge.selection import Selection
from spear.judge.weights import merged, odd, usual, vanished
from spear.layers import network_after

Loss = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")

# A replay agrees to a few roundings of the client's arithmetic (4 to 7 on real batches through six
# layers), counted against the loss's gradient, a difference of numbers of size one. It may never be
# off by more than exactness allows.
_ROUNDINGS = 50.0
_REPLAY_LIMIT = 1e-3
# Noise on the layer is on the others too. Its share of a norm hardly varies.
_NOISE = 1.5
_NOISE_LIMIT = 1e-2  # beyond this a comparison would not say much
# Neighbours within the error of a recovered sample at which a replay is tried again: a neuron whose
# preactivation is zero to rounding may have been on the other side for the client.
_NEIGHBOURS = 16
_REACH = 20.0  # the last neighbour is this many errors away: still well inside the tolerance
_THRESHOLD = 1e-4  # of a typical preactivation: float32 rounds to 1e-6 of it
_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a replay showed."""

    labels: Tensor | None  # (b,) int64: the nearest label; None where targets are numbers
    matched: Tensor  # (b,) bool: is its gradient the recovered one?
    objections: tuple[str, ...]  # parts of the update that disagree
    compared: bool  # were gradients of later layers there to compare?
    merged: Tensor  # (b,) bool: weighs as much as several samples
    vanished: int  # samples that the batch was divided by, and that left no trace
    free_targets: bool = False  # are targets numbers, so that any weight of a sample fits?

    @property
    def agrees(self) -> bool:
        """Does all of the update agree, later layers among it?"""
        all_match = bool(self.matched.all()) and not self.free_targets
        return self.compared and all_match and not self.objections


class Replay:
    """The network behind the layer, in float64, at the recovered preactivations."""

    def __init__(
        self,
        factors: Factors,
        selection: Selection,
        network: nn.Module,
        loss: Loss,
        relative_error: Tensor,
    ) -> None:
        self.factors, self.network, self.loss = factors, network, loss
        self.C = selection.C
        self.bias = factors.view.bias.to(self.C)
        self.Z = self.C @ factors.preactivation.T + self.bias  # (b, m)
        self.D = (factors.L @ selection.Q).T  # (b, m)
        eps = torch.finfo(factors.view.weight_grad.dtype).eps
        noise = (
            factors.noise * selection.Q.norm(dim=0) * self.D.shape[1] ** 0.5 / self.D.norm(dim=1)
        )
        self.rounding = _ROUNDINGS * eps
        self.own = UNDECIDED * (noise + relative_error)  # (b,)
        self.relative_error = relative_error.clamp_min(eps)
        with torch.no_grad():
            self.classes = int(network(self.Z[:1]).shape[-1])

    @staticmethod
    def prepare(
        factors: Factors,
        selection: Selection,
        model: nn.Module,
        loss: Loss | None,
        relative_error: Tensor,
    ) -> Replay | str:
        view = factors.view
        if view.layer is None:
            return "the update does not say which layer it is: use spear.observe(model, gradients)"
        behind = network_after(model, view.layer)
        if isinstance(behind, str):
            return behind
        if any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in behind.modules()):
            return "dropout is active behind the layer, so its gradients are random"
        network = copy.deepcopy(behind).to(factors.left.device, torch.float64).requires_grad_(True)
        loss = loss or nn.functional.cross_entropy
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).to(factors.left.device, torch.float64)
        return Replay(factors, selection, network, loss, relative_error)

    @staticmethod
    def attempt(
        factors: Factors,
        selection: Selection,
        model: nn.Module,
        loss: Loss | None,
        *,
        relative_error: Tensor,
        use: Callable[[Replay], T],
    ) -> T | str:
        """What `use` makes of the replay, if it can be done; otherwise one line on why not.

        The user's model and loss run here, and may raise anything: then there is no replay.
        """
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            Precautions(),
        ):
            try:
                replay = Replay.prepare(factors, selection, model, loss, relative_error)
                return replay if isinstance(replay, str) else use(replay)
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                return (
                    "running the model and loss on one sample per label failed "
                    f"({type(error).__name__}: {lines[0][:120]})"
                )

    @property
    def compared(self) -> bool:
        """Are there gradients of later layers to compare with?"""
        return any(n in self.factors.view.others for n, _ in self.network.named_parameters())

    @property
    def limit(self) -> float:
        """How far a replayed gradient may be off at most, relative to its length."""
        return _REPLAY_LIMIT

    def jacobian(self, z: Tensor) -> Tensor:
        """Of the network's outputs at one z, (outputs, m)."""
        jacobian = torch.autograd.functional.jacobian
        J: Tensor = jacobian(self.network, z.detach()[None])  # type: ignore[no-untyped-call]
        return J.reshape(-1, len(z))

    def run(self, generator: torch.Generator | None) -> Replayed:
        labels, matched, factor = self.match_labels(generator)
        objections = self.compare_update(labels, factor) if bool(matched.all()) else ()
        if self.classes <= 2:
            # With two classes, gradients of samples with one ReLU pattern are parallel.
            heavy = factor > 1.5 * factor[matched].min() if bool(matched.any()) else ~matched
            if bool((heavy & matched).any()):
                count = int((heavy & matched).sum())
                objections = (
                    *objections,
                    f"{count} samples weigh more than others: with two classes, samples with one "
                    "ReLU pattern merge",
                )
                matched = matched & ~heavy
        several = merged(factor, matched)
        gone = vanished(factor, matched & ~several)
        if gone or self.factors.faded:  # what does not show may be in what does
            matched = matched & ~odd(factor, matched)
        return Replayed(labels, matched, objections, self.compared, several, gone)

    def match_labels(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """The label of each sample, whether its gradient is the recovered one, and their ratio."""
        labels, residual = self.nearest_labels(self.Z)
        for i in (residual > self.tolerance(labels)).nonzero().flatten().tolist():
            self.Z[i], residual[i] = self.across_thresholds(i, labels[i], residual[i])
        recovered = self.Z.clone()
        for growth in torch.linspace(0, 1, _NEIGHBOURS).tolist():
            open_ = residual > self.tolerance(labels)
            if not bool(open_.any()):
                break
            size = self.relative_error[open_, None] * _REACH**growth * recovered.abs().mean()
            step = torch.randn(len(size), self.Z.shape[1], generator=generator).to(self.Z)
            neighbours = recovered[open_] + size * step
            tried, distance = self.nearest_labels(neighbours, self.D[open_])
            better = distance < residual[open_]
            labels[open_] = torch.where(better, tried, labels[open_])
            residual[open_] = torch.minimum(distance, residual[open_])
            self.Z[open_] = torch.where(better[:, None], neighbours, self.Z[open_])
        matched = (residual <= self.tolerance(labels)) & residual.isfinite()
        return self._within_rounding(labels, matched)

    def _within_rounding(self, labels: Tensor, matched: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Match samples that the network is sure of: little but rounding is left of their gradient.

        With 1 - p = 1e-6, float32 computes p - 1 to one digit, and dL/dz = J^T (p - e) points
        elsewhere than an exact replay does. But it is J^T of something, and that is p - e up to a
        rounding of one, once divided by what the other samples were multiplied with.
        """
        factor = self._factors(labels)
        common = usual(factor, matched)
        open_ = (~matched).nonzero().flatten().tolist()
        if common is None or 4 * self.classes > self.D.shape[1]:
            return labels, matched, factor
        for i in open_:
            z, J = self.Z[i : i + 1].detach(), self.jacobian(self.Z[i])  # (classes, m)
            at_outputs = torch.linalg.lstsq(J.T, self.D[i][:, None]).solution[:, 0]
            off = (J.T @ at_outputs - self.D[i]).norm() / self.D[i].norm()
            slopes = self._slopes(self.network(z).detach()[0])  # (classes, classes)
            label = (at_outputs / common - slopes).abs().amax(1).argmin()
            rounding = (at_outputs / common - slopes[label]).abs().max()
            if float(off) <= _REPLAY_LIMIT and float(rounding) <= self.rounding:
                labels[i], matched[i], factor[i] = label, True, common
        return labels, matched, factor

    def _slopes(self, outputs: Tensor) -> Tensor:
        """The loss's gradient at the outputs of one sample, for every label (labels, outputs)."""
        leaf = outputs.expand(self.classes, *outputs.shape).detach().requires_grad_()
        targets = torch.arange(self.classes, device=outputs.device)
        with torch.enable_grad():
            losses = [self.loss(o[None], t[None]).sum() for o, t in zip(leaf, targets, strict=True)]
            (slopes,) = torch.autograd.grad(losses, leaf)
        return slopes.flatten(1)

    def across_thresholds(self, i: int, label: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A neighbour of sample i with hidden neurons on the side that the client's rounding put them.

        Of the neurons whose preactivation is zero to rounding, each is tried on its other side, by the
        smallest step of z that takes it there; what brings the gradient nearer is kept.
        """
        z, target = self.Z[i : i + 1], self.D[i : i + 1]
        for _ in range(FLIPS):
            steps = smallest_steps(
                self.network, z, max(_THRESHOLD, _REACH * float(self.relative_error[i]))
            )
            if not len(steps):
                break
            near = self._distance(
                z + steps, target.expand(len(steps), -1), label.expand(len(steps), 1)
            )[:, 0]
            best = int(near.argmin())
            if not float(near[best]) < float(residual):
                break
            z, residual = z + steps[best], near[best]
        return z[0], residual

    def tolerance(self, labels: Tensor) -> Tensor:
        """How far a true sample's replayed gradient may be off, relative to its length, (b,)."""
        with torch.enable_grad():
            outputs = self.network(self.Z).detach().requires_grad_()
            losses = self._single_losses(outputs, labels)
            gradient: Tensor = torch.autograd.grad(losses, outputs)[0]
        size = gradient.flatten(1).norm(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        tolerance: Tensor = self.rounding * (1 + 1 / size) + self.own
        return tolerance.clamp_max(_REPLAY_LIMIT)

    def nearest_labels(self, Z: Tensor, D: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For rows of Z (k, m): the label whose gradient points along D, and how far off it is.

        The likeliest label is tried first; where its gradient is not the recovered one, all are.
        """
        D = self.D if D is None else D
        labels = self._likeliest(Z, D)
        residuals = self._distance(Z, D, labels[:, None])[:, 0]
        far = (residuals > self.rounding).nonzero().flatten()
        step = max(1, _ROWS_AT_ONCE // self.classes)
        for some in torch.split(far, step) if len(far) else ():
            every = torch.arange(self.classes, device=Z.device).expand(len(some), -1)
            nearest = self._distance(Z[some], D[some], every).min(1)
            labels[some], residuals[some] = nearest.indices, nearest.values
        return labels, residuals

    def _likeliest(self, Z: Tensor, D: Tensor) -> Tensor:
        """The label whose loss gradient at the outputs lies along J d, J the network's Jacobian.

        d = J^T (dL/doutput) up to scale, so J d = J J^T (dL/doutput), which is nearest to it.
        """
        try:
            _, moved = torch.autograd.functional.jvp(self.network, Z.detach(), D)  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            # A layer without a second derivative: nothing is known, so every label will be tried. An
            # error that is more than that comes up again there, in the first derivative.
            return torch.zeros(len(Z), dtype=torch.int64, device=Z.device)
        with torch.no_grad():
            outputs = self.network(Z)
        labels = []
        for o, w in zip(outputs, moved, strict=True):
            leaf = o.expand(self.classes, *o.shape).detach().requires_grad_()
            targets = torch.arange(self.classes, device=Z.device)
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.loss(leaf, targets).sum(), leaf)
            along = (slope.flatten(1) @ w.flatten()) / slope.flatten(1).norm(dim=1)
            labels.append(along.nan_to_num(-torch.inf).argmax())
        return torch.stack(labels)

    def _distance(self, Z: Tensor, D: Tensor, labels: Tensor) -> Tensor:
        """How far D is from the gradient of each label (k, l), up to one positive factor."""
        k, count = labels.shape
        s = self.gradient(Z.repeat_interleave(count, 0), labels.flatten()).view(k, count, -1)
        along = (s * D[:, None]).sum(-1).clamp_min(0) / s.square().sum(-1)
        distance: Tensor = (D[:, None] - along[..., None] * s).norm(dim=-1)
        relative: Tensor = distance / D.norm(dim=-1)[:, None]
        return relative.nan_to_num(torch.inf)

    def gradient(self, Z: Tensor, targets: Tensor) -> Tensor:
        """dL/dz of each row on its own (the loss is a sum or mean over rows)."""
        with torch.enable_grad():
            leaf = Z.detach().requires_grad_()
            total = self.total(self.network, leaf, targets)
            (gradient,) = torch.autograd.grad(total, leaf)
        return gradient

    def total(self, network: nn.Module, Z: Tensor, targets: Tensor) -> Tensor:
        """The loss of a network like this one, a sum or mean over the rows of Z."""
        value: Tensor = self.loss(network(Z), targets).sum()
        return value

    def _factors(self, labels: Tensor) -> Tensor:
        """What each sample's gradient was multiplied with: 1/b for a mean, or its clipping."""
        s = self.single_gradients(self.Z, labels)
        return (s * self.D).sum(1) / s.square().sum(1)  # (b,)

    def single_gradients(self, Z: Tensor, labels: Tensor) -> Tensor:
        """dL/dz (b, m) of every sample, each with a loss of its own."""
        with torch.enable_grad():
            leaf = Z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._single_losses(self.network(leaf), labels), leaf)
        return gradient

    def _single_losses(self, outputs: Tensor, labels: Tensor) -> list[Tensor]:
        """The loss of every sample in a batch of its own, so that a mean divides by one.

        The network runs all samples at once: one by one, its weights go through memory b times.
        """
        return [self.loss(o[None], y[None]).sum() for o, y in zip(outputs, labels, strict=True)]

    def compare_update(self, labels: Tensor, factor: Tensor) -> tuple[str, ...]:
        """Compute the update behind the layer again; name the parameters that disagree.

        The layer's own gradient is D X with D matched column by column, so it agrees already.
        """
        if not self.compared:
            return ()
        losses = torch.stack(self._single_losses(self.network(self.Z), labels))
        return self.disagreements(factor @ losses, float(self.tolerance(labels).max()))

    def _unexplained(self, parameter: Tensor, size: float) -> float:
        """What noise, and the rounding of weights that were subtracted, add to a gradient's error."""
        noise = _NOISE * self.factors.noise * math.sqrt(parameter.numel())
        noise = min(noise, _NOISE_LIMIT * size)
        training = self.factors.view.training
        if training is None:
            return noise
        eps = torch.finfo(self.factors.view.weight_grad.dtype).eps
        return noise + eps * float(parameter.detach().norm()) / training.lr

    def disagreements(self, total: Tensor, limit: float) -> tuple[str, ...]:
        """Parameters behind the layer whose gradient is not that of the replayed total loss."""
        others = self.factors.view.others
        parameters = {n: p for n, p in self.network.named_parameters() if n in others}
        if not parameters:
            return ()
        replayed = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
        doubts = []
        for name, computed in zip(parameters, replayed, strict=True):
            seen = others[name].to(computed)
            distance = float((computed - seen).norm())
            size = max(float(seen.norm()), float(computed.norm()))
            if not distance <= limit * size + self._unexplained(parameters[name], size):
                share = distance / max(float(seen.norm()), 1e-300)
                doubts.append(
                    f"the replayed gradient of {name!r} is off by {share:.1e} of its norm"
                )
        return tuple(doubts)
