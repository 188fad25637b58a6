import math
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from spear import metrics
from spear.errors import InvalidOption
from spear.metrics import PERFECT_DB, Average, Rate, score


@given(st.permutations(range(5)), st.integers(0, 100))
def test_the_best_assignment_is_found_and_nothing_reordered(order, seed):
    x = torch.rand(5, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shuffled = x[list(order)] + 1e-4
    before = shuffled.clone()
    found = score(shuffled, x)
    assert found.truth.tolist() == list(order)
    assert found.exact
    assert found.worst == pytest.approx(80, abs=1e-6)
    assert torch.equal(before, shuffled)


def test_equal_bits_and_missing_samples():
    x = torch.rand(4, 30)
    assert score(x, x).mean == PERFECT_DB
    part = score(x[:3], x)
    assert (part.missing, part.exact) == (1, False)
    nothing = score(x[:0], x)
    assert (nothing.missing, nothing.mean, nothing.worst, nothing.exact) == (4, None, None, False)


def test_one_sample_below_sixty_decibel_is_not_exact():
    x = torch.rand(3, 50, dtype=torch.float64)
    y = x.clone()
    y[1] += 1.1e-3
    assert not score(y, x).exact


def test_nan_is_no_match():
    x = torch.rand(2, 10)
    y = x.clone()
    y[0] = torch.nan
    assert score(y, x).worst == -PERFECT_DB


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="expected samples of shape"):
        score(torch.rand(2, 5), torch.rand(2, 6))


def test_surplus_samples_are_counted_and_the_best_ones_chosen():
    """More recovered than there are: the long one is left over, though it comes first."""
    x = torch.rand(3, 10, dtype=torch.float64)
    found = score(torch.cat([10 * torch.ones(1, 10), x[[1, 2, 0]]]), x)
    assert found.truth.tolist() == [1, 2, 0]
    assert (found.missing, found.surplus, found.worst, found.exact) == (0, 1, PERFECT_DB, False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
def test_a_broken_sample_does_not_spoil_the_assignment_of_the_others(bad):
    x = torch.rand(6, 10, dtype=torch.float64)
    y = x[[3, 5, 0, 1, 2, 4]] + 1e-9
    y[0, 2] = bad
    found = score(y, x)
    assert found.truth.tolist() == [3, 5, 0, 1, 2, 4]
    assert float(found.psnr[0]) <= -100
    assert bool((found.psnr[1:] > 150).all())


def test_a_broken_truth_is_refused():
    with pytest.raises(InvalidOption, match="finite truth"):
        score(torch.rand(2, 5), torch.tensor([[1.0, 2, 3, 4, torch.nan]]))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_no_other_assignment_costs_less(k, b, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(k, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(b, 3, generator=generator, dtype=torch.float64)
    cost = (x[:, None] - y[None]).square().sum(2)
    pairs = metrics.assign(x, y)
    least = min(
        sum(float(cost[i, j]) for i, j in zip(rows, columns, strict=True))
        for rows in combinations(range(k), min(k, b))
        for columns in permutations(range(b), min(k, b))
    )
    assert float(cost[pairs.found, pairs.truth].sum()) == pytest.approx(least)
    assert (len(pairs) + pairs.missing, len(pairs) + pairs.surplus) == (b, k)


@given(st.floats(1e-6, 1), st.integers(0, 50))
def test_psnr_mse_and_mae_agree_with_a_planted_error(size, seed):
    x = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert metrics.mse(x + size, x).tolist() == pytest.approx([size**2] * 3)
    assert metrics.mae(x - size, x).tolist() == pytest.approx([size] * 3)
    assert metrics.psnr(x + size, x).tolist() == pytest.approx([-20 * math.log10(size)] * 3)


def test_pairs_must_be_pairs():
    for function in (metrics.mse, metrics.mae, metrics.psnr, metrics.ssim):
        with pytest.raises(InvalidOption, match="pair them"):
            function(torch.rand(1, 3, 16, 16), torch.rand(2, 3, 16, 16))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 11, 17)])
@pytest.mark.parametrize("noise", [1e-4, 0.05, 1.0])
def test_ssim_is_that_of_scikit_image(shape, noise):
    reference = pytest.importorskip("skimage.metrics", reason="needs the cli extra")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, *shape, generator=generator, dtype=torch.float64)
    y = x + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    expected = [
        reference.structural_similarity(
            a.numpy(),
            b.numpy(),
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1,
        )
        for a, b in zip(y, x, strict=True)
    ]
    assert metrics.ssim(y, x).tolist() == pytest.approx(expected, abs=1e-12)


def test_ssim_needs_room_for_its_window():
    with pytest.raises(InvalidOption, match="at least 11 x 11"):
        metrics.ssim(torch.rand(1, 3, 10, 20), torch.rand(1, 3, 10, 20))


def test_image_scores_state_what_is_missing_and_what_was_not_computed():
    x = torch.rand(4, 3, 8, 8)
    found = metrics.score_images(x[[2, 0, 3]], x)
    assert found.pairs.truth.tolist() == [2, 0, 3]
    assert (found.ssim, found.lpips, found.exact) == (None, None, False)
    assert (
        str(found.notes["ssim"]) == "not computed: 8 x 8 pixels are smaller than the window of 11"
    )
    assert str(found.notes["lpips"]).startswith("not computed: no weights were given")
    assert metrics.score_images(x, x).exact
    with pytest.raises(InvalidOption, match=r"\(b, C, H, W\)"):
        metrics.score_images(x.flatten(1), x.flatten(1))
    nothing = metrics.score_images(torch.rand(0, 3, 32, 32), torch.rand(4, 3, 32, 32))
    for values in (nothing.psnr, nothing.ssim, nothing.mse, nothing.mae):
        assert values.tolist() == []
    assert (nothing.pairs.missing, nothing.exact) == (4, False)


def test_a_broken_image_has_no_ssim_and_the_worst_psnr():
    x = torch.rand(3, 3, 16, 16)
    y = x.clone()
    y[1, 0, 0, 0] = torch.nan
    found = metrics.score_images(y, x)
    assert found.psnr.tolist() == [PERFECT_DB, -PERFECT_DB, PERFECT_DB]
    assert Average.of(found.ssim, found.pairs.missing) == Average(1.0, samples=2, missing=1)
    assert not found.exact


def test_features_are_assigned_by_angle_not_by_length():
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    found = metrics.score_features(torch.tensor([1e-3, 7, 1e3, 2, 50])[:, None] * x.flip(0), x)
    assert found.truth.tolist() == [4, 3, 2, 1, 0]
    assert found.cosine.tolist() == pytest.approx([1] * 5)
    opposite = metrics.score_features(-x[:1], x[:1])
    assert opposite.average.value == pytest.approx(-1)


def test_a_zero_has_no_angle():
    x = torch.eye(3)
    y = x.clone()
    y[1] = 0
    for found in (metrics.score_features(y, x), metrics.score_features(x, y)):
        assert found.truth.tolist() == [0, 1, 2]
        assert found.average == Average(1.0, samples=2, missing=1)


@pytest.mark.parametrize(("count", "trials"), [(0, 10), (10, 10), (3, 10), (99, 100)])
def test_the_interval_is_clopper_pearson(count, trials):
    """At its lower end, `count` or more has probability 2.5 %; at its upper end, `count` or fewer."""
    low, high = Rate(count, trials).interval()
    if count > 0:
        assert binom.sf(count - 1, trials, low) == pytest.approx(0.025)
    if count < trials:
        assert binom.cdf(count, trials, high) == pytest.approx(0.025)
    assert (low == 0, high == 1) == (count == 0, count == trials)


def test_rates_of_nothing_and_impossible_ones():
    assert (Rate(0, 0).share, Rate(0, 0).interval(), str(Rate(0, 0))) == (None, (0, 1), "no trials")
    with pytest.raises(InvalidOption, match="count <= trials"):
        Rate(3, 2)
    with pytest.raises(InvalidOption, match="confidence"):
        Rate(1, 2).interval(1.0)
