"""Models that torch.fx cannot trace: watched on a made-up input, and run from a layer on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear import Outcome, Proof
from spear.errors import Declined
from spear.federated import fedsgd
from spear.update import Watched, inspect_layers, layer_inputs, network_after, trace
from support.planted import gaussian, labels, module, worst_error

N, M = 30, 120


def layers():
    torch.manual_seed(0)
    return {"first": nn.Linear(N, M), "second": nn.Linear(M, 50), "last": nn.Linear(50, 10)}


def asks_for_values(self, x):
    x = x.view(x.size(0), -1)
    h = self.first(x)
    if float(h.detach().mean()) > 1e9:
        h = -h
    return self.last(F.relu_(self.second(torch.relu(h))))


def calls_forward(self, x):
    if x.ndim == 4:
        x = x.flatten(1)
    return self.last.forward(torch.relu(self.second.forward(F.relu(self.first.forward(x)))))


def loops(self, x):
    for name in ("first", "second"):
        x = getattr(self, name)(x).relu_()
        if x.max() < 0:
            break
    return self.last(x)


@pytest.mark.parametrize("forward", [asks_for_values, calls_forward, loops])
def test_what_cannot_be_traced_is_watched_and_proved(forward):
    model = module(forward, **layers())
    assert isinstance(trace(model), Watched)
    assert [(r.name, r.relu) for r in inspect_layers(model)] == [
        ("first", "after"),
        ("second", "both"),
        ("last", "before"),
    ]
    x, y = gaussian(5, N), labels(5)
    view = spear.observe(model, fedsgd(model, x, y))
    assert view.reads_data
    assert "watched on one made-up input" in view.choice
    result = spear.invert(view)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert worst_error(result.inputs, x) < 1e-4


@pytest.mark.parametrize("forward", [asks_for_values, calls_forward, loops])
@pytest.mark.parametrize("layer", ["first", "second"])
def test_the_network_behind_a_watched_layer_is_the_models(forward, layer):
    model = module(forward, **layers())
    behind, x = network_after(model, layer), gaussian(4, N)
    read, expected = layer_inputs(model, layer, x)
    z = model.get_submodule(layer)(read)
    assert torch.allclose(behind(z), expected)
    own = {"first": {"second", "last"}, "second": {"last"}}[layer]
    assert {name.split(".")[0] for name, _ in behind.named_parameters()} == own
    doubled = copy.deepcopy(behind).double()
    assert doubled(z.double()).dtype == torch.float64
    assert next(model.parameters()).dtype == torch.float32


def test_a_bypass_is_found_without_a_trace():
    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h) + x.mean() if h.sum() < 1e9 else h

    model = module(forward, first=nn.Linear(N, M), last=nn.Linear(M, 10))
    assert "bypasses" in network_after(model, "first").reason


def test_watching_leaves_the_model_and_the_random_state_as_they_were():
    def forward(self, x):
        h = self.norm(F.dropout(torch.relu(self.first(x)), 0.5, self.training))
        return self.last(h) if h.sum() < 1e9 else h

    linear = {"first": nn.Linear(N, M), "norm": nn.BatchNorm1d(M), "last": nn.Linear(M, 10)}
    model = module(forward, **linear).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert isinstance(trace(model), Watched)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_encoder_with_a_relu_is_looked_into():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(5 * 16, 10))
    reports = {r.name: r for r in inspect_layers(model, trace(model, (5, 16)))}
    assert reports["0.linear1"].relu == "after"
    assert reports["0.linear2"].relu == "before"
    x, y = torch.randn(2, 5, 16), labels(2)
    view = spear.observe(model, fedsgd(model, x, y), layer="0.linear1", input_shape=(5, 16))
    read, _ = layer_inputs(model, "0.linear1", x)
    result = spear.invert(view)
    assert result.batch_size == 10
    assert worst_error(result.inputs, read.detach().flatten(0, 1)) < 1e-3


def test_a_shape_that_cannot_be_guessed_is_asked_for():
    def forward(self, x):
        return self.last(torch.relu(self.first(x[:, 20]))) if x.sum() < 1e9 else x

    model = module(forward, first=nn.Linear(N, M), last=nn.Linear(M, 10))
    unknown = trace(model)
    assert isinstance(unknown, Declined)
    assert "input_shape=" in unknown.reason
    assert isinstance(trace(model, (21, N)), Watched)


def test_inputs_normalised_inside_the_model_are_called_activations():
    def forward(self, x):
        return self.last(torch.relu(self.first((x - 0.5) / 0.25)))

    model = module(forward, first=nn.Linear(N, M), last=nn.Linear(M, 10))
    x, y = torch.rand(4, N, generator=torch.Generator().manual_seed(0)), labels(4)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)))
    assert result.outcome is Outcome.EXACT
    assert not result.reads_data
    assert worst_error(result.inputs, (x - 0.5) / 0.25) < 1e-4
