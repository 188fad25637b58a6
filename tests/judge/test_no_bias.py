"""Layers without a bias: directions from the gradient, scales from the model where it fixes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spear
from spear import Outcome, Proof
from spear.errors import InvalidUpdate
from spear.federated import fedsgd
from spear.judge import Cause
from support.planted import gaussian, labels, worst_error

N, M = 40, 150


def unbiased(outputs=10, *, last=True, hidden=False):
    torch.manual_seed(0)
    inner = [nn.Linear(M, M), nn.ReLU()] if hidden else []
    first = nn.Linear(N, M, bias=False)
    return nn.Sequential(first, nn.ReLU(), *inner, nn.Linear(M, outputs, bias=last))


@pytest.mark.parametrize("model", [unbiased(), unbiased(last=False), unbiased(hidden=True)])
def test_softmax_fixes_the_scale(model):
    x, y = gaussian(8, N), labels(8)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert worst_error(result.inputs, x) < 1e-4


def parallel(found, truth):
    cosines = nn.functional.normalize(found.double()) @ nn.functional.normalize(truth.double()).T
    return bool((cosines.amax(0) > 1 - 1e-8).all())


def test_two_classes_do_not_and_samples_come_back_up_to_a_factor():
    model = unbiased(2)
    x, y = gaussian(8, N), labels(8, 2)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)))
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.SCALE)
    assert "up to a factor" in result.reason
    assert parallel(result.inputs, x)  # and upright


def test_a_layer_by_itself():
    model = unbiased()
    x, y = gaussian(8, N), labels(8)
    gradients = fedsgd(model, x, y)
    view = spear.LayerUpdate(
        weight=model[0].weight, bias=None, weight_grad=gradients["0.weight"], bias_grad=None
    )
    assert not view.has_bias
    result = spear.invert(view)
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.SCALE)
    assert parallel(result.inputs, x)
    with pytest.raises(InvalidUpdate, match="leave out both"):
        spear.LayerUpdate(
            weight=view.weight, bias=None, weight_grad=view.weight_grad, bias_grad=view.bias_grad
        )


def test_darker_copies_are_not_called_one_sample():
    """Nothing shows them without a bias gradient: x and x / 2 leave one trace between them."""
    model = unbiased()
    x, y = gaussian(6, N), labels(6)
    x[1], y[1] = x[0] / 2, y[0]
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)))
    wrong = torch.cdist(result.inputs.double(), x.double()).amin(1) > 1e-3
    assert not bool((result.certified & wrong).any())
    assert result.outcome is not Outcome.EXACT
