"""What else could explain the update: one function per rival explanation.

A replay shows that an explanation fits; a proof needs that no other one does. Each function here names
one way in which other data could have produced the same update, tries it numerically, and rules for
which samples it fails. `certify` combines the rulings.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear import theory
from spear.factors import Factors
from spear.judge.causes import Cause
from spear.judge.fit import Fit
from spear.judge.layer import (
    SINGLE_PRECISION_FROM,
    Recovered,
    bias_in_span,
    signs_hold,
    spare_rows,
)
from spear.judge.losses import gradients_of
from spear.judge.simulation import Simulated, scale_claimed
from spear.search import SIGN_AGREEMENT, redundancy, smallest_eigenvalues, smallest_singular, unit
from spear.tolerances import (
    COINCIDENCE,
    DEVIATIONS_TO_SPARE,
    EXACT_ERROR,
    LARGEST_MERGE,
    MARGIN,
    NEAR_DUPLICATE,
    PATTERN_CHANCE,
    SPARE_ROWS,
    TRAINING_DISTANCE,
    TRAINING_SCALE,
    UNDECIDED,
    WHOLE_WEIGHT,
)

SCALED_ALIKE = (
    "weight and bias gradients were scaled by the same factor (if not, the inputs are off by a "
    "factor)"
)
UNSEEN = "samples whose gradient vanished, if there were any, are not part of this verdict"
NO_MERGE = (
    "no recovered sample is several merged into one (near-duplicates; with one output or two classes, "
    "others too)"
)
NOT_ALL_PAIRED = (
    "not every sample in the batch has a near-duplicate (such pairs would be recovered as one "
    "sample each)"
)
NOT_ALL_MERGED = (
    "not every recovered sample is equally many merged into one (samples that switch on the same "
    "neurons can merge)"
)
DIVIDED_BY_ALL = (
    "the client divides by the number of its samples, as a mean does (only one of them was not "
    "clipped, and its weight is compared with that)"
)
WEIGHED_ALIKE = (
    "the client's loss weighs every class and sample alike, unless SPEAR was told otherwise"
)
NOT_SCALED = "the update was not multiplied by a factor that SPEAR was not told"
GENERAL_POSITION = (
    "no two samples have parallel gradients (where targets are free numbers, such a pair would look "
    "like one sample)"
)

_ANY_SCALE = (
    "would fit as well at another scale. Only the bias gradient fixes the scale, and it may have been "
    "scaled apart from the weights'"
)
NO_BIAS = "are known only up to a factor each, since the layer has no bias"
_SEVERAL = "may be several samples merged into one"
_MAY_BE_SEVERAL = (
    f"{_SEVERAL}. Give samples= if you know how many there are: their weights do not tell"
)


@dataclass(frozen=True, eq=False)
class Ruling:
    """For which samples one rival explanation fails."""

    cause: Cause
    excluded: Tensor  # (b,) bool
    words: str  # what may be true of the others
    assumptions: tuple[str, ...] = ()  # what the exclusion rests on and cannot test
    missing: str = ""  # what else must have been in the batch, in words


def mix(found: Recovered, fit: Fit | None) -> Ruling:
    """Could part of another sample be in this one?

    A direction is a sample's own if the rows in which the sample is off, zero AND with a negative
    preactivation, have no other kernel: then noise leaves only a small share of other samples
    (`mixing_errors`). More rows than it was solved for must hold it, or the replay. A wrong
    direction is a mix and spoils the samples it mixes: only samples that are provably not in it
    remain. Zeros by cancellation do not count: with one output, d_i / s_i - d_j / s_j vanishes
    wherever both are on, and holds both.
    """
    selection = found.selection
    everything = fit is not None and fit.agrees and bool(fit.matched.all())
    sound = signs_hold(found, replayed=everything)
    determined = selection.directions.redundancy > 0
    if fit is not None and fit.agrees:
        determined = determined | fit.matched
    elif selection.directions.side.name == "outputs":
        determined = determined | _is_determined_redundantly(found, determined)
    sound = sound & determined
    if selection.directions.side.name == "outputs":
        sound = sound & _is_determined(found)
        if not everything:
            sound = sound & ~_leaves_another_free(found)
        if not bool(sound.all()):
            sound = sound & unmixed(found, sound)
    return Ruling(
        Cause.MIXED,
        sound,
        "may hold parts of others. Likely causes: a wrong direction, dropout, weights of another "
        "round, or an activation other than ReLU",
    )


def _is_determined_redundantly(found: Recovered, determined: Tensor) -> Tensor:
    """Undetermined directions (b,) that their rows that are off still hold, whichever is left out.

    The rows of near-duplicates hold what these span together; that noise keeps such rows from leaving a
    second direction quite free counts for nothing.
    """
    selection, held = found.selection, found.confirmed_zero_rows
    side = selection.directions.side
    twice = torch.zeros_like(determined)
    white = unit(selection.Q * side.scales[:, None], 0)
    for j in (~determined).nonzero().flatten().tolist():
        if int(held[:, j].sum()) < selection.b + SPARE_ROWS:
            continue
        found.factors.check_time()
        seen = torch.linalg.svdvals(side.basis[held[:, j]]) > UNDECIDED * side.zero
        if int(seen.sum()) == selection.b - 1:
            twice[j] = redundancy(side, white[:, j], held[:, j]) > 0
    return twice


def _leaves_another_free(found: Recovered) -> Tensor:
    """Directions (b,) whose rows that are off keep a second one out by no more than noise does.

    Twins in one cell leave their mean, and a difference so faint that any two mixes of them have zeros
    to spare in rows where it drowns. Both then have nearly the same input, so that shares of one in the
    other seem to do no harm.
    """
    selection, held = found.selection, found.confirmed_zero_rows
    side, s = selection.directions.side, found.factors.singular_values
    free = torch.zeros_like(selection.contradictions, dtype=torch.bool)
    if found.b == 1:
        return free
    # Single precision is enough to see which are far from it.
    white = side.white.float() if found.b > SINGLE_PRECISION_FROM else side.white
    own = unit(selection.Q * s[:, None], 0).to(white)
    least = smallest_eigenvalues(white, held.to(white), own) / MARGIN  # from above
    rounding = torch.finfo(white.dtype).eps * len(white)
    clear = least > max(float(side.noise_of_rows / s.min()) ** 2, rounding)
    for j in (~clear).nonzero().flatten().tolist():
        found.factors.check_time()
        rows = side.basis[held[:, j]]
        free[j] = len(rows) < found.b - 1 or smallest_singular(rows)[1] <= side.noise_of_rows
    return free


def _is_determined(found: Recovered) -> Tensor:
    """Per sample (b,): do the rows that are off leave no visible share of another sample?"""
    share = (found.mixing_errors * found.distances).nan_to_num(0.0).norm(dim=1)
    level = found.sizes.clamp_min(found.value_range)
    # Whether the error is small enough to be called exact is asked elsewhere; this allows ten times it.
    held: Tensor = share <= MARGIN * EXACT_ERROR * level
    return held


def unmixed(found: Recovered, sound: Tensor) -> Tensor:
    """Which samples are no part of the directions that turned out wrong.

    If the wrong direction is zero in a row, its own preactivation agrees, and a sample is not zero
    there, then the sample is not in the mix, unless those zeros are just what the direction was
    solved for. Zeros by cancellation agree with the preactivation by chance, as often as not: as many
    as contradict it count for nothing.
    """
    selection, side = found.selection, found.selection.directions.side
    D = (side.basis @ selection.directions.vectors).abs()  # (rows, b), unit directions
    active = UNDECIDED * side.zero * DEVIATIONS_TO_SPARE / EXACT_ERROR < D
    wrong = (~sound).nonzero().flatten().tolist()
    informative = torch.stack(
        [
            found.confirmed_zero_rows[:, j]
            & spare_rows(found.factors, selection.directions.zeros[:, j])
            for j in wrong
        ],
        1,
    )  # (rows, wrong)
    excluding = active.T.to(D) @ informative.to(D)  # (b, wrong)
    cancelled = selection.directions.zeros & (found.Z[:, found.factors.live_rows].T > 0)
    return (excluding >= SPARE_ROWS + 2 * cancelled[:, wrong].sum(0)).all(1)


def scale(found: Recovered, fit: Fit | None) -> Ruling:
    """Would the same inputs, larger or smaller, explain the update as well?

    x t with d / t gives the same dL/dW. The bias gradient fixes t if it was scaled like the
    weights'. Behind the layer, t shows wherever the network is not homogeneous: in the direction of
    a labelled gradient (softmax of other outputs), in weights that are equal at one scale only, in
    the gradients of later layers. The fit must break at t = 1 +- what is claimed, both for all
    samples together with the biases of all layers scaled alike (a learning rate of their own), and
    for each sample alone.
    """
    words = _ANY_SCALE if found.view.has_bias else NO_BIAS
    if fit is None or found.selection.directions.side.name != "outputs":
        everyone = torch.ones(found.b, dtype=torch.bool, device=found.selection.C.device)
        view = found.view
        homogeneous = not view.has_bias or (view.model is not None and not bool(view.bias.any()))
        fixed = not (homogeneous or found.factors.zero_input)  # a zero input is only a guess here
        return Ruling(Cause.SCALE, everyone & fixed, words, (SCALED_ALIKE,))
    own = (EXACT_ERROR * found.value_range / found.sizes).clamp_max(0.5)  # claimed, relative
    alone = (fit.off_at(1 + own) > 1) & (fit.off_at(1 - own) > 1)
    pinned = bool(alone[fit.matched].all())
    if not pinned:
        together = torch.full_like(own, float(own.min()))
        pinned = _scale_is_identified(fit, [1 + together, 1 - together])
        if pinned:
            alone = alone | _alone_by_weight(fit, own)
        if pinned and fit.agrees and not bool(alone.all()):
            off = torch.stack([fit.alone_off_at(1 + t, ~alone) for t in (own, -own)])
            alone = alone | (off > 1).all(0)
    if pinned and not bool(alone.all()):
        return Ruling(Cause.SCALE, alone | _no_louder(found, alone), words, (SCALED_ALIKE,))
    return Ruling(Cause.SCALE, alone & pinned, words)


def _no_louder(found: Recovered, pinned: Tensor) -> Tensor:
    """Samples (b,) whose weight and bias gradients are no longer than those of pinned ones.

    A faint sample's own replay is too coarse to show its scale. What scales a sample's weight gradient
    apart from its bias gradient is clipping of each by its norm, and that touches the loudest first: if
    louder samples were not scaled apart, this one was not.
    """
    if not bool(pinned.any()):
        return pinned
    D = found.factors.output_gradients(found.selection.Q)
    d = D.norm(dim=0)  # (b,): of the bias gradient
    whole = d * found.selection.C.norm(dim=1)
    no_louder: Tensor = (d <= d[pinned].max()) & (whole <= whole[pinned].max())
    return no_louder


def _scale_is_identified(fit: Fit, steps: list[Tensor]) -> bool:
    """Is the scale of all samples together fixed by directions, weights or later layers?"""
    directions = all(fit.breaks_at(t) for t in steps)
    return (
        directions or _identified_by_weights(fit, steps) or _identified_by_later_layers(fit, steps)
    )


def _weights_equal(fit: Fit, weights: Tensor) -> tuple[bool, bool]:
    """Are weights (b,) all one, and all the same, as far as they are known?"""
    known, tolerance = weights[fit.matched], fit.weight_error[fit.matched]
    ones = bool(((known - 1).abs() <= tolerance).all())
    return ones, bool(((known / known.median() - 1).abs() <= tolerance).all())


def _identified_by_weights(fit: Fit, steps: list[Tensor]) -> bool:
    """Are the weights equal here, and at no other scale?"""
    if fit.weights is None or fit.labels is None or not bool(fit.matched.any()):
        return False
    ones, same = _weights_equal(fit, fit.weights)
    there = [
        _weights_equal(fit, weights) for t in steps if (weights := fit.weights_at(t)) is not None
    ]
    if ones and not any(one for one, _ in there):
        return True
    several = int(fit.matched.sum()) > 1
    return same and several and not any(same for _, same in there)


def _identified_by_later_layers(fit: Fit, steps: list[Tensor]) -> bool:
    """Do later weights break at another scale? (Biases may have been scaled as this layer's was.)"""
    return fit.agrees and all(fit.update_off_at(t, biases=False) > 1 for t in steps)


def _alone_by_weight(fit: Fit, own: Tensor) -> Tensor:
    """Per sample (b,): is its weight that of others, and would it not be at a scale of its own?"""
    if fit.weights is None or fit.labels is None:
        return torch.zeros_like(fit.matched)
    tolerance = fit.weight_error
    common = _grouped(fit.weights, tolerance)[0] > 1
    ones = (fit.weights - 1).abs() <= tolerance
    moved = torch.ones_like(fit.matched)
    for t in (1 + own, 1 - own):
        weights = fit.weights_at(t)
        assert weights is not None
        moved &= (weights / fit.weights - 1).abs() > tolerance
    return (common | ones) & moved


def merge(found: Recovered, fit: Fit | None) -> Ruling:
    """Could this trace be two or more samples?

    Samples that switch on the same neurons have gradients in a space with as many dimensions as the
    outputs can vary in. In one dimension (one output, two classes) all of them merge, at any distance,
    into one trace at a weighted mean. In more, samples with the same label merge as long as the part of
    their difference that no single sample explains, a product of two small steps, stays below the noise
    (`merge_radius`). What merges weighs more than one sample. So a merge is excluded where

    - as many samples were told as there are traces;
    - or only samples could merge that all equal the returned one, to the claimed error;
    - or weights are those of single samples: equal, or as clipping by norm makes them. If only
      near-duplicates can merge, every sample would need a near-duplicate, which is assumed away. If
      others can, all would have to merge in equal numbers, a coincidence whose chance is computed.

    If more samples were told than there are traces, equal weights are not enough: one of `told` samples
    weighs b / told of what one of b does, a pair twice that.
    """
    everyone = torch.ones(found.b, dtype=torch.bool, device=found.selection.C.device)
    told = found.view.samples
    if told == found.b:
        return Ruling(Cause.MERGED, everyone, "")
    if fit is None:
        more = told is not None and told > found.b  # then some may be in these traces
        apart = not (more or _bias_left_over(found.factors) or _one_dimension(found.view.model))
        single = everyone & ~_difference_shows(found) & apart
        return Ruling(Cause.MERGED, single, _MAY_BE_SEVERAL, (NO_MERGE,))
    radius = merge_radius(found, fit)  # (b,)
    spread = _spread(found.X)
    # The mean of two is half as far from both; the other half is a margin.
    # An input that the layer ignores shows nowhere, however large the difference.
    blind = _ignores_inputs(found)
    harmless = (radius <= EXACT_ERROR * found.value_range) & (not blind)
    if fit.dimensions < 2:
        harmless, radius = torch.zeros_like(harmless), torch.full_like(radius, torch.inf)
    assumptions: tuple[str, ...] = ()
    single, doubled = harmless, ""
    if fit.weights is None:
        assumptions = (GENERAL_POSITION, NOT_SCALED)
    elif not bool(harmless.all()):
        near = radius <= NEAR_DUPLICATE * spread
        single, assumptions = _single(found, fit, near)
        # A trace that weighs as much as several is several, however near they are.
        heavy = _grouped(fit.weights, fit.weight_error)[1]
        # A single trace weighs as one sample, whatever it is made of. And what stands out beside the
        # samples may be the difference of two in one trace, unless a heavy trace explains it.
        left_over = _difference_shows(found) & ~heavy.any()
        single = single & ~left_over & (found.b > 1)
        single = single | (harmless & ~heavy)
        assumptions += (WEIGHED_ALIKE,) if not fit.told else ()
    if told is not None and told > found.b:
        single = single & (harmless | _weighs_one_of(told, found, fit))
    if fit.weights is not None:
        doubled = _duplicate_remark(found, fit)
        if not _weights_equal(fit, fit.weights)[0]:
            assumptions = (*assumptions, UNSEEN)
    words = _MAY_BE_SEVERAL if told is None else _SEVERAL
    return Ruling(Cause.MERGED, single, words, assumptions, doubled)


def _ignores_inputs(found: Recovered) -> bool:
    """Is there an input with a gradient that no weight reads?"""
    view = found.view
    if view.rounds is not None:
        return view.rounds.ignored_columns
    return bool((view.weight[:, found.factors.live_columns] == 0).all(0).any())


def _weighs_one_of(told: int, found: Recovered, fit: Fit) -> Tensor:
    """Traces (b,) that weigh as one of this many samples; none where weights do not show."""
    if fit.weights is None:
        return torch.zeros_like(fit.matched)
    return (fit.weights * told / found.b - 1).abs() <= 2 * fit.weight_error


def _bias_left_over(factors: Factors) -> bool:
    """Is more of dL/db outside the span of L than rounding leaves, as with a darker copy?

    On honest updates rounding left 0.2 to 0.5 of one, and noise about as much.
    """
    g = factors.bias_grad
    rounding = 2 * factors.eps * float(g.norm())
    noise = SPARE_ROWS * factors.noise * math.sqrt(len(g))
    return float(factors.bias_outside.norm()) > rounding + noise


def _one_dimension(model: nn.Module | None) -> bool:
    """Does a model that cannot be run end in one output or two classes, by the look of its layers?"""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)] if model is not None else []
    return bool(layers) and layers[-1].out_features <= 2


def _duplicate_remark(found: Recovered, fit: Fit) -> str:
    """In words: do some traces weigh as much as several others, so that duplicates are likely?

    Clipping by norm makes all weights differ, and some become multiples of others by chance. Then
    only a multiple of a weight that several share counts, before or after clipping.
    """
    assert fit.weights is not None
    tolerance = fit.weight_error
    size, multiple = _grouped(fit.weights, tolerance)
    if _may_be_clipped(found, fit) and int(size.max()) < found.b:
        clipped = fit.weights * gradient_norms(found, fit)
        shared = _grouped(clipped, tolerance)[0] > 1
        if bool(shared.any()):
            multiple = _grouped(fit.weights, tolerance, among=size > 1)[1]
            multiple = multiple | _grouped(clipped, tolerance, among=shared)[1]
    heavy = int((multiple & fit.matched).sum())
    if not heavy:
        return ""
    return (
        f"{heavy} of {len(fit.weights)} samples weigh as much as several others: the batch may have "
        "held (near-)duplicates of them"
    )


def scale_in_training(found: Recovered, off: Tensor) -> Ruling:
    """Would larger or smaller inputs explain several local steps as well?

    x t goes with d / t, so a column of summed gradients that agrees to a share `off` (b,) leaves t no
    more than that. Half of the claimed error is left for whatever else is not repeated exactly.
    """
    claimed = EXACT_ERROR * found.value_range / found.sizes
    return Ruling(Cause.SCALE, 2 * off <= claimed, _ANY_SCALE)


def mix_in_training(found: Recovered, simulated: Simulated) -> Ruling:
    """Could part of another sample be in this one, after several local steps? See `mix`.

    The training is known nearly, so a few signs may be wrong, and zeros count only where it says that
    the sample was off. Any two of them may be left out, and the others must still hold the direction:
    a row that is no zero turns a direction that hangs on it.
    """
    factors, selection = found.factors, found.selection
    side, live = selection.directions.side, factors.live_rows
    values = (side.basis @ selection.directions.vectors).abs()  # (rows, b)
    off, on = selection.directions.zeros, values > UNDECIDED * side.zero
    highest, slack = simulated.highest[:, live].T, simulated.slack[:, live].T
    slack = slack + factors.weight_lengths[live] * factors.preactivation_error(selection.C)
    wrong = ((off & (highest > slack)) | (on & (highest < -slack))).sum(0)
    decided = ((off | on) & (highest.abs() > slack)).sum(0)  # (b,)
    few = (1 - SIGN_AGREEMENT) * decided if simulated.dimensions > 1 else torch.zeros_like(decided)
    held = dataclasses.replace(found, confirmed=off & (highest < -slack))
    sound = (wrong <= few) & _is_determined(held) & _held_by_several(held)
    at_once = found.b if bool(sound.all()) else 1  # all of them by luck, or one of them
    chance = [
        theory.pattern_by_chance(max(rows, 1), found.b) * math.comb(rows, k)
        for rows, k in zip(decided.tolist(), wrong.tolist(), strict=True)
    ]
    sound = sound & (max(chance) ** at_once <= PATTERN_CHANCE)
    if not bool(sound.all()):
        sound = sound & unmixed(held, sound)
    return Ruling(
        Cause.MIXED,
        sound,
        "may hold parts of others: their zeros and signs do not agree with the local training",
    )


def _held_by_several(found: Recovered) -> Tensor:
    """Directions (b,) that their confirmed zeros hold, with two to spare."""
    selection, held = found.selection, found.confirmed_zero_rows
    side = selection.directions.side
    white = unit(selection.Q * side.scales[:, None], 0)
    enough = []
    for j in range(found.b):
        found.factors.check_time()
        enough.append(redundancy(side, white[:, j], held[:, j]) > 1)
    return torch.tensor(enough, device=white.device)


def scale_of_all(found: Recovered, simulated: Simulated) -> Ruling:
    """Did weights and biases move at another rate than told, so that all inputs have another scale?

    If the order is known, all samples then weigh more or less than the training gives them, or the
    training fits better at another scale of inputs. If it is not, the client must be one of those that
    were simulated in orders of their own, and every rival far from it (ensemble.py).
    """
    apart = abs(simulated.usual_weight - 1)
    off = abs(simulated.scale - 1)
    if simulated.ordered:
        known = max(2 * apart, off + simulated.scale_error) <= scale_claimed(found)
    else:
        known = off + DEVIATIONS_TO_SPARE * simulated.scale_error <= TRAINING_SCALE
        known = known and simulated.distance <= TRAINING_DISTANCE
    alike = torch.full_like(simulated.recognised, known and bias_in_span(found.factors))
    return Ruling(Cause.SCALE, alike, _ANY_SCALE, (SCALED_ALIKE,))


def merge_in_simulation(found: Recovered, simulated: Simulated) -> Ruling:
    """The same where steps are simulated: a trace of several samples weighs as one only if the others
    are faint, and then what they leave beside it shows."""
    factors = found.factors
    if bool(_difference_shows(found).any()) or _bias_left_over(factors):
        nobody = torch.zeros(found.b, dtype=torch.bool, device=found.selection.C.device)
        return Ruling(Cause.MERGED, nobody, _MAY_BE_SEVERAL)
    return merge_in_training(found, simulated.dimensions)


def merge_in_training(found: Recovered, dimensions: int) -> Ruling:
    """The same after several local steps, which are repeated with each sample's weight as it is.

    A trace of several would weigh more than one sample and be off, unless all are alike.
    """
    everyone = torch.ones(found.b, dtype=torch.bool, device=found.selection.C.device)
    told = found.view.samples
    if told == found.b:
        return Ruling(Cause.MERGED, everyone, "")
    if told is not None and told > found.b:  # these weigh as b samples do: they hold the others
        return Ruling(Cause.MERGED, ~everyone, _SEVERAL)
    if dimensions > 1:
        return Ruling(Cause.MERGED, everyone, "", (NOT_ALL_PAIRED,))
    unlikely = _chance_of_pairs(found.b) <= COINCIDENCE
    assumptions = (NOT_ALL_MERGED,) if unlikely else ()
    return Ruling(Cause.MERGED, everyone & unlikely, _MAY_BE_SEVERAL, assumptions)


def merge_radius(found: Recovered, fit: Fit) -> Tensor:
    """How far apart (b,), per input, two samples with one label and ReLU pattern can be unseen.

    w (s1 x1' + s2 x2') = 2 w s x' + w/2 ds dx': one sample at the mean, and a second part of length
    w/2 |ds| |dx|. ds grows with dx at a rate that the network gives (`curvature`). That part shows

    - if dx is like noise: as a further singular value, so it is below the first one left over;
    - if dx leads to another sample: as entries of that one's column in rows where it is off;
    - if dx is parallel to x, a darker copy: outside the span of L in the bias gradient, where dx has
      length |dx| / |x|.
    """
    factors, selection, X, Z = found.factors, found.selection, found.X, found.Z
    m, n = factors.m, factors.n
    noise = torch.randn(1, n, generator=torch.Generator().manual_seed(0)).to(X)
    noise = noise / noise.norm()
    if factors.view.rounds is not None:
        noise = noise @ factors.view.rounds.basis.T
    noise = noise @ factors.view.weight.to(X).T
    edge = factors.noise * (math.sqrt(m) + math.sqrt(n))
    left_over = max(edge, *factors.spectrum[factors.b : factors.b + 1].tolist(), 0.0)
    reaches = [(2 * left_over / fit.curvature(noise.expand_as(Z))).sqrt()]
    if len(X) > 1:
        apart = (found.distances * math.sqrt(n)).fill_diagonal_(torch.inf)
        distance, nearest = apart.min(1)
        way = (Z[nearest] - Z) / distance[:, None]
        zeros = factors.zero * math.sqrt(m) * selection.Q.norm(dim=0)[nearest]
        reaches.append((2 * zeros * distance / fit.curvature(way)).sqrt())
    length = X.norm(dim=1)
    g = factors.bias_grad
    rounding = torch.finfo(factors.view.bias_precision).eps * g.norm()
    outside = factors.bias_outside.norm()
    if selection.bias_noise is not None:
        outside = outside.new_tensor(selection.bias_noise * math.sqrt(m))
    in_bias = torch.maximum(outside, rounding)
    if not factors.view.has_bias:
        in_bias = torch.full_like(in_bias, torch.inf)
    along = (Z - factors.bias) / length[:, None]
    beside = (length.square() + 1).sqrt()
    reaches.append((2 * in_bias * beside / fit.curvature(along)).sqrt())
    radius: Tensor = torch.stack(reaches).amax(0).nan_to_num(torch.inf) / math.sqrt(n)
    return radius


def _spread(X: Tensor) -> float:
    """How far apart samples are, per input: from each other, or a single one from its mean."""
    if len(X) == 1:
        return float(X.std()) if X.numel() > 1 else 0.0
    distances = torch.pdist(X) / math.sqrt(X.shape[1])
    return float(distances.median())


def _single(found: Recovered, fit: Fit, near: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Samples (b,) that weigh as single ones; and what that assumes."""
    assert fit.weights is not None
    single, unlikely = _by_groups(fit, fit.weights, fit.weight_error, near)
    assumptions: tuple[str, ...] = (NOT_ALL_MERGED,) if unlikely else (NOT_ALL_PAIRED,)
    if _may_be_clipped(found, fit) and not bool(single.all()):
        explained, alone = _by_clipping(found, fit)
        single = single | (explained & near)
        assumptions += (DIVIDED_BY_ALL,) if alone else ()
    return single & fit.matched, assumptions


def _by_clipping(found: Recovered, fit: Fit) -> tuple[Tensor, bool]:
    """Weights (b,) that clipping by norm explains: c as they are, or K / norm where that is less.

    Most samples must be among them, and several share K. Several must share c, too, or a single one has
    the weight of one of b in a mean, and a norm that clipping leaves alone.
    """
    assert fit.weights is not None
    tolerance = fit.weight_error
    clipped = fit.weights * gradient_norms(found, fit)
    alike, multiple = _grouped(clipped, tolerance)
    heaviest = fit.weights.max()
    whole = (fit.weights / heaviest - 1).abs() <= 2 * tolerance
    alone = whole & (int(whole.sum()) == 1) & ((heaviest - 1).abs() <= tolerance)
    alone = alone & (clipped <= clipped[alike.argmax()])
    explained = (whole & (int(whole.sum()) > 1)) | alone | ((alike > 1) & ~multiple)
    return explained & (2 * int(explained.sum()) > len(explained)), bool(alone.any())


def _may_be_clipped(found: Recovered, fit: Fit) -> bool:
    """Can we compute what clipping by norm would make of the weights?"""
    known = fit.labels is not None and fit.whole
    return found.view.reads_data and fit.dimensions > 1 and known


def _by_groups(fit: Fit, weights: Tensor, tolerance: Tensor, near: Tensor) -> tuple[Tensor, bool]:
    """Weights (b,) that are those of single samples, by how many share them.

    A weight that is a whole multiple of a lighter one may be a merge.
    """
    size, multiple = _grouped(weights, tolerance)
    b = len(weights)
    usual = (size == b) | ((2 * size > b) & ~multiple)
    chance = torch.tensor([_chance_of_pairs(k) for k in size.tolist()], device=weights.device)
    if fit.dimensions < 2 and fit.labels is not None:
        chance = chance * (_unseen_share(fit, tolerance).to(chance) ** size)
    unlikely = usual & (chance <= COINCIDENCE)
    single = (usual & near) | unlikely
    return single, bool((single & ~near).any())


def _grouped(
    weights: Tensor, tolerance: Tensor, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many weights (b,) equal each, and whether it is a multiple of a lighter one, `among` some."""
    ratio = weights[:, None] / weights[None]  # (b, b)
    bound = tolerance[:, None] + tolerance[None]
    size = ((ratio - 1).abs() <= bound).sum(1)
    whole = ratio.round()
    beyond = (ratio - whole).abs() <= torch.maximum(bound, bound.new_tensor(WHOLE_WEIGHT)) * whole
    multiples = beyond & (whole >= 2) & (whole <= LARGEST_MERGE)
    if among is not None:
        multiples = multiples & among
    return size, multiples.any(1)


def _chance_of_pairs(k: int) -> float:
    """How likely 2k samples fall into k equally likely cells in pairs: (2k)! / 2^k k^2k."""
    return math.exp(math.lgamma(2 * k + 1) - k * math.log(2) - 2 * k * math.log(k))


def _unseen_share(fit: Fit, tolerance: Tensor) -> Tensor:
    """With one output: the share (b,) of the outputs' spread in which a pair weighs twice one sample.

    Two samples at outputs o - e and o + e weigh s(o - e) + s(o + e), and count as one at their weighted
    mean. Where s is curved, that is not twice a single weight.
    """
    replay, labels = fit.replay, fit.labels
    assert labels is not None
    outputs = replay.outputs_here().detach()
    margin = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    share = torch.ones_like(margin)
    one_number = outputs.shape[1] == 1 or (outputs.shape[1] == 2 and replay.label_dimensions == 1)
    if len(margin) < 2 or not one_number:
        return share

    def slope(o: Tensor) -> Tensor:
        moved = o[:, None] if outputs.shape[1] == 1 else torch.stack([-o / 2, o / 2], 1)
        leaf = moved.detach().requires_grad_()
        (grad,) = gradients_of(replay.single_losses(leaf, labels).sum(), leaf)
        return grad[:, -1]

    spread = margin.std()
    for halvings in range(8):
        e = spread / 2**halvings
        low, high = slope(margin - e), slope(margin + e)
        mean = (low * (margin - e) + high * (margin + e)) / (low + high)
        off = ((low + high) / (2 * slope(mean)) - 1).abs()
        share = torch.where(off > tolerance, share.clamp_max(2.0**-halvings), share)
    return share


def gradient_norms(found: Recovered, fit: Fit) -> Tensor:
    """The norm (b,) of each sample's gradient over all parameters, as clipping takes it."""
    replay, labels = fit.replay, fit.labels
    assert labels is not None
    d = fit.single_gradients.square().sum(1)
    x = found.selection.C.square().sum(1)
    parameters = list(replay.network.parameters())
    behind = []
    for loss in replay.single_losses(replay.outputs_here(), labels):
        found.factors.check_time()
        slopes = gradients_of(loss, parameters, materialize_grads=True, retain_graph=True)
        behind.append(sum(float(slope.square().sum()) for slope in slopes))
    norms: Tensor = (d * (x + 1) + d.new_tensor(behind)).sqrt()
    weights = replay.joint_weights(replay.Z, replay.D, labels)
    single = replay.single_weights(labels)
    return norms * single / weights  # weights are joint ones: what they would be each on its own


def contradicted(fit: Fit) -> Ruling:
    """Does the loss that explains the others fail to explain this sample?"""
    words = (
        f"have a gradient that no label explains, though {fit.loss.value} explains the others. Likely "
        "causes: several samples merged into one, mixed labels, or a wrong sample"
    )
    return Ruling(Cause.CONTRADICTED, fit.matched, words)


def _difference_shows(found: Recovered) -> Tensor:
    """Which samples (b,) may be two in one trace, whose difference is what stands out beside it?

    It is zero where both are off. What was left out as too faint is that for no sample whose zeros, in
    all that stands out, leave no second direction free, unless a neuron among them shows an input that
    is on wherever this sample is: then it may be a part of it that switches on a neuron more.
    """
    extra = _extra_singular_value(found.factors)
    shows = torch.full((found.b,), extra, device=found.selection.C.device)
    whole, directions = found.factors.whole, found.selection.directions
    if whole is None:
        return shows
    if directions.side.name != "outputs":
        return torch.ones_like(shows)
    side, enough = whole.outputs, whole.b - 1
    for i, zeros in enumerate(directions.zeros.T):
        free = int(zeros.sum()) < enough or (
            smallest_singular(side.basis[zeros])[1] <= side.noise_of_rows
        )
        shows[i] |= free or _on_where_it_is(found, zeros, side.basis.norm(dim=1))
    return shows


def _on_where_it_is(found: Recovered, zeros: Tensor, loudness: Tensor) -> bool:
    """Is the input that the loudest of these rows (live,) shows on in all the others?"""
    factors, view = found.factors, found.view
    if view.rounds is not None or not view.has_bias:
        return False
    live = factors.live_rows.nonzero().flatten()
    row = live[(loudness * zeros).argmax()]
    if not bool(factors.bias_grad[row].abs() > 0):
        return False
    x = view.weight_grad[row].double() / factors.bias_grad[row]
    z = view.weight.double() @ x + view.bias.double()
    return bool((z[live[~zeros]] > 0).all())


def _extra_singular_value(factors: Factors) -> bool:
    """Does one more singular value stand out from what was taken for noise?"""
    b, s = factors.b, factors.spectrum
    m, n = int(factors.live_rows.sum()), int(factors.live_columns.sum())
    k, p = m - b - 1, n - b - 1
    if len(s) < min(m, n) or len(s) < b + 1 + SPARE_ROWS or min(k, p) < 1:
        return False  # a sketch, or too little to compare with
    rest = s[b + 1 :]
    edge = float(rest.norm()) / math.sqrt(k * p) * (math.sqrt(k) + math.sqrt(p))
    # A rounding of the loudest sample does not count, nor a few of the factorisation's own.
    eps = factors.eps
    rounding = max(eps, MARGIN * torch.finfo(s.dtype).eps) * float(s[0])
    return float(s[b]) > max(MARGIN * edge, rounding)


def missing(factors: Factors) -> str:
    """In words: could the batch hold more samples? Empty if nothing says so.

    A sample whose gradient is below the update's noise leaves no trace, and unless it was told, nothing
    shows that it was there: a mean over more samples looks like any other factor.
    """
    if factors.zero_input:
        return (
            f"besides these {factors.b} there are samples whose inputs are all zero: they show only in "
            "the bias gradient"
        )
    if _extra_singular_value(factors):
        return (
            f"besides these {factors.b} something fainter stands out from the update's rounding: "
            "perhaps a sample with hardly any weight"
        )
    told = factors.view.samples
    if told is None or told <= factors.b:
        return ""
    return (
        f"the update was computed from {told} samples, as was told, and {factors.b} are visible in it: "
        "the others are duplicates, merged into these, or their gradient vanished"
    )
