"""Several rounds of the same data as one view."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import spear
from spear.factors import factorise
from spear.federated import fedavg
from support.planted import gaussian, seeded

B, M, N = 30, 30, 150


def network(m=M, n=N, seed=0, classes=5):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(n, m), nn.ReLU(), nn.Linear(m, m), nn.ReLU(), nn.Linear(m, classes)
    )


def data(b=B, n=N, seed=1):
    labels = torch.randint(5, (b,), generator=seeded(seed))
    return gaussian(b, n, seed), labels


def play(count, x, y, *, net=None, lr=0.5, who=None, sent=None, reduction="mean"):
    """Models and what was sent, round after round."""
    net = net or network(n=x.shape[1])
    for r in range(count):
        some = torch.arange(len(x)) if who is None else who(r)
        outputs = net(x[some])
        loss = nn.functional.cross_entropy(outputs, y[some], reduction=reduction)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        yield copy.deepcopy(net), [g.clone() for g in grads] if sent is None else sent(r, grads)
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p.sub_(lr * (g if reduction == "mean" else g / len(x)))


def views(rounds):
    return (spear.observe(model, update) for model, update in rounds)


def right(result, x):
    """How many samples came back to 60 dB."""
    if not len(result.inputs):
        return 0
    off = torch.cdist(x.double(), result.inputs.double()).amin(1) / x.shape[1] ** 0.5
    return int((off < 1e-3 * float(x.max() - x.min())).sum())


def test_more_samples_than_neurons_come_back_from_several_rounds():
    x, y = data(40)
    view = spear.combine(views(play(10, x, y, lr=1.0)))
    result = spear.invert(view)
    assert (result.outcome.name, result.proof.name) == ("EXACT", "REPLAY"), result.explanation
    assert result.batch_size == 40 > M
    assert right(result, x) == 40
    nearest = torch.cdist(result.inputs.double(), x.double()).argmin(1)
    assert torch.equal(result.labels, y[nearest])


def test_bare_layers_are_combined_too():
    x, y = data()
    bare = (spear.LayerUpdate(net[0].weight, net[0].bias, g[0], g[1]) for net, g in play(8, x, y))
    result = spear.invert(spear.combine(bare))
    assert (result.outcome.name, result.proof.name) == ("EXACT", "PATTERN"), result.explanation
    assert right(result, x) == B


def test_the_combined_view_is_the_stacked_layer_in_other_coordinates():
    x, y = data(12)
    rounds = list(play(4, x, y))
    view = spear.combine(views(rounds))
    assert view.rounds is not None
    factors = factorise(view)
    assert factors.b == 12
    basis, scale = view.rounds.basis, torch.tensor([r.factor for r in view.rounds.each])
    stacked = torch.cat([g[0] for _, g in rounds]).double()
    scale = scale.repeat_interleave(M)[:, None].double()
    torch.testing.assert_close(view.weight_grad @ basis, scale * stacked, atol=1e-6, rtol=0)
    Z = torch.cat([net[0](x) for net, _ in rounds], 1).detach().double()  # (b, R m)
    coordinates = x.double() @ basis.T
    torch.testing.assert_close(coordinates @ view.weight.T + view.bias, Z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)).double())


def test_one_view_is_left_as_it_is():
    x, y = data(5)
    (view,) = views(play(1, x, y))
    same = spear.combine([view])
    assert same.rounds is None
    assert same.weight_grad is view.weight_grad


def test_a_model_beside_combined_rounds_is_refused():
    x, y = data(5)
    view = spear.combine(views(play(3, x, y)))
    with pytest.raises(spear.InvalidOption, match="leave out model="):
        spear.invert(view, model=network())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_and_sums(reduction):
    x, y = data()
    result = spear.invert(spear.combine(views(play(7, x, y, reduction=reduction))))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation


def test_rounds_with_part_of_the_samples():
    x, y = data()
    result = spear.invert(
        spear.combine(
            views(play(14, x, y, who=lambda r: torch.randperm(B, generator=seeded(r))[:20]))
        )
    )
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation


def test_data_that_grows():
    x, y = data()
    grown = play(10, x, y, who=lambda r: torch.arange(min(B, 15 + 3 * r)))
    result = spear.invert(spear.combine(views(grown)))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation


def test_a_loud_round_is_named_and_left_out():
    x, y = data()

    def noisy(r, grads):
        return [g + 1e-4 * torch.randn(g.shape, generator=seeded(r)) * (r == 3) for g in grads]

    result = spear.invert(spear.combine(views(play(8, x, y, sent=noisy))))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation
    assert any("round 4 is left out: its noise" in words for words in result.details)


def test_a_round_in_half_precision_is_weighed_or_left_out():
    x, y = data()
    half = play(8, x, y, sent=lambda r, grads: [g.half() if r == 2 else g for g in grads])
    result = spear.invert(spear.combine(views(half)))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation


def test_a_round_of_another_client_is_named_and_left_out():
    x, y = data()
    rounds = list(play(8, x, y))
    rounds[4] = next(iter(play(1, *data(10, seed=9), net=network(seed=3))))
    result = spear.invert(spear.combine(views(rounds)))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation
    assert any("round 5 is left out" in w and "no other round" in w for w in result.details)


def test_a_round_with_weights_of_another_is_named_and_left_out():
    x, y = data()
    rounds = list(play(9, x, y))
    rounds[7] = (rounds[2][0], rounds[7][1])
    result = spear.invert(spear.combine(views(rounds)))
    assert (result.outcome.name, right(result, x)) == ("EXACT", B), result.explanation
    assert any("round 8 is left out" in w and "another round's" in w for w in result.details)


def test_a_repeated_round_is_named_and_left_out():
    x, y = data(8)
    rounds = list(play(3, x, y))
    view = spear.combine(views([*rounds, rounds[1]]))
    assert "round 4 is left out: it repeats round 2" in view.choice


def test_layers_that_do_not_fit_are_left_out():
    x, y = data(8)
    others = play(1, x, y, net=network(m=20))
    view = spear.combine(views([*play(3, x, y), *others]))
    assert "round 4 is left out: it is of layer '0' of 20 x 150, others layer '0' of 30 x 150" in (
        view.choice
    )


def test_inner_layers_only_behind_frozen_ones():
    x, y = data(6)
    net = nn.Sequential(nn.Linear(N, 40), nn.Tanh(), nn.Linear(40, M), nn.ReLU(), nn.Linear(M, 5))
    frozen = copy.deepcopy(net)
    frozen[0].requires_grad_(False)
    moved = list(views(play(3, x, y, net=net)))
    assert "layers before it were trained" in spear.combine(moved).choice

    def inner():
        for _ in range(3):
            loss = nn.functional.cross_entropy(frozen(x), y)
            trained = [p for p in frozen.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, trained)
            yield spear.observe(frozen, [None, None, *grads])
            with torch.no_grad():
                for p, g in zip(trained, grads, strict=True):
                    p.sub_(0.1 * g)

    view = spear.combine(inner())
    assert view.rounds is not None
    assert len(view.rounds) == 3


def test_errors_say_what_was_expected():
    with pytest.raises(spear.InvalidUpdate, match="at least one round"):
        spear.combine([])
    with pytest.raises(spear.InvalidUpdate, match="round 1 is a int"):
        spear.combine([3])
    x, y = data(5)
    view = spear.combine(views(play(3, x, y)))
    with pytest.raises(spear.InvalidUpdate, match="combined already"):
        spear.combine([view, view])
    adam = (spear.observe(net, [0.01 * g.sign() for g in grads]) for net, grads in play(3, x, y))
    with pytest.raises(spear.InvalidUpdate, match="Adam"):
        spear.combine(adam)


def test_rounds_of_local_training_come_back_without_a_proof():
    """A client of four, whose own weights are seen: each round goes on from the mean of all."""
    clients = [data(seed=seed) for seed in range(1, 5)]
    net, generator, sent = network(), torch.Generator().manual_seed(0), []
    how = {"lr": 0.1, "epochs": 2, "batch_size": B // 2}
    for _ in range(8):
        after = [fedavg(net, x, y, generator=generator, **how) for x, y in clients]
        sent.append(spear.observe(copy.deepcopy(net), after=after[0], **how))
        net.load_state_dict({k: sum(a[k] for a in after) / len(after) for k in after[0]})
    result = spear.invert(spear.combine(sent))
    x, _ = clients[0]
    assert right(result, x) == len(x)
    assert result.outcome is spear.Outcome.APPROXIMATE
    assert result.cause is spear.Cause.TRAINING
    assert not result.certified.any()


@pytest.mark.parametrize(("epochs", "outcome"), [(1, "EXACT"), (2, "APPROXIMATE")])
def test_rounds_of_an_untold_number_of_steps_are_proved_if_one_step_explains_them(epochs, outcome):
    x, y = data(12)
    net, sent = network(), []
    for _ in range(4):
        after = fedavg(net, x, y, lr=0.2, epochs=epochs)
        sent.append(spear.observe(net, after=after, lr=0.2))
        net.load_state_dict(after)
    result = spear.invert(spear.combine(sent))
    assert right(result, x) == 12
    assert result.outcome.name == outcome, result.explanation
    assert bool(result.certified.all()) == (epochs == 1)


def test_local_training_at_an_unknown_rate_is_not_combined():
    x, y = data(5)
    (net, grads), *_ = play(1, x, y)
    after = {name: p - 0.1 * g for (name, p), g in zip(net.named_parameters(), grads, strict=True)}
    with pytest.raises(spear.InvalidUpdate, match="give lr="):
        spear.combine([spear.observe(net, after=after, epochs=5)])


def test_what_is_kept_grows_with_the_samples_and_not_with_the_inputs():
    x, y = data(10, n=4000)
    kept = []

    def one_at_a_time():
        for view in views(play(30, x, y, net=network(n=4000), lr=0.01)):
            kept.append(SimpleNamespace(size=view.weight_grad.numel()))
            yield view

    view = spear.combine(one_at_a_time())
    assert view.rounds is not None
    raw = sum(each.size for each in kept)
    tensors = (view.weight, view.weight_grad, view.rounds.basis)
    assert sum(t.numel() for t in tensors) < raw / 10


def test_augmented_data_have_no_end():
    x, y = data(B)
    net = network()

    def rounds():
        for r in range(6):
            moved = x + 0.1 * torch.randn(x.shape, generator=seeded(r))
            yield from play(1, moved, y, net=net)

    result = spear.invert(spear.combine(views(rounds())))
    assert (result.outcome.name, result.cause.name) == ("INCONCLUSIVE", "NO_GAP")
    assert "augmentation" in result.reason


def test_too_few_rounds_say_how_many_more():
    x, y = data(45)
    result = spear.invert(spear.combine(views(play(2, x, y))))
    assert result.outcome.name in ("INCONCLUSIVE", "APPROXIMATE")
    assert "more would do" in result.reason


def test_a_round_that_noise_nearly_hides_belongs_to_the_others():
    """Gradients shrink as training goes on, the noise does not: the last round shows no samples."""
    x, y = data(6)

    def sent(r, grads):
        noise = torch.Generator().manual_seed(r)
        size = 0.005 if r == 5 else 1.0
        return [size * g + 1e-5 * torch.randn(g.shape, generator=noise) for g in grads]

    alone = list(views(play(6, x, y, net=network(m=40), sent=sent)))
    assert factorise(alone[-1]).batch_size is None
    view = spear.combine(alone)
    assert view.rounds is not None
    assert not view.rounds.left_out
    assert view.rounds.batch_size == 6
