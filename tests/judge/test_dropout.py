"""Dropout beside the ReLU: recovered, proved by its zeros, and what it is told from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear import Outcome, Proof
from spear.errors import Declined
from spear.factors import factorise
from spear.federated import fedsgd
from spear.judge import Cause, certify
from spear.judge.layer import Recovered
from spear.judge.selection import _Matching
from spear.search import Directions, unit
from spear.update import network_after
from support.planted import bare, gaussian, labels, module, worst_error

N, M = 40, 160

PLACES = {
    "module before": lambda self, x: torch.relu(self.drop(self.first(x))),
    "module behind": lambda self, x: self.drop(torch.relu(self.first(x))),
    "function before": lambda self, x: F.relu(F.dropout(self.first(x), 0.5, self.training)),
    "function behind": lambda self, x: F.dropout(F.relu(self.first(x)), training=self.training),
    "channels": lambda self, x: F.dropout2d(F.relu(self.first(x)), 0.5, self.training),
    "untraceable": lambda self, x: F.dropout(
        F.relu(self.first(x)) if x.sum() < 1e9 else x, 0.5, self.training
    ),
}


def dropping(place, p=0.5, outputs=10, **more):
    torch.manual_seed(0)
    hidden = PLACES[place]
    layers = {
        "first": nn.Linear(N, M),
        "drop": nn.Dropout(p),
        "last": nn.Linear(M, outputs),
        **more,
    }
    return module(lambda self, x: self.last(hidden(self, x)), **layers).train()


def update(model, b=6, seed=0, outputs=10):
    x, y = gaussian(b, N, seed), labels(b, outputs, seed)
    torch.manual_seed(seed)
    return x, y, fedsgd(model, x, y)


@pytest.mark.filterwarnings("ignore:dropout2d")  # of the client's own run
@pytest.mark.parametrize("place", PLACES)
def test_dropout_beside_the_relu_is_recovered_and_proved(place):
    model = dropping(place)
    x, y, gradients = update(model)
    view = spear.observe(model, gradients)
    assert (view.layer, view.dropout) == ("first", 0.5)
    result = spear.invert(view)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert worst_error(result.inputs, x) < 1e-4
    order = torch.cdist(result.inputs, x).argmin(1)
    assert result.labels.tolist() == y[order].tolist()


def test_a_model_in_eval_mode_is_read_as_the_update_shows_it():
    model = dropping("module behind")
    x, _, gradients = update(model)
    result = spear.invert(spear.observe(model.eval(), gradients))
    assert result.outcome is Outcome.EXACT
    assert "switched off" in result.mistake
    assert worst_error(result.inputs, x) < 1e-4
    without = spear.invert(spear.observe(model, fedsgd(model, x, labels(len(x)))))
    assert (without.outcome, without.mistake) == (Outcome.EXACT, "")


def test_a_layer_by_itself_is_proved_once_the_rate_is_told():
    model = dropping("module behind", p=0.2)
    x, _, gradients = update(model, b=4)
    alone = bare(spear.observe(model, gradients))
    unsaid = spear.invert(alone)
    assert (unsaid.outcome, unsaid.cause) == (Outcome.APPROXIMATE, Cause.DROPOUT)
    assert "dropout=" in unsaid.reason
    assert worst_error(unsaid.inputs, x) < 1e-4
    told = spear.LayerUpdate(
        weight=alone.weight,
        bias=alone.bias,
        weight_grad=alone.weight_grad,
        bias_grad=alone.bias_grad,
        dropout=0.2,
    )
    assert spear.invert(told).proof is Proof.PATTERN


def test_too_few_rows_that_are_on_prove_nothing():
    """Two classes leave a replay one dimension, and a zero says nothing of its neuron's sign."""
    model = dropping("module behind", p=0.8, outputs=2)
    _, _, gradients = update(model, b=12, outputs=2)
    result = spear.invert(spear.observe(model, gradients))
    assert not bool(result.certified.any())
    assert result.outcome is not Outcome.EXACT


def test_a_mix_of_two_samples_is_not_certified_for_its_zeros():
    """With dropout a mix has many zeros, and none contradicts it: the replay must."""
    model = dropping("module behind")
    x, _, gradients = update(model, b=4)
    factors = factorise(spear.observe(model, gradients))
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(x.double() @ R.T)
    Q[:, 0] += 0.5 * Q[:, 1]
    vectors, side = unit(Q, 0), factors.outputs
    zeros = (side.basis @ vectors).abs() <= side.zero
    directions = Directions(side, vectors, zeros, torch.full((4,), 2))
    chosen = _Matching(factors, directions).selection(list(range(4)))
    judged = certify(factors, chosen)
    wrong = torch.cdist(Recovered(factors, chosen).X, x.double()).amin(1) > 1e-3
    assert bool(wrong.any())
    assert not bool((judged.certified & wrong).any())


def test_dropout_farther_behind_leaves_the_pattern_as_proof():
    torch.manual_seed(0)
    deep = nn.Sequential(
        *(nn.Linear(N, M), nn.ReLU(), nn.Linear(M, M), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(M, 10),
    ).train()
    x, _, gradients = update(deep)
    assert isinstance(network_after(deep, "0"), Declined)
    result = spear.invert(spear.observe(deep, gradients))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    assert worst_error(result.inputs, x) < 1e-4
    assert any("dropout is active farther behind" in words for words in result.details)


def test_several_steps_have_several_masks():
    model = dropping("module behind", p=0.3)
    x, y = gaussian(4, N), labels(4)
    local = copy.deepcopy(model)
    optimiser = torch.optim.SGD(local.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(local(x), y).backward()
        optimiser.step()
    result = spear.invert(spear.observe(model, after=local.state_dict(), lr=0.01, epochs=3))
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.DROPOUT)
    assert worst_error(result.inputs, x) < 1e-3
