"""The default finder: both halves of a sample are searched together, then rounded, read, taken away.

One round of the cascade, in the dimensions of what is still missing (dual.py):

1. guess   from many starts at once: shrink U q towards sparsity, with a threshold per row that the
           signs of H c raise or lower; read the signs from the pattern of U q (starts.py).
2. refine  each distinct result to the kernel of the rows that are certainly off, until it is exact
           (starts.py).
3. round   to the kernel of ALL its zero rows, at the update's noise level (kernels.py).
4. read    c of every sample found, from its pattern alone.
5. deflate the missing samples live in the space that the found ones leave: a smaller problem with
           as many rows, hence easier. The first round finds most samples, the next ones the rest.

Where the paper needs 2^b submatrices, a start succeeds with probability 0.3 to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.errors import InvalidOption
from spear.factors import Factors, Side
from spear.search.blocks import Blocks, refine_blocks, search_blocks
from spear.search.candidates import CandidatePool
from spear.search.deadline import NEVER, Deadline, TimeIsUp
from spear.search.directions import Directions
from spear.search.dual import (
    RIDGE,
    SIGN_AGREEMENT,
    BalancedProblem,
    DualProblem,
    SignRegression,
    agreement,
    balance,
    consistent_samples,
    deflate,
    dual_problem,
    read_samples,
)
from spear.search.kernels import (
    certain_zeros,
    round_to_kernel,
    scale,
    smallest_singular,
    sparsest_independent,
    unit,
)
from spear.search.next_layer import NextLayer, directions_off, search_by_messages
from spear.search.noisy import estimate
from spear.search.output_layer import vertices_by_linear_programme
from spear.search.path import OnePass
from spear.search.sampling import Draw, SamplingFinder, kernels
from spear.search.sharpening import sharpen
from spear.search.starts import (
    SHARP_RIDGE,
    guess_from_rows,
    guess_from_signs,
    kernels_near,
    refine_to_kernel,
    search_from_starts,
)
from spear.search.two_levels import TwoLevels, search_two_levels
from spear.search.watch import Watch
from spear.tolerances import ROWS_PER_SAMPLE, UNDECIDED

_BLOCKS = 512  # b x b inverses at a time when sampling
_AT_ONCE = 1 << 25  # entries of these: 256 MB in float64
_LARGEST_SWAP = 1 << 21  # b^2 rows up to which swapping in rejected directions is worth trying
_CLUSTER_GUESSES = 16  # guesses at a shared pattern
_SPARE_ROWS = 3  # rows beyond the rank, too many for an accident
# Above this noise, relative to the gradient's entries, zeros cannot be told one by one from small
# entries (kernels round to them up to 1e-2 on real batches).
_KERNEL_NOISE_LIMIT = 5e-3
_MAX_SAMPLES_PER_ROW = 0.8  # per live row: beyond, none can have enough zeros, whatever the data
_NEGATIVE_SHARES = (
    0.99,
    0.9,
    0.7,
)  # of the negative rows: many are needed, and few signs are wrong
_MOST_REPAIRS = 8  # directions solved anew, the worst first
_MOST_DIRECTIONS = 20  # overdetermined ones per sample: so many are mixes, and more help no one
_BLOCK_STARTS = 2  # per missing sample: nearly all of them end near a sample
_CANCELS = 1e-4  # how near a row comes to zero in some mix of two samples, for the smallest rows
_BY_ACCIDENT = 1e-3  # how many mixes may pass for samples
_SLOW = 0.125  # share of the missing samples: a usual round finds half of them or more
_SIGN_GUESSES = 128  # random ones: as many as the fewest starts
# Share of rows whose sign a regression on the zeros gets right: 0.8 and more for samples, up to 0.64
# for differences of two (64 to 256 images of MNIST and CIFAR-10).
_PLAIN_AGREEMENT = 0.72
# Starts of a usual round per sample that it finds: nearly all end near one, several near the same.
_STARTS_PER_HIT = 4
_MOST_STARTS = 8  # times as many as in the first round
_WIDE = (
    4  # rows per sample: with more, rounds without the next layer find half of the batch or more
)
_MOST_IN_VAIN = 2  # rounds with the next layer that find nothing: more find nothing either
_FEW_MISSING = 4  # missing samples up to which single rows are tried first


@dataclass(frozen=True)
class _Effort:
    """What a round is given, after what the last ones found."""

    idle: int  # rounds since the last that left fewer missing
    more: float  # times the usual starts
    slow: bool
    """Did the last round find few in spite of many starts? Then starts take more steps, and hold c less
    near q: in a batch of a quarter of the neurons the cosine of the two is 0.5, and three times as many
    starts end near a sample."""


@dataclass(frozen=True)
class CascadeFinder:
    """The joint search for zeros and signs.

    Args:
        starts: per missing sample in the first round, at least 128 altogether. Later rounds take up to
            eight times as many, as the hits of the last one call for.
        steps: of the search in a round; twice as many once rounds find nothing.
        patience: rounds without a new direction before it turns to the paper's sampling, of rows that
            are likely off for the missing samples.
        max_samples: submatrices that may then be sampled; 0 gives up instead.
    """

    starts: int = 1
    steps: int = 80
    patience: int = 6
    max_samples: int = 50_000

    def __post_init__(self) -> None:
        for name in ("starts", "steps", "patience"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.max_samples < 0:
            raise InvalidOption(f"expected max_samples >= 0, got {self.max_samples}")

    def satisfied(self, factors: Factors, match: float) -> bool:
        return SamplingFinder().satisfied(factors, match)

    def search(
        self, factors: Factors, *, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        with suppress(TimeIsUp):  # what was found has been yielded
            yield from self._search(factors, generator, watch)

    def _search(
        self, factors: Factors, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        rows = int(factors.live_rows.sum())
        if factors.relu != "before" and factors.b > _MAX_SAMPLES_PER_ROW * rows:
            watch.remark(
                f"telling a sample from the others takes {factors.b - 1} rows in which it is off, "
                f"and a ReLU switches off about half of {rows}: attack a wider layer, or combine more "
                "rounds of the same data"
            )
            return
        if factors.relative_noise > _KERNEL_NOISE_LIMIT and factors.relu != "before":
            yield from self._estimates(factors, generator, watch)
            return
        if factors.relu == "before":
            inputs = factors.inputs
            pool = CandidatePool(inputs, threshold=factors.b / inputs.size, watch=watch)
            yield from vertices_by_linear_programme(
                factors, pool, patience=self.patience, generator=generator, watch=watch
            )
            if not pool.complete:
                rest = SamplingFinder(max_samples=max(1, self.max_samples))
                yield from rest.search(factors, generator=generator, watch=watch)
            return
        side = factors.outputs
        pool = CandidatePool(side, threshold=factors.b / side.size, watch=watch)
        # Faint samples make white rows noisy; estimates allow for that.
        weak = factors.has_weak_sample and factors.view.rounds is None
        if not (weak and factors.noisy):
            yield from self._rounds(factors, pool, generator, watch)
        if weak and not pool.complete:
            for found in self._estimates(factors, generator, watch):
                pool.keep(found, found.redundancy > 0)
            yield pool.snapshot(reserve=False)
            yield from self._rounds(factors, pool, generator, watch)
        if not pool.complete and (path := OnePass.of(factors)) is not None:
            yield from self._rounds(factors, pool, generator, watch, path)
        if not factors.view.has_bias or watch.expired:
            return
        if factors.trained or not factors.outputs.uneven:
            yield from _repaired(factors, pool, watch)
            return
        with watch.stage("repair"):
            solved_anew = without_contradictions(factors, pool.snapshot())
        if solved_anew is not None:
            yield solved_anew

    def _estimates(
        self, factors: Factors, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        return estimate(
            factors,
            starts=_MOST_STARTS * self.starts,
            steps=self.steps,
            patience=self.patience,
            generator=generator,
            watch=watch,
        )

    def _rounds(
        self,
        factors: Factors,
        pool: CandidatePool,
        generator: torch.Generator,
        watch: Watch,
        path: OnePass | None = None,
    ) -> Iterator[Directions]:
        side, b = factors.outputs, factors.b
        blocks_of = functools.cache(functools.partial(Blocks.of, factors))
        blocks = blocks_of(0)
        whole = dual_problem(factors, None if blocks is None else blocks.change)
        messages = _MessageRounds(factors, whole, self.steps)
        missing, idle, slow, fewest, more = whole, 0, False, b, 1.0  # `more` times the usual starts

        if len(pool) or path is not None:
            missing = _missing(messages, pool, blocks, watch, path, idle)
        while missing.missing and not watch.expired:
            left = missing.missing
            if blocks is not None and _by_blocks(blocks, left, idle) and idle < self.patience:
                finer = blocks_of(idle // 2) or blocks
                grown = _block_round(
                    pool, finer, missing, idle=idle, generator=generator, watch=watch
                )
            elif path is None and messages.wanted(left):
                grown = messages.round(pool, balance(missing), generator, watch)
            elif idle < self.patience:
                effort = _Effort(idle, more, slow)
                grown = self._round(
                    pool, balance(missing), effort, messages.levels, generator, watch
                )
            elif idle == self.patience and not whole.dropout and _span_cluster(pool, whole, watch):
                yield pool.snapshot()
                return
            elif len(pool) <= _MOST_DIRECTIONS * b and watch.count("submatrices", 0) < min(
                self.max_samples, _all_of(side)
            ):
                grown = _sample(pool, balance(missing), generator, watch)
            else:
                watch.remark(_stuck(left, b, watch))
                if b * b * len(side.white) <= _LARGEST_SWAP:
                    yield pool.snapshot()
                return
            watch.report("search", found=b - left, batch_size=b)
            idle += not messages.failed
            if grown:
                _forget_mixes(pool, whole, blocks, watch)
                yield pool.snapshot(reserve=False)
            if grown or path is not None:
                with watch.stage("read"):
                    missing = _missing(messages, pool, blocks, watch, path, idle)
                idle = 0 if missing.missing < fewest else idle
                fewest = min(fewest, missing.missing)
            found = left - missing.missing
            if not messages.compared(found / left):
                slow = found < _SLOW * left and more == _MOST_STARTS and not slow
                more = self._more_starts(left, found, more)

    def _starts(self, missing: int, more: float) -> int:
        return max(128, math.ceil(self.starts * missing * more))

    def _more_starts(self, missing: int, found: int, more: float) -> float:
        """How many times as many starts the next round takes, after one that found so many."""
        per_hit = self._starts(missing, more) / max(found, 1)
        return min(max(1.0, per_hit / _STARTS_PER_HIT), _MOST_STARTS)

    def _round(  # noqa: PLR0917
        self,
        pool: CandidatePool,
        residual: BalancedProblem,
        effort: _Effort,
        levels: TwoLevels | None,
        generator: torch.Generator,
        watch: Watch,
    ) -> bool:
        """One round of the cascade; is there a new direction?"""
        watch.count("rounds")
        idle, slow = effort.idle, effort.slow
        kind = (idle + (residual.missing <= _FEW_MISSING)) % 3
        with watch.stage("seek"):
            if kind == 1:
                guesses = guess_from_rows(residual)
            elif kind == 2:
                guesses = guess_from_signs(residual, _SIGN_GUESSES, generator)
            else:
                starts = self._starts(residual.missing, effort.more) << min(idle // 2, 3)
                steps = self.steps << max(min(idle // 2, 1), slow)
                ridge = SHARP_RIDGE if slow else RIDGE
                guesses = search_from_starts(residual, starts, steps, generator, watch, ridge=ridge)
                watch.count("starts", starts)
        with watch.stage("settle"):
            struggling = slow or idle > 0 or residual.least_agreement < SIGN_AGREEMENT
            narrow = len(residual.U) < 2 * _WIDE * pool.side.white.shape[1]
            parts = []
            if kind or not narrow:
                parts.append(kernels_near(pool.side, residual, *guesses, watch))
            if struggling or (narrow and not kind):
                refined = refine_to_kernel(pool.side, residual, *guesses, watch, not struggling)
                parts.append(refined)
            if struggling:
                parts.append(sharpen(pool.side, residual, *guesses, generator, watch))
            if residual.missing == 1:  # its signs are exact: all rows count, not the lowest alone
                last = directions_off(pool.side, guesses[1], watch.deadline)
                parts.append(last)
        with watch.stage("round"):
            found = pool.rounded(torch.cat(parts))
        with watch.stage("vouch"):
            return pool.keep(found, accepted(residual, found, kind > 0, watch, levels))


@dataclass(eq=False)
class _MessageRounds:
    """Rounds that use the next layer's gradient, where there is one."""

    factors: Factors
    whole: DualProblem
    steps: int
    found: int = 0  # samples that are taken out of `layer`
    in_vain: int = 0
    failed: bool = False  # did the last round use it and find nothing?
    now: bool = False  # does this round use it?
    share_without: float = 1.0  # of the missing samples, that the last round without it found
    _share: float | None = None  # the same with it
    _read: tuple[Tensor, Tensor] | None = None  # c (k, b) of the pool's first, and which fit (k,)

    @cached_property
    def layer(self) -> NextLayer | None:
        return NextLayer.of(self.factors)

    @cached_property
    def levels(self) -> TwoLevels | None:
        return TwoLevels.of(self.factors, self.whole)

    @cached_property
    def rows(self) -> int:
        return int(self.factors.live_rows.sum())

    @property
    def narrow(self) -> bool:
        """Is the next layer of use? In wide ones what is hard, as near-duplicates, stays so."""
        return self.rows < 2 * _WIDE * self.factors.b

    @property
    def share(self) -> float:
        """Of the missing samples, that the next layer finds; until it was asked, a guess."""
        if self._share is not None:
            return self._share
        many = self.rows < _WIDE * self.factors.b and self.levels is not None
        return 1.0 if many else _SLOW

    def wanted(self, missing: int) -> bool:
        """Is the next layer to be asked? If it finds more than rows; not twice in turn in vain."""
        again = not self.failed and self.in_vain < _MOST_IN_VAIN
        needed = self.narrow and self.share_without <= self.share
        self.failed = False
        self.now = missing > 1 and needed and again and (self.levels or self.layer) is not None
        return self.now

    def compared(self, share: float) -> bool:
        """Note the share of the missing samples that a round found; was it one with the next layer?"""
        if self.now:
            self._share = share
        else:
            self.share_without = share
        return self.now

    def samples(self, q: Tensor, off: Tensor, watch: Watch) -> tuple[Tensor, Tensor]:
        """Both halves (k, b) of those directions (k', b) with zeros (k', rows) that are samples.

        c is read from the next layer's activations, exactly; what these do not explain, and where there
        are none, from signs.
        """
        whole = self.whole
        if self.layer is None or self.factors.row_factors is not None:
            sure = certain_zeros(self.factors.outputs, off, q)
            return consistent_samples(whole, q, sure, watch=watch)
        c, fits = self._read or (q[:0], off[:0, 0])
        read = self.layer.read(whole, off[len(c) :], watch.deadline)
        self._read = torch.cat([c, read[0]]), torch.cat([fits, read[1]])
        c, fits = (part.clone() for part in self._read)
        rest = (~fits).nonzero().flatten().tolist()
        if rest and len(q) <= whole.missing:
            c[rest], share = read_samples(whole, q, off, watch, only=rest)
            fits[rest] = share >= whole.least_agreement
        return q[fits], c[fits]

    def round(
        self,
        pool: CandidatePool,
        residual: BalancedProblem,
        generator: torch.Generator,
        watch: Watch,
    ) -> bool:
        """One round with the next layer's gradient; is there a new direction?"""
        watch.count("rounds")
        starts = max(128, residual.missing)  # many end in the same few: more rounds help more
        watch.count("starts", starts)
        search = self._by_levels if self.levels is not None else self._by_activations
        candidates = search(pool, residual, starts, generator, watch)
        with watch.stage("round"):
            rounded = pool.rounded(candidates)
        with watch.stage("vouch"):
            grown = pool.keep(rounded, accepted(residual, rounded, False, watch, self.levels))
        self.failed, self.in_vain = not grown, 0 if grown else self.in_vain + 1
        return grown

    def _by_levels(
        self,
        pool: CandidatePool,
        residual: BalancedProblem,
        starts: int,
        generator: torch.Generator,
        watch: Watch,
    ) -> Tensor:
        """White directions (k, b) whose gradients have two levels."""
        assert self.levels is not None
        with watch.stage("seek"):
            guesses = search_two_levels(residual, self.levels, starts, self.steps, generator, watch)
        with watch.stage("settle"):
            return kernels_near(pool.side, residual, *guesses, watch)

    def _by_activations(
        self,
        pool: CandidatePool,
        residual: BalancedProblem,
        starts: int,
        generator: torch.Generator,
        watch: Watch,
    ) -> Tensor:
        """White directions (k, b) of samples whose activations the next layer's gradient shows."""
        assert self.layer is not None
        q, _ = pool.overdetermined()
        self.layer = self.layer.without(pool.side.white @ q[self.found :].T, watch.deadline)
        self.found = len(q)
        with watch.stage("seek"):
            z = search_by_messages(residual, self.layer, starts, self.steps, generator, watch)
        with watch.stage("settle"):
            return directions_off(pool.side, z, watch.deadline)


def _repaired(factors: Factors, pool: CandidatePool, watch: Watch) -> Iterator[Directions]:
    """The pool with directions solved anew from signs, as long as there are new ones.

    A right direction in place of a wrong one makes the signs of others right.
    """
    grown = True
    while grown:
        with watch.stage("repair"):
            grown = pool.add(directions_from_signs(factors, pool.snapshot()))
        if grown:
            yield pool.snapshot()


def directions_from_signs(factors: Factors, pool: Directions) -> Tensor:
    """White directions (k, b), solved anew for the rows that each sample's signs say are off.

    A mix of two samples may pass for one: of like images in the zeros that they share and a row or two
    more, and after local steps, when fewer rows stay off. It spoils the input of the other sample; its
    own is right, and its signs give the true direction. After one step that is asked of those whose
    zeros contradict their signs.
    """
    directions = [pool.side.white.new_zeros(0, factors.b)]
    chosen = _all_samples(pool)
    if chosen is None:
        return directions[0]
    Z = _preactivations(factors, chosen)
    doubtful = ((Z < 0) ^ chosen.zeros).any(0)
    for z, contradicted in zip(Z.T, doubtful.tolist(), strict=True):
        factors.check_time()
        # Rows that tell a sample from one like it are hardly negative: the most negative do not do.
        shares = _NEGATIVE_SHARES if contradicted else _NEGATIVE_SHARES[-1:] * factors.trained
        found = [_from_negative(pool.side, z, share) for share in shares]
        directions += [(q * pool.side.scales)[None] for q in found]
    return torch.cat(directions)


def without_contradictions(factors: Factors, pool: Directions) -> Directions | None:
    """The b directions, those solved anew whose zeros contradict their signs.

    Over rounds, and beside far fainter samples, few rows may hold a direction. A row that is no zero
    turns it then, and hides zeros that are. It spoils the inputs of all others by a little. Its own
    input rests on the others' directions, so its signs are right and say which rows are off. None if
    nothing was gained.
    """
    chosen, gained = _all_samples(pool), False
    if chosen is None:
        return None
    tried: list[int] = []
    while len(tried) < _MOST_REPAIRS:
        factors.check_time()
        Z = _preactivations(factors, chosen)
        contradictions = (
            ((Z < 0) ^ chosen.zeros)
            .sum(0)
            .index_fill_(0, torch.tensor(tried, dtype=torch.int64, device=Z.device), 0)
        )
        worst = int(contradictions.argmax())
        tried.append(worst)
        best, most = None, int(chosen.zeros[:, worst].sum())
        for share in _NEGATIVE_SHARES:
            found = round_to_kernel(chosen.side, _from_negative(chosen.side, Z[:, worst], share))
            if found is not None and int(found[1].sum()) > most:
                best, most = found, int(found[1].sum())
        anew = None if best is None else chosen.replaced(worst, *best)
        if anew is not None and not int(torch.linalg.inv_ex(anew.vectors).info):  # no other's again
            chosen, gained = anew, True
    return chosen if gained else None


def _all_samples(pool: Directions) -> Directions | None:
    """The b sparsest independent directions; None if there are fewer."""
    white = unit(pool.vectors * pool.side.scales[:, None], 0)
    chosen = sparsest_independent(white, pool.sparsity + pool.redundancy)
    return pool.pick(chosen) if len(chosen) == len(white) else None


def _preactivations(factors: Factors, samples: Directions) -> Tensor:
    """Z (rows, b) of b directions, the larger of before and after."""
    C = scale(torch.linalg.inv(samples.vectors), factors.bias_coordinates)  # (b, b)
    H, bias = factors.before_and_after
    Z: Tensor = (H @ C.T + bias).amax(0)[factors.live_rows]
    return Z


def _from_negative(side: Side, z: Tensor, share: float) -> Tensor:
    """The direction (b,) that this share of the rows with z < 0 annihilates, the most negative ones."""
    count = max(int(share * int((z < 0).sum())), side.basis.shape[1])
    return smallest_singular(side.basis[z.argsort()[:count]])[0]


def _all_of(side: Side) -> int:
    """Enough draws to see every submatrix of a small layer."""
    rows, b = side.white.shape
    return 20 * math.comb(rows, b - 1)


def accepted(
    residual: BalancedProblem,
    found: Directions,
    doubtful: bool,
    watch: Watch | None = None,
    levels: TwoLevels | None = None,
) -> Tensor:
    """Directions (c,) that are samples: with spare zeros and, where in doubt, fitting signs.

    With few samples missing, signs that fit in every row are enough: near-duplicates of an image differ
    in a row or two, and leave each other no zeros to spare. With dropout they are not: where a sample
    has a zero it may be on, so the sum of two fits wherever one of them is on. A regression tells which
    directions are in doubt: two samples that the network takes for the same wrong class, beyond any
    doubt of its own, have the same gradient wherever both are on, so that their difference has more
    zeros than either. If the time is up, what is in doubt is not. Where only outputs follow, a sample
    has a gradient there (`levels`), and a mix has none.
    """
    determined = found.redundancy > 0
    explained = torch.ones_like(determined) if levels is None else levels.fits(found)
    white = found.vectors * found.side.scales[:, None]
    q = residual.c_basis.T @ white
    off = certain_zeros(found.side, found.zeros.T, unit(white.T))
    z = SignRegression(residual, q.dtype, ridge=SHARP_RIDGE).read(q, 1 - off.T.to(q))
    sure = (1 - 2 * off.T.to(q)).abs()  # (rows, c)
    right = sure * ((z > 0) == (off.T < 0.5))
    plain = right.sum(0) >= _PLAIN_AGREEMENT * sure.sum(0)
    doubted = doubtful | (found.redundancy < 2) | ~plain
    ask = (determined & doubted) | (residual.missing <= _FEW_MISSING)
    if watch is not None and watch.expired:
        return determined & explained & ~ask
    asked = ask.nonzero().flatten()
    fits = agreement(residual, unit(q[:, asked].T), off[asked], watch)
    enough = (fits == 1) & (not residual.dropout)
    determined[asked] = (determined[asked] & (fits >= residual.least_agreement)) | enough
    return determined & explained


def _sample(
    pool: CandidatePool, residual: BalancedProblem, generator: torch.Generator, watch: Watch
) -> bool:
    """The paper's sampling, of rows that are likely off for a missing sample.

    Of thousands of submatrices some give mixes with zeros to spare, so signs have to fit as well.
    """
    with watch.stage("sample"):
        b = pool.side.white.shape[1]
        blocks = max(1, min(_BLOCKS, _AT_ONCE // b**2))
        draw = Draw(blocks, weights=residual.weights, deadline=watch.deadline)
        candidates, count = kernels(pool.side, b - 1, generator, draw)
        watch.count("submatrices", count)
        drawn = CandidatePool(pool.side, pool.threshold, watch)
        drawn.add(candidates[: _MOST_DIRECTIONS * b])
        found = drawn.snapshot(reserve=False)
        return pool.keep(found, accepted(residual, found, doubtful=True, watch=watch))


def _zeros_of_its_own(rows: int) -> int:
    """How many zeros tell a sample from a mix that holds its nearest.

    Where two samples are on, half of the rows, each row vanishes in one mix of them. That k rows do in
    the same mix, to what noise can tell, happens rows^k / k! * chance^(k - 1) times.
    """
    on, count = rows / 2, 2
    while on**count / math.factorial(count) * _CANCELS ** (count - 1) > _BY_ACCIDENT:
        count += 1
    return count


def _forget_mixes(
    pool: CandidatePool, whole: DualProblem, blocks: Blocks | None, watch: Watch
) -> None:
    """Over rounds, drop what its zeros show as a mix; where signs can tell, only if they do too."""
    if blocks is None:
        return
    suspect = pool.possible_mixes(_zeros_of_its_own(len(pool.side.white)))
    unknown = whole.missing - len(pool) + int(suspect.sum())
    if bool(suspect.any()) and 0 <= ROWS_PER_SAMPLE * unknown <= blocks.neurons:
        q, off = pool.overdetermined()
        share = read_samples(whole, q, certain_zeros(pool.side, off, q), watch)[1]
        suspect = suspect & (share < whole.least_agreement)
    pool.forget(suspect)


def _by_blocks(blocks: Blocks, missing: int, idle: int) -> bool:
    """Blocks while signs say nothing, rows and signs for the last; both in turn if stuck."""
    if missing > blocks.neurons:
        return True
    return (ROWS_PER_SAMPLE * missing > blocks.neurons) == (idle % 2 == 0)


def _block_round(
    pool: CandidatePool,
    blocks: Blocks,
    missing: DualProblem,
    *,
    idle: int,
    generator: torch.Generator,
    watch: Watch,
) -> bool:
    """One round of the search by blocks; is there a new direction?"""
    watch.count("rounds")
    starts = max(128, _BLOCK_STARTS * missing.missing) << min(idle // 2, 3)
    found, _ = pool.overdetermined()
    with watch.stage("seek"):
        guesses = search_blocks(
            blocks,
            found,
            missing,
            starts=starts,
            generator=generator,
            watch=watch,
        )
        watch.count("starts", starts)
    with watch.stage("settle"):
        candidates = refine_blocks(blocks, found, guesses, watch)
    with watch.stage("round"):
        rounded = pool.rounded(candidates)
    return pool.keep(rounded, rounded.redundancy == 2)


def _missing(  # noqa: PLR0917
    messages: _MessageRounds,
    pool: CandidatePool,
    blocks: Blocks | None,
    watch: Watch,
    path: OnePass | None,
    idle: int,
) -> DualProblem:
    """What is left to find beside the pool: both halves, as far as signs can be read."""
    if path is not None:
        return path.missing(pool, idle, watch)
    whole = messages.whole
    q, off = pool.overdetermined()
    if blocks is None:
        return deflate(whole, *messages.samples(q, off, watch))
    if len(q) > whole.missing:
        chosen = sparsest_independent(q.T, off.sum(1).double())
        q, off = q[chosen], off[chosen]
    return deflate(whole, q, read_samples(whole, q, certain_zeros(pool.side, off, q), watch)[0])


def _stuck(missing: int, b: int, watch: Watch) -> str:
    return (
        f"the cascade found {b - missing} of {b} samples and got stuck on the last "
        f"{missing}: {watch.count('starts', 0):,} starts and "
        f"{watch.count('submatrices', 0):,} submatrices gave no other direction"
    )


def _span_cluster(pool: CandidatePool, whole: DualProblem, watch: Watch) -> bool:
    """Are the missing samples nearly the same? Then what they span completes the pool."""
    q, off = pool.overdetermined(spare=1)
    q, c = consistent_samples(whole, q, certain_zeros(pool.side, off, q), watch=watch)
    span = cluster(pool.side, balance(deflate(whole, q, c)), watch.deadline)
    if not len(span) or not pool.add_spanning(equally_weighted(q, span, whole.h)):
        return False
    watch.remark(
        f"{len(span)} samples have the same zeros, as near-duplicates do, and mix freely: only their "
        "span is known"
    )
    return True


def equally_weighted(q: Tensor, span: Tensor, h: Tensor) -> Tensor:
    """The span (r, b) beside the found q (k, b), rotated so that its members weigh the same.

    All of them then come out as nearly the same picture, the cluster's mean.
    """
    c = torch.linalg.inv(torch.cat([q, span]).T)[len(q) :]  # (r, b), dual to the span
    weight = unit(c @ h)
    axis = weight - torch.full_like(weight, len(span) ** -0.5)
    if float(axis.norm()) < torch.finfo(axis.dtype).eps:
        return span
    mirrored: Tensor = span - 2 * torch.outer(unit(axis), unit(axis) @ span)  # Householder
    return mirrored


def cluster(side: Side, residual: BalancedProblem, deadline: Deadline = NEVER) -> Tensor:
    """White directions (r, b) that span the missing samples; none if they share no pattern.

    Samples with one pattern, such as near-duplicates of an image, mix freely: no zeros tell them
    apart. But the rows in which they are off leave exactly their span free, and with it the inputs
    of all other samples are known.
    """
    b = side.white.shape[1]
    needed = b - residual.missing
    _, guesses = guess_from_rows(residual)
    for z in guesses[:, :_CLUSTER_GUESSES].T:
        for share in (0.9, 0.7, 0.5):
            off = z.argsort()[: int(share * float((z < 0).sum()))]
            if len(off) < needed + _SPARE_ROWS:
                break
            deadline.check()
            _, s, Vt = torch.linalg.svd(side.basis[off], full_matrices=True)
            if int((s > UNDECIDED * side.zero).sum()) == needed:
                span: Tensor = torch.linalg.qr((Vt[needed:] * side.scales).T).Q.T
                return span
    return side.white.new_zeros(0, b)
