"""The sole judge of "exact": what can be proved about recovered samples, without ground truth.

PATTERN needs the layer only: every condition that a true sample must meet. REPLAY needs the model:
each sample is run through it, the label whose gradient is the recovered column of dL/dZ is found,
and the whole update is computed again from recovered inputs and labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from spear import theory
from spear.factors import UNDECIDED, Factors, Side
from spear.replay import Loss, Replay, Replayed
from spear.retraining import Retrained, retrain
from spear.selection import Selection

# "Exact" is an error below 1e-3 of the data's range (60 dB); the predicted error must be five times
# smaller, since the prediction is a standard deviation, and of the sample's own size.
_EXACT = 2e-4
# Rows in which a wrong direction is zero and a sample is not: each shows that the direction holds
# nothing of the sample. Three, so that no single misread zero decides.
_EXCLUDING_ROWS = 3
_LEVERAGE = 1e-3  # a zero row whose leverage is within this of one was solved for
# What chance may achieve before a pattern proves something.
_LUCK = 1e-9


_UNSEEN = (
    "the layer alone cannot show whether a sample is the mean of several that are nearly the same, "
    "nor whether its weight and bias gradients were clipped apart"
)


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
    precise: Tensor  # (b,) bool: is that error small enough to speak of exact?
    labels: Tensor | None  # (b,) int64, -1 where no label matched; None without a model
    whole: bool  # all samples certified, and the update as a whole agrees
    doubts: tuple[str, ...]  # what speaks against a stronger verdict
    remark: str  # what the proof leaves out


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
    size = selection.C.norm(dim=1) / math.sqrt(factors.view.inputs)  # root mean square, (b,)
    precise = error <= _EXACT * size
    if factors.noisy and not bool(precise.any()):
        no = torch.zeros_like(precise)
        return Certificate(no, Proof.NONE, error, precise, None, False, (), "")
    if factors.view.training is not None and not factors.view.training.one_step:
        retrained = _retrained(factors, selection, model, loss)
        return _of_training(selection, retrained, error, precise)
    certified, doubts = pattern_holds(factors, selection)
    replayed: Replayed | str = "no model was given"
    if model is not None:
        replayed = Replay.attempt(
            factors,
            selection,
            model,
            loss,
            relative_error=error / size,
            use=lambda replay: replay.run(generator),
        )
    labels, proof, remark = None, Proof.PATTERN, ""
    if isinstance(replayed, str):
        remark = f"no replay: {replayed}; {_UNSEEN}" if model is not None else _UNSEEN
    else:
        if replayed.compared:
            # The replay stands in for redundancy, not for the signs or the bias gradient.
            proof = Proof.REPLAY
            certified = signs_hold(factors, selection)
        else:
            remark = "no gradient of a later layer to compare, so the replay only gave labels"
        certified = certified & replayed.matched
        doubts = _doubts_of(replayed, certified, doubts)
        if replayed.vanished:
            doubts = (*doubts, _vanished(replayed.vanished, len(certified)))
        if bool(replayed.merged.any()):
            doubts = (*doubts, _merged(int(replayed.merged.sum())))
            certified = certified & ~replayed.merged
        if replayed.objections:
            certified = torch.zeros_like(certified)
        elif selection.directions.side.name == "outputs" and not bool(certified.all()):
            # Gradients hardly notice a small share of a wrong direction in an input.
            certified = certified & _uncontaminated(selection, certified)
        labels = torch.where(replayed.matched, replayed.labels, -1)
    doubts = (*doubts, *_faint(certified, precise))
    certified = certified & precise
    gone = not isinstance(replayed, str) and replayed.vanished > 0
    whole = bool(certified.all()) and not gone
    proof = proof if bool(certified.any()) else Proof.NONE
    return Certificate(certified, proof, error, precise, labels, whole, doubts, remark)


def _faint(certified: Tensor, precise: Tensor) -> tuple[str, ...]:
    """In words: how many samples are right, but not known well enough to be called exact."""
    faint = int((certified & ~precise).sum())
    words = f"{faint} of {len(precise)} samples are too faint against the update's noise"
    return (words,) if faint else ()


def _retrained(
    factors: Factors, selection: Selection, model: nn.Module | None, loss: Loss | None
) -> Retrained | str:
    if model is None:
        return "no model was given"
    return retrain(factors, selection, model, loss)


def _of_training(
    selection: Selection, retrained: Retrained | str, error: Tensor, precise: Tensor
) -> Certificate:
    """After several local steps signs and zeros need not match: only repeating them proves."""
    no = torch.zeros_like(precise)
    doubts: tuple[str, ...]
    if isinstance(retrained, str):
        doubts = (f"several local steps are proved only by repeating them, and {retrained}",)
        return Certificate(no, Proof.NONE, error, precise, None, False, doubts, "")
    certified = retrained.matched & (selection.directions.firmness > 0)
    doubts = retrained.objections
    if not bool(certified.all()):
        lost = int((~certified).sum())
        words = f"repeating the local training does not confirm {lost} of {len(certified)} samples"
        doubts = (words, *doubts)
        certified = certified & _uncontaminated(selection, certified)
    if retrained.objections:
        certified = no
    doubts = (*doubts, *_faint(certified, precise))
    certified = certified & precise
    labels = torch.where(retrained.matched, retrained.labels, -1)
    proof = Proof.REPLAY if bool(certified.any()) else Proof.NONE
    remark = f"{retrained.epochs} local epochs repeated"
    whole = bool(certified.all())
    return Certificate(certified, proof, error, precise, labels, whole, doubts, remark)


def _vanished(count: int, shown: int) -> str:
    return (
        f"the gradients were divided by {shown + count}, so {count} more samples than the {shown} that "
        "show were in the batch: their gradient has vanished, and nothing is known of them"
    )


def _merged(count: int) -> str:
    return (
        f"{count} of the samples weighs as much as several others: it is the mean of samples that are "
        "the same, or so nearly the same that the update does not tell them apart"
    )


def _doubts_of(
    replayed: Replayed, certified: Tensor, by_pattern: tuple[str, ...]
) -> tuple[str, ...]:
    lost = int((~replayed.matched).sum())
    if not lost:
        return replayed.objections if bool(certified.all()) else (*by_pattern, *replayed.objections)
    return (
        *by_pattern,
        *replayed.objections,
        f"the gradient of {lost} of {len(certified)} samples matches no label in the replay "
        "(other weights or loss than the client's, weight and bias clipped apart, or wrong samples)",
    )


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
    whose own error mixes the samples.
    """
    rows = (selection.C / factors.singular_values).norm(dim=1)  # |row of D^+|, D^+ = C S^-1 U^T
    mixing = (selection.Q.norm(dim=0) * selection.C.norm(dim=1)).square().sum()
    per_input = float(mixing) / factors.view.inputs
    error: Tensor = factors.noise * rows * (1 + per_input) ** 0.5  # (b,)
    return error


def pattern_holds(factors: Factors, selection: Selection) -> tuple[Tensor, tuple[str, ...]]:
    """Per sample: does every condition hold that can be checked with the layer alone?"""
    side = selection.directions.side
    b, rows = selection.b, side.basis.shape[0]
    doubts: list[str] = []
    if _chance(selection) ** b > _LUCK:
        doubts.append(f"{rows} live rows prove nothing about {b} samples: attack a wider layer")
        return torch.zeros(b, dtype=torch.bool, device=selection.C.device), tuple(doubts)
    if not _bias_in_span(factors):
        doubts.append("the bias gradient is no combination of the recovered samples'")
    sound = signs_hold(factors, selection) & (selection.directions.firmness > 0)
    apart = _clipped_apart(factors, selection)
    if apart:
        doubts.append(apart)
        return sound, tuple(doubts)
    if factors.view.relu == "both":
        sound &= _other_side(factors, selection)
    if side.name == "outputs" and not bool(sound.all()):
        sound &= _uncontaminated(selection, sound)
    if not bool(sound.all()):
        doubts.append(
            f"{int((~sound).sum())} of {b} samples break a necessary condition (a direction is wrong, "
            "or dropout, other weights or another activation than ReLU shape the gradient)"
        )
        if _chance(selection) > _LUCK:
            sound = torch.zeros_like(sound)
    return sound, tuple(doubts)


def _chance(selection: Selection) -> float:
    """How likely a pattern of one sample fits by luck."""
    return theory.pattern_by_chance(selection.directions.side.basis.shape[0], selection.b)


def _bias_in_span(factors: Factors) -> bool:
    """dL/db = dL/dZ 1 lies in the span of L, up to the noise of its own entries."""
    g = factors.view.bias_grad.to(factors.left)
    rest = g - factors.left @ (factors.left.T @ g)
    eps = torch.finfo(factors.view.bias_grad.dtype).eps
    rounding = UNDECIDED * eps * float(g.norm())
    return float(rest.norm()) <= rounding + factors.zero * math.sqrt(len(g))


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


def _uncontaminated(selection: Selection, sound: Tensor) -> Tensor:
    """Which samples hold nothing of the directions that turned out wrong.

    A wrong direction is a mix of samples, and spoils the inverse's rows of exactly those it mixes.
    Where the wrong direction is zero and a sample is not, the sample is not in the mix: unless those
    zeros are just what the direction was solved for, none to spare, and so say nothing.
    """
    side = selection.directions.side
    D = (side.basis @ selection.directions.vectors).abs()  # (rows, b), unit directions
    active = UNDECIDED * side.zero / _EXACT < D  # would show in a mix even with a share of 2e-4
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
