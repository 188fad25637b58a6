import math
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spear import theory
from spear.errors import InvalidOption


def test_the_papers_printed_values():
    assert theory.expected_samples(16) == pytest.approx(1.8e5, rel=0.02)
    assert theory.samples_with_high_probability(10, 1e-8, 1e-11) == pytest.approx(4e4, rel=0.1)
    assert theory.sparsity_threshold(400, 1e-5) == 0.395


def test_tau_needs_the_strict_sum():
    strict = theory.false_rejection(0.395, 400)
    printed = stats.binom.cdf(158, 400, 0.5)
    assert strict == pytest.approx(9.98e-6, rel=1e-3)
    assert printed == pytest.approx(1.56e-5, rel=1e-2)
    assert strict < 1e-5 < printed


def test_high_probability_needs_a_small_false_rejection_rate():
    with pytest.raises(InvalidOption, match="p_fr below 1e-09"):
        theory.samples_with_high_probability(10, 1e-8, 2e-9)
    assert theory.samples_with_high_probability(10, 1e-8, 1e-9) > 4.5e4


def test_high_probability_solves_its_quadratic():
    b, p = 12, 1e-6
    n, q = theory.samples_with_high_probability(b, p), theory.success_probability(b)
    z = (b * math.log(2 * b / p) - n * q) / math.sqrt(n * q * (1 - q))
    assert stats.norm.cdf(z) == pytest.approx(p / 2, rel=1e-6)


def test_success_probability_bounds_a_simulation():
    b, trials = 5, 20_000
    rng = np.random.default_rng(0)
    A = rng.integers(0, 2, (trials, b - 1, b)) * np.abs(rng.normal(size=(trials, b - 1, b)))
    zero_columns = (A == 0).all(1).sum(1)
    good = (zero_columns == 1) & (np.linalg.matrix_rank(A) == b - 1)
    assert good.mean() >= theory.success_probability(b)


def test_narrow_layers_need_more_and_wide_ones_agree_with_the_lemma():
    assert theory.expected_samples_narrow(20, 200) > 5 * theory.expected_samples(20)
    wide = theory.expected_samples_narrow(10, 200_000) / theory.expected_samples(10)
    assert wide == pytest.approx(1, rel=0.05)
    assert theory.expected_samples_narrow(5, 8, zeros=[3, 4, 4, 4, 4]) == math.inf


def test_narrow_with_equal_columns_is_the_coupon_collector():
    b, m, zeros = 6, 40, 20
    rate = math.comb(zeros, b - 1) / math.comb(m, b - 1) * (1 - theory.SINGULAR_BASE ** (b - 1))
    expected = theory.harmonic(b) / rate
    assert theory.expected_samples_narrow(b, m, [zeros] * b) == pytest.approx(expected, rel=0.01)


@given(st.integers(2, 12), st.integers(13, 120))
def test_the_approximation_stays_below_the_bound(b, m):
    assert (
        0 <= theory.failure_approximation(b, m) <= theory.failure_bound(b, m) + 1e-12 <= 1 + 1e-12
    )


def nested_zeros(b, m):
    """P(some column of m random rows is zero wherever another is), by all matrices of zeros."""
    matrices = product(product((False, True), repeat=m), repeat=b)
    pairs = list(permutations(range(b), 2))
    found = [
        any(all(zj for zi, zj in zip(c[i], c[j], strict=True) if zi) for i, j in pairs)
        for c in matrices
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize(("b", "m"), [(2, 1), (2, 5), (3, 3), (3, 4), (4, 3)])
def test_what_fails_at_least_is_no_more_than_what_fails(b, m):
    exact = nested_zeros(b, m)
    assert 0.75**m <= theory.failure_at_least(b, m) <= exact + 1e-12
    assert b > 2 or theory.failure_at_least(b, m) == pytest.approx(exact)


@given(st.integers(1, 30), st.integers(1, 200))
def test_the_bounds_that_hold_are_in_order(b, m):
    assert 0 <= theory.failure_at_least(b, m) <= theory.failure_bound_by_columns(b, m)


def test_pairs_of_nested_columns_are_counted_by_kind():
    """Bonferroni's second sum, by every pair of events and every row of zeros."""
    b, m = 5, 20
    rows = list(product((False, True), repeat=b))
    events = list(permutations(range(b), 2))
    both = [
        sum(all(z[j] for i, j in pair if z[i]) for z in rows) / len(rows)
        for pair in combinations(events, 2)
    ]
    expected = len(events) * 0.75**m - sum(p**m for p in both)
    assert theory.failure_at_least(b, m) == pytest.approx(expected)


@given(st.integers(1, 2000), st.floats(1e-12, 0.4))
def test_the_threshold_keeps_its_promise(m, p_fr):
    tau = theory.sparsity_threshold(m, p_fr)
    assert theory.false_rejection(tau, m) < p_fr
    assert theory.false_rejection(tau + 1 / m, m) >= p_fr * (1 - 1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.success_probability(0),
        lambda: theory.sparsity_threshold(10, 0.0),
        lambda: theory.failure_bound(3, 0),
        lambda: theory.samples_with_high_probability(4, 1.5),
        lambda: theory.expected_samples_narrow(3, 10, zeros=[5]),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(InvalidOption, match="expected"):
        call()


def test_one_sample_needs_no_search():
    assert theory.success_probability(1) == 1
    assert theory.samples_with_high_probability(1, 1e-3) == 1
    assert theory.failure_bound(1, 40) == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_found_takes_for_ever():
    """A column with fewer zeros than a submatrix has rows never shows; 2^-5000 is no number."""
    assert theory.expected_samples_narrow(5, 40, zeros=[20, 20, 20, 20, 3]) == math.inf
    assert theory.expected_samples_narrow(5, 40, zeros=[20, 20, 20, 20, 4]) < math.inf
    assert theory.samples_with_high_probability(5000, 1e-3) == math.inf


def test_a_rejection_rate_is_a_probability():
    with pytest.raises(InvalidOption, match="0 <= p_fr < 1, got 1"):
        theory.samples_with_high_probability(4, 1e-3, 1.0)


# Several rounds


def drifting(seed, b, m, rounds, movement):
    """Which neurons are off (rounds, m, b) while Gaussian preactivations drift."""
    start, drift = np.random.default_rng(seed).normal(size=(2, m, b))
    return np.stack([start + r * movement * drift < 0 for r in range(rounds)])


@pytest.mark.parametrize(("rounds", "movement"), [(2, 0.3), (10, 0.05), (20, 0.2)])
def test_neurons_that_stay_off_are_those_of_a_drift(rounds, movement):
    never_on = drifting(0, 200, 1000, rounds, movement).all(0).mean()
    assert theory.stay_off(rounds, movement=movement) == pytest.approx(never_on, abs=0.005)
    assert theory.stay_off(1, off=0.3, movement=movement) == 0.3


def test_the_fewest_zeros_are_those_of_the_typical_worst_sample():
    b, m = 100, 50
    fewest = [drifting(seed, b, m, 1, 0)[0].sum(0).min() for seed in range(201)]
    typical = np.median(fewest)
    assert theory.independent_zeros(b, m, 1) == pytest.approx(typical, abs=1)
    nine_in_ten = np.quantile(drifting(0, 10_000, m, 1, 0)[0].sum(0), 0.1)
    assert theory.independent_zeros(b, m, 1, share=0.9) == nine_in_ten > typical


def planted(seed, b, m, rounds, movement):
    """dL/dZ (rounds, m, b) of fixed zeros, whose values are polynomials of time."""
    rng = np.random.default_rng(seed)
    on = rng.integers(0, 2, (m, b))
    powers = rng.normal(size=(rounds, m, b))
    moved = movement * (rounds - 1) * np.linspace(0, 1, rounds)
    return sum(on * np.multiply.outer(moved**k, powers[k]) for k in range(rounds))


@pytest.mark.parametrize("movement", [0.0, 1e-5, 1e-3, 0.3])
def test_rank_of_a_sample_that_never_switches_a_neuron(movement):
    """Counted at the level that the theory takes noise to drown, for a smooth movement alone."""
    b, m, rounds, noise = 400, 60, 6, 1e-8
    D = planted(0, b, m, rounds, movement)
    off = D[0, :, 0] == 0
    spectrum = np.linalg.svd(D[:, off].reshape(-1, b), compute_uv=False)
    rank = (spectrum > theory._LOST_TO_CONDITION * noise * spectrum[0]).sum()
    foreseen = theory._smooth_directions(movement * (rounds - 1), rounds, noise)
    assert rank / off.sum() <= foreseen < rank / off.sum() + 1


def test_rounds_lift_the_limit_of_the_width():
    assert theory.rounds_needed(40, 100) == 1
    assert theory.rounds_needed(100, 100) == 3
    assert theory.rounds_needed(300, 100) == 9
    assert theory.rounds_needed(300, 100, off=0.3) > theory.rounds_needed(300, 100)


def test_rounds_in_which_nothing_moves_say_nothing_new():
    still = theory.independent_zeros(300, 100, 50, movement=0.0)
    assert still == theory.independent_zeros(300, 100, 1)
    assert theory.rounds_needed(300, 100, movement=0.0) is None
    assert theory.rounds_needed(300, 100, movement=1e-4) > 20 * theory.rounds_needed(300, 100)
    assert theory.largest_batch(100, 50, movement=0.0) == theory.largest_batch(100, 1)


def test_noise_costs_rounds_where_weights_hardly_move():
    exact, float32, noisy = (
        theory.rounds_needed(150, 50, movement=0.004, noise=noise) for noise in (0, 1.3e-7, 1e-4)
    )
    assert exact < float32 < noisy


def test_more_samples_than_inputs_are_never_determined():
    assert theory.rounds_needed(785, 100, inputs=784) is None
    assert theory.rounds_needed(784, 100, inputs=784) == theory.rounds_needed(784, 100)
    assert theory.largest_batch(100, 100, inputs=784) == 784


@given(
    st.integers(1, 500),
    st.integers(1, 300),
    st.floats(0.05, 0.9),
    st.floats(0, 2),
    st.floats(0, 1e-3),
)
def test_the_largest_batch_of_the_rounds_needed(b, m, off, movement, noise):
    options = {"off": off, "movement": movement, "noise": noise}
    needed = theory.rounds_needed(b, m, **options)
    if needed is None:
        assert theory.independent_zeros(b, m, 10_000, **options) < b - 1
        return
    assert theory.largest_batch(m, needed, **options) >= b
    assert needed == 1 or theory.largest_batch(m, needed - 1, **options) < b


def test_more_rounds_as_many_as_the_rank_lacks():
    assert theory.more_rounds(100, 33, 2) == 4
    assert theory.more_rounds(100, 98, 6) == 1
    assert theory.more_rounds(100, 120, 6) == 0
    assert theory.more_rounds(100, 60, 6, before=57) == 13
    assert theory.more_rounds(100, 60, 6, before=60) is None
    assert theory.more_rounds(100, 0, 3) is None
    assert theory.more_rounds(1, 0, 1) == 0


def test_more_rounds_agrees_with_the_rounds_needed():
    zeros = math.floor(theory.independent_zeros(200, 50, 4))
    assert 4 + theory.more_rounds(200, zeros, 4) == theory.rounds_needed(200, 50)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.stay_off(0),
        lambda: theory.stay_off(2, off=1.0),
        lambda: theory.stay_off(2, movement=-0.1),
        lambda: theory.stay_off(2, movement=math.nan),
        lambda: theory.stay_off(2, movement=math.inf),
        lambda: theory.rounds_needed(0, 10),
        lambda: theory.rounds_needed(10, 10, noise=1.0),
        lambda: theory.rounds_needed(10, 10, share=0.0),
        lambda: theory.rounds_needed(10, 10, inputs=0),
        lambda: theory.largest_batch(0, 2),
        lambda: theory.largest_batch(10, 0),
        lambda: theory.largest_batch(10, 2, inputs=0),
        lambda: theory.more_rounds(10, 3, 0),
        lambda: theory.more_rounds(10, -1, 2),
        lambda: theory.more_rounds(10, 3, 2, before=4),
    ],
)
def test_bad_arguments_about_rounds_are_refused(call):
    with pytest.raises(InvalidOption, match="expected"):
        call()
