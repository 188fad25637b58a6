"""The paper's finder (Algorithm 1): kernels of random submatrices of L, filtered by sparsity.

Two shortcuts that change no result. One b x b inverse holds the kernels of b submatrices: its column j
vanishes on all sampled rows but the j-th. And a candidate that shows no zeros in a few other rows is
rejected without looking at the rest.

One departure from the paper: every second step draws rows by how many of the directions found so far
vanish there. If inputs are not centred, samples share their zeros (a neuron that is on for all of them
helps nobody), and such draws hit the missing directions far more often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear import theory
from spear.errors import InvalidOption
from spear.factors import Factors, Side
from spear.search.candidates import CandidatePool
from spear.search.deadline import NEVER, Deadline, TimeIsUp
from spear.search.directions import Directions
from spear.search.kernels import unit
from spear.search.watch import Watch

_INVERSES = 4096  # b x b inverses per step: 20 to 40 ms on two cores at b = 20
_FIRST_STEPS = 4  # before draws are planned ahead for workers: small problems are solved by then
_GROUP_DRAWS = 512  # submatrices per step within one group of a prior
_AT_ONCE = 1 << 30  # multiplications between two looks at the time
_PROBES = 12  # rows a candidate is tried on first
# A float32 kernel is good to 1e-7 times the condition of the submatrix: an entry this far below a
# typical one may be a zero. What survives is computed again in float64.
_PROBE_MARGIN = 2e-3
_PROBE_ZEROS = 2  # zeros it must show there: a true direction fails this 0.3 % of the time


@dataclass(frozen=True)
class SamplingFinder:
    """Algorithm 1 of the paper.

    Args:
        max_samples: N, the budget of submatrices. Unless given: 20 times what the theory expects, at
            least 5e7 (a minute on two cores) and at most the paper's 2e9.
        false_rejection: p_fr, which sets the sparsity threshold tau.
        threshold: tau itself, for layers whose gradient is not half zeros.
        stop_match: the sparsity match at which to stop early. Unless given: 1 for a clean update, 0.99
            for a noisy one, whose patterns cannot match in every entry.
        rows: of a submatrix. Unless given: b-1, and b+1 for a noisy update as in the paper.
        adaptive: every second step draws rows by the zeros found so far; False always draws uniformly,
            as the paper does.
        independent: take one submatrix of every b rows drawn instead of all b that leave one out. Those
            overlap, so 2b / (b+1) times as many are needed (`theory.expected_samples_narrow`), but b of
            them cost as much as two or three. True counts as the paper's lemma does.
        at_once: blocks of b rows drawn between two looks at the pool, the resolution of counts.
        prior: approximate inputs (k, n), say from an optimisation attack. Each gives the 3b rows with
            the most negative preactivation, and submatrices are drawn within these.
    """

    max_samples: int | None = None
    false_rejection: float = 1e-5
    threshold: float | None = None
    stop_match: float | None = None
    rows: int | None = None
    adaptive: bool = True
    independent: bool = False
    at_once: int = _INVERSES
    prior: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < 1:
            raise InvalidOption(f"expected max_samples >= 1, got {self.max_samples}")
        for name in ("false_rejection", "threshold"):
            p = getattr(self, name)
            if p is not None and not 0 < p < 1:
                raise InvalidOption(f"expected 0 < {name} < 1, got {p}")
        if self.stop_match is not None and not 0 < self.stop_match <= 1:
            raise InvalidOption(f"expected 0 < stop_match <= 1, got {self.stop_match}")
        for name in ("rows", "at_once"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidOption(f"expected {name} >= 1, got {count}")

    def satisfied(self, factors: Factors, match: float) -> bool:
        goal = self.stop_match or (0.99 if factors.noisy else 1.0)
        return match >= goal

    def search(
        self, factors: Factors, *, generator: torch.Generator, watch: Watch
    ) -> Iterator[Directions]:
        b = factors.b
        rows, groups = self._rows(factors), self._groups(factors)
        sides = [s for s in _sparse_sides(factors) if len(s.basis) >= max(rows, b)]
        pools = [self._pool(side, watch) for side in sides]
        expected = theory.expected_samples_narrow(b, factors.m)
        budget = self._budget(expected, sides, rows)
        plan = _DrawSchedule(self, pools, groups, rows, budget, watch)
        next_look = [0] * len(pools)
        with suppress(TimeIsUp):  # what was found by then stands
            for i, candidates, count in plan.drawn(generator):
                pool, sampled = pools[i], watch.count("submatrices", count)
                grown = pool.add(candidates)
                # As in Algorithm 1, only once b independent directions are at hand. Those in reserve
                # are mostly mixes: a choice with them is tried now and then.
                if (grown and pool.complete) or (sampled >= next_look[i] and pool.sufficient):
                    next_look[i] = 3 * sampled // 2
                    yield pool.snapshot()
                found = max(len(pool) for pool in pools)
                watch.report("search", done=sampled, expected=expected, found=found, batch_size=b)
        if watch.count("submatrices", 0) >= budget:
            watch.remark(f"its budget of {budget:,.0f} submatrices (max_samples=) was spent")
        yield from (pool.snapshot() for pool in pools if len(pool) or pool.sufficient)

    def draw(self, pool: CandidatePool, groups: Tensor, step: int, most: int) -> Draw:
        """What the next submatrices are drawn from: a prior's rows, zeros found so far, or all rows."""
        deadline = pool.watch.deadline
        if len(groups):
            # A few draws from every group, many times over: a good prior's group gives the same
            # direction each time, and looking at it thousands of times would take most of the
            # search.
            most = min(most, max(1, _GROUP_DRAWS // pool.side.white.shape[1]))
            if pool.side.name == "outputs" and step % 4:
                draw_number = step - step // 4  # counts the steps that take this branch
                among = groups[draw_number % len(groups)]
                return Draw(most, self.independent, among=among, deadline=deadline)
        if self.adaptive and step % 2 == 0:
            weights = pool.zero_counts
            return Draw(most, self.independent, weights=weights, deadline=deadline)
        return Draw(most, self.independent, deadline=deadline)

    def _groups(self, factors: Factors) -> Tensor:
        """For each approximate sample of the prior, the 3b live rows most likely to be its zeros."""
        side = factors.outputs
        if self.prior is None:
            return torch.zeros(0, 0, dtype=torch.int64, device=side.white.device)
        if self.prior.ndim != 2 or self.prior.shape[1] != factors.n:
            raise InvalidOption(
                f"expected prior to be approximate inputs (k, {factors.n}), "
                f"got {tuple(self.prior.shape)}"
            )
        weight, bias = factors.view.weight, factors.view.bias
        Z = self.prior.detach().to(weight) @ weight.T + bias  # (k, m)
        live = Z.to(side.white)[:, factors.live_rows]
        return live.topk(min(3 * factors.b, live.shape[1]), largest=False).indices

    def _pool(self, side: Side, watch: Watch) -> CandidatePool:
        return CandidatePool(side, self._threshold(side), watch)

    def _threshold(self, side: Side) -> float:
        return self.threshold or theory.sparsity_threshold(side.size, self.false_rejection)

    def _budget(self, expected: float, sides: list[Side], rows: int) -> float:
        """N: as asked for, else from the theory; never far beyond all submatrices there are."""
        wanted = min(2e9, max(5e7, 20 * expected)) if self.max_samples is None else self.max_samples
        submatrices = sum(math.comb(len(side.basis), max(rows, 0)) for side in sides)
        return min(wanted, 20 * submatrices)

    def _rows(self, factors: Factors) -> int:
        b = factors.b
        rows = self.rows or (b + 1 if factors.noisy and b > 1 else b - 1)
        if rows < b - 1:
            raise InvalidOption(f"expected rows >= b - 1 = {b - 1}, got {rows}")
        return rows


@dataclass(frozen=True, eq=False)
class _DrawSchedule:
    """Which submatrices are drawn: the first steps here, one after the other, later ones by workers."""

    finder: SamplingFinder
    pools: list[CandidatePool]
    groups: Tensor
    rows: int
    budget: float
    watch: Watch

    def drawn(self, generator: torch.Generator) -> Iterator[tuple[int, Tensor, int]]:
        """For each draw: the pool it is for, its candidates (k, b), and how many were tried."""
        draws = self._draws()
        for i, draw in itertools.islice(draws, _FIRST_STEPS * len(self.pools)):
            yield i, *kernels(self.pools[i].side, self.rows, generator, draw)
        sides = tuple(pool.side for pool in self.pools)
        seeded = ((i, draw, _seed(generator)) for i, draw in draws)
        worth = 0 if len(self.groups) else math.inf  # a draw within a group takes a millisecond
        yield from self.watch.map(
            _seeded_kernels, (sides, self.rows), seeded, multiplications=worth
        )

    def _draws(self) -> Iterator[tuple[int, Draw]]:
        """Draws for each pool in turn, from what it has found when they are asked for."""
        planned = self.watch.count("submatrices", 0)
        for step in itertools.count(1):  # pragma: no branch: it ends by budget or time
            for i, pool in enumerate(self.pools):
                if planned >= self.budget or self.watch.expired:
                    return
                each = 1 if self.finder.independent else pool.side.white.shape[1]
                most = math.ceil(min((self.budget - planned) / each, self.finder.at_once))
                draw = self.finder.draw(pool, self.groups, step, most)
                planned += draw.submatrices(pool.side, self.rows)
                yield i, draw


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=generator, device=generator.device))


def _seeded_kernels(
    sides: tuple[Side, ...], rows: int, i: int, draw: Draw, seed: int
) -> tuple[int, Tensor, int]:
    """`kernels` of one of the sides, with its own randomness."""
    side = sides[i]
    generator = torch.Generator().manual_seed(seed)
    return i, *kernels(side, rows, generator, draw)


def _sparse_sides(factors: Factors) -> list[Side]:
    sides = [factors.outputs] if factors.relu in ("after", "both") else []
    return [*sides, factors.inputs] if factors.relu in ("before", "both") else sides


@dataclass(frozen=True, eq=False)
class Draw:
    """How submatrices are drawn: how many b-row blocks, and from which rows."""

    blocks: int = _INVERSES
    independent: bool = False  # one submatrix from each block, not all that leave a row out
    weights: Tensor | None = None  # (rows,) heavy rows are drawn first
    among: Tensor | None = None  # (k,) indices of the only rows to draw from
    deadline: Deadline = NEVER

    def order(
        self, rows: int, size: int, generator: torch.Generator, device: torch.device
    ) -> Tensor:
        """Random orders of the rows (shuffles, rows): each run of `size` in them is one draw."""
        keys = torch.rand(-(-self.blocks // self.per_order(rows, size)), rows, generator=generator)
        if self.weights is None:
            return keys.to(device).argsort(1)
        # Exponential clocks: a row rings first, and is drawn, in proportion to its weight.
        return (-keys.to(device).log() / self.weights.float()).argsort(1)

    def submatrices(self, side: Side, rows: int) -> int:
        """How many submatrices of this many rows `kernels` tries."""
        b = side.white.shape[1]
        available = len(side.white) if self.among is None else len(self.among)
        if b == 1 or available < max(rows, b):
            return 1
        if rows < b:
            return self.blocks * (1 if self.independent else b)
        per_order = self.per_order(available, rows)
        return -(-self.blocks // per_order) * per_order

    def per_order(self, rows: int, size: int) -> int:
        """Draws taken from one order; with weights, only from its first half."""
        return -(-(rows // size) // 2) if self.weights is not None else rows // size


def kernels(side: Side, rows: int, generator: torch.Generator, draw: Draw) -> tuple[Tensor, int]:
    """Kernels of random submatrices that may be directions, white (k, b); and how many were tried."""
    if draw.among is None:
        white, basis = side.white, side.basis
    else:
        white, basis = side.white[draw.among], side.basis[draw.among]
    b = white.shape[1]
    if b == 1:
        return white.new_ones(1, 1), 1
    if len(white) < max(rows, b):
        return white.new_zeros(0, b), 1
    if rows == b - 1:
        return kernels_by_inverse(white, generator, draw)
    q, count = kernels_by_gram(basis, rows, side.zero, generator, draw)
    return q * side.scales, count


def kernels_by_inverse(white: Tensor, generator: torch.Generator, draw: Draw) -> tuple[Tensor, int]:
    """Kernels of (b-1)-row submatrices that look sparse: b from each inverse, or one.

    A random order of the rows is cut into blocks of b; the rows after a block are its probes.
    """
    r, b = white.shape
    rows = white.float()  # (r, b)
    order = draw.order(r, b, generator, white.device)
    block = b * torch.arange(draw.per_order(r, b), device=white.device)[:, None]
    probes = min(_PROBES, r - b)
    drawn = order[:, block + torch.arange(b, device=white.device)].flatten(0, 1)  # (N, b)
    others = order[:, (block + b + torch.arange(probes, device=white.device)) % r].flatten(0, 1)
    drawn, others = drawn[: draw.blocks], others[: draw.blocks]
    found, step = [white[:0]], max(1, _AT_ONCE // b**3)
    for some, probed in zip(torch.split(drawn, step), torch.split(others, step), strict=True):
        draw.deadline.check()
        found.append(_sparse_kernels(white, rows, some, probed, draw.independent))
    candidates = torch.cat(found)
    return candidates[candidates.isfinite().all(1)], len(drawn) * (1 if draw.independent else b)


def _sparse_kernels(
    white: Tensor, rows: Tensor, drawn: Tensor, others: Tensor, last_only: bool
) -> Tensor:
    """Kernels (k, b) of blocks of rows (N, b) without one of them, with zeros in other rows (N, p)."""
    (r, b), probes = white.shape, others.shape[1]
    inverse = _leaving_one_out(rows[drawn], last_only)  # (N, b, k), k = b or 1
    values = (rows[others] @ inverse).abs()  # (N, probes, k)
    # A kernel's typical value: its length times that of a row, spread over b entries.
    typical = inverse.norm(dim=-2, keepdim=True) * (rows.norm() / (r * b) ** 0.5)
    needed = min(_PROBE_ZEROS, probes)
    sparse = (values <= _PROBE_MARGIN * typical).sum(-2) >= needed  # (N, k)
    kept, left_out = sparse.nonzero(as_tuple=True)
    blocks, of_kept = kept.unique(return_inverse=True)  # a block may be kept up to b times
    kernels: Tensor = _leaving_one_out(white[drawn[blocks]], last_only)[of_kept, :, left_out]
    return kernels


def _leaving_one_out(blocks: Tensor, last_only: bool) -> Tensor:
    """The kernels of blocks (N, b, b) without the j-th row, for every j or the last one."""
    if last_only:
        last = torch.zeros_like(blocks[..., :1])
        last[:, -1] = 1
        kernels: Tensor = torch.linalg.solve_ex(blocks, last).result
    else:
        kernels = torch.linalg.inv_ex(blocks).inverse
    return kernels


def kernels_by_gram(
    basis: Tensor, rows: int, zero: float, generator: torch.Generator, draw: Draw
) -> tuple[Tensor, int]:
    """For noisy updates: least-squares kernels of larger submatrices, of rank exactly b-1.

    The paper's rank condition: the smallest singular value drowns in the noise, the second smallest
    does not. Both are read off the inverse of the Gram matrix.
    """
    r = len(basis)
    order = draw.order(r, rows, generator, basis.device)
    chosen = order[:, : draw.per_order(r, rows) * rows].reshape(-1, rows)
    A = basis[chosen]  # (N, rows, b), equal noise everywhere
    inverse = torch.linalg.inv_ex(A.mT @ A).inverse  # (N, b, b)
    q = inverse @ inverse.sum(-1, keepdim=True)
    q = unit(inverse @ unit(q, -2), -2)  # three steps of inverse iteration
    smallest = (A @ q).square().sum((-2, -1))  # (N,) smallest eigenvalue of the Gram matrix
    # The sum of the other 1/eigenvalue.
    rest = inverse.diagonal(dim1=-2, dim2=-1).sum(-1) - 1 / smallest
    noise = rows * (zero / 2) ** 2
    full = (smallest <= noise) & (rest * noise <= 1) & q.isfinite().all(-2).squeeze(-1)
    return q[full].squeeze(-1), len(chosen)
