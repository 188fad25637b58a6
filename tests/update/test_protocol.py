"""Protocol: how an update came about."""

import math
import pickle

import pytest
import torch

from spear import InvalidOption, Protocol


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            {"sends": "delta"},
            "expected sends to be one of gradient, weights, difference, got 'delta'",
        ),
        ({"samples": 0}, "expected samples to be a whole number >= 1, got 0"),
        ({"samples": True}, "expected samples to be a whole number"),
        ({"lr": 0.1}, "lr belongs to local training"),
        ({"sends": "weights", "lr": -1.0}, "expected lr > 0, got -1.0"),
        ({"sends": "weights", "lr": [0.1, math.nan]}, "expected lr > 0"),
        (
            {"sends": "weights", "lr": [0.1, 0.2], "epochs": 3},
            "one lr for each step or epoch, got 2",
        ),
        ({"sends": "weights", "lr": [0.1, 0.2]}, "got 2 for an unknown number"),
        ({"sends": "weights", "epochs": 2, "local_steps": 2}, "local_steps or epochs"),
        ({"sends": "weights", "nesterov": True}, "nesterov needs momentum > 0"),
        ({"sends": "weights", "momentum": 1.0}, "expected 0 <= momentum < 1"),
        ({"sends": "weights", "weight_decay": -1}, "expected weight_decay >= 0"),
        ({"clip": 0}, "expected clip > 0"),
        ({"clipping": "flat"}, "expected clipping to be one of per-sample, per-layer, global"),
        ({"sigma": 1.0, "clip": 1.0, "epsilon": 1.0, "samples": 3}, "noise in one unit"),
        ({"noise_multiplier": 1.0}, "give clip .C., or the noise as sigma"),
        ({"precision": "quantise-8"}, "2-bit to 16-bit, got 'quantise-8'"),
        ({"precision": "1-bit"}, "2-bit to 16-bit"),
        ({"pruned": 1.0}, "expected 0 <= pruned < 1"),
        ({"reduction": "none"}, "expected reduction to be one of mean, sum"),
        ({"class_weights": [1.0, -1.0]}, "expected class_weights > 0"),
        ({"optimizer": torch.optim.Adam}, "expected optimizer to be a name such as sgd"),
    ],
)
def test_what_cannot_be_is_told(told, words):
    with pytest.raises(InvalidOption, match=words):
        Protocol(**told)


def test_the_command_line_reads_its_own_names():
    with pytest.raises(InvalidOption) as caught:
        Protocol(sends="weights", local_batch_size=0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == "expected local_batch_size to be a whole number >= 1, got 0"
    shown = error.worded(lambda name: f"--{name.replace('_', '-')}")
    assert shown == "expected --local-batch-size to be a whole number >= 1, got 0"


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        ({}, 1),
        ({"sends": "weights"}, None),
        ({"sends": "weights", "epochs": 1}, 1),
        ({"sends": "weights", "local_steps": 4}, 4),
        ({"sends": "weights", "epochs": 2, "local_batch_size": 8}, None),
        ({"sends": "weights", "epochs": 2, "local_batch_size": 8, "samples": 8}, 2),
        ({"sends": "difference", "epochs": 2, "local_batch_size": 8, "samples": 20}, 6),
    ],
)
def test_steps_are_counted_as_far_as_they_are_known(told, steps):
    protocol = Protocol(**told)
    assert protocol.steps == steps
    assert protocol.one_step == (steps == 1)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("lr", [0.1, (0.1, 0.02, 0.3)])
def test_what_weight_decay_leaves_is_what_torch_leaves(nesterov, lr):
    protocol = Protocol(
        sends="weights", lr=lr, epochs=3, momentum=0.9, nesterov=nesterov, weight_decay=0.2
    )
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimiser = protocol.optimiser([weight])
    for rate in protocol.rates(3):
        optimiser.param_groups[0]["lr"] = rate
        weight.grad = torch.zeros_like(weight)
        optimiser.step()
    kept = protocol.weight_decay_factor(3, weight)
    assert kept == pytest.approx(float(weight.detach()), abs=1e-12)


def test_weight_decay_may_spare_biases():
    protocol = Protocol(sends="weights", lr=0.1, weight_decay=0.2, decays_biases=False)
    weight, bias = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (2,)))
    optimiser = protocol.optimiser([weight, bias])
    for p in (weight, bias):
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for p, kept in ((weight, 0.98), (bias, 1.0)):
        assert torch.allclose(p, torch.full_like(p, kept))
        assert protocol.weight_decay_factor(1, p) == pytest.approx(kept)
    with pytest.raises(InvalidOption, match="give weight_decay > 0"):
        Protocol(sends="weights", decays_biases=False)


def test_words_say_what_differs():
    base = Protocol(samples=8)
    other = Protocol(samples=8, clip=1.0, sigma=0.1, precision="8-bit", pruned=0.5, clients=3)
    assert base.words() == "b = 8"
    assert other.words(base) == "C = 1, σ = 0.1, 8-bit, 50% pruned, 3 clients aggregated"
    assert base.words(other) == "not clipped, no noise, float32, not pruned, 1 clients aggregated"
    assert other.undefended == Protocol(samples=8, clients=3)
    assert other.defended
    assert not base.defended
