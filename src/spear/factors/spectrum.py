"""What the singular values of an update say: how many samples it holds, and where noise begins."""

from __future__ import annotations

import torch
from torch import Tensor

from spear.factors.streaming import noise_floor
from spear.tolerances import MIN_ROUNDINGS_ABOVE

_MIN_SAMPLE_GAP = 1.05  # times the next value: 1.01 is usual from one value of noise to the next


def batch_size_from(s: Tensor, m: int, n: int, eps: float) -> int | None:
    """The numerical rank of an m x n matrix from all its singular values s; None without a gap.

    A clean update falls by orders of magnitude after its last sample. A noisy one ends in the bulk of a
    random matrix, whose largest singular value is sigma (sqrt m + sqrt n).
    """
    r = len(s)
    if r == 0 or float(s[0]) == 0:
        return 0
    positions = torch.arange(r, device=s.device)
    i = torch.arange(r, dtype=s.dtype, device=s.device)
    tail = s.square().flip(0).cumsum(0).flip(0)  # energy of s_i, s_i+1, ...
    # The most that noise with the tail's energy could reach, if the rank were i.
    edge = (tail / ((m - i) * (n - i))).sqrt() * ((m - i).sqrt() + (n - i).sqrt())
    floor = noise_floor(s, eps)
    drop = s[:-1] / s[1:].clamp_min(floor)  # (r-1,) s_i / s_i+1
    # Rounding is uneven from row to row: its largest value reached 4 times the edge and, where one
    # sample is far louder than the others, 40 times the median. Samples taken for noise stand out
    # further.
    median = s[(positions + r) // 2]  # of s_i, s_i+1, ...: they are sorted
    quiet = (s[1:] <= 10 * edge[1:]) & (s[1:] <= 1000 * median[1:].clamp_min(floor))
    clean = torch.where(quiet, drop, 0.0)  # values below the floor drop no further
    gaps = torch.nonzero(clean >= 100).flatten()
    if len(gaps):
        return int(gaps[-1]) + 1
    gaussian = _gaussian_from(s, edge, m, n)
    if gaussian is not None:
        return gaussian
    # Other noise keeps to the edge as well, and samples stand out from it; a spectrum that merely
    # levels off is a batch as large as the layer. A fifth of the spectrum has to show the noise.
    shown = r - max(3, r // 5)
    if shown > 0 and float(clean[:shown].max()) >= 10:
        return int(clean[:shown].argmax()) + 1
    bulk = torch.nonzero((s <= 1.1 * edge)[:shown]).flatten()
    return _before_a_drop(drop, int(bulk[0])) if len(bulk) else None


def _before_a_drop(drop: Tensor, rank: int) -> int | None:
    """The rank if the spectrum falls there; a sample or two as faint as noise count as noise."""
    for faint in range(1 + max(1, rank // 10)):
        if rank == faint or float(drop[rank - faint - 1]) >= 1.2:
            return rank - faint
    return None


def _gaussian_from(s: Tensor, edge: Tensor, m: int, n: int) -> int | None:
    """Where the spectrum becomes that of Gaussian noise, down to its last value; None if nowhere.

    Such noise does not reach beyond its edge, except by 1 % to 5 % in these sizes, so whatever does
    is a sample, however little it stands out. Moments of the rest tell noise from a batch as large
    as the layer: for a k x p matrix, mean s^4 is 1 + k/p times the square of mean s^2, and mean s^6
    is 1 + 3 k/p + (k/p)^2 times its cube (Marchenko and Pastur).
    """
    i = torch.arange(len(s), dtype=s.dtype, device=s.device)
    k, p = min(m, n) - i, max(m, n) - i
    scaled = s / s[0]
    second, fourth, sixth = (
        scaled.pow(power).flip(0).cumsum(0).flip(0) / k for power in (2, 4, 6)
    )  # means over s_i, s_i+1, ...
    c = k / p
    # Twice the spread of 40 matrices in each of nine sizes from 40 x 60 to 400 x 3072.
    spread = 5 * c.sqrt() / k
    is_noise = (
        (s <= (1 + k.pow(-2 / 3)) * edge)
        & ((fourth / (second.square() * (1 + c)) - 1).abs() <= spread)
        & ((sixth / (second.pow(3) * (1 + 3 * c + c.square())) - 1).abs() <= 3 * spread)
    )
    # A batch far larger than the layer comes close too: 4 to 40 m Gaussian samples left a tenth of the
    # spectrum or more above the edge, and a fifth of the energy or more below it.
    rest = second * k
    is_noise &= (i <= len(s) / 12) | ((i <= len(s) / 4) & (rest <= 0.1 * rest[0]))
    found = torch.nonzero(is_noise).flatten()
    if not len(found):
        return None
    rank = int(found[0])
    # Coarse grids smear their noise over the edge, value by value: samples stand apart from it.
    apart = torch.nonzero(s[:rank] >= _MIN_SAMPLE_GAP * s[1 : rank + 1]).flatten()
    if not len(apart):
        return 0 if not rank else None
    return int(apart[-1]) + 1 if 2 * int(apart[-1]) + 2 >= rank else None


def rank_without_gap(s: Tensor, eps: float) -> int:
    """How many samples stand out if the spectrum fades into rounding without a gap; else 0."""
    if len(s) < 4 or float(s[len(s) // 2]) > eps * float(s[0]):
        return 0  # it does not reach rounding: a batch as large as the layer, or noise
    return int((s >= MIN_ROUNDINGS_ABOVE * eps * s[0]).sum())
