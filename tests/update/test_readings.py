"""An update passed off as something else is recognised, named, and attacked as what it is."""

import copy

import pytest
import torch
from torch import nn

import spear
from spear import Cause, Outcome
from spear.errors import NothingToAttack
from spear.federated import fedavg, mlp
from spear.update import looks_like_adam
from support.planted import plant, worst_error

LR = 0.1


def forms(planted, lr=LR, epochs=1):
    """What a client with these samples may send, by name."""
    after = fedavg(planted.model, planted.inputs, planted.labels, lr=lr, epochs=epochs)
    before = dict(planted.model.named_parameters())
    difference = {name: after[name] - p.detach() for name, p in before.items()}
    return {
        "gradient": planted.gradients,
        "turned": {name: -g for name, g in planted.gradients.items()},
        "weights": {name: after[name] for name in before},
        "difference": difference,
        "difference turned": {name: -d for name, d in difference.items()},
    }


@pytest.mark.parametrize(
    ("sent", "said", "words"),
    [
        ("gradient", "gradients", ""),
        ("turned", "gradients", "given as a gradient, but it has the sign of a difference"),
        ("difference", "gradients", "given as a gradient, but it has the sign of a difference"),
        ("weights", "gradients", "given as a gradient, but it is close"),
        ("weights", "after", ""),
        ("difference", "after", "given as weights, but it is far"),
        ("gradient", "after", "given as weights, but it is far"),
        ("difference", "difference", ""),
        ("difference turned", "difference", "the difference has the opposite sign"),
        ("weights", "difference", "given as a difference of weights, but it is close"),
    ],
)
def test_it_is_read_as_what_it_is(sent, said, words):
    planted = plant(5, m=120, n=60, depth=2)
    told = {} if said == "gradients" else {"lr": LR}
    view = spear.observe(planted.model, **{said: forms(planted)[sent]}, **told)
    result = spear.invert(view)
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, planted.inputs) < 1e-2
    assert (words or "all 5 samples") in result.reason.split(":")[0].split(";")[0]
    assert result.mistake == (result.reason.split(";")[0] if words else "")


@pytest.mark.parametrize("said", ["gradients", "after", "difference"])
def test_the_models_own_weights_are_no_update(said):
    planted = plant(3)
    with pytest.raises(NothingToAttack, match="equals the model"):
        spear.observe(planted.model, **{said: dict(planted.model.state_dict())})


def test_a_whole_state_dict_given_as_gradients_is_recognised():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 100), nn.ReLU(), nn.BatchNorm1d(100), nn.Linear(100, 5)
    ).eval()
    x, y = torch.randn(4, 40), torch.arange(4)
    view = spear.observe(model, fedavg(model, x, y, lr=LR))
    assert "but it is close to the weights: read as weights" in view.mistake
    assert worst_error(spear.invert(view).inputs, x) < 1e-2


def locally(optimiser, steps, size, seed=0):
    torch.manual_seed(seed)
    model = mlp(100, 10, width=120, seed=seed)
    x, y = torch.randn(48, 100), torch.randint(10, (48,))
    local = copy.deepcopy(model)
    trained = optimiser(local.parameters(), lr=1e-3)
    for _ in range(steps):
        chosen = torch.randperm(48)[:size]
        trained.zero_grad()
        nn.functional.cross_entropy(local(x[chosen]), y[chosen]).backward()
        trained.step()
    return model, local.state_dict()


@pytest.mark.parametrize(("steps", "size"), [(1, 4), (5, 48), (20, 16)])
@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_that_nobody_mentioned_is_named(optimiser, size, steps):
    model, after = locally(optimiser, steps, size)
    result = spear.invert(spear.observe(model, after=after, lr=1e-3), max_seconds=20)
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.OPTIMISER), result.reason
    assert result.reason.startswith("the update looks like one of Adam")


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("size", [4, 48])
def test_sgd_is_not_taken_for_adam(size, steps):
    model, after = locally(torch.optim.SGD, steps, size)
    assert not looks_like_adam(spear.observe(model, after=after, lr=1e-3))


@pytest.mark.parametrize("m", [10, 100, 400])
def test_noise_is_not_taken_for_adam(m):
    torch.manual_seed(m)
    noise = [torch.randn(s) for s in ((m, 60), (m,), (m, 60), (m,))]
    weight, bias, weight_grad, bias_grad = noise
    view = spear.LayerUpdate(weight=weight, bias=bias, weight_grad=weight_grad, bias_grad=bias_grad)
    assert not looks_like_adam(view)


def test_weights_of_another_round_are_not_called_safe():
    """The client started from other weights than those that were handed in."""
    planted = plant(6, m=120, n=60, depth=2)
    torch.manual_seed(1)
    other = copy.deepcopy(planted.model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.02 * torch.randn_like(p))
    after = forms(planted)["weights"]
    result = spear.invert(spear.observe(other, after=after, lr=LR), max_seconds=20)
    assert result.outcome is Outcome.INCONCLUSIVE
    assert "weights of another round" in result.reason
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn_like(p))
    result = spear.invert(spear.observe(other, planted.gradients), max_seconds=4)
    assert result.outcome in (Outcome.INCONCLUSIVE, Outcome.APPROXIMATE)
    assert not result.certified.any()


def test_a_state_dict_of_a_plain_mlp_needs_no_model():
    planted = plant(4, m=80, depth=3)
    view = spear.observe(planted.model.state_dict(), planted.gradients)
    assert "plain MLP" in view.choice
    assert spear.invert(view).outcome is Outcome.EXACT
    state = {**planted.model.state_dict(), "scale": torch.ones(3)}
    alone = spear.observe(state, planted.gradients)
    assert alone.model is None
    assert "no plain MLP" in alone.notes[0]
    assert worst_error(spear.invert(alone).inputs, planted.inputs) < 1e-2
