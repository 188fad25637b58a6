import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear.metrics import PERFECT_DB, score


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
