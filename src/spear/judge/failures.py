"""Why a search found no samples, or not all: the cause that applies, and what to do about it.

The first cause that fits is named. Each is a measurement on the update, or something that was told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from spear import theory
from spear.factors import Factors, batch_size_from, rounding_of
from spear.judge.causes import Cause
from spear.tolerances import MARGIN, MOVED_TOO_FAR, ROWS_PER_SAMPLE, SAME_NOISE
from spear.update import NOISE_UNITS, LayerUpdate

_ROWS_OF_NOISE = (
    40,
    400,
)  # rows and columns of another layer: the fewest that show its noise, the most
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
    if inputs_moved(view) and (
        stopped is None if view.samples is None else factors.b > view.samples
    ):
        return Cause.TRAINING, INPUTS_MOVED
    narrow = view.rounds is not None or rows < ROWS_PER_SAMPLE * factors.b
    if stopped is not None:
        cause, again = stopped
        # Whether the layer is too narrow shows only once the search has given up by itself.
        return cause, f"{again}. {too_narrow(factors)}" if narrow and cause is Cause.TIME else again
    too_many = _too_many(factors)
    if too_many or narrow:
        return Cause.NARROW, too_many or too_narrow(factors)
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


def _too_many(factors: Factors) -> str:
    """That there are as many samples as the layer can tell apart, or more, in words; else empty."""
    view, told = factors.view, factors.view.samples
    most = min(factors.m, view.features)
    samples = max(told or 0, factors.batch_size or 0)
    if samples < most or view.rounds is not None:
        return ""
    read = f"{factors.n} inputs"
    if view.features < factors.n:
        read = f"inputs that are linear functions of {view.features} numbers"
    what = f"{samples} samples {'were told' if samples == told else 'show'}"
    wider = "A smaller batch would show more" if most < factors.m else too_narrow(factors, samples)
    return (
        f"{what}, and the layer has {read} and {factors.m} outputs: {most} samples or more cannot be "
        f"told apart. {wider}"
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
    if too_many := _too_many(factors):
        return Cause.NARROW, too_many
    if inputs_moved(factors.view):
        return Cause.TRAINING, f"the difference of the weights shows no samples. {INPUTS_MOVED}"
    if factors.trained:
        return Cause.NO_GAP, (
            "the difference of the weights shows no samples, which does not tell whether data leaks. "
            "Likely causes: weights of another round than those the client was sent, "
            f"{smaller} samples or more, an optimiser other than SGD, corrections of its steps such as "
            "the control variates of SCAFFOLD, or noise"
        )
    return Cause.NO_GAP, (
        "the spectrum shows no gap, which does not tell whether data leaks. Likely causes: a "
        f"batch of min(m, n) = {smaller} samples or more (attack a wider layer, or combine several "
        "rounds of the same data), noise, pruning, an optimiser other than SGD, or weights in place of "
        "gradients"
    )


def why_noisy(factors: Factors) -> tuple[Cause, str] | None:
    """Where noise that nobody told of may come from, and what to do; None if it was told."""
    view = factors.view
    if not view.trained or view.protocol.given(*NOISE_UNITS) or view.protocol.coarse:
        return None
    entries = int(factors.live_rows.sum()) * int(factors.live_columns.sum())
    if factors.noise <= MARGIN * math.sqrt(rounding_of(view).energy / max(entries, 1)):
        return Cause.NOISE, (
            "That is the rounding of the weights that were subtracted: they moved too little. Larger "
            "steps, or gradients in place of weights, would show more, so this does not tell whether "
            "data leaks"
        )
    if inputs_moved(view):
        return Cause.TRAINING, INPUTS_MOVED
    for name, noise in _noise_elsewhere(view):
        if not 1 / SAME_NOISE <= noise / factors.noise <= SAME_NOISE:
            louder = f"{noise / factors.noise:.2g} times as loud in {name!r} as in {view.layer!r}"
            return Cause.UNFIT, (
                f"It is {louder}, and noise that a client adds is the same everywhere. Likely causes: "
                "corrections in its steps, such as the control variates of SCAFFOLD (take them off "
                "what was sent), or weights of another round: this does not tell whether data leaks"
            )
    return Cause.NOISE, _STALE


def _noise_elsewhere(view: LayerUpdate) -> Iterator[tuple[str, float]]:
    """The noise of an entry in other linear layers, where their spectrum shows it."""
    fewest, most = _ROWS_OF_NOISE
    for name, whole in view.others.items():
        if whole.ndim != 2 or min(whole.shape) < fewest:
            continue
        part = whole[:most, :most].double()
        s, (m, n) = torch.linalg.svdvals(part), part.shape
        b = batch_size_from(s, m, n, torch.finfo(whole.dtype).eps)
        if b is not None and 2 * b <= len(s):
            yield name, float(s[b:].norm()) / math.sqrt((m - b) * (n - b))


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
