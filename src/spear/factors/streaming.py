"""Singular values and left vectors of a gradient, in blocks of columns.

`left_factor` computes all of them. `sketch` computes the leading ones of a gradient whose rank is far
below its size, with a randomised range finder (Halko, Martinsson, Tropp 2011) and one power step: a few
passes over the gradient. All sums are in float64, and nothing as large as the gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import torch
from torch import Tensor

from spear.update import double

_BLOCK = 1 << 21  # entries of a column block: 16 MB in float64

_BLOCKS_PER_TRIANGLE = 4  # columns of a block, in columns of the sketch
_INITIAL_COLUMNS = 64  # of a sketch; doubled until there are twice as many as the rank
_ENOUGH_COLUMNS = 256  # that show the length of a row: to 4 %
# A sketch as wide as a third of the layer costs half as much as the whole factorisation.
_SKETCH_FRACTION = 3
# The drop that ends the samples: in a first look, where random columns mix loud and faint samples and
# hide up to two thirds of a gap, and in the sketch, which shows noise up to a half too low. The whole
# spectrum needs a drop by 100: a sketch that shows 300 leaves no doubt.
_FIRST_PASS_DROP, _SKETCH_DROP = 30.0, 300.0
# How long the SVD of a triangle takes at most, in units of the QR of one block: 0.5 at 400 rows, 2.2 at
# 1000, 5.6 at 2000. It cannot be cut short.
_SVD_BLOCKS = 6.0


class CheckTime(Protocol):
    """Raises once the time is up, or if less is left than the next step needs."""

    def __call__(self, needed: float = 0.0) -> None: ...


def go_on(needed: float = 0.0) -> None:
    """The check where there is no limit of time: it never raises."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """The leading part of a gradient (m, n), and the size of the rest."""

    left: Tensor  # (m, rank)
    values: Tensor  # (min(m, n),) the leading ones; the rest's energy is spread evenly
    outside: Tensor  # (m,) length of each row outside the span of `left`

    @property
    def rank(self) -> int:
        return self.left.shape[1]


def sketch(
    G: Tensor, rows: int, columns: int, eps: float, check_time: CheckTime = go_on
) -> Sketch | None:
    """The part of G before its last gap; None if a third of the spectrum shows no gap.

    Args:
        G: (m, n).
        rows: how many of its rows are not zero.
        columns: how many of its columns are not.
        eps: rounding of the update's own dtype; what lies a thousand times below it is no gap.
        check_time: called between blocks of columns; raises to stop.
    """
    drawn = _range(G, eps, min(rows, columns) // _SKETCH_FRACTION, check_time)
    if drawn is None:
        return None
    Y, Q = drawn
    # Wide blocks: with each of them, the triangle so far is factorised again.
    width = _BLOCKS_PER_TRIANGLE * Q.shape[1]
    blocks = (Q.T @ block for _, block in column_blocks(G, width, check_time))
    R = _triangle(blocks, Q.shape[1], min(width, G.shape[1]))
    _, s, Wt = torch.linalg.svd(R)  # G^T Q = V S W^T, V (n, k)
    rank = _last_drop(s, eps, _SKETCH_DROP)
    if rank is None:
        return None
    left, leading = _power_step(G, Q @ (Wt[:rank].T / s[:rank]), check_time)
    outside = _outside(G, left, Y, check_time)
    unseen = min(rows, columns) - len(s)
    rest = (outside.square().sum() - s[rank:].square().sum()).clamp_min(0) / unseen
    noise = torch.cat([s[rank:], rest.sqrt().expand(unseen)]).sort(descending=True).values
    return Sketch(left, torch.cat([leading, noise]), outside)


def _range(G: Tensor, eps: float, most: int, check_time: CheckTime) -> tuple[Tensor, Tensor] | None:
    """G times k random columns (m, k), and an orthonormal basis of it.

    Its span holds G's leading left vectors, at most k / 2 of them.
    """
    # It does not matter which directions are drawn; a fixed seed gives one factorisation per update.
    generator = torch.Generator().manual_seed(0)
    Y = torch.zeros(len(G), 0, dtype=torch.float64, device=G.device)
    k = _INITIAL_COLUMNS
    while k <= most:
        fresh = Y.new_zeros(len(G), k - Y.shape[1])
        for _, block in column_blocks(G, check_time=check_time):
            size = (block.shape[1], fresh.shape[1])
            fresh += block @ torch.randn(size, generator=generator, dtype=Y.dtype).to(Y.device)
        Y = torch.cat([Y, fresh], 1)  # (m, k)
        Q: Tensor
        check_time()
        Q, R = torch.linalg.qr(Y)
        rank = _last_drop(torch.linalg.svdvals(R), eps, _FIRST_PASS_DROP)
        if rank is not None and 2 * rank <= k:
            return Y, Q
        k *= 2
    return None


def _power_step(G: Tensor, P: Tensor, check_time: CheckTime) -> tuple[Tensor, Tensor]:
    """U (m, b) and S (b,) of G; V = G^T P has orthonormal columns that span the rows before the gap.

    The range of G times random columns holds noise of all n columns of G. V averages that out, and G V
    is as clean as the singular vectors themselves. V is never formed as a whole.
    """
    Y = torch.zeros_like(P)
    for _, block in column_blocks(G, check_time=check_time):
        Y += block @ (block.T @ P)  # G V (m, b)
    basis, R = torch.linalg.qr(Y)
    rotation, s, _ = torch.linalg.svd(R)
    return basis @ rotation, s


def _outside(G: Tensor, left: Tensor, Y: Tensor, check_time: CheckTime) -> Tensor:
    """Length of each row of G (m,) outside the span of `left` (m, b); Y is G times random columns.

    Random columns keep the length of a row, and many of them to a few per cent.
    """
    if Y.shape[1] >= _ENOUGH_COLUMNS:
        drawn: Tensor = (Y - left @ (left.T @ Y)).norm(dim=1)
        return drawn / math.sqrt(Y.shape[1])
    outside = torch.zeros(len(G), dtype=torch.float64, device=left.device)
    for _, block in column_blocks(G, check_time=check_time):
        outside += (block - left @ (left.T @ block)).square().sum(1)
    return outside.sqrt()


def _last_drop(s: Tensor, eps: float, least: float) -> int | None:
    """How many singular values stand before the last drop by `least` or more."""
    floor = noise_floor(s, eps)
    fallen = (s[:-1] >= least * s[1:].clamp_min(floor)) & (s[:-1] > floor)
    found = torch.nonzero(fallen).flatten()
    return int(found[-1]) + 1 if len(found) else None


def noise_floor(s: Tensor, eps: float) -> float:
    """Rounding leaves about a tenth of eps; a drop to a hundredth of that is no further gap."""
    return float(s.norm()) * max(torch.finfo(s.dtype).eps, 1e-3 * eps)


def with_unseen(s: Tensor, energy: float, count: int) -> Tensor:
    """Singular values (count,) of a matrix of which `s` are known, and the energy of the others."""
    unseen = count - len(s)
    if unseen <= 0:
        return s[:count]
    rest = s.new_full((unseen,), math.sqrt(max(energy, 0.0) / unseen))
    return torch.cat([s, rest]).sort(descending=True).values


def left_factor(
    G: Tensor,
    live_rows: Tensor,
    live_columns: Tensor,
    check_time: CheckTime = go_on,
    row_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """U (m, r) and S (r,) of the live part (m, n), r = min(m, n), by QR of blocks (TSQR).

    That never squares the condition number, and only a triangle of the smaller dimension is kept from
    block to block. Empty rows and columns are left out: the exact zeros that they would add to S look
    like the end of a spectrum, far below the rounding of an update. Rows are multiplied by their
    factors (m,), if there are any.
    """
    m, n = int(live_rows.sum()), int(live_columns.sum())
    if not m:
        return G.new_zeros(0, 0, dtype=torch.float64), G.new_zeros(0, dtype=torch.float64)
    began = monotonic()
    scale = torch.ones_like(G[:, :1], dtype=torch.float64)  # (m, 1)
    if row_factors is not None:
        scale = row_factors[:, None]
    if m <= n:
        width = max(m, _BLOCK // m)
        blocks = (
            (block * scale)[live_rows][:, live_columns[columns]]
            for columns, block in column_blocks(G, width, check_time)
        )
        triangle = _triangle(blocks, m, width)
        check_time(_SVD_BLOCKS * (monotonic() - began) / math.ceil(G.shape[1] / width))
        U, s, _ = torch.linalg.svd(triangle.T, full_matrices=False)
        return U, s
    width = max(n, _BLOCK // n)
    everything = (rows.T for rows in _scaled_rows(G[:, live_columns], scale, width))
    triangle = _triangle(everything, n, width)
    check_time(_SVD_BLOCKS * (monotonic() - began) / math.ceil(len(G) / width))
    _, s, Vt = torch.linalg.svd(triangle, full_matrices=False)
    step = max(1, _BLOCK // n)
    rows = _scaled_rows(G[:, live_columns], scale, step)
    left = torch.cat([some @ Vt.T for some in rows])[live_rows]
    return torch.linalg.qr(left).Q, s  # G V, sorted from loud to quiet: orthonormalised, it is U


def _scaled_rows(G: Tensor, scale: Tensor, step: int) -> Iterator[Tensor]:
    """Rows of G (m, n) times their factors (m, 1), in float64, so many at a time."""
    for rows, factors in zip(torch.split(G, step), torch.split(scale, step), strict=True):
        yield double(rows) * factors


def _triangle(blocks: Iterator[Tensor], m: int, width: int | None = None) -> Tensor:
    """The triangle (m, m) of the QR decomposition of A^T, from blocks of the columns of A (m, n)."""
    stacked: Tensor | None = None
    for block in blocks:
        if stacked is None:
            stacked = block.new_zeros(m, m + max(width or 0, block.shape[1]))
        end = m + block.shape[1]
        stacked[:, m:end] = block
        # A transposed view is LAPACK's own layout.
        R = torch.linalg.qr(stacked[:, :end].T, mode="r").R
        stacked[:, :m] = R.T
    assert stacked is not None
    return stacked[:, :m].T


def column_blocks(
    G: Tensor, width: int | None = None, check_time: CheckTime = go_on
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns in float64, a few megabytes each, all in the same memory.

    The time is checked between two of them, so what is small is always finished. The next block takes
    about as long as the last one.
    """
    width = min(G.shape[1], width or max(1, _BLOCK // len(G)))
    buffer = torch.empty(len(G), width, dtype=torch.float64, device=G.device)
    began = monotonic()
    for start in range(0, G.shape[1], width):
        columns = slice(start, min(start + width, G.shape[1]))
        if start:
            check_time(monotonic() - began)
        began = monotonic()
        yield columns, buffer[:, : columns.stop - start].copy_(G.detach()[:, columns])


def live(G: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns with any gradient at all."""
    step = max(1, _BLOCK // G.shape[1])
    rows = torch.cat([some.any(1) for some in torch.split(G, step)])
    columns = torch.empty(G.shape[1], dtype=torch.bool, device=G.device)
    width = max(1, _BLOCK // len(G))
    for start in range(0, G.shape[1], width):
        columns[start : start + width] = G[:, start : start + width].any(0)
    return rows, columns
