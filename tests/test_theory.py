import math

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
