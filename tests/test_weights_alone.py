"""What the samples' weights give away: duplicates, odd ones, samples that have vanished."""

import torch

from spear.weights import merged, odd, usual, vanished


def all_of(factor):
    return torch.ones(len(factor), dtype=torch.bool)


def test_where_no_weight_is_usual_none_is_odd():
    clipped = torch.tensor([0.1, 0.2, 0.35, 0.5])
    assert usual(clipped, all_of(clipped)) is None
    assert not odd(clipped, all_of(clipped)).any()
    assert vanished(clipped, all_of(clipped)) == 0
    nobody = ~all_of(clipped)
    assert usual(clipped, nobody) is None
    assert not odd(clipped, nobody).any()
    assert not merged(clipped, nobody).any()


def test_a_weight_that_is_off_by_more_than_rounding_is_odd():
    factor = torch.tensor([0.25, 0.25, 0.25, 0.25 * 1.002, 0.25 * 1.0005])
    assert odd(factor, all_of(factor)).tolist() == [False, False, False, True, False]
