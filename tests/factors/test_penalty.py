"""Penalties in the loss are found and removed, and nothing is removed where there is none."""

import dataclasses

import pytest
import torch
from torch import nn

import spear
from spear.factors import factorise
from spear.factors.penalty import without_penalty
from spear.federated import defences
from support.planted import bare, plant, with_noise, worst_error


def penalised(b, l2=0.0, l1=0.0, biases=True, only=None, **how):
    """A planted batch, and the view of an update whose loss holds a penalty."""
    planted = plant(b, **how)
    named = dict(planted.model.named_parameters())
    loss = nn.functional.cross_entropy(planted.model(planted.inputs), planted.labels)
    for name, p in named.items():
        if (p.ndim > 1 or biases) and (only is None or name.startswith(only)):
            loss = loss + l2 / 2 * p.square().sum() + l1 * p.abs().sum()
    sent = torch.autograd.grad(loss, list(named.values()))
    return planted, spear.observe(planted.model, sent)


SIZES = [(1e-2, 0), (1e-3, 0), (1e-5, 0), (0, 1e-2), (0, 1e-4), (0, 1e-6), (1e-3, 1e-4)]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("l2", "l1"), SIZES)
@pytest.mark.parametrize(
    ("b", "m", "n"), [(1, 60, 50), (15, 60, 50), (30, 100, 200), (12, 100, 40)]
)
def test_a_penalty_is_found_and_taken_off(b, m, n, l2, l1, biases):
    planted, view = penalised(b, l2, l1, biases, m=m, n=n, seed=b)
    factors, penalty = without_penalty(factorise(view))
    assert penalty is not None
    assert factors.batch_size == b
    assert penalty.biases == biases
    assert bool(penalty.l2) == bool(l2)
    assert bool(penalty.l1) == bool(l1)
    assert abs(penalty.l2 - l2) <= 1e-4 * l2 + 1e-10
    assert abs(penalty.l1 - l1) <= 1e-4 * l1 + 1e-10
    clean = factors.view
    for name, gradient in clean.others.items():  # those of the batch, to their own rounding
        size = float(view.others[name].abs().max())
        assert torch.allclose(gradient, planted.gradients[name], atol=1e-6 * size, rtol=0)
    assert torch.allclose(clean.bias_grad, planted.gradients["0.bias"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("l2", "l1"), [(1e-2, 0), (0, 1e-4)])
def test_the_samples_come_back(l2, l1):
    planted, view = penalised(15, l2, l1, m=100, n=80)
    factors, _ = without_penalty(factorise(view))
    result = spear.invert(factors.view)
    assert worst_error(result.inputs, planted.inputs) < 6e-4  # 80 dB of a range of six
    assert result.outcome is spear.Outcome.EXACT


def test_double_precision_is_kept():
    planted, view = penalised(15, 1e-4, m=100, n=80, dtype=torch.float64)
    factors, penalty = without_penalty(factorise(view))
    assert abs(penalty.l2 - 1e-4) < 1e-16
    assert worst_error(spear.invert(factors.view).inputs, planted.inputs) < 1e-10


def test_weight_decay_that_was_not_told_in_a_federated_step():
    planted = plant(5, m=100, n=80, dtype=torch.float64)
    before = {n: p.detach() for n, p in planted.model.named_parameters()}
    after = {n: p - 0.1 * (planted.gradients[n] + 5e-4 * p) for n, p in before.items()}
    view = spear.observe(planted.model, after=after, lr=0.1, epochs=1)
    factors, penalty = without_penalty(factorise(view))
    assert penalty.l2 == pytest.approx(5e-4, rel=1e-8)
    assert worst_error(spear.invert(factors.view).inputs, planted.inputs) < 1e-8


def test_weights_given_as_the_gradient_of_a_bare_layer():
    planted = plant(5, m=100, n=80, dtype=torch.float64)
    view = bare(planted.view)
    moved = {"weight_grad": view.weight, "bias_grad": view.bias}
    sent = {name: value - 0.1 * getattr(view, name) for name, value in moved.items()}
    factors, penalty = without_penalty(factorise(dataclasses.replace(view, **sent)))
    assert "the weights themselves" in penalty.words
    assert factors.batch_size == 5
    assert torch.allclose(
        factors.view.weight_grad, -0.1 * planted.gradients["0.weight"], atol=1e-12
    )


def test_a_penalty_on_one_layer_only_is_taken_off_there_only():
    _, view = penalised(5, l1=1e-3, only="0.", m=60, n=50, depth=4)
    factors, penalty = without_penalty(factorise(view))
    assert penalty.l1 == pytest.approx(1e-3, rel=1e-6)
    assert all(torch.equal(g, view.others[n]) for n, g in factors.view.others.items())


def test_a_bare_layer_has_no_others():
    planted, view = penalised(5, 1e-3)
    factors, penalty = without_penalty(factorise(bare(view)))
    assert penalty.l2 == pytest.approx(1e-3, rel=1e-5)
    assert worst_error(spear.invert(factors.view).inputs, planted.inputs) < 6e-4


@pytest.mark.parametrize(
    "sent",
    [
        lambda p: p.gradients,
        lambda p: with_noise(p.gradients, 1e-3),
        lambda p: with_noise(p.gradients, 0.3),
        lambda p: with_noise(p.gradients, 30.0),
        lambda p: defences.prune(p.gradients, 0.5),
        lambda p: defences.half(p.gradients),
        lambda p: {n: torch.zeros_like(g) for n, g in p.gradients.items()},
    ],
)
@pytest.mark.parametrize("b", [3, 60])
def test_where_there_is_none_nothing_is_touched(b, sent):
    planted = plant(b, m=60, n=50, seed=b)
    factors = factorise(spear.observe(planted.model, sent(planted)))
    same, penalty = without_penalty(factors)
    assert penalty is None
    assert same is factors


def test_a_large_batch_with_a_penalty_shows_no_gap():
    _, view = penalised(200, 1e-2, m=60, n=50)
    factors = factorise(view)
    assert without_penalty(factors) == (factors, None)
    assert not factors.batch_size


def test_weights_of_zero_tell_nothing():
    _, view = penalised(60, 1e-2, m=60, n=50)
    blank = dataclasses.replace(view, weight=torch.zeros_like(view.weight))
    assert without_penalty(factorise(blank))[1] is None
