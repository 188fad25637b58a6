"""A client among simulated ones: weights that no order explains, and rivals that would change them."""

import pytest
import torch

from spear.judge.ensemble import Part, compare

ENTRIES, CLIENTS, RIVALS = 60, 64, 8


def part(weight=0.0, *, seed=0, order=0.2, rival=0.3):
    """A part whose orders lead far, in five directions; the client's is heavier by `weight`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    mean, leads = normal(ENTRIES), normal(5, ENTRIES)
    clients = mean + order * normal(CLIENTS, 5) @ leads + 1e-3 * normal(CLIENTS, ENTRIES)
    sent = (1 + weight) * mean + order * normal(5) @ leads + 1e-3 * normal(ENTRIES)
    heavier = clients[-RIVALS:] + rival * mean
    return Part(clients, sent, heavier[None])


@pytest.mark.parametrize("weight", [0.0, 0.02, -0.1])
def test_a_weight_shows_through_orders_that_change_far_more(weight):
    for seed in range(10):
        *others, own = part(weight, seed=seed).weights().tolist()
        deviation = torch.tensor(others).std().item()
        assert deviation < 0.003  # the length of what orders add is half that of the mean
        assert abs(own - weight) < 5 * deviation


def test_simulated_clients_are_near_and_others_far():
    near = [compare([[part(seed=seed)], [part(seed=100 + seed)]]).distance for seed in range(40)]
    assert max(near) < 4.5
    assert sum(d * d for d in near) / len(near) == pytest.approx(2, rel=0.6)  # two dimensions
    far = [compare([[part(0.05, seed=s)], [part(seed=100 + s)]]).distance for s in range(10)]
    assert min(far) > 10


def test_a_rival_that_is_half_true_is_said_to_be():
    compared = compare([[part(0.15, rival=0.3)]])
    share, error = compared.worst
    assert error < 0.01
    assert share == pytest.approx(0.5, abs=5 * error)


def test_a_rival_that_changes_no_weight_cannot_be_excluded():
    _, error = compare([[part(rival=0.0)]]).worst
    assert error > 100


def test_the_worst_rival_counts():
    one = part()
    both = Part(one.clients, one.sent, torch.cat([one.rivals, one.clients[None, -RIVALS:]]))
    assert compare([[both]]).worst[1] > 100
