"""The paper's lemmas as functions: what the sampling finder needs, and how often it must fail.

Closed form throughout: no tensors, no randomness. `b` is the batch size, `m` the width of the attacked
layer, `p_fr` the rate at which the sparsity filter rejects a correct direction. What several rounds add
is ours, not the paper's, with two constants measured by `benchmarks/rounds_theory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import scipy  # loads its parts when first used, so the command line starts sooner
from numpy.typing import NDArray

from spear.errors import InvalidOption

# Tao & Vu (2005): an n x n random sign matrix is singular with probability at most 0.939^n.
SINGULAR_BASE = 0.939
ROUNDING = 1.3e-7
"""Noise of float32 gradients, of a typical entry: `Factors.relative_noise` of real rounds."""
# How far above the noise of an entry a direction must stand to be of use: the images are not orthogonal
# and the zeros no orthonormal rows, which costs a factor each. Measured: 3e3 to 3e4 fit alike.
_LOST_TO_CONDITION = 1e4
MOST_ROUNDS = 10**6
"""More are as good as never."""


def _check(b: int, m: int | None = None) -> None:
    if b < 1:
        raise InvalidOption(f"expected a batch size b >= 1, got {b}")
    if m is not None and m < 1:
        raise InvalidOption(f"expected a width m >= 1, got {m}")


def _check_probability(name: str, p: float) -> None:
    if not 0 < p < 1:
        raise InvalidOption(f"expected 0 < {{{name}}} < 1, got {p}", arguments=(name,))


def success_probability(b: int, singular: float = SINGULAR_BASE) -> float:
    """Lower bound on q: a random (b-1)-row submatrix has one zero column and full rank.

    An n x n matrix is taken to be singular with probability `singular`^n: at most 0.939 is proved; 0.5
    is the limit (Tikhomirov 2020), and what counts agree with.

    >>> f"{success_probability(16):.2e}"
    '2.98e-04'
    """
    _check(b)
    if b == 1:
        return 1.0  # the empty submatrix: its kernel is the whole line
    return b * math.exp2(1 - b) * (1 - math.pow(singular, b - 1))


def harmonic(b: int) -> float:
    """H_b = 1 + 1/2 + ... + 1/b."""
    return float(scipy.special.digamma(b + 1) + np.euler_gamma)


def expected_samples(b: int, singular: float = SINGULAR_BASE) -> float:
    """Expected number of submatrices until all b directions are found, for m >> b.

    >>> f"{expected_samples(16):.1e}"
    '1.8e+05'
    """
    q = success_probability(b, singular)
    return b * harmonic(b) / q if q > 0 else math.inf  # 2^-b underflows beyond b = 1000


def expected_samples_narrow(
    b: int,
    m: int,
    zeros: Sequence[int] | None = None,
    *,
    singular: float = SINGULAR_BASE,
    overlapping: bool = False,
) -> float:
    """The same for a narrow layer, from the number of zeros in each column of dL/dZ.

    The lemma takes all columns as alike, and the b-1 sampled entries of one as zero independently.
    But rows are drawn without replacement, so the chance is hypergeometric, and the column with the
    fewest zeros takes longest: a coupon collector with unequal coupons. Without `zeros`, b typical
    binomial counts are used.

    With `overlapping`, submatrices come b at a time, each leaving out one of b drawn rows. Such a draw
    shows a column if at least b-1 of its b entries are zero, and counts as b submatrices.

    >>> f"{expected_samples_narrow(20, 200):.0e}"
    '5e+07'
    >>> together = expected_samples_narrow(20, 10**6, overlapping=True)
    >>> abs(together / expected_samples_narrow(20, 10**6) - 2 * 20 / 21) < 0.01
    True
    """
    if b == 1:
        return 1.0
    rates = _finding_rates(b, m, zeros, singular, overlapping)
    if not rates.min() > 0:
        return math.inf
    t = np.geomspace(1e-4 / rates.max(), 50 / rates.min(), 4000)
    missing = 1 - _all_found(rates, t)
    return float(t[0] + np.trapezoid(missing, t))  # E[T] = integral of P(T > t)


def _finding_rates(
    b: int, m: int, zeros: Sequence[int] | None, singular: float, overlapping: bool
) -> np.ndarray:
    """How often a submatrix shows each column (b,), given each column's zeros among m rows."""
    _check(b, m)
    if zeros is None:
        zeros = [int(z) for z in scipy.stats.binom.ppf((np.arange(b) + 0.5) / b, m, 0.5)]
    if len(zeros) != b:
        raise InvalidOption(f"expected one count of zeros per sample ({b}), got {len(zeros)}")
    z = np.asarray(zeros)
    drawn = b if overlapping else b - 1
    shown = np.asarray(scipy.stats.hypergeom.sf(b - 2, m, z, drawn)) / (b if overlapping else 1)
    return shown * (1 - math.pow(singular, b - 1))


def _all_found(rates: np.ndarray, t: np.ndarray) -> np.ndarray:
    """P(every column was shown by time t), for Poisson clocks with these rates."""
    found: np.ndarray = np.prod(-np.expm1(-rates[:, None] * t), axis=0)
    return found


def samples_with_high_probability(b: int, p: float, p_fr: float = 0.0) -> float:
    """Number of submatrices after which all b directions are found with probability 1 - p.

    The paper's example (b = 10, p = 1e-8, about 4e4) leaves p_fr open. It must be well below p / b,
    because a direction that the filter rejects is never found.

    >>> f"{samples_with_high_probability(10, 1e-8):.0e}"
    '4e+04'
    """
    _check_probability("p", p)
    if not 0 <= p_fr < 1:
        raise InvalidOption(f"expected 0 <= {{p_fr}} < 1, got {p_fr}", arguments=("p_fr",))
    rejected = -math.expm1(b * math.log1p(-p_fr))  # 1 - (1 - p_fr)^b
    p_star = p - rejected
    if p_star <= 0:
        raise InvalidOption(
            f"{{p_fr}} = {p_fr:g} alone makes SPEAR fail with probability {rejected:.2g} >= {{p}} = "
            f"{p:g}: use {{p_fr}} below {p / b:.1g}",
            arguments=("p_fr", "p"),
        )
    q = success_probability(b)
    if b == 1:
        return 1.0
    if q == 0:
        return math.inf
    directions = b * math.log(2 * b / p_star)  # c^p: correct directions until all b are distinct
    quantile = -float(scipy.stats.norm.ppf(p_star / 2))
    # n q - z sqrt(n q (1-q)) = c is a quadratic in sqrt(n q).
    spread = quantile * math.sqrt(1 - q)
    root = (spread + math.sqrt(spread**2 + 4 * directions)) / 2
    return root**2 / q


def pattern_by_chance(rows: int, b: int) -> float:
    """Probability that a random sign pattern on this many rows is the pattern of some sample.

    Cover (1965): the share of all patterns of N points in b dimensions that a hyperplane can cut.

    >>> pattern_by_chance(200, 20) < 1e-30
    True
    """
    _check(b, rows)
    # As scipy.stats.binom.cdf, which takes half a second to load: every inversion comes here.
    return 1.0 if b >= rows else float(scipy.special.bdtr(b - 1, rows - 1, 0.5))


def poisson_bound(mean: NDArray[np.float64], chance: float) -> NDArray[np.float64]:
    """The least counts that Poisson numbers of these means exceed with at most this chance.

    >>> poisson_bound(np.array([0.0, 0.001, 2.0]), 1e-6).tolist()
    [0.0, 1.0, 12.0]
    """
    most = np.ceil(scipy.special.pdtrik(1 - chance, np.maximum(mean, np.finfo(float).tiny)))
    fewer = np.maximum(most - 1, 0)  # what is rounded up may be one too many
    bound: NDArray[np.float64] = np.where(
        scipy.special.pdtr(fewer, mean) >= 1 - chance, fewer, most
    )
    return bound


def false_rejection(threshold: float, m: int) -> float:
    """Probability that a correct direction has fewer than threshold * m zeros.

    The filter keeps sparsity >= tau * m, so the sum is strict (i < tau * m). The paper prints <=, but
    its own tau = 0.395 at m = 400 meets 1e-5 only with the strict sum.

    >>> f"{false_rejection(0.395, 400):.2e}"
    '9.98e-06'
    """
    _check(1, m)
    return float(scipy.stats.binom.cdf(math.ceil(threshold * m - 1e-9) - 1, m, 0.5))


def sparsity_threshold(m: int, p_fr: float = 1e-5) -> float:
    """The largest tau whose false-rejection rate stays below p_fr.

    >>> sparsity_threshold(400, 1e-5)
    0.395
    """
    _check(1, m)
    _check_probability("p_fr", p_fr)
    # The smallest count whose P(<= count) reaches p_fr, so that P(< count) is still below it.
    return int(scipy.stats.binom.ppf(p_fr, m, 0.5)) / m


def failure_bound(b: int, m: int, p_fr: float = 1e-9) -> float:
    """The paper's bound on the probability that even exhaustive sampling misses a direction.

    It takes submatrices to be singular independently, and is too low where `failure_at_least` is above
    it; `failure_bound_by_columns` holds.
    """
    missed = 1 - _full_rank_submatrix_exists(b, m, SINGULAR_BASE)
    return min(1.0, b * missed - math.expm1(b * math.log1p(-p_fr)))


def failure_approximation(b: int, m: int, p_fr: float = 1e-9) -> float:
    """The same, approximated by independent submatrices, each singular with 0.5^(b-1)."""
    found = _full_rank_submatrix_exists(b, m, 0.5)
    return min(1.0, 1 - found**b - math.expm1(b * math.log1p(-p_fr)))


def failure_bound_by_columns(b: int, m: int, p_fr: float = 1e-9) -> float:
    """A bound on the same that really holds: the paper takes submatrices to be singular independently.

    They share rows, so they are not. Where column i is zero, another column j may be zero throughout,
    with probability (3/4)^m, and then every submatrix there is singular. This sums over the k rows in
    which a column may be zero, and the chance that the other columns lack rank b-1 there.

    >>> failure_bound_by_columns(4, 32) > failure_bound(4, 32)
    True
    """
    _check(b, m)
    k = np.arange(m + 1)
    lacking = np.array([_rank_lacking(b - 1, rows) for rows in k.tolist()])
    missed = b * float(np.sum(scipy.stats.binom.pmf(k, m, 0.5) * lacking))
    return min(1.0, missed - math.expm1(b * math.log1p(-p_fr)))


def failure_at_least(b: int, m: int) -> float:
    """A bound from below on the same: no data, no simulation, and no assumption but the lemma's.

    A direction is missed for certain if some other column is zero wherever its own is. Of the b (b-1)
    such events each has probability (3/4)^m, and Bonferroni's inequality bounds their union: all of
    them, less all pairs of them. Where this lies above `failure_bound`, the paper's bound is no bound.

    >>> failure_at_least(4, 40) > 100 * failure_bound(4, 40)
    True
    """
    _check(b, m)
    if b == 1:
        return 0.0
    events = b * (b - 1)
    equal = b * (b - 1) // 2  # pairs of events: i's zeros are j's, and j's are i's
    chains = b * (b - 1) * (b - 2)  # i's are j's, and j's are k's
    common = b * (b - 1) * (b - 2)  # one source or one target: half of them each
    apart = math.comb(events, 2) - equal - chains - common  # four different columns
    pairs = (equal + chains) * 0.5**m + common * 0.625**m + apart * 0.5625**m
    return max(0.75**m, events * 0.75**m - pairs)


@cache
def _rank_lacking(n: int, k: int) -> float:
    """Bound on the probability that k rows of n random columns, half zeros, have rank below n.

    Hall's theorem: a matrix with random values at its non-zeros has rank below n if and only if some s
    of its columns have non-zeros in fewer than s rows. This sums over all such sets of columns.
    """
    if k < n:
        return 1.0
    s = np.arange(1, n + 1)
    few = _log_binomial(n, s) + scipy.stats.binom.logcdf(s - 1, k, 1 - np.exp2(-s))
    return min(1.0, float(np.exp(np.minimum(few, 0)).sum()))


def _full_rank_submatrix_exists(b: int, m: int, base: float) -> float:
    """P(some full-rank (b-1)-row submatrix is zero in a given column)."""
    _check(b, m)
    if b == 1:
        return 1.0
    k = np.arange(b - 1, m + 1)  # zeros of the column
    with np.errstate(over="ignore"):
        submatrices = np.exp(_log_binomial(k, b - 1))
    some_full_rank = -np.expm1((b - 1) * submatrices * math.log(base))
    return float(np.sum(scipy.stats.binom.pmf(k, m, 0.5) * some_full_rank))


def _log_binomial(n: np.ndarray | int, k: np.ndarray | int) -> np.ndarray:
    n, k = np.asarray(n, dtype=float), np.asarray(k, dtype=float)
    log: np.ndarray = (
        scipy.special.gammaln(n + 1)
        - scipy.special.gammaln(k + 1)
        - scipy.special.gammaln(n - k + 1)
    )
    return log


def stay_off(rounds: int, *, off: float = 0.5, movement: float = 0.03) -> float:
    """The share of neurons that a sample switches on in none of the rounds.

    Preactivations keep their direction for a while, so after R rounds they have moved by (R-1) times
    `movement`, of their size. Their correlation with the first round's is then cos(a), where tan(a) is
    that movement, and a share a/pi has changed sides.

    Args:
        rounds: how many were seen, R.
        off: the share of neurons that a sample leaves off in one round.
        movement: how far preactivations go from one round to the next, of their size.

    >>> [round(stay_off(rounds, movement=0.17), 2) for rounds in (1, 10, 40)]
    [0.5, 0.34, 0.27]
    """
    _check_rounds(rounds, off, movement)
    return off * (1 - math.atan(movement * (rounds - 1)) / math.pi)


def independent_zeros(
    b: int,
    m: int,
    rounds: int,
    *,
    off: float = 0.5,
    movement: float = 0.03,
    noise: float = ROUNDING,
    share: float = 1.0,
) -> float:
    """Rank, above the noise, of the rows in which a sample is off; b - 1 determine the sample.

    R rounds of m neurons are one layer of R m rows. A sample is off in z of m neurons, binomial, and so
    in R z rows; z is taken of the sample with the fewest. Two things keep rows of a neuron apart:

    - weights that move smoothly: after R rounds the k-th direction of a neuron's rows has the size
      (movement (R-1))^(k-1), and counts while it is above the noise;
    - samples that switch some neuron, in this layer or behind it: their columns jump, and each such
      sample is a direction of its own. A sample has switched none of about m with probability
      (1 - movement/pi)^(m (R-1)).

    Args:
        b: samples.
        m: neurons of the layer.
        rounds: how many were seen, R.
        off: the share of neurons that a sample leaves off in one round, of those that some sample
            switches on.
        movement: how far preactivations go from one round to the next, of their size.
        noise: of an entry of the gradient, of a typical entry. Compared with measurements up to 1e-4;
            jumps are taken to stand above it, which is too good for more.
        share: the share of samples that must have as many: all (with probability 1/2), or fewer.

    >>> [int(independent_zeros(100, 50, rounds)) for rounds in (1, 3, 6, 7)]
    [16, 48, 96, 99]
    >>> int(independent_zeros(100, 50, 7, movement=0.0))  # the same rows seven times
    16
    """
    _check(b, m)
    _check_rounds(rounds, off, movement)
    if not 0 <= noise < 1:
        raise InvalidOption(f"expected 0 <= {{noise}} < 1, got {noise}", arguments=("noise",))
    if not 0 < share <= 1:
        raise InvalidOption(f"expected 0 < share <= 1, got {share}")
    short = 1 - 0.5 ** (1 / b) if share == 1 else 1 - share  # this share of samples may have fewer
    fewest = int(scipy.stats.binom.ppf(short, m, off))
    switched = -math.expm1(-m * (rounds - 1) * math.atan(movement) / math.pi)
    smooth = _smooth_directions(movement * (rounds - 1), rounds, noise)
    return min(b - 1.0, rounds * fewest, smooth * fewest + (b - 1) * switched)


def _smooth_directions(moved: float, rounds: int, noise: float) -> float:
    """How many powers of a movement, from the 0th on, are above what noise drowns."""
    drowned = min(1.0, _LOST_TO_CONDITION * noise)
    if moved == 0 or drowned == 1:
        return 1.0
    if moved >= 1 or drowned == 0:
        return float(rounds)
    return min(float(rounds), 1 + math.log(drowned) / math.log(moved))


def _check_rounds(rounds: int, off: float, movement: float) -> None:
    if rounds < 1:
        raise InvalidOption(f"expected {{rounds}} >= 1, got {rounds}", arguments=("rounds",))
    _check_probability("off", off)
    if not (movement >= 0 and math.isfinite(movement)):
        raise InvalidOption(f"expected {{movement}} >= 0, got {movement}", arguments=("movement",))


def _check_inputs(inputs: int | None) -> None:
    if inputs is not None and inputs < 1:
        raise InvalidOption(f"expected {{inputs}} >= 1, got {inputs}", arguments=("inputs",))


def rounds_needed(
    b: int,
    m: int,
    *,
    off: float = 0.5,
    movement: float = 0.03,
    noise: float = ROUNDING,
    share: float = 1.0,
    inputs: int | None = None,
) -> int | None:
    """After how many rounds the zeros of every sample determine it; None if no number is enough.

    For the arguments see `independent_zeros`. `inputs` of the layer, if given, are a limit that no
    rounds lift: more samples than inputs are no longer independent. That zeros determine every sample
    says that there is enough to find, not that a search finds it. Samples that are nearly alike share
    their zeros and take more rounds, which is not foreseen here.

    >>> rounds_needed(100, 50)
    7
    >>> rounds_needed(100, 50, movement=0.002), rounds_needed(100, 50, movement=0.0)
    (23, None)
    """

    def enough(rounds: int) -> bool:
        options = {"off": off, "movement": movement, "noise": noise, "share": share}
        return independent_zeros(b, m, rounds, **options) >= b - 1

    _check_inputs(inputs)
    if inputs is not None and b > inputs:
        return None
    return _smallest(enough, MOST_ROUNDS)


def largest_batch(
    m: int,
    rounds: int,
    *,
    off: float = 0.5,
    movement: float = 0.03,
    noise: float = ROUNDING,
    share: float = 1.0,
    inputs: int | None = None,
) -> int:
    """The largest batch that this many rounds determine. For the arguments see `rounds_needed`.

    >>> largest_batch(100, 1), largest_batch(100, 10), largest_batch(100, 10, movement=0.001)
    (40, 361, 119)
    """

    def too_many(b: int) -> bool:
        options = {"off": off, "movement": movement, "noise": noise, "share": share}
        return independent_zeros(b, m, rounds, **options) < b - 1

    _check(1, m)
    _check_rounds(rounds, off, movement)
    _check_inputs(inputs)
    first = _smallest(too_many, rounds * m + 2)  # no sample is off in more than all rows
    assert first is not None
    return first - 1 if inputs is None else min(first - 1, inputs)


def _smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` for which this holds, if it holds for all larger ones."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def more_rounds(b: int, zeros: int, rounds: int, *, before: int | None = None) -> int | None:
    """About how many more rounds a sample needs, from what was measured; None if more do not help.

    Until b - 1 are reached, the rank of the rows in which a sample is off grows by the same amount each
    round, as long as weights move.

    Args:
        b: samples.
        zeros: rank, above the noise, of the rows in which the sample is off. Where a sample is not
            found: the sum of the ranks of all neurons' rows, times the share that is off.
        rounds: how many were seen.
        before: the same rank one round earlier, if it is known; the last round's gain is then what
            counts, and not the mean over all rounds.

    >>> more_rounds(100, 64, 4), more_rounds(100, 64, 4, before=62), more_rounds(100, 99, 7)
    (3, 18, 0)
    >>> more_rounds(100, 64, 4, before=64) is None  # the last round added nothing
    True
    """
    _check(b)
    if rounds < 1:
        raise InvalidOption(f"expected {{rounds}} >= 1, got {rounds}", arguments=("rounds",))
    if zeros < 0 or (before is not None and not 0 <= before <= zeros):
        raise InvalidOption(f"expected 0 <= before <= zeros, got {before} and {zeros}")
    missing = b - 1 - zeros
    if missing <= 0:
        return 0
    gain = zeros / rounds if before is None else zeros - before
    return math.ceil(missing / gain) if gain > 0 else None
