"""The rounds of several clients: kept compressed, bounded, in memory only."""

import copy
import pickle

import pytest
import torch
from torch import nn

import spear
from spear.factors import Combination, RoundHistory
from support.planted import gaussian, seeded

B, M, N = 30, 30, 150
CLIENTS = ("one", "two", "three")


def network(m=M, n=N):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n, m), nn.ReLU(), nn.Linear(m, m), nn.ReLU(), nn.Linear(m, 5))


def data(seed, b=B, n=N):
    return gaussian(b, n, seed), torch.randint(5, (b,), generator=seeded(seed))


def federation(rounds, clients=CLIENTS, *, net=None, b=B, lr=0.5):
    """Views of every client in every round, as (number, client, view)."""
    net = net or network()
    held = {client: data(seed, b) for seed, client in enumerate(clients, 1)}
    for number in range(1, rounds + 1):
        steps = []
        for client, (x, y) in held.items():
            loss = nn.functional.cross_entropy(net(x), y)
            steps.append(torch.autograd.grad(loss, list(net.parameters())))
            yield number, client, spear.observe(net, steps[-1])
        with torch.no_grad():
            for p, *gradients in zip(net.parameters(), *steps, strict=True):
                p.sub_(lr * sum(gradients) / len(gradients))


def filled(played, clients=CLIENTS, **options):
    history = RoundHistory(**options)
    for number, client, view in federation(played, clients):
        history.add(client, number, view)
    return history


def test_kept_rounds_are_those_of_combine():
    rounds = [view for _, client, view in federation(6) if client == "one"]
    kept, whole = filled(6).view("one"), spear.combine(rounds)
    assert kept.rounds.batch_size == whole.rounds.batch_size == B
    for part in ("weight", "weight_grad"):  # up to the choice of the basis
        ours = getattr(kept, part) @ kept.rounds.basis
        theirs = getattr(whole, part) @ whole.rounds.basis
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert torch.equal(kept.bias, whole.bias)


def test_a_client_comes_back_from_its_own_rounds():
    x, _ = data(2)
    result = spear.invert(filled(9).view("two"))
    assert result.outcome.name == "EXACT", result.explanation
    assert torch.cdist(x.double(), result.inputs.double()).amin(1).max() < 1e-2


def test_a_combination_grows_and_views_made_before_stay():
    rounds = [view for _, _, view in federation(4, ["one"])]
    together = Combination()
    views = []
    for view in rounds:
        assert together.add(view) == ""
        views.append(together.view())
    assert [1 if v.rounds is None else len(v.rounds) for v in views] == [1, 2, 3, 4]
    for count in (2, 3):
        fresh = spear.combine(rounds[:count])
        assert torch.equal(fresh.weight_grad, views[count - 1].weight_grad)
        assert torch.equal(fresh.rounds.live_columns, views[count - 1].rounds.live_columns)


def test_only_the_last_rounds_are_kept_and_nothing_of_those_before():
    history = filled(5, rounds=3)
    view = history.view("one")
    assert [each.number for each in view.rounds.each] == [3, 4, 5]
    rounds = [view for _, client, view in federation(5) if client == "one"]
    for each, sent in zip(view.rounds.each, rounds[2:], strict=True):
        gradient = view.weight_grad[each.rows] @ view.rounds.basis / each.factor
        torch.testing.assert_close(gradient, sent.weight_grad.double(), atol=1e-7, rtol=0)
    first = rounds[0].weight_grad
    held = [t for group in history._kept["one"]._groups.values() for t in group.tensors()]
    assert not any(t.shape == first.shape and torch.equal(t, first) for t in held)


def test_samples_that_only_a_forgotten_round_had_are_gone():
    net, together = network(n=600), Combination()
    gone = data(1, b=8, n=600)[0].double()

    def share_shown():
        (group,) = together._groups.values()
        return float((gone @ group.basis.T).norm() / gone.norm())

    for seed in (1, 2, 2):
        x, y = data(seed, b=8, n=600)
        loss = nn.functional.cross_entropy(net(x), y)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        together.add(spear.observe(net, gradients))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.sub_(0.5 * g)
    assert share_shown() > 0.99
    together.forget_oldest()
    assert share_shown() < 0.5  # rounding spreads over all inputs, with some share of any sample
    assert together.view().rounds.batch_size == 8


def test_weights_are_held_once_for_all_clients():
    one, three = filled(6, ["one"]), filled(6)
    addresses = [set(sizes) for sizes in three._held.values()]
    assert len(set.intersection(*addresses)) >= 6  # the weights of every round at least
    everything = sum(sum(sizes.values()) for sizes in three._held.values())
    assert 0 < three.used * 2**20 < everything
    assert one.used < three.used


def test_what_is_kept_is_compressed():
    history = RoundHistory()
    raw = 0
    for number, client, view in federation(12, ["one"], net=network(n=N), b=5, lr=0.1):
        history.add(client, number, view)
        raw += view.weight_grad.numel() * 8
    coordinates = [kept.gradient for kept in next(iter(history._kept["one"]._groups.values())).kept]
    assert sum(part.numel() * 8 for part in coordinates) < raw / 4


def test_clients_with_the_fewest_rounds_make_room():
    roomy = filled(4)
    limit = roomy.used * 0.7
    history = RoundHistory(megabytes=limit)
    for number, client, view in federation(4):
        history.add(client, number, view)
        assert history.used <= limit
    assert history.crowded_out
    assert max(history.count(client) for client in CLIENTS) == 4  # some are kept whole
    assert min(history.count(client) for client in CLIENTS) < 4


def test_a_client_alone_loses_its_oldest_rounds():
    limit = filled(3, ["one"]).used
    history = filled(6, ["one"], megabytes=limit)
    assert history.used <= limit
    numbers = [each.number for each in history.view("one").rounds.each]
    assert numbers == list(range(7 - len(numbers), 7))
    assert history.crowded_out == {"one"}
    tiny = filled(2, ["one"], megabytes=1e-6)
    assert (tiny.count("one"), tiny.used) == (0, 0)


def test_copies_and_pickles_hold_nothing():
    history = filled(3, rounds=7)
    for again in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert (again.rounds, again.used) == (7, 0)
        assert not any(again.count(client) for client in CLIENTS)
    history.clear()
    assert history.used == 0
    assert not history._holders


def test_rounds_that_do_not_fit_say_why():
    history = RoundHistory()
    (_, client, view), *_ = federation(1, ["one"])
    assert history.add(client, 1, view) == ""
    assert "it repeats round 1" in history.add(client, 2, view)
    assert history.count(client) == 1


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": 2.5}, {"megabytes": 0}])
def test_wrong_bounds_are_told(wrong):
    with pytest.raises(spear.InvalidOption, match="expected a history"):
        RoundHistory(**wrong)
