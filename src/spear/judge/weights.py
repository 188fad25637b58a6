"""What each sample's gradient was multiplied with, 1/b or its clipping, and what that gives away."""

from __future__ import annotations

import torch
from torch import Tensor

_WHOLE = 1e-2  # a weight this near a whole number of others is one
_ODD = 1e-3  # deviation of a weight that is more than rounding: 1e-5 and less on clean batches
_DIVISOR = 2e-4  # a divisor this near a whole number is one: weights are known to 1e-5 and better
_MULTIPLE = 1e-3  # the same between two samples: what tells near-duplicates apart enters squared
_COPIES = 16  # of one sample: more than that were hardly in the batch
_LARGEST = 4  # times the samples that show: more than that were hardly in the batch


def merged(factor: Tensor, matched: Tensor) -> Tensor:
    """Which samples (b,) weigh a whole number of times as much as others, or may do so.

    Two samples of one label whose inputs nearly agree leave one trace, of twice the weight, at their
    mean: their difference enters the gradient squared, and drowns. So it may be a duplicate, or not.
    """
    if 2 * int(matched.sum()) < len(matched):  # too few to compare: the divisor has to speak
        return matched & ~_single(factor)
    lightest, median = factor[matched].min(), factor[matched].median()
    as_lightest = _whole(factor / lightest, _MULTIPLE)
    if bool((as_lightest > 0)[matched].all()):
        return as_lightest > 1
    as_most = _whole(factor / median, _WHOLE)
    if 2 * int((as_most == 1)[matched].sum()) < int(matched.sum()):
        return torch.zeros_like(matched)  # clipped one by one: weights say nothing
    return as_most > 1


def _whole(times: Tensor, tolerance: float) -> Tensor:
    """The whole number that each of these (b,) nearly is; 0 where it is none, or too large to tell."""
    whole = times.round()
    near = (times - whole).abs() <= tolerance * whole
    return torch.where(near & (whole <= _COPIES), whole, 0)


def _single(factor: Tensor) -> Tensor:
    """Which weights (b,) are those of one sample in a sum, or in a mean over at least b."""
    divisor = (1 / factor).round()
    near = (1 / factor - divisor).abs() <= _DIVISOR * divisor
    return near & ((divisor >= len(factor)) | (divisor == 1))


def usual(factor: Tensor, matched: Tensor) -> float | None:
    """What most matched samples were multiplied with; None if there is no such number."""
    if not bool(matched.any()):
        return None
    common = factor[matched].median()
    alike = ((factor / common - 1).abs() <= _WHOLE) & matched
    return float(common) if 2 * int(alike.sum()) > int(matched.sum()) else None


def odd(factor: Tensor, matched: Tensor) -> Tensor:
    """Which samples (b,) weigh a little more or less than most others, which no mean explains.

    A sample's weight hangs on the bias gradient as its inputs do on theirs. So where most weigh the
    same, one that does not is off by as much: by samples too faint to show, or factors of its own.
    """
    common = usual(factor, matched)
    if common is None:
        return torch.zeros_like(matched)
    return (factor / common - 1).abs() > _ODD


def vanished(factor: Tensor, matched: Tensor) -> int:
    """How many samples a mean was taken over besides those that are there.

    A mean over N divides every gradient by N. If that is more than the update shows, the others'
    gradients have vanished: nothing is known of them. A sum does not tell, nor an update that was
    scaled as a whole: there N is hardly ever a whole number, or not of the batch's order.
    """
    common = usual(factor, matched)
    if common is None or common <= 0 or 1 / common > _LARGEST * len(factor):
        return 0
    divided_by = round(1 / common)
    whole = abs(1 / common - divided_by) <= _DIVISOR * divided_by
    return max(0, divided_by - len(factor)) if whole else 0
