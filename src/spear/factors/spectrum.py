"""What the singular values of an update say: how many samples it holds, and where noise begins."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spear.factors.streaming import noise_floor
from spear.tolerances import GAP, MIN_ROUNDINGS_ABOVE, ROUNDING_VARIANCE
from spear.update import LayerUpdate, double

_MIN_SAMPLE_GAP = 1.05  # times the next value: 1.01 is usual from one value of noise to the next
# Fewer values do not tell noise from a batch (`_gaussian_from` was measured from 40 x 60 on). Of 786
# clean batches in 20 rows or fewer, 100 seemed to be nothing but noise, and 1 of 351 in 25 or 30.
_FEWEST_VALUES = 30

# Expected to measured energy of rounding, either way: 0.6 to 1.3 for weights subtracted (bags of words
# at rates of 1e-5 to 0.1), up to 2 where the client's own sums add to it.
_SIMILAR_ENERGY = 4.0
_ENTRIES_AT_ONCE = 1 << 21  # 16 MB in float64


class Rounding(NamedTuple):
    """What rounding, and nothing else, puts into an update of which m x n entries are live."""

    edge: float  # largest singular value
    energy: float  # sum of all squared ones

    def level(self, s: Tensor, m: int, n: int) -> float:
        """The edge, if the spectrum shows such rounding; 0 if the numbers were not rounded after all.

        Numbers that need fewer digits are exact, and so may be a difference that was never weights.
        """
        k = int((s > self.edge).sum())
        return self.edge if self._share(s, k, m, n) >= 1 / _SIMILAR_ENERGY else 0.0

    def rank(self, s: Tensor, m: int, n: int) -> int | None:
        """How many values stand out, if all others are this rounding and nothing is in between."""
        k = int((s >= MIN_ROUNDINGS_ABOVE * self.edge).sum())
        if k == len(s) or float(s[k]) > MIN_ROUNDINGS_ABOVE / 2 * self.edge:
            return None
        explained = 1 / _SIMILAR_ENERGY <= self._share(s, k, m, n) <= _SIMILAR_ENERGY
        return k if explained else None

    def _share(self, s: Tensor, k: int, m: int, n: int) -> float:
        """Energy from the k-th value on, relative to what rounding would have there."""
        expected = self.energy * (m - k) * (n - k) / (m * n)
        return float(s[k:].square().sum()) / expected if expected else math.inf


NO_ROUNDING = Rounding(0.0, 0.0)


def rounding_of(view: LayerUpdate, row_factors: Tensor | None = None) -> Rounding:
    """The rounding of a gradient's entries, and of the weights it is the difference of.

    An entry has an error of ulp^2 / 12 in the mean square: ulp(G) as it was sent and, if weights were
    subtracted, ulp(W) over the learning rate, wherever anything changed. The largest singular value of
    independent errors is at most the length of the loudest row plus that of the loudest column, and
    little less (Bandeira and van Handel, 2016). The client's own sums add more. Rows may have been
    multiplied by factors (m,) since.
    """
    G, W, rate = view.weight_grad.detach(), view.weight.detach(), view.protocol.rate
    own, before = torch.finfo(G.dtype).eps, torch.finfo(W.dtype).eps / rate * view.trained
    columns, loudest, energy = 0.0 * double(G[0]), 0.0, 0.0
    step = max(1, _ENTRIES_AT_ONCE // G.shape[1])
    factors = torch.ones_like(double(G[:, 0])) if row_factors is None else row_factors
    parts = (torch.split(each, step) for each in (G, W, factors))
    for gradient, weight, factor in zip(*parts, strict=True):
        errors = (own * double(gradient)).square_()  # (rows, n)
        if before:
            errors += (before * double(weight)).square_() * (errors > 0)
        errors *= factor.square()[:, None]
        rows = errors.sum(1)
        columns += errors.sum(0)
        loudest, energy = max(loudest, float(rows.max())), energy + float(rows.sum())
    edge = math.sqrt(loudest) + math.sqrt(float(columns.max()))
    return Rounding(math.sqrt(ROUNDING_VARIANCE) * edge, ROUNDING_VARIANCE * energy)


def batch_size_from(
    s: Tensor, m: int, n: int, eps: float, rounding: Rounding = NO_ROUNDING
) -> int | None:
    """The numerical rank of an m x n matrix from all its singular values s; None without a gap.

    A clean update falls by orders of magnitude after its last sample. A noisy one ends in the bulk of a
    random matrix, whose largest singular value is sigma (sqrt m + sqrt n). Whatever follows a value
    that rounding alone explains, that value is no sample: rounding that keeps to some rows or columns
    (inputs that are multiples of each other, as word counts are) has a gap of its own.
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
    # Values below the floor drop no further.
    clean = torch.where(quiet & (s[:-1] > rounding.level(s, m, n)), drop, 0.0)
    gaps = torch.nonzero(clean >= GAP).flatten()
    if len(gaps):
        return int(gaps[-1]) + 1
    many = r >= _FEWEST_VALUES
    for known in (_gaussian_from(s, edge, m, n) if many else None, rounding.rank(s, m, n)):
        if known is not None:
            return known
    # Other noise keeps to the edge as well, and samples stand out from it; a spectrum that merely
    # levels off is a batch as large as the layer. A fifth of the spectrum has to show the noise.
    shown = r - max(3, r // 5)
    if shown > 0 and float(clean[:shown].max()) >= 10:
        return int(clean[:shown].argmax()) + 1
    bulk = torch.nonzero((s <= 1.1 * edge)[: shown * many]).flatten()
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
