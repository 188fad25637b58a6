"""Why a search found no samples, or not all: the cause that applies, and what to do about it.

The first cause that fits is named. Each is a measurement on the update, or something that was told.
"""

from __future__ import annotations

import math

from spear import theory
from spear.factors import Factors, rounding_of
from spear.judge.causes import Cause
from spear.tolerances import MARGIN, MOVED_TOO_FAR, ROWS_PER_SAMPLE
from spear.update import NOISE_UNITS, LayerUpdate

_NOT_AS_SAID = (
    "Likely causes: weights of another round than the client's, no ReLU after the layer, an optimiser "
    "other than SGD, or too few neurons; `spear check` says more"
)
_STALE = (
    "Either the client adds noise (then give sigma=), or these are weights of another round: this does "
    "not tell whether data leaks"
)


def why_not_found(factors: Factors, stopped: tuple[Cause, str] | None) -> tuple[Cause, str]:
    """Why the search found no samples, or not all, and what to do.

    Args:
        factors: of the update.
        stopped: the cause and the words if the search was stopped before it gave up.
    """
    view, rows = factors.view, int(factors.live_rows.sum())
    moved = local_movement(factors)
    if moved > MOVED_TOO_FAR:
        return Cause.MOVED, (
            f"The client's local training moved preactivations by {moved:.0%} of their size, so that "
            "which neurons are off changed on the way: fewer or smaller local steps would show more"
        )
    if inputs_moved(view) and (view.samples is None or factors.b > view.samples):
        return Cause.TRAINING, INPUTS_MOVED
    narrow = view.rounds is not None or rows < ROWS_PER_SAMPLE * factors.b
    if stopped is not None:
        cause, again = stopped
        return cause, f"{again}. {too_narrow(factors)}" if narrow else again
    if _told_too_many(factors) or narrow:
        return Cause.NARROW, _too_many(factors) if _told_too_many(factors) else too_narrow(factors)
    if view.dropout and (1 - view.dropout) * rows < ROWS_PER_SAMPLE * factors.b:
        return Cause.DROPOUT, (
            f"Dropout of {view.dropout:g} leaves each sample few of the layer's {rows} rows: a wider "
            "layer or a smaller batch would show more"
        )
    return Cause.UNFIT, _NOT_AS_SAID if not view.batch_norm else (
        f"Likely cause: batch norm ({view.batch_norm!r}, in train mode) couples the samples of a "
        "batch, so that none has a gradient of its own"
    )


INPUTS_MOVED = (
    "The layers before this one were trained as well, so that every local step gave it other inputs: "
    "attack a layer that reads the data, or updates of one step"
)


def inputs_moved(view: LayerUpdate) -> bool:
    """Did the layer's inputs change from one local step to the next?"""
    return view.trained and not view.protocol.one_step and not view.reads_data


def _told_too_many(factors: Factors) -> bool:
    told = factors.view.samples
    return told is not None and factors.view.rounds is None and told >= min(factors.m, factors.n)


def _too_many(factors: Factors) -> str:
    told, smaller = factors.view.samples, min(factors.m, factors.n)
    return (
        f"{told} samples were told, and the layer has {factors.n} inputs and {factors.m} outputs: "
        f"{smaller} samples or more cannot be told apart. {too_narrow(factors, told)}"
    )


def local_movement(factors: Factors) -> float:
    """How far several local steps moved preactivations, as a share of their size; 0 for one step."""
    if not factors.trained or factors.protocol.one_step or factors.view.rounds is not None:
        return 0.0
    before, after = factors.before_and_after[0]  # (m, b) each
    size = before.norm(dim=1)[factors.live_rows].clamp_min(1e-300)
    return float(((after - before).norm(dim=1)[factors.live_rows] / size).median())


def why_no_gap(factors: Factors) -> tuple[Cause, str]:
    """Why the spectrum does not show where the samples end."""
    rounds, smaller = factors.view.rounds, min(factors.m, factors.n)
    told, epochs = factors.view.samples, factors.protocol.epochs or 1
    if told is not None and told < smaller <= told * epochs and factors.view.reads_data:
        return Cause.AUGMENTED, (
            f"the difference of the weights shows {smaller} samples or more, and {told} were told. "
            f"Likely cause: random augmentation, which makes {epochs} versions of each in {epochs} "
            "epochs, too many for the layer: this does not tell whether data leaks"
        )
    if rounds is not None:
        return Cause.NO_GAP, (
            f"{len(rounds)} rounds of {rounds.width} neurons show no end of the samples, which does "
            f"not tell whether data leaks. Likely causes: {smaller} samples or more (give more "
            "rounds), augmentation or changing clients, so that every round has other data, or noise"
        )
    if _told_too_many(factors):
        return Cause.NARROW, _too_many(factors)
    if inputs_moved(factors.view):
        return Cause.TRAINING, f"the difference of the weights shows no samples. {INPUTS_MOVED}"
    if factors.trained:
        return Cause.NO_GAP, (
            "the difference of the weights shows no samples, which does not tell whether data leaks. "
            "Likely causes: weights of another round than those the client was sent, "
            f"{smaller} samples or more, an optimiser other than SGD, or noise"
        )
    return Cause.NO_GAP, (
        "the spectrum shows no gap, which does not tell whether data leaks. Likely causes: a "
        f"batch of min(m, n) = {smaller} samples or more (attack a wider layer), noise, "
        "pruning, an optimiser other than SGD, or weights in place of gradients"
    )


def why_noisy(factors: Factors) -> str:
    """Where noise that nobody told of may come from, in words; empty if it was told."""
    view = factors.view
    if not view.trained or view.protocol.given(*NOISE_UNITS) or view.protocol.coarse:
        return ""
    entries = int(factors.live_rows.sum()) * int(factors.live_columns.sum())
    if factors.noise <= MARGIN * math.sqrt(rounding_of(view).energy / max(entries, 1)):
        return (
            "That is the rounding of the weights that were subtracted: they moved too little. Larger "
            "steps, or gradients in place of weights, would show more, so this does not tell whether "
            "data leaks"
        )
    return INPUTS_MOVED if inputs_moved(view) else _STALE


def too_narrow(factors: Factors, samples: int | None = None) -> str:
    """What would help a layer that does not tell the samples apart, in words."""
    rounds = factors.view.rounds
    if rounds is None:
        if not factors.view.reads_data:
            return "The layer is too narrow for the batch: attack a wider one"
        needed = theory.rounds_needed(samples or factors.b, factors.m, inputs=factors.n)
        several = "several" if needed is None else f"about {max(needed, 2)}"
        return (
            "The layer is too narrow for the batch: attack a wider one, or combine "
            f"{several} rounds of the same data (spear.combine)"
        )
    needed = theory.rounds_needed(
        factors.b,
        rounds.width,
        movement=movement(factors),
        noise=min(factors.relative_noise, 0.5),
        inputs=factors.n,
    )
    if needed is None:
        return (
            "The weights hardly move from round to round, so that more rounds add little: attack a "
            "wider layer, or rounds with a larger learning rate"
        )
    if needed > len(rounds):
        more = needed - len(rounds)
        return (
            f"{len(rounds)} rounds are too few for a layer of {rounds.width} neurons: about {more} "
            f"more would do"
        )
    return (
        "These rounds should hold enough zeros. Likely causes: samples that are nearly alike, weights "
        "that hardly move or that change most signs in a round, or rounds of other data. More rounds "
        "may help"
    )


def movement(factors: Factors) -> float:
    """How far preactivations go from one round to the next, as a share of their size."""
    rounds = factors.view.rounds
    assert rounds is not None
    each = factors.preactivation.view(len(rounds), rounds.width, -1)  # (R, m, b)
    if len(rounds) < 2:
        return 0.0
    steps = (each[1:] - each[:-1]).flatten(1).norm(dim=1)
    return float((steps / each[:-1].flatten(1).norm(dim=1).clamp_min(1e-300)).median())
