"""Several rounds: the rows of one neuron as a block, and the search for directions by whole blocks.

A sample that is off for a neuron in one round is mostly off in the next. So neuron k gives not R rows
but a subspace V_k, of the dimension that its R rows have above the noise, and a sample's q is
orthogonal to V_k for every neuron that it never switches on, a third of all after 20 rounds. Sparse
search becomes group-sparse search, which is far easier, and needs no signs:

    q <- normalise( sum_k w_k P_k^T P_k q * max(0, 1 - shrink / |P_k q|) )

with P_k an orthonormal basis of V_k, w_k the chance that it is off, in coordinates in which
sum_k w_k P_k^T P_k = 1, and |P_k q| in units of what a random q has. Samples that were found are kept
out by searching where c_i . q = 0 for their c_i: these coordinates make c ~ q, to an error that the
found samples show among themselves, and signs are read within that error (dual.py). What is left is a
smaller problem of the same kind, with blocks, coordinates and noise of its own. Over many rounds few
neurons stay off throughout: then a neuron is several blocks, of some rounds each.

What blocks leave free together, two samples that switch on the same neurons, is told apart by rows: in
some rounds one is off and the other is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.factors import Factors, Side
from spear.search.deadline import NEVER, Deadline
from spear.search.dual import (
    DualProblem,
    chance_off,
    dual_problem,
    error_of_duals,
    solve_definite,
)
from spear.search.kernels import unit
from spear.search.parallel import piece_length
from spear.search.starts import distinct
from spear.search.watch import Watch
from spear.tolerances import ROWS_PER_SAMPLE, UNDECIDED, ZERO_DEVIATIONS

# Samples per round of a block: one that has many of the b dimensions is hardly ever off. Twenty rounds
# of 300 samples are one block; forty rounds of 60 (30 neurons) are found in pieces of 7 to 20.
_SAMPLES_PER_ROUND = 4
_SWEEPS = 5  # of Tyler's scatter for subspaces
# Of the zero level: a direction of a block this far above it is known to 1/15, and weaker ones mislead.
_ABOVE_NOISE = 3.0
# In units of a random q's size, from the first step to the last: strong shrinkage finds the blocks that
# are on, weak shrinkage leaves them as they are. At b = 2 m and 8 rounds 0.38 and 0.50 of the starts
# end near a sample (two batches), with 0.3 throughout 0.11 and 0.20.
_SHRINK = (0.9, 0.1)
_NEARLY_ZERO = 0.3
_STEPS = 150
_FEWEST_ROWS = 2  # that a frame has for every dimension
_LEAST_WEIGHT = 1e-3  # that a block keeps: nothing is excluded on an estimate
# Sizes at which a block counts as half zero: among what is free, then anywhere. Blocks that are off
# have 0.3 and less at first, and 1e-5 in the end. At b = 2 m and 8 rounds, half of the guesses near a
# sample reach it so; with jumps (0.1, 0.03) one in ten.
_SOFTNESS = tuple(torch.logspace(-0.5, -1, 10).tolist())
_SHARPER = (*torch.logspace(-1, -2, 12).tolist(), 0.003, 0.001)
_ROUGH = 0.02  # float32 is enough for softer blocks, whose weights differ by less than 1e4
_OFF = 1e-3  # a block's size below which all its rows are taken to be off
_LARGEST_KERNEL = 8  # dimensions of a kernel of blocks in which samples are told apart by rows
_DRAWS = 2000  # of d - 1 rows in such a kernel: three in ten rows are off for a sample
_SPARE_ROWS = 10  # that a direction in a kernel must have, beyond those it was solved for
_SAME_IN_KERNEL = 1 - 1e-6
_MOST_KEPT = 1 << 26  # entries of products that are computed once: 512 MB in float64
_AT_ONCE = 1 << 22  # entries of the largest tensor: 32 MB in float64
_SAME_COSINE = 0.97  # |cos| with a direction that was found


@dataclass(frozen=True, eq=False)
class Frame:
    """Blocks of orthonormal rows, in coordinates in which their weighted sum is one."""

    basis: Tensor  # (t, r)
    block: Tensor  # (t,) which block a row of the basis belongs to
    weights: Tensor  # (count,): the chance that a block is off for a sample

    @property
    def count(self) -> int:
        return int(self.block[-1]) + 1

    @cached_property
    def typical(self) -> Tensor:
        """The size (count, 1) that a random q of unit length has in each block."""
        dims = torch.bincount(self.block, minlength=self.count)
        return (dims.to(self.basis) / self.basis.shape[1]).sqrt()[:, None]

    def sizes(self, values: Tensor) -> Tensor:
        """Sizes (count, k) of blocks, in units of a random q's, from basis @ q (t, k)."""
        squares = values.new_zeros(self.count, values.shape[1])
        squares.index_add_(0, self.block, values.square())
        return squares.sqrt_().div_(self.typical.to(values))

    def grams(self) -> Tensor | None:
        """P_k^T P_k of every block (count, r r); None if that is too much to keep."""
        if self.count * self.basis.shape[1] ** 2 > _MOST_KEPT:
            return None
        dims = torch.bincount(self.block).tolist()
        return torch.stack([(part.T @ part).flatten() for part in torch.split(self.basis, dims)])

    def weighted_grams(self, grams: Tensor | None, weights: Tensor) -> Tensor:
        """sum_k weight_k P_k^T P_k (k, r, r) for every column of weights (count, k)."""
        r = self.basis.shape[1]
        if grams is not None:
            return (weights.T.to(grams) @ grams).view(-1, r, r)
        basis = self.basis.to(weights)
        return torch.stack([basis.T @ (w[self.block, None] * basis) for w in weights.T])


@dataclass(frozen=True, eq=False)
class Blocks(Frame):
    """The rows of each neuron, in all rounds or in some, as a basis in balanced coordinates."""

    side: Side
    of_row: Tensor  # (rows,) the block of each row of the side, -1 where it is none
    change: Tensor  # (b, b): q here = change @ white q, up to scale
    rows: Tensor  # (t, b): the same span as the basis, but in units of noise
    neurons: int

    @staticmethod
    def of(factors: Factors, halvings: int = 0) -> Blocks | None:
        """The blocks of several rounds; None of one round, whose blocks are single rows.

        Each halving makes them blocks of half as many rounds. The last samples may be off for no neuron
        throughout, and still in many rows.
        """
        rounds = factors.view.rounds
        if rounds is None or len(rounds) < 2:
            return None
        side, live = factors.outputs, factors.live_rows
        neurons, round_of_row = rounds.neurons[live], side.round_of_row
        assert round_of_row is not None
        parts: list[Tensor] = []
        of_row = torch.full_like(neurons, -1)
        pieces = math.ceil(_SAMPLES_PER_ROUND * len(rounds) / factors.b) << halvings
        pieces = min(pieces, len(rounds))
        group = neurons + rounds.width * (round_of_row * pieces // len(rounds))  # (rows,)
        for k in range(rounds.width * pieces):
            factors.check_time()
            rows = (group == k).nonzero().flatten()
            _, s, Vt = torch.linalg.svd(side.basis[rows], full_matrices=False)
            above = s > _ABOVE_NOISE * side.zero  # noise is even in these coordinates
            if bool(above.any()):
                of_row[rows] = len(parts)
                parts.append(s[above, None] * Vt[above] / side.scales)  # as functions of a white q
        if not parts:
            return None
        chance = _by_block(chance_off(dual_problem(factors)), of_row)
        frame, change = _balanced(parts, chance)
        one = torch.diag(1 / side.scales)
        here, noise = (
            torch.linalg.solve_triangular(change, rows, upper=True, left=False)
            for rows in (torch.cat(parts), one * (side.zero / ZERO_DEVIATIONS))
        )
        deviation = float(noise.square().sum(0).mean().sqrt())
        return Blocks(
            frame.basis,
            frame.block,
            frame.weights,
            side,
            of_row,
            change,
            here / deviation,
            rounds.live_neurons(live),
        )

    def here(self, white: Tensor) -> Tensor:
        """White directions (k, b) as columns (b, k) of unit length in these coordinates."""
        return unit(self.change @ white.T, 0)

    def beside(
        self, known: Tensor, free: Tensor, chance: Tensor, deadline: Deadline = NEVER
    ) -> list[tuple[Frame, Tensor]]:
        """Frames in what known samples q (b, f) leave free (b, r), each with its coordinates' q (b, r).

        The c of known samples are read, with an error of about one size in every direction. So the rows
        of a block are off by that times what these samples have in them, besides their noise. One frame
        has every direction of the blocks that stands above that; the other only the highest. Where
        weights hardly move, all others come from the few samples that switched neurons, and every start
        of the first frame ends in one of those. Blocks weigh as their rows have a chance (rows,) to be
        off: in uncentred data, neurons that are on for everyone have most of the energy.
        """
        free = torch.linalg.qr(free).Q  # (b, r)
        r, error = free.shape[1], error_of_duals(known)
        heights, parts = [], []
        for part in torch.split(self.rows, torch.bincount(self.block).tolist()):
            deadline.check()
            noise = torch.eye(len(part), dtype=part.dtype, device=part.device)
            spread = torch.linalg.qr(torch.cat([noise, error * (part @ known).T]), mode="r").R
            even = torch.linalg.solve_triangular(spread.T, part @ free, upper=False)
            _, s, Vt = torch.linalg.svd(even, full_matrices=False)
            heights.append(s / (len(part) ** 0.5 + r**0.5))  # in units of the edge of noise
            parts.append(Vt)
        ranked = torch.cat(heights).sort(descending=True).values
        above = max(int((ranked > 1).sum()), _FEWEST_ROWS * r)
        frames = []
        for count in {min(above, len(ranked)), min(above, len(ranked), int(ROWS_PER_SAMPLE * r))}:
            least = float(ranked[count - 1])
            kept = [max(1, int((s >= least).sum())) for s in heights]  # one for every neuron
            highest = [part[:n] for part, n in zip(parts, kept, strict=True)]
            frame, change = _balanced(highest, _by_block(chance, self.of_row))
            lift = torch.linalg.solve_triangular(change, free, upper=True, left=False)
            frames.append((frame, lift))
        return frames


def _by_block(chance: Tensor, of_row: Tensor) -> Tensor:
    """The mean chance (count,) of a block's rows to be off, from that of all rows."""
    chance, of_row = chance[of_row >= 0], of_row[of_row >= 0]
    total = chance.new_zeros(int(of_row.max()) + 1).index_add_(0, of_row, chance)
    return (total / torch.bincount(of_row)).clamp_min(_LEAST_WEIGHT)


def _balanced(parts: list[Tensor], weights: Tensor) -> tuple[Frame, Tensor]:
    """Blocks of rows (t_k, r) in balanced coordinates (Tyler's scatter), and the change to these."""
    rows = torch.cat(parts)
    block = torch.repeat_interleave(torch.tensor([len(part) for part in parts])).to(rows.device)
    change = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    basis = _orthonormal(rows, block)
    for _ in range(_SWEEPS):
        weighed = weights.sqrt()[block, None] * basis
        change = torch.linalg.qr(weighed, mode="r").R @ change
        turned = torch.linalg.solve_triangular(change, rows, upper=True, left=False)
        basis = _orthonormal(turned, block)
    return Frame(basis, block, weights), change


def _orthonormal(rows: Tensor, block: Tensor) -> Tensor:
    parts = torch.split(rows, torch.bincount(block).tolist())
    return torch.cat([torch.linalg.qr(part.T).Q.T for part in parts])


@dataclass(frozen=True, eq=False)
class Guesses:
    """Directions near samples, in the coordinates of a frame."""

    frame: Frame
    lift: Tensor  # (b, r): q of coordinates in the frame
    q: Tensor  # (r, k)


def search_blocks(
    blocks: Blocks,
    found: Tensor,
    missing: DualProblem,
    *,
    starts: int,
    generator: torch.Generator,
    watch: Watch,
) -> list[Guesses]:
    """Guesses at samples beside those found, none twice.

    Args:
        blocks: of all neurons.
        found: (f, b) white directions.
        missing: what is left to find beside them.
        starts: how many.
        generator: for the starts.
        watch: with the workers, if there are any.
    """
    free = blocks.change @ missing.q_basis  # (b, r)
    frames = blocks.beside(blocks.here(found), free, chance_off(missing), watch.deadline)
    guesses = []
    for frame, lift in frames:
        q = _starts(frame, starts // len(frames), generator)
        work = 2 * frame.basis.numel() * q.shape[1] * _STEPS
        pieces = [(some,) for some in torch.split(q, piece_length(q.shape[1], work), 1)]
        shared = frame, watch.deadline
        q = torch.cat(list(watch.map(_shrunk, shared, pieces, multiplications=work)), 1)
        guesses.append(Guesses(frame, lift, q[:, _sparsest_first(frame, q, missing.missing)]))
    return guesses


def _sparsest_first(frame: Frame, q: Tensor, samples: int) -> Tensor:
    """Indices of distinct columns (r, k), those with the most blocks that are nearly zero first."""
    nearly_zero = -frame.sizes(frame.basis @ q).clamp_max(_NEARLY_ZERO).sum(0)
    return distinct(q, nearly_zero, 2 * samples + 8)


def _starts(frame: Frame, count: int, generator: torch.Generator) -> Tensor:
    """Sums and differences of two rows (r, count)."""
    pick = torch.randint(len(frame.basis), (2, count), generator=generator)
    flip = torch.randint(2, (count, 1), generator=generator) * 2 - 1
    first, second = frame.basis[pick.to(frame.basis.device)]
    return unit(first + second * flip.to(first)).T


def _shrunk(frame: Frame, deadline: Deadline, q: Tensor) -> Tensor:
    """From starts (r, k) to nearly group-sparse directions (r, k), in float32."""
    basis = frame.basis.float()
    back = (frame.weights[frame.block, None] * frame.basis).float().T.contiguous()
    q = unit(q.float(), 0)
    for shrink in torch.linspace(*_SHRINK, _STEPS).tolist():
        deadline.check()
        values = basis @ q  # (t, k)
        sizes = frame.sizes(values).clamp_min_(1e-12)
        level = shrink * sizes.square().mean(0).sqrt_()  # what is missing may be small all over
        q = unit(back @ values.mul_((1 - level / sizes).clamp_min_(0)[frame.block]), 0)
    return q.double()


def refine_blocks(blocks: Blocks, found: Tensor, guesses: list[Guesses], watch: Watch) -> Tensor:
    """Exact directions (k', b), white, from guesses beside what was found (f, b)."""
    lifted, sizes = [], []
    for each in guesses:  # first among what is free, so that none goes back to a sample found
        size = each.frame.sizes(each.frame.basis @ each.q)
        q, size = _sharpen(each.frame, _SOFTNESS, each.q, size, watch)
        lifted.append(unit(each.lift @ q, 0))
        sizes.append(size)
    q, size = torch.cat(lifted, 1), torch.cat(sizes, 1)
    new = distinct(q, -size.clamp_max(_NEARLY_ZERO).sum(0), q.shape[1])
    if len(found):
        new = new[(blocks.here(found).T @ q[:, new]).abs().amax(0) < _SAME_COSINE]
    q, size = _sharpen(blocks, _SHARPER, q[:, new], size[:, new], watch)
    new = distinct(q, -size.clamp_max(_NEARLY_ZERO).sum(0), q.shape[1])
    pieces = [(off,) for off in (size[:, new] <= _OFF).T]
    work = len(blocks.of_row) * len(q) ** 2 * len(pieces)
    parts = watch.map(_exact, (blocks,), pieces, multiplications=work)
    return torch.cat([q.new_zeros(0, len(q)), *parts])


def _sharpen(
    frame: Frame, schedule: tuple[float, ...], q: Tensor, sizes: Tensor, watch: Watch
) -> tuple[Tensor, Tensor]:
    """`_sharpened` for as many guesses at a time as fit."""
    r, count = q.shape
    if not count:
        return q, sizes
    work = frame.count * r**2 * count * len(schedule)
    step = max(1, min(_AT_ONCE // r**2, piece_length(count, work)))
    split = zip(torch.split(q, step, 1), torch.split(sizes, step, 1), strict=True)
    pieces = [(one.contiguous(), two.contiguous()) for one, two in split]
    shared = frame, frame.grams(), schedule, watch.deadline
    parts = watch.map(_sharpened, shared, pieces, multiplications=work, complete=True)
    q, sizes = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return q, sizes


def _sharpened(  # noqa: PLR0917
    frame: Frame,
    grams: Tensor | None,
    schedule: tuple[float, ...],
    deadline: Deadline,
    q: Tensor,
    sizes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Guesses (r, k) and their blocks' sizes (count, k), as small blocks count ever more.

    Each step takes the vector that the blocks annihilate best, weighed by 1 / (size^2 + softness^2).
    """
    rough = None if grams is None else grams.float()
    for softness in schedule:
        deadline.check()
        fine = softness < _ROUGH
        weights = (1 / (sizes.square() + softness**2)).to(torch.float64 if fine else torch.float32)
        gram = frame.weighted_grams(grams if fine else rough, weights)
        gram.diagonal(dim1=1, dim2=2).add_(torch.finfo(gram.dtype).eps * weights.max())
        q = unit(solve_definite(gram, q.T.to(gram)[:, :, None])[:, :, 0].T, 0)
        sizes = frame.sizes(frame.basis.to(q) @ q).double()
    return q.double(), sizes


def _exact(blocks: Blocks, off: Tensor) -> Tensor:
    """White directions (k, b) that blocks which are off (count,) leave free."""
    rows = off[blocks.of_row] & (blocks.of_row >= 0)
    kernel = _kernel(blocks.side, rows)  # (b, d)
    if kernel.shape[1] > 1:  # others are off for the same neurons, though not in every round
        kernel = _sparsest(blocks.side, kernel, rows)
    return unit((kernel * blocks.side.scales[:, None]).T)


def _kernel(side: Side, rows: Tensor) -> Tensor:
    """Orthonormal columns (b, d) that some rows annihilate, up to noise; none if there are too many."""
    b = side.basis.shape[1]
    if int(rows.sum()) < b - _LARGEST_KERNEL:
        return side.basis.new_zeros(b, 0)
    A = side.basis[rows]
    R = torch.linalg.qr(A, mode="r").R if len(A) > b else A
    _, s, Vt = torch.linalg.svd(R, full_matrices=True)
    dimension = b - int((s > side.free).sum())
    kernel: Tensor = Vt[b - dimension :].T if dimension <= _LARGEST_KERNEL else Vt[:0].T
    return kernel


def _sparsest(side: Side, kernel: Tensor, rows: Tensor) -> Tensor:
    """Directions (b, k) inside a kernel (b, d) that further rows single out.

    In the few dimensions of a kernel a sample is what d - 1 rows leave free in which it is off; its
    other rows agree. So many are drawn, and those with rows to spare are kept.
    """
    d = kernel.shape[1]
    others = side.basis[~rows] @ kernel  # (t, d)
    shown = others.norm(dim=1) > side.free
    others = others[shown]
    if len(others) < d + _SPARE_ROWS:
        return kernel[:, :0]
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(others), (_DRAWS, d - 1), generator=generator).to(others.device)
    drawn = unit(others)[pick]  # (draws, d - 1, d)
    vectors = torch.linalg.svd(drawn, full_matrices=True).Vh[:, -1]  # (draws, d)
    zeros = ((others @ vectors.T).abs() <= side.zero * UNDECIDED).sum(0)  # (draws,)
    chosen: list[int] = []
    for i in zeros.argsort(descending=True).tolist():
        if int(zeros[i]) < d - 1 + _SPARE_ROWS or len(chosen) >= d:
            break
        if all(float((vectors[i] @ vectors[j]).abs()) < _SAME_IN_KERNEL for j in chosen):
            chosen.append(i)
    directions: Tensor = kernel @ vectors[chosen].T
    return directions
