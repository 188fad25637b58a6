"""Several rounds: the rows of one neuron as a block, and the search for directions by whole blocks.

A sample that is off for a neuron in one round is mostly off in the next. So neuron k gives not R rows
but a subspace V_k, of the dimension that its R rows have above the noise, and a sample's q is
orthogonal to V_k for every neuron that it never switches on, a third of all after 20 rounds. Sparse
search becomes group-sparse search, which is far easier, and needs no signs:

    q <- normalise( sum_k P_k^T P_k q * max(0, 1 - shrink / |P_k q|) )

with P_k an orthonormal basis of V_k, in coordinates in which sum_k P_k^T P_k = 1, and |P_k q| in units
of what a random q has. Signs say little as long as more samples are missing than half the neurons (any
pattern of m signs has some c in more dimensions than that, Cover 1965). Samples that were found are
kept out by searching where c_i . q = 0 for their c_i: read from signs or, while these say little, taken
to be c ~ q, which nearly holds in these coordinates.

What blocks leave free together, two samples that switch on the same neurons, is told apart by rows: in
some rounds one is off and the other is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.factors import Factors, Side
from spear.search.kernels import unit
from spear.search.parallel import piece_length
from spear.search.starts import distinct
from spear.search.watch import Watch
from spear.tolerances import UNDECIDED

_SWEEPS = 5  # of Tyler's scatter for subspaces
# Of the zero level: a direction of a block this far above it is known to 1/15, and weaker ones mislead.
_ABOVE_NOISE = 3.0
# In units of a random q's size, for one start after the other. 0.3 hits most often (at b = 3 m in 0.9
# of the starts, 0.5 in 0.6), but then the same few samples: where weights hardly move (learning rate
# 0.001), these four together find three times as many.
_SHRINK = (0.3, 0.5, 0.7, 0.9)
_NEARLY_ZERO = 0.3
_STEPS = 160
_FREE_STEPS = 10  # of those, outside the complement of what was found
# Sizes at which a block counts as half zero, from a guess (0.1) to a kernel; sizes of blocks that are
# off were below 0.25 after the search, and fell to 1e-5 (benchmarks/rounds.py).
_SOFTNESS = (0.1, 0.03, 0.01, 0.001)
_OFF = 1e-3  # a block's size below which all its rows are taken to be off
_POSSIBLY_OFF = 0.6  # blocks larger than this have no say while a guess is sharpened
_FEWEST_BLOCKS = 0.3  # share of the blocks that always have a say
_LARGEST_KERNEL = 8  # dimensions of a kernel of blocks in which samples are told apart by rows
_DRAWS = 2000  # of d - 1 rows in such a kernel: three in ten rows are off for a sample
_SPARE_ROWS = 10  # that a direction in a kernel must have, beyond those it was solved for
_SAME_IN_KERNEL = 1 - 1e-6
_SAME_COSINE = 0.97  # |cos| with a direction that was found


@dataclass(frozen=True, eq=False)
class Blocks:
    """The rows of each neuron as an orthonormal basis, in balanced coordinates."""

    side: Side
    of_row: Tensor  # (rows,) the block of each row of the side, -1 where it is none
    basis: Tensor  # (t, b)
    block: Tensor  # (t,) which block a row of the basis belongs to
    change: Tensor  # (b, b): q here = change @ white q, up to scale

    @staticmethod
    def of(factors: Factors) -> Blocks | None:
        """The blocks of several rounds; None of one round, whose blocks are single rows."""
        rounds = factors.view.rounds
        if rounds is None or len(rounds) < 2:
            return None
        side, live = factors.outputs, factors.live_rows
        neurons = rounds.neurons[live]
        parts: list[Tensor] = []
        block: list[Tensor] = []
        of_row = torch.full_like(neurons, -1)
        for k in range(rounds.width):
            rows = (neurons == k).nonzero().flatten()
            _, s, Vt = torch.linalg.svd(side.basis[rows], full_matrices=False)
            above = Vt[s > _ABOVE_NOISE * side.zero]  # noise is even in these coordinates
            if len(above):
                of_row[rows] = len(parts)
                block.append(torch.full((len(above),), len(parts), device=neurons.device))
                parts.append(above / side.scales)  # as functions of a white q
        if not parts:
            return None
        return _balanced(side, of_row, torch.cat(parts), torch.cat(block))

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

    def here(self, white: Tensor) -> Tensor:
        """White directions (k, b) as columns (b, k) of unit length in these coordinates."""
        return unit(self.change @ white.T, 0)

    def white(self, q: Tensor) -> Tensor:
        """Columns (b, k) as white directions (k, b) of unit length."""
        return unit(torch.linalg.solve_triangular(self.change, q, upper=True).T)


def _balanced(side: Side, of_row: Tensor, rows: Tensor, block: Tensor) -> Blocks:
    """Coordinates in which the blocks are orthonormal and sum to one (Tyler's scatter)."""
    b = rows.shape[1]
    change = torch.eye(b, dtype=rows.dtype, device=rows.device)
    basis = _orthonormal(rows, block)
    for _ in range(_SWEEPS):
        change = torch.linalg.qr(basis, mode="r").R @ change
        turned = torch.linalg.solve_triangular(change, rows, upper=True, left=False)
        basis = _orthonormal(turned, block)
    return Blocks(side, of_row, basis, block, change)


def _orthonormal(rows: Tensor, block: Tensor) -> Tensor:
    parts = torch.split(rows, torch.bincount(block).tolist())
    return torch.cat([torch.linalg.qr(part.T).Q.T for part in parts])


def search_blocks(
    blocks: Blocks,
    found: Tensor,
    free: Tensor,
    *,
    starts: int,
    generator: torch.Generator,
    watch: Watch,
) -> tuple[Tensor, Tensor]:
    """Guesses q (b, k) at samples beside those found, and their blocks' sizes (count, k).

    Args:
        blocks: of all neurons.
        found: (f, b) white directions.
        free: (r, b) white directions that span, nearly, what is missing.
        starts: how many.
        generator: for the starts.
        watch: with the workers, if there are any.
    """
    known = blocks.here(found)
    free = torch.linalg.qr(blocks.here(free)).Q  # (b, r)
    pick = torch.randint(len(blocks.basis), (2, starts), generator=generator)
    flip = torch.randint(2, (starts, 1), generator=generator) * 2 - 1
    first, second = blocks.basis[pick.to(blocks.basis.device)]
    q = unit(first + second * flip.to(first)).T  # (b, starts)
    work = 2 * blocks.basis.numel() * starts * _STEPS
    pieces = [(some,) for some in torch.split(q, piece_length(starts, work), 1)]
    parts = watch.map(_descend, (blocks, free), pieces, multiplications=work)
    q, sizes = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    nearly_zero = -sizes.clamp_max(_NEARLY_ZERO).sum(0)
    new = distinct(q, nearly_zero, 2 * free.shape[1] + 8)
    if known.shape[1]:
        new = new[(known.T @ q[:, new]).abs().amax(0) < _SAME_COSINE]
    return q[:, new], sizes[:, new]


def _descend(blocks: Blocks, free: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """From starts (b, k) to nearly group-sparse directions: first among what is free, then anywhere."""
    whole = blocks.basis.float()
    if free.shape[1] < free.shape[0]:
        part = (blocks.basis @ free).float()
        q = free @ _shrunk(blocks, part, (free.T @ q).float(), _STEPS - _FREE_STEPS).double()
        q = _shrunk(blocks, whole, q.float(), _FREE_STEPS).double()
    else:
        q = _shrunk(blocks, whole, q.float(), _STEPS).double()
    return q, blocks.sizes(blocks.basis @ q)


def _shrunk(blocks: Blocks, basis: Tensor, q: Tensor, steps: int) -> Tensor:
    back, q = basis.T.contiguous(), unit(q, 0)
    shrink = q.new_tensor(_SHRINK).repeat(-(-q.shape[1] // len(_SHRINK)))[: q.shape[1]]  # (k,)
    for _ in range(steps):
        values = basis @ q  # (t, k)
        sizes = blocks.sizes(values).clamp_min_(1e-12)
        level = shrink * sizes.square().mean(0).sqrt_()  # what is missing may be small all over
        q = unit(back @ values.mul_((1 - level / sizes).clamp_min_(0)[blocks.block]), 0)
    return q


def refine_blocks(blocks: Blocks, q: Tensor, sizes: Tensor, watch: Watch) -> Tensor:
    """Exact directions (k', b), white, from guesses (b, k) and their blocks' sizes (count, k)."""
    work = blocks.basis.numel() * blocks.basis.shape[1] * q.shape[1] * len(_SOFTNESS)
    step = piece_length(q.shape[1], work)
    split = zip(torch.split(q, step, 1), torch.split(sizes, step, 1), strict=True)
    pieces = [(one.contiguous(), two.contiguous()) for one, two in split] if q.shape[1] else []
    parts = watch.map(_refine, (blocks,), pieces, multiplications=work)
    return torch.cat([q.new_zeros(0, len(q)), *parts])


def _refine(blocks: Blocks, q: Tensor, sizes: Tensor) -> Tensor:
    """Each guess on its own: the vector that its small blocks annihilate best, ever more sharply."""
    found = []
    for guess, size in zip(q.T, sizes.T, strict=True):
        off = _sharpened(blocks, guess, size) <= _OFF  # (count,)
        rows = off[blocks.of_row] & (blocks.of_row >= 0)
        kernel = _kernel(blocks.side, rows)  # (b, d)
        if kernel.shape[1] > 1:  # others are off for the same neurons, though not in every round
            kernel = _sparsest(blocks.side, kernel, rows)
        found.append(unit((kernel * blocks.side.scales[:, None]).T))
    return torch.cat([q.new_zeros(0, len(q)), *found])


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


def _sharpened(blocks: Blocks, q: Tensor, sizes: Tensor) -> Tensor:
    """Sizes (count,) of the blocks, once small ones count as 1 / size^2 and the guess has followed."""
    always = int(_FEWEST_BLOCKS * blocks.count) + 1
    x = q[:, None]
    for softness in _SOFTNESS:
        heard = sizes <= max(_POSSIBLY_OFF, float(sizes.kthvalue(always).values))
        weights = heard / (sizes.square() + softness**2)
        rows = heard[blocks.block]
        A = blocks.basis[rows] * weights[blocks.block[rows]].sqrt()[:, None]
        gram = A.T @ A
        gram.diagonal().add_(1e-13 * float(gram.diagonal().mean()))
        lower = torch.linalg.cholesky_ex(gram).L
        for _ in range(2):
            x = unit(torch.cholesky_solve(x, lower), 0)
        sizes = blocks.sizes(blocks.basis @ x)[:, 0]
    return sizes
