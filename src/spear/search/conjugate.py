"""Kernels of many sets of rows at once, by conjugate gradients: a few products with all rows per step.

Each direction q has rows of its own, those in which its sample is off. A factorisation of these takes
rows * b^2 multiplications for each. A step of conjugate gradients takes rows * b, as columns of two
products that all directions share, and 10 to 40 steps are enough: of a wide layer's rows, half are off,
and these are well conditioned. Steps are in single precision. What they leave is computed in double
precision and solved again, until it is as exact as a factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spear.search.deadline import NEVER, Deadline

_SINGLE = 1e-6  # of the slope: what single precision can take away in one pass
_ROUNDINGS = 4.0  # of what is left: a slope below these, in each of b entries, is as good as zero
_PASSES = 4  # of refinement; two are usual
_IN_NOISE = 0.03  # of an entry's share of what is left: a slope this small is that of noise
_BELOW_NOISE = 0.1  # of the noise of an entry: an error that small is never seen
_STEPS = 60  # of a pass: with more, a factorisation is no slower
_INVERSE_STEPS, _ROUGHLY = 8, 1e-2  # for an eigenvalue, and how well its systems are solved
_FIRST_LOOK, _LOOKED_AT = 10, 5  # steps before the first look at what is left, and between two


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows (rows, b) shared by all directions, in both precisions."""

    double: Tensor
    single: Tensor

    @staticmethod
    def of(rows: Tensor) -> Rows:
        return Rows(rows, rows.float())


def kernels_of(
    rows: Rows, kept: Tensor, guess: Tensor, deadline: Deadline = NEVER
) -> tuple[Tensor, Tensor]:
    """For each column, the unit vector (b, k) that the rows kept (rows, k) annihilate best.

    If they leave several, the one nearest the guess (b, k). Also which columns settled (k,): the others
    are badly conditioned, and need a factorisation.
    """
    q = normalize(guess, dim=0)
    weight, fixed = kept.to(rows.single), q.to(rows.single)
    noise = 1 / weight.sum(0).clamp_min(1).sqrt()  # of an entry, relative to all that is left
    settled = torch.zeros_like(noise, dtype=torch.bool)
    for _ in range(_PASSES):
        deadline.check()
        left = -weight * (rows.double @ q)
        solved = least_squares(rows.single, weight, left, fixed, _SINGLE)
        q = q + solved.change
        error = (_SINGLE * (left.norm(dim=0) + solved.left)).to(noise)
        settled = solved.settled & (error <= _BELOW_NOISE * noise * solved.left)
        if bool(settled.all()):
            break
    return normalize(q, dim=0), settled


@dataclass(frozen=True, eq=False)
class Solved:
    """Least squares, column by column."""

    change: Tensor  # (b, k)
    left: Tensor  # (k,): length of what is left
    settled: Tensor  # (k,) bool: is the slope as flat as was asked for?


def least_squares(  # noqa: PLR0917
    rows: Tensor,
    weight: Tensor,
    left: Tensor,
    fixed: Tensor,
    tolerance: float,
    span: Tensor | None = None,
) -> Solved:
    """The change of q (b, k) that takes most away of what is left (rows, k), orthogonal to `fixed`.

    Conjugate gradients for least squares, in the precision of the rows (rows, b), until the slope has
    fallen by the tolerance in all columns or is lost in the noise of what is left, or the steps are
    used up. Weights (rows, k) are 0 or 1. What lies in a span (rows, p), orthonormal, does not count as
    left.
    """
    length = left.norm(dim=0).clamp_min(torch.finfo(left.dtype).tiny)
    r = (left / length).to(rows)
    x = torch.zeros_like(fixed)
    s = _beside(rows.T @ (r * weight), fixed)
    p, slope = s, s.square().sum(0)
    tiny, eps = torch.finfo(rows.dtype).tiny, torch.finfo(rows.dtype).eps
    floor = _IN_NOISE**2 / weight.sum(0).clamp_min(
        1
    )  # of the squared slope, relative to what is left
    floor = floor.clamp_min(len(s) * (_ROUNDINGS * eps) ** 2)
    enough, flat = tolerance**2 * slope, torch.zeros_like(slope, dtype=torch.bool)
    for step in range(1, _STEPS + 1):
        t = (rows @ p).mul_(weight)
        t = t if span is None else t.addmm_(span, span.T @ t, alpha=-1)
        far = slope / t.square().sum(0).clamp_min(tiny)
        x.addcmul_(p, far)
        r.addcmul_(t, far, value=-1)
        s = _beside(rows.T @ (r if span is None else r * weight), fixed)
        before, slope = slope, s.square().sum(0)
        if step >= _FIRST_LOOK and step % _LOOKED_AT == 0:
            flat = slope <= torch.maximum(enough, floor * r.square().sum(0))
            if bool(flat.all()):
                break
        p = s.addcmul(p, slope / before.clamp_min(tiny))
    return Solved(x.to(left) * length, r.norm(dim=0).to(left) * length, flat)


def smallest_eigenvalues(rows: Tensor, kept: Tensor, beside: Tensor) -> Tensor:
    """Of the Gram matrices of rows (rows, b) kept (rows, k), beside unit vectors (b, k): (k,).

    By inverse iteration, approached from above, to a few per cent.
    """
    x = torch.linspace(1, 2, beside.numel(), dtype=rows.dtype, device=rows.device).sin_()
    x, size = x.view_as(beside), torch.ones_like(beside[0])
    for _ in range(_INVERSE_STEPS):
        right = _beside(normalize(x, dim=0), beside)
        x = _beside(_gram_solved(rows, kept, right, beside), beside)
        size = x.norm(dim=0) / right.norm(dim=0)
    return 1 / size


def _gram_solved(rows: Tensor, kept: Tensor, right: Tensor, beside: Tensor) -> Tensor:
    """x (b, k) with Gram x = right, beside `beside`, by conjugate gradients."""
    tiny = torch.finfo(rows.dtype).tiny
    x, r, p = torch.zeros_like(right), right, right
    size = r.square().sum(0)
    for step in range(1, _STEPS + 1):
        t = _beside(rows.T @ (rows @ p).mul_(kept), beside)
        far = size / (p * t).sum(0).clamp_min(tiny) * (size > _ROUGHLY**2)
        x.addcmul_(p, far)
        r = r.addcmul(t, far, value=-1)
        before, size = size, r.square().sum(0)
        if step % _LOOKED_AT == 0 and bool((size <= _ROUGHLY**2).all()):
            break
        p = r.addcmul(p, size / before.clamp_min(tiny))
    return x


def _beside(s: Tensor, fixed: Tensor) -> Tensor:
    """The part of s (b, k) orthogonal to fixed (b, k)."""
    return s.addcmul_(fixed, (s * fixed).sum(0), value=-1)
