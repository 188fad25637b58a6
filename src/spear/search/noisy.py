"""Samples under noise: patterns as probabilities, directions as least squares on the pattern.

Under noise no entry of dL/dZ is zero, so kernels of few rows, and rounding to them, lead nowhere.
But the search for both halves (starts.py) hardly notices noise, because it weighs all rows. What it
finds is brought to the precision that the noise allows by alternating between

    the pattern:    how likely each row is off, from the size of U q and the sign of H c, and
    the direction:  the unit vector that the rows that are likely off annihilate best.

With the true pattern this is as good as knowing dL/dZ itself, up to the scale (rescaling.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors
from spear.search.candidates import CandidatePool
from spear.search.deadline import NEVER, Deadline, TimeIsUp
from spear.search.directions import Directions
from spear.search.dual import (
    BalancedProblem,
    DualProblem,
    SignRegression,
    agreement,
    balance,
    consistent_samples,
    deflate,
    dual_problem,
)
from spear.search.kernels import unit
from spear.search.starts import distinct, guess_from_rows, search_from_starts
from spear.search.watch import Watch

# A guess is off by more than the noise: zeros are first sought at this share of a typical entry,
# then at half of it, and so on down to the noise.
_FIRST_ALLOWANCE = 0.3
_SIGN_ODDS = 2.0  # log odds per typical preactivation, as long as z itself is only a guess
_RIDGE = 0.5  # of the signs: between a guess (1.5) and an exact pattern (0.1)
# Share of rows, weighted by their certainty, whose sign some input explains: 0.85 to 1 for samples
# at the paper's noisiest setting, up to 0.79 for most mixes. A few mixes reach 0.87; reading all
# samples together (`consistent_samples`) drops those. Seen on a handful of batches.
_SIGN_AGREEMENT = 0.85
_SIGN_AGREEMENT_FEW, _SIGN_AGREEMENT_LAST = 0.8, 0.6
_FEW_MISSING = 4  # missing samples up to which single rows are tried first
_SWEEPS = 12  # of the joint refinement; patterns settle in three to six
_SAME_COSINE = 0.98  # |cos| above which two refined directions are the same
# Share of a direction's zeros that another has not, below which it is a mix that holds the other: 0.03
# for a mix, 0.15 and more for photos, 0.05 for two inputs at a cosine of 0.99.
_MIXED = 0.05
_AT_ONCE = (
    1 << 20
)  # entries of matrices whose eigenvectors are computed between two looks at the time


@dataclass(frozen=True, eq=False)
class NoiseUnits:
    """L in coordinates in which every entry of L p has noise one, for p of unit length."""

    basis: Tensor  # (rows, b)
    scales: Tensor  # (b,): q of the whitened problem = scales * p

    @staticmethod
    def of(factors: Factors) -> NoiseUnits:
        """Noise over n inputs raises singular values: s~^2 = s^2 + n noise^2; U_j's is s~/s^2."""
        raised, noise = factors.singular_values, factors.noise
        signal = raised.square() - factors.n * noise**2
        scales = signal.clamp_min(1e-3 * raised.square()) / (noise * raised)
        return NoiseUnits(factors.left[factors.live_rows] * scales, scales)

    def vector(self, q: Tensor) -> Tensor:
        """p (b, k), of unit length, of whitened directions q (b, k)."""
        return unit(q / self.scales[:, None], 0)

    def white(self, p: Tensor) -> Tensor:
        """Whitened directions q (k, b), of unit length, of p (b, k)."""
        return unit((p * self.scales[:, None]).T)

    def annihilated(
        self, off: Tensor, allowance: float = 0.0, deadline: Deadline = NEVER
    ) -> Tensor:
        """The p (b, k) that rows annihilate best, each weighted by its chance of being off (rows, k).

        Best in units of its noise: |p|^2, and with an allowance that share of a typical entry of L p.
        (In units of |p| alone a guess would turn to the faintest sample, which is small everywhere.)
        """
        rows, b = self.basis.shape
        noise = (1 + 2 * allowance**2 / rows * self.scales.square()).sqrt()  # (b,)
        scaled = self.basis / noise
        outer = (scaled[:, :, None] * scaled[:, None, :]).flatten(1)  # (rows, b b)
        smallest = [off.new_zeros(0, b)]
        for grams in torch.split((off.T @ outer).view(-1, b, b), max(1, _AT_ONCE // b**2)):
            deadline.check()
            smallest.append(torch.linalg.eigh(grams).eigenvectors[:, :, 0])
        return unit(torch.cat(smallest).T / noise[:, None], 0)


def estimate(
    factors: Factors,
    *,
    starts: int,
    steps: int,
    patience: int,
    generator: torch.Generator,
    watch: Watch,
) -> Iterator[Directions]:
    """Rounds of search, polish and deflation as in the cascade; then all samples together."""
    whole, units, b = dual_problem(factors), NoiseUnits.of(factors), factors.b
    p, off = whole.U.new_zeros(b, 0), whole.U.new_zeros(len(whole.U), 0)
    missing = b
    rounds = _rounds(
        whole, units, starts, steps, patience=patience, generator=generator, watch=watch
    )
    with suppress(TimeIsUp):  # what was found by then stands
        for found in rounds:
            p, off, missing = found
            watch.report("search", found=b - missing, batch_size=b)
        if p.shape[1] == b:
            with watch.stage("refine"):
                p, off = refine_jointly(factors, whole, units, p)
    if p.shape[1] < b:
        watch.remark(
            f"under this noise {b - missing} of {b} samples show; {watch.count('starts', 0):,} starts "
            "gave no more"
        )
    yield _directions(factors, units, p, off, watch)


def _rounds(
    whole: DualProblem,
    units: NoiseUnits,
    starts: int,
    steps: int,
    *,
    patience: int,
    generator: torch.Generator,
    watch: Watch,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """After every round: p (b, k) and off (rows, k) of those found, and how many are missing."""
    b = whole.missing
    p, off = whole.U.new_zeros(b, 0), whole.U.new_zeros(len(whole.U), 0)
    missing, idle, fewest = whole, 0, b
    while missing.missing and idle < patience and not watch.expired:
        residual = balance(missing)
        watch.count("rounds")
        by_rows = (idle + (residual.missing <= _FEW_MISSING)) % 2 == 1
        with watch.stage("seek"):
            count = max(128, starts * residual.missing) << min(idle // 2, 3)
            guesses = (
                guess_from_rows(residual)
                if by_rows
                else search_from_starts(residual, count, steps, generator, watch)
            )
            watch.count("starts", 0 if by_rows else count)
        with watch.stage("polish"):
            new_p, new_off = refine_each(units, residual, *guesses, by_sign=by_rows, watch=watch)
        p, off = _independent(torch.cat([p, new_p], 1), torch.cat([off, new_off], 1))
        if residual.missing == 1 and p.shape[1] == b:
            yield p, off, 0
            return
        with watch.stage("read"):
            q, c = consistent_samples(
                whole, units.white(p), off.T, least_agreement=_SIGN_AGREEMENT_FEW, watch=watch
            )
            missing = deflate(whole, q, c)
        if p.shape[1]:
            kept = (units.vector(q.T).T @ p).abs().argmax(1)  # drops mixes, which no longer fit
            p, off = p[:, kept], off[:, kept]
        idle = 0 if missing.missing < fewest else idle + 1
        fewest = min(fewest, missing.missing)
        yield p, off, missing.missing


def refine_each(
    units: NoiseUnits,
    residual: BalancedProblem,
    q: Tensor,
    score: Tensor,
    *,
    by_sign: bool,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Guesses (r, k) with scores (rows, k), each on its own: p (b, l) and off (rows, l).

    Only those that some input explains are kept. With `by_sign` the score is a preactivation and better
    than q, as with few samples missing, whose c are orthogonal to every q found.
    """
    if not q.shape[1]:
        return units.basis.new_zeros(len(units.scales), 0), units.basis[:, :0]
    deadline = NEVER if watch is None else watch.deadline
    signs = SignRegression(residual, torch.float64, ridge=_RIDGE)
    z = score if by_sign else score - score.mean(0)
    p = units.vector(residual.q_basis @ q)
    if by_sign:
        p = units.annihilated(torch.sigmoid(-2 * _SIGN_ODDS * z), _FIRST_ALLOWANCE, deadline)
    off = torch.zeros_like(score)
    loudest = float((units.basis @ p).square().mean(0).max().sqrt())
    for allowance in _allowances(loudest):
        off = torch.sigmoid(_odds_by_size(units.basis @ p, allowance) - _SIGN_ODDS * z)
        p = units.annihilated(off, allowance, deadline)
        on = 1 - torch.sigmoid(_odds_by_size(units.basis @ p, allowance))
        z = signs.read(residual.c_basis.T @ units.white(p).T, on)
    here = unit((residual.c_basis.T @ units.white(p).T).T)
    fits = agreement(residual, here, off.T, watch)
    least = _least_agreement(residual.missing)
    kept = distinct(p, torch.where(fits >= least, fits, -1.0), p.shape[1])
    kept = kept[fits[kept] >= least]
    return p[:, kept], off[:, kept]


def _allowances(loudest: float) -> list[float]:
    """Shares of a typical entry that count as noise, halved down to the noise itself."""
    halvings = max(1, math.ceil(math.log2(max(1.0, _FIRST_ALLOWANCE * loudest))))
    return [_FIRST_ALLOWANCE / 2**i for i in range(halvings + 1)] + [0.0]


def _least_agreement(missing: int) -> float:
    """How well signs must agree: the fewer samples are missing, the fewer mixes there are."""
    if missing > _FEW_MISSING:
        return _SIGN_AGREEMENT
    return _SIGN_AGREEMENT_FEW if missing > 1 else _SIGN_AGREEMENT_LAST


def refine_jointly(
    factors: Factors, whole: DualProblem, units: NoiseUnits, p: Tensor
) -> tuple[Tensor, Tensor]:
    """All samples together: with b directions, c = Q^-1 gives every preactivation and its error."""
    lengths = factors.weight_lengths[factors.live_rows, 0]  # (rows,)
    off = torch.zeros_like(units.basis)
    for _ in range(_SWEEPS):
        factors.check_time()
        values = units.basis @ p
        by_size = _odds_by_size(values)
        c = torch.linalg.inv(units.white(p)).T  # (b, b): row i belongs to sample i
        z = (whole.H @ c.T).amax(0)  # (rows, b), up to sign and scale
        z = z * torch.sign((z * torch.tanh(-by_size)).sum(0))  # on where values are large
        error = factors.noise * lengths[:, None] * c.norm(dim=1)
        by_sign = torch.special.log_ndtr(-z / error) - torch.special.log_ndtr(z / error)
        before, off = off, torch.sigmoid(by_size + by_sign.clamp(-10, 10))
        refined = units.annihilated(off)
        if bool(((refined.T @ refined).abs().fill_diagonal_(0) > _SAME_COSINE).any()):
            break  # two have merged: the last sweep that told them apart stands
        p = refined
        if torch.equal(before > 0.5, off > 0.5):
            break
    return p, off


def _odds_by_size(values: Tensor, allowance: float = 0.0) -> Tensor:
    """Log odds (rows, k) that an entry is only noise of size one, not noise on top of a gradient.

    With an allowance, this share of a typical gradient counts as noise too.
    """
    typical = (2 * values.square().mean(0) - 1).clamp_min(1.0)  # half of the rows are on
    noise = 1 + allowance**2 * typical
    share = typical / (typical + noise)
    return torch.log1p(typical / noise) / 2 - values.square() / noise * share / 2


def _independent(p: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """Those (b, l) that are not nearly the same as an earlier one, nor a mix that holds another one."""
    overlap = (p.T @ p).abs().triu(1)
    new = (overlap <= _SAME_COSINE).all(0)
    p, off = p[:, new], off[:, new]
    count = off.sum(0)
    own = count[:, None] - off.T @ off  # (l, l): zeros of i that j has not
    mixed = ((own < _MIXED * count[:, None]) & (count[:, None] < count)).any(1)
    return p[:, ~mixed], off[:, ~mixed]


def _directions(
    factors: Factors, units: NoiseUnits, p: Tensor, off: Tensor, watch: Watch
) -> Directions:
    """As directions of the outputs' side; if the noise is small, only those with a sharp kernel.

    A faint sample's direction that is not sharp holds more of the loud samples than of its own.
    """
    side = factors.outputs
    vectors = unit(units.white(p).T / side.scales[:, None], 0)
    if factors.noisy:
        redundancy = torch.full((p.shape[1],), 2, dtype=torch.int64, device=p.device)
        return Directions(side, vectors, off > 0.5, redundancy)
    pool = CandidatePool(side, threshold=0.0, watch=watch)
    found = pool.rounded(units.white(p))
    near = (unit(found.vectors * side.scales[:, None], 0).T @ units.white(p).T).abs() > _SAME_COSINE
    sharp = near.any(1) & (found.redundancy > 0)
    return found.pick(sharp.nonzero().flatten().tolist())
