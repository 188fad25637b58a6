"""The sole judge of "exact": what can be proved about recovered samples, without ground truth.

PATTERN needs the layer only: every condition that a true sample must meet. REPLAY needs the model:
each sample is run through it, the label whose gradient is the recovered column of dL/dZ is found,
and the whole update is computed again from recovered inputs and labels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from spear.factors import UNDECIDED, Factors
from spear.layers import network_after
from spear.selection import Selection

Loss = Callable[[Tensor, Tensor], Tensor]

# "Exact" is an error below 1e-3 of the data's range (60 dB); the predicted error must be five times
# smaller, since the prediction is a standard deviation.
_EXACT = 2e-4
# Rows in which a wrong direction is zero and a sample is not: each shows that the direction holds
# nothing of the sample. Three, so that no single misread zero decides.
_EXCLUDING_ROWS = 3
# A replay agrees to a few roundings of the client's arithmetic (4 to 7 on real batches through six
# layers), counted against the loss's gradient, a difference of numbers of size one. It may never be
# off by more than exactness allows.
_ROUNDINGS = 50.0
_REPLAY_LIMIT = 1e-3
# Neighbours within the error of a recovered sample at which a replay is tried again: a neuron whose
# preactivation is zero to rounding may have been on the other side for the client.
_NEIGHBOURS = 8
_ROWS_AT_ONCE = 1 << 14


class Proof(Enum):
    """What stands behind `certified`."""

    REPLAY = "replay"  # model given: recomputed and matched
    PATTERN = "pattern"  # layer only: every necessary condition holds
    NONE = "none"


@dataclass(frozen=True, eq=False)
class Certificate:
    """The evidence on each selected sample."""

    certified: Tensor  # (b,) bool
    proof: Proof
    predicted_error: Tensor  # (b,) standard deviation of an input's error
    precise: bool  # is that error small enough to speak of exact?
    labels: Tensor | None  # (b,) int64, -1 where no label matched; None without a model
    whole: bool  # all samples certified, and the update as a whole agrees
    doubts: tuple[str, ...]  # what speaks against a stronger verdict


def certify(
    factors: Factors,
    selection: Selection,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Certificate:
    """Judge a selection: by replay if a model is given and can be run, else by pattern."""
    error = predicted_error(factors, selection)
    spread = _spread(factors, selection)
    precise = bool((error <= _EXACT * spread).all())
    by_pattern, doubts = pattern_holds(factors, selection)
    if model is None:
        whole = bool(by_pattern.all()) and precise
        proof = Proof.PATTERN if bool(by_pattern.any()) else Proof.NONE
        return Certificate(by_pattern, proof, error, precise, None, whole, doubts)
    replayed = _Replay.prepare(factors, selection, model, loss, error / spread)
    if isinstance(replayed, str):
        whole = bool(by_pattern.all()) and precise
        proof = Proof.PATTERN if bool(by_pattern.any()) else Proof.NONE
        doubts = (*doubts, f"no replay: {replayed}")
        return Certificate(by_pattern, proof, error, precise, None, whole, doubts)
    labels, matched, factor = replayed.match_labels(generator)
    if bool(matched.all()):
        doubts = replayed.compare_update(labels, factor)
    else:
        lost = int((~matched).sum())
        doubts = (
            *doubts,
            f"the gradient of {lost} of {len(matched)} samples matches no label in the replay",
        )
    whole = bool(matched.all()) and not doubts and precise
    proof = Proof.REPLAY if bool(matched.any()) else Proof.NONE
    return Certificate(
        matched, proof, error, precise, torch.where(matched, labels, -1), whole, doubts
    )


def predicted_error(factors: Factors, selection: Selection) -> Tensor:
    """Standard deviation of the error of an input, per sample, from the update's noise.

    X = D^+ dL/dW carries noise * |row of D^+|, once directly and once through the directions,
    whose own error mixes the samples.
    """
    rows = (selection.C / factors.singular_values).norm(dim=1)  # |row of D^+|, D^+ = C S^-1 U^T
    mixing = (selection.Q.norm(dim=0) * selection.C.norm(dim=1)).square().sum()
    per_input = float(mixing) / factors.view.inputs
    error: Tensor = factors.noise * rows * (1 + per_input) ** 0.5  # (b,)
    return error


def _spread(factors: Factors, selection: Selection) -> float:
    """The scale of the data: root mean square of all recovered inputs (R has orthonormal rows)."""
    return float(selection.C.square().mean().sqrt()) * math.sqrt(factors.b / factors.view.inputs)


def pattern_holds(factors: Factors, selection: Selection) -> tuple[Tensor, tuple[str, ...]]:
    """Per sample: does every condition hold that can be checked with the layer alone?"""
    side = selection.directions.side
    b, rows = selection.b, side.basis.shape[0]
    doubts: list[str] = []
    if rows <= 2 * (b + 1):
        # Cover (1965): up to 2(b+1) points, any sign pattern is some hyperplane's.
        doubts.append(
            f"{rows} live rows prove nothing about {b} samples: more than {2 * b + 2} would"
        )
        return torch.zeros(b, dtype=torch.bool, device=selection.C.device), tuple(doubts)
    spanned = _bias_in_span(factors)
    if not spanned:
        doubts.append("the bias gradient is no combination of the samples': not of one batch")
    sound = selection.contradictions == 0
    sound &= selection.directions.firmness > 0
    sound &= selection.C.isfinite().all(1)
    if factors.view.relu == "both":
        sound &= _other_side(factors, selection)
    if side.name == "outputs" and not bool(sound.all()):
        sound &= _uncontaminated(selection, sound)
    if not bool(sound.all()):
        doubts.append(f"{int((~sound).sum())} of {b} samples break a necessary condition")
    return sound & spanned, tuple(doubts)


def _bias_in_span(factors: Factors) -> bool:
    """dL/db = dL/dZ 1 lies in the span of L, up to the noise of its own entries."""
    g = factors.view.bias_grad.to(factors.left)
    rest = g - factors.left @ (factors.left.T @ g)
    eps = torch.finfo(factors.view.bias_grad.dtype).eps
    rounding = UNDECIDED * eps * float(g.norm())
    return float(rest.norm()) <= rounding + factors.zero * math.sqrt(len(g))


def _other_side(factors: Factors, selection: Selection) -> Tensor:
    """Between two ReLUs: the inputs are non-negative AND the output gradient fits the signs."""
    s = factors.singular_values
    lengths = (selection.C / s).norm(dim=1)
    X = factors.inputs.white @ selection.C.T  # (columns, b)
    slack = (
        UNDECIDED * factors.zero * lengths * (1 + selection.b)
    )  # directions mix b samples' noise
    nonnegative: Tensor = (X >= -slack).all(0)
    if selection.directions.side.name == "outputs":
        return nonnegative
    D = (factors.L @ selection.Q).abs()  # (m, b)
    level = factors.zero * selection.Q.norm(dim=0) * (1 + selection.b)
    Z = factors.preactivation @ selection.C.T + factors.view.bias.to(D)[:, None]
    wrong = ((D <= level) & (Z > 0)) | ((D > UNDECIDED * level) & (Z <= 0))
    fits: Tensor = ~wrong.any(0)
    return fits


def _uncontaminated(selection: Selection, sound: Tensor) -> Tensor:
    """Which samples hold nothing of the directions that turned out wrong.

    A wrong direction is a mix of samples, and spoils the inverse's rows of exactly those it mixes.
    Where the wrong direction is zero and a sample is not, the sample is not in the mix.
    """
    side = selection.directions.side
    D = (side.basis @ selection.directions.vectors).abs()  # (rows, b), unit directions
    active = UNDECIDED * side.zero / _EXACT < D  # would show in a mix even with a share of 2e-4
    wrong_zero = selection.directions.zeros[:, ~sound]  # (rows, wrong)
    excluding = active.T.to(D) @ wrong_zero.to(D)  # (b, wrong)
    return (excluding >= _EXCLUDING_ROWS).all(1)


class _Replay:
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

    @staticmethod
    def prepare(
        factors: Factors,
        selection: Selection,
        model: nn.Module,
        loss: Loss | None,
        relative_error: Tensor,
    ) -> _Replay | str:
        view = factors.view
        if view.layer is None:
            return "the update does not say which layer it is: use spear.observe(model, gradients)"
        if view.training is not None and (view.training.epochs or 2) > 1:
            return "the update sums several local steps"
        if view.training is not None and view.training.batch_size is not None:
            return "the update sums several local steps"
        behind = network_after(model, view.layer)
        if isinstance(behind, str):
            return behind
        network = copy.deepcopy(behind).to(factors.left.device, torch.float64)
        return _Replay(
            factors, selection, network, loss or nn.functional.cross_entropy, relative_error
        )

    def match_labels(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """The label of each sample, whether its gradient is the recovered one, and their ratio."""
        labels, residual = self._nearest_labels(self.Z)
        for _ in range(_NEIGHBOURS):
            open_ = residual > self.tolerance(labels)
            if not bool(open_.any()):
                break
            scale = self.relative_error[open_, None] * self.Z.abs().mean()
            step = torch.randn(scale.shape[0], self.Z.shape[1], generator=generator).to(self.Z)
            tried, distance = self._nearest_labels(self.Z[open_] + scale * step, self.D[open_])
            better = distance < residual[open_]
            labels[open_] = torch.where(better, tried, labels[open_])
            residual[open_] = torch.minimum(distance, residual[open_])
        matched = (residual <= self.tolerance(labels)) & residual.isfinite()
        return labels, matched, self._factors(labels)

    def tolerance(self, labels: Tensor) -> Tensor:
        """How far a true sample's replayed gradient may be off, relative to its length, (b,)."""
        with torch.enable_grad():
            outputs = self.network(self.Z).detach().requires_grad_()
            losses = [
                self.loss(o[None], y[None]).sum() for o, y in zip(outputs, labels, strict=True)
            ]
            gradient: Tensor = torch.autograd.grad(losses, outputs)[0]
        size = gradient.flatten(1).norm(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        tolerance: Tensor = self.rounding * (1 + 1 / size) + self.own
        return tolerance.clamp_max(_REPLAY_LIMIT)

    def _nearest_labels(self, Z: Tensor, D: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For rows of Z (k, m): the label whose gradient points along D, and how far off it is."""
        D = self.D if D is None else D
        with torch.no_grad():
            classes = self.network(Z[:1]).shape[-1]
        labels, residuals = [], []
        step = max(1, _ROWS_AT_ONCE // classes)
        for start in range(0, len(Z), step):
            z, d = Z[start : start + step], D[start : start + step]
            targets = torch.arange(classes, device=z.device).repeat(len(z))
            s = self._gradient(z.repeat_interleave(classes, 0), targets).view(len(z), classes, -1)
            along = (s * d[:, None]).sum(-1).clamp_min(0) / s.square().sum(
                -1
            )  # one positive factor
            distance = (d[:, None] - along[..., None] * s).norm(dim=-1) / d.norm(dim=-1)[:, None]
            nearest = distance.nan_to_num(torch.inf).min(1)
            labels.append(nearest.indices)
            residuals.append(nearest.values)
        return torch.cat(labels), torch.cat(residuals)

    def _gradient(self, Z: Tensor, targets: Tensor) -> Tensor:
        """dL/dz of each row on its own (the loss is a sum or mean over rows)."""
        with torch.enable_grad():
            leaf = Z.detach().requires_grad_()
            total = self.loss(self.network(leaf), targets).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
        return gradient

    def _factors(self, labels: Tensor) -> Tensor:
        """What each sample's gradient was multiplied with: 1/b for a mean, or its clipping."""
        s = torch.cat(
            [self._gradient(z[None], y[None]) for z, y in zip(self.Z, labels, strict=True)]
        )
        return (s * self.D).sum(1) / s.square().sum(1)  # (b,)

    def compare_update(self, labels: Tensor, factor: Tensor) -> tuple[str, ...]:
        """Compute the update behind the layer again; name the parameters that disagree.

        The layer's own gradient is D X with D matched column by column, so it agrees already.
        """
        others = self.factors.view.others
        parameters = {n: p for n, p in self.network.named_parameters() if n in others}
        if not parameters:
            return ()
        total = 0.0
        for z, y, weight in zip(self.Z, labels, factor, strict=True):
            total = total + weight * self.loss(self.network(z[None]), y[None]).sum()
        assert isinstance(total, Tensor)
        replayed = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
        limit = max(float(self.tolerance(labels).max()), 1e-6)
        doubts = []
        for name, computed in zip(parameters, replayed, strict=True):
            seen = others[name].to(computed)
            distance = float((computed - seen).norm())
            if distance > limit * max(float(seen.norm()), float(computed.norm())):
                share = distance / max(float(seen.norm()), 1e-300)
                doubts.append(
                    f"the replayed gradient of {name!r} is off by {share:.1e} of its norm"
                )
        return tuple(doubts)
