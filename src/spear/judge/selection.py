"""The two-stage greedy choice of b directions, and the sparsity matching coefficient lambda.

The paper's text and pseudocode differ in two places. The loops of Algorithm 3 are printed with inverted
conditions ("while rank of B is b", "while not changed"); they must run until the rank is b, and as long
as something changes. And where the pseudocode takes the first improving swap, the text takes the best
one. We follow the text: all swaps of a candidate are scored together, and the best needs fewest rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spear import theory
from spear.factors import Factors
from spear.search import (
    INDEPENDENT,
    SIGN_AGREEMENT,
    Directions,
    Watch,
    certain_zeros,
    consistent_samples,
    dual_problem,
    scale,
    sparsest_independent,
    unit,
)
from spear.tolerances import (
    BELOW_NOISE_CHANCE,
    MARGIN,
    MISSING_TO_FOUND_RATIO,
    PART_CHANCE,
    PATTERN_AGREES_NOISY,
    UNDECIDED,
    WRONG_SIGNS,
    ZERO_DEVIATIONS,
)

_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True, eq=False)
class Selection:
    """b directions with their scale: the disaggregation matrix Q and its inverse."""

    directions: Directions  # the b chosen ones
    Q: Tensor  # (b, b): dL/dZ = L Q
    C: Tensor  # (b, b) = Q^-1: X = C R
    contradictions: Tensor  # (b,) entries per sample that no rounding explains
    match: float  # lambda
    frozen: Tensor | None = None
    """(m,) bool: neurons that sent nothing although samples switch them on."""
    unscaled: Tensor | None = None
    """(b,) bool: samples whose scale dL/db does not give; None if it gives all."""
    bias_noise: float | None = None
    """Of an entry of dL/db, if some traces spoil it."""
    only_extra_zeros: bool = False
    """Are all contradictions zeros where the sign says on, as with dropout that nobody told?"""
    wrong_rows: Tensor | None = None
    """(m,) how many samples' signs contradict their zeros in each row."""

    @property
    def b(self) -> int:
        return len(self.Q)


def select(
    factors: Factors, pool: Directions, watch: Watch, *, second_stage: bool = True
) -> Selection | None:
    """GreedyFilter: the sparsest independent directions, then the swaps that raise lambda most.

    Args:
        factors: of the update.
        pool: the candidates.
        watch: its deadline ends the swaps.
        second_stage: False leaves out the swaps, to see what they are worth.
    """
    if pool.side.name == "inputs":
        return _select_inputs(factors, pool)
    chosen = sparsest_independent(_white(pool), pool.sparsity + pool.redundancy)
    if len(chosen) < factors.b:
        return None
    problem = _Matching(factors, pool)
    if second_stage:
        chosen = problem.improve(chosen, watch)
    return problem.selection(chosen)


def _white(pool: Directions) -> Tensor:
    """The directions (b, c) in whitened coordinates: independent there, however faint the sample."""
    return unit(pool.vectors * pool.side.scales[:, None], 0)


class _State(NamedTuple):
    """The inverse of unscaled directions and what follows from it."""

    C: Tensor  # (b, b)
    F: Tensor  # (ends, m, b) = W R^T C^T
    t: Tensor  # (b,) scales


class _Matching:
    """lambda for sets of directions, with swaps by rank-one updates of the inverse."""

    def __init__(self, factors: Factors, pool: Directions) -> None:
        self.factors = factors
        self.pool = pool
        self.H, self.bias = factors.before_and_after  # (ends, m, b), (ends, m, 1)
        self.lengths = factors.weight_lengths  # (m, 1)
        live, count = factors.live_rows, len(pool)
        values = (pool.side.basis @ pool.vectors).abs()
        self.off = torch.ones(len(live), count, dtype=torch.bool, device=live.device)
        self.off[live] = pool.zeros  # (m, c) dL/dZ = 0, in silent neurons for every direction
        hidden = pool.side.hidden(pool.vectors, pool.zeros)
        if hidden is not None:
            self.off[live] &= ~hidden  # it may be on, and drowned in louder samples
        self.on = torch.zeros_like(self.off)
        # Rounding adds up over millions of inputs, so a direction's own zeros set the level.
        level = torch.where(pool.zeros, values, pool.side.zero).amax(0)
        self.on[live] = values > UNDECIDED * level  # (m, c) dL/dZ certainly not 0
        self.h = factors.bias_coordinates
        self.biased = factors.view.has_bias
        self.dropout = factors.view.dropout > 0
        if self.dropout:  # a zero says nothing: its neuron may be on and dropped
            self.off = torch.zeros_like(self.off)
        self.rows = torch.full((count,), len(live), device=live.device)  # in which it took part
        for each in factors.view.rounds.each if factors.view.rounds is not None else ():
            silent = silent_in(pool.zeros, live, each.rows)
            self.off[each.rows] &= ~silent  # a sample that was absent may be on
            self.rows -= silent * len(live[each.rows])

    def contradictions(
        self, F: Tensor, t: Tensor, reach: Tensor, off: Tensor, on: Tensor, *, dim: int = -2
    ) -> Tensor:
        """Entries per sample (with dim = -1 per row) whose sign contradicts the zero pattern.

        F (..., ends, m, k) = W R^T c for unscaled rows c of the inverse, t (..., k) their scale, reach
        (..., k) their error. A sign within rounding and noise contradicts nothing, and neither does one
        that changed during local training.
        """
        Z = F / t[..., None, None, :] + self.bias  # (..., ends, m, k)
        slack = self.lengths * (reach / t.abs())[..., None, :]
        lowest, highest = Z.amin(-3), Z.amax(-3)
        # ~ so that NaN counts as wrong both ways.
        wrong = (off & ~(lowest <= slack)) | (on & ~(highest > -slack))
        return wrong.sum(dim)

    def least_contradictions(
        self, F: Tensor, t: Tensor, reach: Tensor, off: Tensor, on: Tensor
    ) -> Tensor:
        """The same (..., k); without a bias an input may have either sign, and the better counts."""
        wrong = self.contradictions(F, t, reach, off, on)
        if self.biased:
            return wrong
        return torch.minimum(wrong, self.contradictions(F, -t, reach, off, on))

    def state(self, chosen: list[int]) -> _State:
        C = torch.linalg.inv(self.pool.vectors[:, chosen])
        # Without a bias nothing says how large an input is: it gets a root mean square of one.
        t = C @ self.h if self.biased else C.norm(dim=1) / self.factors.n**0.5
        return _State(C, self.H @ C.T, t)

    def wrong(self, chosen: list[int]) -> Tensor:
        state = self.state(chosen)
        reach = self.factors.preactivation_error(state.C)
        off, on = self.off[:, chosen], self.on[:, chosen]
        return self.least_contradictions(state.F, state.t, reach, off, on)

    def improve(self, chosen: list[int], watch: Watch) -> list[int]:
        """Stage two: swap the pair that lowers the contradictions most, until none does."""
        current = int(self.wrong(chosen).sum())
        while current and not watch.expired:
            best, swap = current, None
            inside, state = set(chosen), self.state(chosen)
            others = [j for j in range(len(self.pool)) if j not in inside]
            for j, places in product(others, self._places(state)):
                if watch.expired:
                    break
                totals = self._swap(state, chosen, j, places)  # (k,)
                i = int(totals.argmin())
                if int(totals[i]) < best:
                    best, swap = int(totals[i]), (int(places[i]), j)
            if swap is None:
                break
            chosen = [*chosen[: swap[0]], swap[1], *chosen[swap[0] + 1 :]]
            current = best
        return chosen

    @staticmethod
    def _places(state: _State) -> tuple[Tensor, ...]:
        """The places of the b chosen directions, as many at a time as fit."""
        places = torch.arange(len(state.C), device=state.C.device)
        return torch.split(places, max(1, _AT_ONCE // state.F.numel()))

    def _swap(self, state: _State, chosen: list[int], j: int, i: Tensor) -> Tensor:
        """Contradictions with candidate j in each of the places i (k,), one at a time."""
        C, F, t = state.C, state.F, state.t
        a = C @ self.pool.vectors[:, j]  # (b,) candidate in terms of the chosen
        k = torch.arange(len(i), device=a.device)
        possible = a[i].abs() > INDEPENDENT
        ratio = a[None, :] / torch.where(possible, a[i], 1.0)[:, None]  # (k, b): a_l / a_i
        ratio[k, i] = 0.0  # c_i itself only changes its scale
        own = F[..., i].movedim(-1, 0)[..., None]  # (k, ends, m, 1)
        F_new = F[None] - own * ratio[:, None, None, :]  # (k, ends, m, b)
        t_new = t[None] - t[i][:, None] * ratio  # (k, b)
        C_new = C[None] - ratio[:, :, None] * C[i][:, None]  # (k, b, b)
        if not self.biased:
            t_new = C_new.norm(dim=2)
        reach = self.factors.preactivation_error(C_new)  # (k, b)
        off = self.off[:, chosen].expand(len(i), -1, -1).clone()
        on = self.on[:, chosen].expand(len(i), -1, -1).clone()
        off[k, :, i] = self.off[:, j]
        on[k, :, i] = self.on[:, j]
        totals = self.least_contradictions(F_new, t_new, reach, off, on).sum(-1)
        return torch.where(possible, totals, torch.iinfo(totals.dtype).max)

    def selection(self, chosen: list[int], t: Tensor | None = None) -> Selection:
        """The choice, with the scales the bias gradient gives, or with others (b,)."""
        vectors = self.pool.vectors[:, chosen]
        picked = self.pool.pick(chosen)
        state = self.state(chosen)
        off, on = self.off[:, chosen], self.on[:, chosen]
        reach = self.factors.preactivation_error(state.C)
        if t is not None:
            state = state._replace(t=t)
        elif not self.biased or self.factors.noisy:  # noise may turn the sign of a scale
            upright = self.contradictions(state.F, state.t, reach, off, on)
            turned = self.contradictions(state.F, -state.t, reach, off, on)
            state = state._replace(t=torch.where(turned < upright, -state.t, state.t))
        frozen = self._frozen(state, reach, off, on)
        if frozen is not None:
            off = off & ~frozen[:, None]
        wrong = self.contradictions(state.F, state.t, reach, off, on)
        silent = off & (state.F / state.t + self.bias > 0).all(0)
        wrong = wrong - rows_below_noise(picked, torch.minimum(silent.sum(0), wrong))
        stray = self.contradictions(state.F, state.t, reach, torch.zeros_like(off), on)
        signs = int(on.sum() if self.dropout else self.rows[chosen].sum())
        match = 1 - int(wrong.sum()) / max(signs, 1)
        return Selection(
            picked,
            vectors * state.t,
            state.C / torch.where(state.t == 0, torch.nan, state.t)[:, None],
            wrong,
            match,
            frozen,
            unscaled=None
            if self.biased or t is not None
            else torch.ones_like(wrong, dtype=torch.bool),
            only_extra_zeros=not int(stray.sum()) and not self.dropout,
            wrong_rows=self.contradictions(state.F, state.t, reach, off, on, dim=-1),
        )

    def _frozen(self, state: _State, reach: Tensor, off: Tensor, on: Tensor) -> Tensor | None:
        """Neurons (m,) without a gradient although samples switch them on: frozen or masked.

        They are ignored if the rows with a gradient contradict no sample.
        """
        if self.dropout:
            return None
        live = self.factors.live_rows
        lowest = (state.F / state.t + self.bias).amin(0)  # (m, b)
        rows = ~live & (lowest > self.lengths * (reach / state.t.abs())).any(1)
        if not bool(rows.any()):
            return None
        others = self.contradictions(state.F, state.t, reach, off & live[:, None], on)
        return rows if not int(others.sum()) else None


def contradicted_rounds(factors: Factors, selection: Selection) -> list[int]:
    """Rounds, by index, whose weights contradict their own update, while those of others do not.

    At weights of another round, signs are wrong in every neuron that changed side since.
    """
    rounds, wrong = factors.view.rounds, selection.wrong_rows
    if rounds is None or wrong is None or not bool(wrong.any()):
        return []
    each = torch.stack([wrong[r.rows].sum() for r in rounds.each])
    entries = rounds.width * selection.b
    bad = each > WRONG_SIGNS * entries
    sound = each * MARGIN <= WRONG_SIGNS * entries
    if not bool(bad.any()) or not bool((bad | sound).all()) or int(bad.sum()) * 2 >= len(each):
        return []
    return bad.nonzero().flatten().tolist()


def silent_in(zeros: Tensor, live_rows: Tensor, rows: slice) -> Tensor:
    """Directions (c,) without any gradient in a round: samples that took no part in it.

    Args:
        zeros: (live rows, c) of all rounds.
        live_rows: (m,) bool.
        rows: of the round.
    """
    before = int(live_rows[: rows.start].sum())
    count = int(live_rows[rows].sum())
    silent: Tensor = zeros[before : before + count].all(0)
    return silent


def at_scales(factors: Factors, selection: Selection, t: Tensor) -> Selection:
    """The same directions at other scales (b,): columns of dL/dZ are L v t, v of unit length."""
    return _Matching(factors, selection.directions).selection(list(range(selection.b)), t)


def rows_below_noise(directions: Directions, silent: Tensor) -> Tensor:
    """How many rows per direction (b,) may be on and yet read as zero, drowned in noise.

    Args:
        directions: the b chosen ones.
        silent: (b,) rows per direction that are zero although the sign says on.

    Entries of dL/dZ come arbitrarily close to zero. Their density there, times the level of the zeros,
    is how many drowned entries to expect; more than Poisson's law allows are no accident. Over rounds a
    row counts as zero until it is off by more than is undecided (`round_to_kernel`).
    """
    values = (directions.side.basis @ directions.vectors).abs()  # (rows, b)
    reach = 1.0 if directions.side.round_of_row is None else UNDECIDED / ZERO_DEVIATIONS
    level = torch.where(directions.zeros, values, directions.side.zero).amax(0)
    on = (~directions.zeros).sum(0)  # (b,)
    few = (on // 10).clamp_min(1)
    sizes = values.masked_fill(directions.zeros, torch.inf).sort(0).values
    density = few / sizes.gather(0, few[None] - 1)[0]  # zero where no row is on
    expected = (reach * level * density).tolist()
    means = np.array([*expected, sum(expected)])
    *most, together = theory.poisson_bound(means, BELOW_NOISE_CHANCE).tolist()
    if float(silent.sum()) > together:
        return torch.zeros_like(silent)
    allowed = torch.tensor(most, device=silent.device)
    return torch.where(silent <= allowed, silent, 0)


def _select_inputs(factors: Factors, pool: Directions) -> Selection | None:
    """The choice on the inputs' side, where each direction is judged on its own.

    A direction p is a whole sample here, x ~ (V S) p, and its scale follows from c . (Q 1) = 1. An
    input that comes out of a ReLU has no negative entry, so negative entries count against a direction.
    The paper leaves the coefficient for this side open.
    """
    s = factors.singular_values
    C = scale((pool.vectors * s[:, None]).T, factors.bias_coordinates)  # (c, b)
    lengths = (C / s).norm(dim=1)  # noise of an entry of x, in units of the update's
    X = (pool.side.basis / s) @ C.T  # (rows, c)
    negative = (~(-UNDECIDED * pool.side.zero * lengths <= X)).sum(0)  # (c,)
    order = pool.sparsity + pool.redundancy - 3 * negative.to(pool.sparsity)
    chosen = sparsest_independent(_white(pool), order)
    if len(chosen) < factors.b:
        return None
    C = C[chosen]
    if not bool(C.isfinite().all()):
        return None
    wrong = negative[chosen]
    match = 1 - int(wrong.sum()) / (factors.n * len(chosen))
    return Selection(pool.pick(chosen), torch.linalg.inv(C), C, wrong, match)


def select_part(
    factors: Factors, pool: Directions, watch: Watch
) -> tuple[Factors, Selection | None]:
    """The samples found, with everything they do not explain taken for noise; None if that is loud.

    Gradients of a trained network span many orders of magnitude, and the faintest samples drown. The
    others are x = D^+ dL/dW, off by no more than what is left over.
    """
    if not 0 < len(pool) < factors.b or pool.side.name != "outputs":
        return factors, None
    white = unit(pool.vectors * pool.side.scales[:, None], 0)  # (b, k)
    part = factors.restricted_to(white.T)
    if float(part.spectrum[-1]) > MISSING_TO_FOUND_RATIO * float(part.singular_values[0]):
        return factors, None
    live = part.left[part.live_rows]
    inside = unit((live.T @ (pool.side.white @ white)) / part.singular_values[:, None], 0)  # (k, k)
    directions = Directions(part.outputs, inside, pool.zeros, pool.redundancy)
    chosen = select(part, directions, watch)
    return (part, chosen) if chosen is not None else (factors, None)


def approximate_inputs(factors: Factors, pool: Directions, watch: Watch | None = None) -> Tensor:
    """C (k, b) of samples read from their pattern alone, X ~ C R, where some of the b were not found.

    Empty if there are too few rows for a pattern to say anything, or if the zeros are the inputs'.
    """
    by_chance = theory.pattern_by_chance(len(pool.side.basis), factors.b)
    if factors.view.rounds is not None:  # signs repeat from round to round; what is found is known
        neurons = factors.view.rounds.live_neurons(factors.live_rows)
        unknown = factors.b - min(len(pool), factors.b) + 1
        by_chance = theory.pattern_by_chance(neurons, unknown)
    if pool.side.name != "outputs" or by_chance > PART_CHANCE:
        return pool.vectors.T[:0]
    white = unit((pool.vectors * pool.side.scales[:, None]).T)
    strict = not (factors.noisy or factors.view.dropout)
    agrees = SIGN_AGREEMENT if strict else PATTERN_AGREES_NOISY
    off = certain_zeros(pool.side, pool.zeros.T, white)
    _, c = consistent_samples(dual_problem(factors), white, off, agrees, watch)
    if not factors.view.has_bias:
        return c[:0]  # neither scale nor sign is known
    h = factors.bias_coordinates * factors.singular_values
    return c / (c @ h)[:, None] * factors.singular_values
