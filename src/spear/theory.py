"""The paper's lemmas as functions: what the sampling finder needs and how often it must fail.

Everything here is closed form: no tensors, no randomness. `b` is the batch size, `m` the width of
the attacked layer, `p_fr` the rate at which the sparsity filter rejects a correct direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

from spear.errors import InvalidOption

# Tao & Vu (2005): an n x n random sign matrix is singular with probability at most 0.939^n.
SINGULAR_BASE = 0.939


def _check(b: int, m: int | None = None) -> None:
    if b < 1:
        raise InvalidOption(f"expected a batch size b >= 1, got {b}")
    if m is not None and m < 1:
        raise InvalidOption(f"expected a width m >= 1, got {m}")


def _check_probability(name: str, p: float) -> None:
    if not 0 < p < 1:
        raise InvalidOption(f"expected 0 < {name} < 1, got {p}")


def success_probability(b: int) -> float:
    """Lower bound on q: a random (b-1)-row submatrix has one zero column and full rank.

    >>> f"{success_probability(16):.2e}"
    '2.98e-04'
    """
    _check(b)
    if b == 1:
        return 1.0  # the empty submatrix: its kernel is the whole line
    return b * math.exp2(1 - b) * (1 - math.pow(SINGULAR_BASE, b - 1))


def harmonic(b: int) -> float:
    """H_b = 1 + 1/2 + ... + 1/b."""
    return float(special.digamma(b + 1) + np.euler_gamma)


def expected_samples(b: int) -> float:
    """Expected number of submatrices until all b directions are found, for m >> b.

    >>> f"{expected_samples(16):.1e}"
    '1.8e+05'
    """
    q = success_probability(b)
    return b * harmonic(b) / q if q > 0 else math.inf  # 2^-b underflows beyond b = 1000


def expected_samples_narrow(b: int, m: int, zeros: Sequence[int] | None = None) -> float:
    """The same for a narrow layer: from the number of zeros in each column of dL/dZ.

    The lemma takes the b-1 sampled entries of a column to be zero independently, and all columns to
    be alike. In a layer of width m rows are drawn without replacement, so the chance is
    hypergeometric, and the column with the fewest zeros keeps everybody waiting: the coupon
    collector with unequal coupons. Without `zeros`, b typical counts of a binomial are taken.

    >>> f"{expected_samples_narrow(20, 200):.0e}"
    '5e+07'
    """
    _check(b, m)
    if b == 1:
        return 1.0
    if zeros is None:
        zeros = [int(z) for z in stats.binom.ppf((np.arange(b) + 0.5) / b, m, 0.5)]
    if len(zeros) != b:
        raise InvalidOption(f"expected one count of zeros per sample ({b}), got {len(zeros)}")
    if min(zeros) < b - 1:
        return math.inf
    all_zero = np.exp(_log_binomial(np.asarray(zeros), b - 1) - _log_binomial(m, b - 1))
    rate = all_zero * (1 - SINGULAR_BASE ** (b - 1))  # (b,) chance per submatrix, per column
    t = np.geomspace(1e-4 / rate.max(), 50 / rate.min(), 4000)
    missing = 1 - np.prod(-np.expm1(-rate[:, None] * t), axis=0)  # P(some column not found by t)
    return float(t[0] + np.trapezoid(missing, t))  # E[T] = integral of P(T > t)


def samples_with_high_probability(b: int, p: float, p_fr: float = 0.0) -> float:
    """Number of submatrices after which all b directions are found with probability 1 - p.

    The paper's example (b = 10, p = 1e-8, about 4e4) leaves the choice of p_fr open; it has to be
    well below p / b, since a direction that the filter rejects is never found.

    >>> f"{samples_with_high_probability(10, 1e-8):.0e}"
    '4e+04'
    """
    _check_probability("p", p)
    if not 0 <= p_fr < 1:
        raise InvalidOption(f"expected 0 <= p_fr < 1, got {p_fr}")
    rejected = -math.expm1(b * math.log1p(-p_fr))  # 1 - (1 - p_fr)^b
    p_star = p - rejected
    if p_star <= 0:
        raise InvalidOption(
            f"p_fr = {p_fr:g} alone makes SPEAR fail with probability {rejected:.2g} >= p = {p:g}: "
            f"use p_fr below {p / b:.1g}"
        )
    q = success_probability(b)
    if b == 1:
        return 1.0
    if q == 0:
        return math.inf
    directions = b * math.log(2 * b / p_star)  # c^p: correct directions until all b are distinct
    quantile = -float(stats.norm.ppf(p_star / 2))
    # n q - z sqrt(n q (1-q)) = c is a quadratic in sqrt(n q).
    spread = quantile * math.sqrt(1 - q)
    root = (spread + math.sqrt(spread**2 + 4 * directions)) / 2
    return root**2 / q


def pattern_by_chance(rows: int, b: int) -> float:
    """Probability that a random sign pattern on so many rows is the pattern of some sample.

    Cover (1965): of all patterns of N points in b dimensions, a hyperplane can cut this share.

    >>> pattern_by_chance(200, 20) < 1e-30
    True
    """
    _check(b, rows)
    return float(stats.binom.cdf(b - 1, rows - 1, 0.5))


def false_rejection(threshold: float, m: int) -> float:
    """Probability that a correct direction has fewer than threshold * m zeros.

    The filter keeps a direction with sparsity >= tau * m, so the sum is strict (i < tau * m). The
    paper prints it with <=, but its own tau = 0.395 at m = 400 only meets 1e-5 with the strict sum.

    >>> f"{false_rejection(0.395, 400):.2e}"
    '9.98e-06'
    """
    _check(1, m)
    return float(stats.binom.cdf(math.ceil(threshold * m - 1e-9) - 1, m, 0.5))


def sparsity_threshold(m: int, p_fr: float = 1e-5) -> float:
    """The largest tau whose false-rejection rate stays below p_fr.

    >>> sparsity_threshold(400, 1e-5)
    0.395
    """
    _check(1, m)
    _check_probability("p_fr", p_fr)
    zeros = int(stats.binom.ppf(p_fr, m, 0.5))  # the smallest count whose P(<= count) reaches p_fr
    return zeros / m  # so P(< count) is still below it


def failure_bound(b: int, m: int, p_fr: float = 1e-9) -> float:
    """Upper bound on the probability that even exhaustive sampling misses a direction."""
    missed = 1 - _full_rank_submatrix_exists(b, m, SINGULAR_BASE)
    return min(1.0, b * missed - math.expm1(b * math.log1p(-p_fr)))


def failure_approximation(b: int, m: int, p_fr: float = 1e-9) -> float:
    """The same, approximated with independent submatrices that are singular with 0.5^(b-1)."""
    found = _full_rank_submatrix_exists(b, m, 0.5)
    return min(1.0, 1 - found**b - math.expm1(b * math.log1p(-p_fr)))


def _full_rank_submatrix_exists(b: int, m: int, base: float) -> float:
    """P(some full-rank (b-1)-row submatrix is zero in a given column)."""
    _check(b, m)
    if b == 1:
        return 1.0
    k = np.arange(b - 1, m + 1)  # zeros of the column
    with np.errstate(over="ignore"):
        submatrices = np.exp(_log_binomial(k, b - 1))
    some_full_rank = -np.expm1((b - 1) * submatrices * math.log(base))
    return float(np.sum(stats.binom.pmf(k, m, 0.5) * some_full_rank))


def _log_binomial(n: np.ndarray | int, k: int) -> np.ndarray:
    n = np.asarray(n, dtype=float)
    log: np.ndarray = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    return log
