"""Small clients that do what those of public code bases do (docs/real-clients.md), one step each.

What they send is given to `observe` as it is.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear import Outcome
from spear.check import preflight
from spear.check.conclusion import Exposure
from support.planted import gaussian, labels, module, worst_error

N, M, B, LR = 40, 120, 6, 0.1


def linear(*sizes, **more):
    torch.manual_seed(0)
    made = {f"fc{i + 1}": nn.Linear(*pair) for i, pair in enumerate(pairwise(sizes))}
    return {**made, **more}


def dropped_logits(self, x):
    return self.fc2(torch.relu(self.drop(self.fc1(x.view(-1, N)))))


def dropped_softmax(self, x):
    return dropped_logits(self, x).softmax(1)


def asks_for_dimensions(self, x):
    if x.ndim == 4:
        x = x.view(x.size(0), -1)
    return self.fc2(nn.ReLU()(self.fc1(x)))


def calls_forward(self, x):
    for layer in (self.fc1, self.fc2):
        x = F.dropout(F.relu(layer.forward(x)), p=0.1, training=self.training)
    return self.fc3(x)


def three_outputs(self, x):
    h = self.fc2(F.relu(self.fc1(x)))
    return h, F.normalize(h), self.fc3(F.relu(h))


def inplace():
    layers = linear(N, M, M, 10)
    return nn.Sequential(
        *(nn.Flatten(), layers["fc1"], nn.ReLU(True), layers["fc2"], nn.ReLU(inplace=True)),
        layers["fc3"],
    )


def nll(outputs, targets):
    return F.nll_loss(outputs, targets)


def last_of_three(outputs, targets):
    return F.cross_entropy(outputs[2], targets)


MODELS = {
    "Linear, Dropout, ReLU, softmax and NLL": (
        lambda: module(dropped_softmax, **linear(N, M, 10, drop=nn.Dropout(0.5))),
        nll,
        None,
    ),
    "Linear, Dropout, ReLU": (
        lambda: module(dropped_logits, **linear(N, M, 10, drop=nn.Dropout())),
        F.cross_entropy,
        None,
    ),
    "ReLU in place": (inplace, F.cross_entropy, None),
    "asks for dimensions, makes its ReLU": (
        lambda: module(asks_for_dimensions, **linear(N, M, 10)),
        F.cross_entropy,
        None,
    ),
    "three outputs": (
        lambda: module(three_outputs, **linear(N, M, M, 10)),
        last_of_three,
        last_of_three,
    ),
    "softmax and cross-entropy": (
        lambda: nn.Sequential(*linear(N, M).values(), nn.ReLU(), nn.Linear(M, 10), nn.Softmax(1)),
        F.cross_entropy,
        None,
    ),
    "one probability": (
        lambda: nn.Sequential(*linear(N, M).values(), nn.ReLU(), nn.Linear(M, 1), nn.Sigmoid()),
        lambda outputs, targets: F.binary_cross_entropy(outputs[:, 0], (targets % 2).float()),
        None,
    ),
}


def step(model, loss):
    """A client that takes one step, with the inputs it had."""
    x, y, local = gaussian(B, N), labels(B), copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(local.parameters(), lr=LR)
    torch.manual_seed(0)
    loss(local(x), y).backward()
    optimiser.step()
    return x, y, local


@pytest.mark.parametrize("name", MODELS)
def test_models_of_public_code_bases(name):
    make, loss, told = MODELS[name]
    model = make().train()
    x, _, local = step(model, loss)
    view = spear.observe(model, after=local.state_dict(), lr=LR)
    result = spear.invert(view, loss=told)
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, x) < 1e-3


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


FORMS = {
    "a state dict": lambda local: local.state_dict(),
    "the module": lambda local: local,
    "(name, tensor) pairs that are made on the way": lambda local: (
        (name, p.detach().clone()) for name, p in local.named_parameters()
    ),
    "arrays in the order of the state dict": lambda local: [
        v.numpy() for v in local.state_dict().values()
    ],
    "a list with one flat vector": lambda local: [flat(local.parameters())],
    "a number and a flat vector": lambda local: (B, flat(local.parameters()).numpy()),
    "a number and a state dict": lambda local: (B, local.state_dict()),
    "arrays, a number and metrics": lambda local: (
        [v.numpy() for v in local.state_dict().values()],
        B,
        {"loss": 0.5},
    ),
    "names of DataParallel": lambda local: nn.DataParallel(local).state_dict(),
    "names of Opacus": lambda local: OrderedDict(
        (f"_module.{name}", v) for name, v in local.state_dict().items()
    ),
    "a checkpoint": lambda local: {"state_dict": local.state_dict(), "epoch": 3},
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_public_code_bases(name):
    model = inplace()
    x, _, local = step(model, F.cross_entropy)
    result = spear.invert(spear.observe(model, after=FORMS[name](local), lr=LR))
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, x) < 1e-3


def test_old_minus_new_is_read_as_what_it_is():
    model = inplace()
    x, _, local = step(model, F.cross_entropy)
    old = dict(model.named_parameters())
    difference = {name: (old[name] - p).detach() for name, p in local.named_parameters()}
    result = spear.invert(spear.observe(model, difference=difference, lr=LR))
    assert result.outcome is Outcome.EXACT
    assert "opposite sign" in result.mistake
    assert worst_error(result.inputs, x) < 1e-3


def test_deeper_dropout_and_layers_called_by_hand():
    model = module(calls_forward, **linear(N, M, M, 10)).train()
    x, _, local = step(model, F.cross_entropy)
    view = spear.observe(model, after=local.state_dict(), lr=LR)
    result = spear.invert(view)
    assert view.layer == "fc1"
    assert worst_error(result.inputs, x) < 1e-3
    assert bool(result.certified.all())  # by its pattern: the second mask is not known
    assert any("dropout is active farther behind" in words for words in result.details)


@pytest.mark.parametrize("name", MODELS)
def test_the_preflight_predicts_it(name):
    make, _, told = MODELS[name]
    seen = preflight(make().train(), samples=B, data="numbers", sends="weights", lr=LR)
    expected = Exposure.EXPOSED if told is None else Exposure.PARTLY
    assert seen.verdict in (Exposure.EXPOSED, expected), seen.headline


def pictures(*first, side, channels, drop=0.0):
    """A small convolutional network for pictures of some size, behind what it does to them first."""
    torch.manual_seed(0)
    pixels = (side - 5) // 4 + 1
    return nn.Sequential(
        *(*first, nn.Conv2d(channels, 4, 5, stride=4), nn.ReLU(), nn.Dropout(drop), nn.Flatten()),
        *(nn.Linear(4 * pixels**2, M), nn.ReLU(), nn.Linear(M, 10)),
    )


PICTURES = {
    "channels last": (lambda self, x: x.permute(0, 3, 1, 2), 32, 3, (32, 32, 3)),
    "no channels": (lambda self, x: x.unsqueeze(1), 28, 1, (28, 28)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_preflight_finds_the_shape_of_pictures(name):
    """Models that move or add the channels themselves; dropout before the layer draws one mask."""
    forward, side, channels, shape = PICTURES[name]
    model = pictures(module(forward), side=side, channels=channels, drop=0.25).train()
    seen = preflight(model, samples=B, data="drawings", sends="weights", lr=LR, local_steps=1)
    assert f"all {B} made-up samples came back exactly" in seen.headline
    assumed = next(remark.words for remark in seen.remarks if remark.subject == "assumed")
    assert " x ".join(map(str, shape)) in assumed
    x, y, local = gaussian(B, math.prod(shape)).view(B, *shape), labels(B), copy.deepcopy(model)
    F.cross_entropy(local(x), y).backward()
    torch.optim.SGD(local.parameters(), lr=LR).step()
    result = spear.invert(spear.observe(model, after=local.state_dict(), lr=LR, epochs=1))
    assert len(result.inputs) == B


def test_what_comes_back_is_compared_with_what_the_layer_read():
    """Mini-batches are shuffled, dropout draws a mask in every step, and convolutions are trained."""
    model = pictures(side=32, channels=3, drop=0.25).train()
    told = {"samples": B, "lr": LR, "epochs": 1, "local_batch_size": 3}
    assert (
        f"all {B} made-up samples came back exactly"
        in preflight(model, data="photos", **told).headline
    )


def test_one_step_of_the_whole_batch_is_rehearsed_as_one_step():
    """A batch size of at least the samples: the attack, told both, proves what one step proves."""
    model = MODELS["Linear, Dropout, ReLU"][0]().train()
    told = {"samples": B, "lr": LR, "epochs": 1, "local_batch_size": B + 4}
    seen = preflight(model, data="numbers", **told)
    assert any(f"exactly, {B} of them proved" in remark.words for remark in seen.remarks)
    steps = preflight(model, data="numbers", **{**told, "local_batch_size": 2})
    assert any("0 of them proved" in remark.words for remark in steps.remarks)


def test_a_rehearsal_that_ran_out_of_time_says_so():
    seen = preflight(inplace(), samples=B, data="numbers", max_seconds=1e-3)
    assert seen.verdict is Exposure.UNKNOWN
    assert "in the time it had" in seen.headline
    assert any(told.options.get("max_seconds") == 1e-2 for told in seen.what_to_do)
