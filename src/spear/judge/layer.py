"""What every true sample must meet, seen from the layer alone: signs, zeros, bias gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spear import theory
from spear.factors import UNDECIDED, Factors, Side
from spear.judge.selection import Selection

# "Exact" is an error below 1e-3 of the data's range (60 dB); the predicted error must be five times
# smaller, since the prediction is a standard deviation: see docs/algorithm.md for real errors.
EXACT = 2e-4
# Rows in which a wrong direction is zero and a sample is not: each shows that the direction holds
# nothing of the sample. Three, so that no single misread zero decides.
_EXCLUDING_ROWS = 3
_GAP = 100.0  # fall of the next layer's spectrum behind the last sample
_OUTSIDE = 1e-3  # share of an activation outside the next layer's span that no rounding explains
_LEVERAGE = 1e-3  # a zero row whose leverage is within this of one was solved for
_SPARE_ROWS = 10  # that tell the noise of a bias gradient
# What chance may achieve before a pattern proves something.
_LUCK = 1e-9


def signs_hold(factors: Factors, selection: Selection) -> Tensor:
    """Per sample: no sign contradicts its zeros, and the bias gradient is of this batch."""
    sound = (selection.contradictions == 0) & selection.C.isfinite().all(1) & _bias_in_span(factors)
    if _clipped_apart(factors, selection):
        return torch.zeros_like(sound)  # no scale of the batch can be trusted
    if not bool(sound.all()) and _chance(selection) > _LUCK:
        return torch.zeros_like(sound)  # in a batch that is partly wrong, one may fit by luck
    return sound


def predicted_error(factors: Factors, selection: Selection) -> Tensor:
    """Standard deviation of the error of an input, per sample, from the update's noise.

    X = D^+ dL/dW carries noise * |row of D^+|, once directly and once through the directions,
    whose own error mixes the samples. And D^+ dL/db = 1 gives the scale, with the noise of dL/db.
    """
    rows = (selection.C / factors.singular_values).norm(dim=1)  # |row of D^+|, D^+ = C S^-1 U^T
    mixing = (selection.Q.norm(dim=0) * selection.C.norm(dim=1)).square().sum()
    per_input = float(mixing) / factors.view.inputs
    size = selection.C.norm(dim=1) / math.sqrt(factors.view.inputs)
    in_scale = size * _bias_noise(factors)  # (b,)
    error: Tensor = rows * (factors.noise**2 * (1 + per_input) + in_scale.square()).sqrt()
    return error


def _bias_noise(factors: Factors) -> float:
    """Standard deviation of the noise in an entry of dL/db: what of it lies outside the span of L."""
    spare = int(factors.live_rows.sum()) - factors.b
    if spare < _SPARE_ROWS:
        return factors.noise
    return float(_bias_outside(factors).norm()) / math.sqrt(spare)


def precise_enough(factors: Factors, selection: Selection, error: Tensor) -> Tensor:
    """Per sample: is its predicted error (b,) small enough to speak of exact?"""
    size = selection.C.norm(dim=1) / math.sqrt(factors.view.inputs)  # root mean square, (b,)
    precise: Tensor = error <= EXACT * size
    if bool(precise.all()):
        return precise
    X = factors.combine(selection.C / factors.singular_values)  # (b, n)
    spans = X.amax(1) - X.amin(1)
    # The data's range is that of most samples: one that is wrong may have any.
    precise |= error <= EXACT * spans.median()
    return precise


def pattern_holds(
    factors: Factors, selection: Selection, outside: Tensor | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Per sample: does every condition hold that can be checked with the layer alone?

    Args:
        factors: of the update.
        selection: the b samples.
        outside: (b,) bool, from `outside_next_layer`; found here unless given.
    """
    side = selection.directions.side
    b, rows = selection.b, side.basis.shape[0]
    doubts: list[str] = []
    if not telling(selection):
        doubts.append(f"{rows} live rows prove nothing about {b} samples: attack a wider layer")
        return torch.zeros(b, dtype=torch.bool, device=selection.C.device), tuple(doubts)
    if not _bias_in_span(factors):
        doubts.append("the bias gradient is no combination of the recovered samples'")
    sound = signs_hold(factors, selection) & (selection.directions.firmness > 0)
    apart = _clipped_apart(factors, selection)
    if apart:
        doubts.append(apart)
        return sound, tuple(doubts)
    outside = outside_next_layer(factors, selection) if outside is None else outside
    strangers = sound & outside
    if bool(strangers.any()):
        doubts.append(
            f"the next layer's gradient does not know {int(strangers.sum())} of {b} samples at their "
            "scale: weight and bias gradients were clipped apart (per-layer clipping), or differ "
            "otherwise"
        )
        return torch.zeros_like(sound), tuple(doubts)
    if factors.view.relu == "both":
        sound &= _other_side(factors, selection)
    if side.name == "outputs" and not bool(sound.all()):
        sound &= uncontaminated(selection, sound)
    if not bool(sound.all()):
        doubts.append(
            f"{int((~sound).sum())} of {b} samples break a necessary condition (a direction is wrong, "
            "or dropout, other weights or another activation than ReLU shape the gradient)"
        )
        if _chance(selection) > _LUCK:
            sound = torch.zeros_like(sound)
    return sound, tuple(doubts)


def telling(selection: Selection) -> bool:
    """Are there so many rows that patterns of all samples do not fit by luck?"""
    return _chance(selection) ** selection.b <= _LUCK


def _chance(selection: Selection) -> float:
    """How likely a pattern of one sample fits by luck."""
    return theory.pattern_by_chance(selection.directions.side.basis.shape[0], selection.b)


def _bias_in_span(factors: Factors) -> bool:
    """dL/db = dL/dZ 1 lies in the span of L, up to the noise of its own entries."""
    g, rest = factors.view.bias_grad.to(factors.left), _bias_outside(factors)
    eps = torch.finfo(factors.view.bias_grad.dtype).eps
    rounding = UNDECIDED * eps * float(g.norm())
    return float(rest.norm()) <= rounding + factors.zero * math.sqrt(len(g))


def _bias_outside(factors: Factors) -> Tensor:
    """The part of dL/db (m,) that is no combination of the columns of L."""
    g = factors.view.bias_grad.to(factors.left)
    return g - factors.left @ (factors.left.T @ g)


def _clipped_apart(factors: Factors, selection: Selection) -> str:
    """How it is known that weight and bias gradients have factors of their own; empty if it is not."""
    if factors.view.clipped_apart:
        return (
            "weight and bias gradients were clipped apart (per-layer clipping), so the bias gradient "
            "does not give a sample's scale: each may be right but for one factor"
        )
    if _fits_at_another_scale(factors, selection):
        return (
            "some samples fit their zeros at another scale only than the bias gradient gives: weight "
            "and bias gradients were clipped apart (per-layer clipping), or are not of one batch"
        )
    return ""


def _fits_at_another_scale(factors: Factors, selection: Selection) -> bool:
    """Do signs contradict zeros, and does a scale of its own settle it for every such sample?

    A right direction with a wrong scale t breaks the signs of neurons whose threshold -bias / (W x)
    lies between t and 1. Others break them too: noise, and directions that are wrong, which may fit
    somewhere by luck. So only directions speak that their own zeros prove.
    """
    broken = selection.contradictions > 0
    proved = selection.directions.firmness > 0
    if factors.noisy or selection.directions.side.name != "outputs" or not bool(broken.any()):
        return False
    lowest, highest = scale_range(factors, selection)
    return bool((proved & (lowest <= highest) & (highest > 0))[broken].all())


def outside_next_layer(factors: Factors, selection: Selection) -> Tensor:
    """Which samples (b,) the next layer's gradient does not know, where it can tell.

    Its rows are sums of the samples' activations relu(z), whatever each was multiplied with. So an
    activation outside their span belongs to no sample: an input of the wrong scale, say, whose weight
    and bias gradient were clipped apart.
    """
    nothing = torch.zeros(selection.b, dtype=torch.bool, device=selection.C.device)
    gradient = factors.view.next_gradient
    if gradient is None or selection.directions.side.name != "outputs":
        return nothing
    _, s, Vt = torch.linalg.svd(gradient.to(selection.C), full_matrices=False)
    if len(s) <= selection.b or not float(s[selection.b - 1]) > _GAP * float(s[selection.b]):
        return nothing  # fewer or more samples show there: it says nothing
    noise = float(s[selection.b] / s[selection.b - 1])  # how far the span may have turned
    span = Vt[: selection.b]  # (b, m)
    Z = selection.C @ factors.preactivation.T + factors.view.bias.to(selection.C)
    active = Z.clamp_min(0)  # (b, m)
    rest = active - (active @ span.T) @ span
    outside: Tensor = rest.norm(dim=1) > max(_OUTSIDE, UNDECIDED * noise) * active.norm(dim=1)
    return outside


def scale_range(factors: Factors, selection: Selection) -> tuple[Tensor, Tensor]:
    """Per sample (b,): the factors t > 0 at which every sign of t W x + bias fits the zeros."""
    D = (factors.L @ selection.Q).abs()  # (m, b)
    level = factors.zero * selection.Q.norm(dim=0)
    Z = factors.preactivation @ selection.C.T  # (m, b) = W x
    slack = factors.weight_lengths * factors.reach(selection.C)
    bias = factors.view.bias.to(Z)[:, None]
    off, on = D <= level, D > UNDECIDED * level
    # Where off, t Z + bias <= slack; where on, t Z + bias >= -slack.
    threshold = torch.where(off, slack - bias, -slack - bias) / Z  # (m, b)
    bounds_above = (off & (Z > 0)) | (on & (Z < 0))
    bounds_below = (off & (Z < 0)) | (on & (Z > 0))
    highest = torch.where(bounds_above, threshold, torch.inf).amin(0)
    lowest = torch.where(bounds_below, threshold, 0.0).amax(0).clamp_min(0)
    return lowest, highest


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


def uncontaminated(selection: Selection, sound: Tensor) -> Tensor:
    """Which samples hold nothing of the directions that turned out wrong.

    A wrong direction is a mix of samples, and spoils the inverse's rows of exactly those it mixes.
    Where the wrong direction is zero and a sample is not, the sample is not in the mix: unless those
    zeros are just what the direction was solved for, none to spare, and so say nothing.
    """
    side = selection.directions.side
    D = (side.basis @ selection.directions.vectors).abs()  # (rows, b), unit directions
    active = UNDECIDED * side.zero / EXACT < D  # would show in a mix even with a share of 2e-4
    wrong = selection.directions.zeros[:, ~sound].T  # (wrong, rows)
    telling = torch.stack([zeros & _spare(side, zeros) for zeros in wrong], 1)  # (rows, wrong)
    excluding = active.T.to(D) @ telling.to(D)  # (b, wrong)
    return (excluding >= _EXCLUDING_ROWS).all(1)


def _spare(side: Side, zeros: Tensor) -> Tensor:
    """Which of the zero rows (rows,) would be zero even if it had not been solved for them."""
    spare = torch.zeros_like(zeros)
    U, s, _ = torch.linalg.svd(side.basis[zeros], full_matrices=False)
    rank = int((s > UNDECIDED * side.zero).sum())
    if int(zeros.sum()) >= rank + _EXCLUDING_ROWS:
        spare[zeros] = U[:, :rank].square().sum(1) < 1 - _LEVERAGE
    return spare
