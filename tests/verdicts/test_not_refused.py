"""What is right must not be refused: losses, protocols and networks that people use, told or not."""

import copy

import pytest
import torch
from torch import nn

import spear
from spear import Cause, Outcome, Proof
from spear.federated import fedsgd
from support.judgements import assert_certified_are_right, judged
from support.planted import client, gaussian, labels, seeded, worst_error

cross_entropy = nn.functional.cross_entropy
TOLD = pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])


def assert_exact(result, x, proof=Proof.REPLAY):
    assert result.outcome is Outcome.EXACT, result.reason
    assert (result.proof, result.cause) == (proof, Cause.PROVED)
    assert worst_error(result.inputs, x) < 1e-3


# Losses.


@TOLD
def test_label_smoothing(told):
    model, x, y = client()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    result = judged(model, fedsgd(model, x, y, loss), loss=loss if told else None)
    assert_exact(result, x)
    assert (result.labels is not None) is told


@TOLD
def test_several_labels_at_once(told):
    model, x, _ = client()
    targets = (torch.rand(5, 10, generator=seeded(0)) < 0.3).float()
    loss = nn.BCEWithLogitsLoss()
    assert_exact(judged(model, fedsgd(model, x, targets, loss), loss=loss if told else None), x)


@pytest.mark.parametrize("n", [60, 1000])
def test_distillation(n):
    """Free targets do not show a sample's weight: only the number of samples settles it."""
    model, x, _ = client(n=n)
    teacher = (3 * gaussian(5, 10, 100)).softmax(1)
    gradients = fedsgd(model, x, teacher, cross_entropy)
    result = judged(model, gradients)
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.MERGED)
    assert worst_error(result.inputs, x) < 1e-4
    assert_exact(spear.invert(spear.observe(model, gradients, samples=5)), x)


@pytest.mark.parametrize("cut", [True, False], ids=["cutmix", "mixup"])
def test_mixed_samples_are_what_the_layer_saw(cut):
    model, x, y = client()
    other, share = torch.arange(5).roll(1), 0.7
    patched, blended = torch.cat([x[:, :42], x[other, 42:]], 1), share * x + (1 - share) * x[other]
    x = patched if cut else blended

    def loss(outputs, targets):
        mixed = cross_entropy(outputs, targets[other])
        return share * cross_entropy(outputs, targets) + (1 - share) * mixed

    assert_exact(judged(model, fedsgd(model, x, y, loss)), x)


@TOLD
@pytest.mark.parametrize(("power", "strength"), [(1, 1e-4), (2, 1e-2)])
def test_a_penalty_in_the_loss(told, power, strength):
    model, x, y = client()
    weights = [p for p in model.parameters() if p.ndim > 1]

    def loss(outputs, targets):
        penalty = sum(p.abs().pow(power).sum() for p in weights)
        return cross_entropy(outputs, targets) + strength * penalty

    result = judged(model, fedsgd(model, x, y, loss), loss=loss if told else None)
    assert_exact(result, x)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_that_were_told(reduction):
    model, x, y = client(b=7)
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10), reduction=reduction)
    result = judged(model, fedsgd(model, x, y, loss), loss=loss)
    assert_exact(result, x)
    assert sorted(result.labels.tolist()) == sorted(y.tolist())
    told = spear.Protocol(class_weights=loss.weight, reduction=reduction)
    same = spear.invert(spear.observe(model, fedsgd(model, x, y, loss), protocol=told))
    assert (same.outcome, same.reason) == (result.outcome, result.reason)


# Batches.


def test_uneven_micro_batches():
    model, x, y = client(b=7)
    first, second = fedsgd(model, x[:4], y[:4]), fedsgd(model, x[4:], y[4:])
    assert_exact(judged(model, {k: (first[k] + second[k]) / 2 for k in first}), x)


@pytest.mark.parametrize("mean", [True, False], ids=["mean of means", "by size"])
def test_clients_of_different_size(mean):
    model, x, y = client(b=8)
    parts = [slice(0, 2), slice(2, 5), slice(5, 8)]
    shares = [1 / 3] * 3 if mean else [2 / 8, 3 / 8, 3 / 8]
    sent = [fedsgd(model, x[part], y[part]) for part in parts]
    total = {k: sum(w * g[k] for w, g in zip(shares, sent, strict=True)) for k in sent[0]}
    assert_exact(judged(model, total), x)


@pytest.mark.parametrize("factor", [3.7, 1e-3])
def test_a_factor_that_nobody_told(factor):
    model, x, y = client()
    result = judged(model, {k: factor * g for k, g in fedsgd(model, x, y).items()})
    assert_exact(result, x)
    assert "more samples" not in result.explanation


@pytest.mark.parametrize("kind", ["zero", "a sum", "a multiple"])
def test_a_sample_without_a_direction_of_its_own_spoils_no_other(kind):
    model, x, y = client(b=6, width=200)
    x[2] = {"zero": 0 * x[0], "a sum": x[0] + x[1], "a multiple": 0.5 * x[0]}[kind]
    result = judged(model, fedsgd(model, x, y))
    assert result.outcome is Outcome.PARTIAL
    assert_certified_are_right(result, x)
    assert int(result.certified.sum()) >= (5 if kind == "zero" else 3)
    assert ("inputs are all zero" in result.reason) is (kind == "zero")


def test_as_many_samples_as_inputs():
    model, x, y = client(b=10, n=10, width=200)
    assert_exact(judged(model, fedsgd(model, x, y)), x)


# Networks.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "frozen"])
def test_neurons_that_are_tied_or_frozen(tied):
    model, x, y = client(width=160)
    if tied:
        with torch.no_grad():
            for p in (model[0].weight, model[0].bias):
                p[:20] = p[20:40]
    gradients = fedsgd(model, x, y)
    for name in () if tied else ("0.weight", "0.bias"):
        gradients[name][:30] = 0
    assert_exact(judged(model, gradients), x)


@pytest.mark.parametrize("stale", [1e-4, 1e-2])
def test_weights_that_are_slightly_stale(stale):
    """No replay can fit, and that is no evidence against samples that match every sign."""
    model, x, y = client()
    newer = copy.deepcopy(model)
    with torch.no_grad():
        for p in newer.parameters():
            p.add_(torch.randn(p.shape, generator=seeded(0)) * stale * p.abs().mean())
    result = judged(model, fedsgd(newer, x, y))
    assert result.outcome is Outcome.APPROXIMATE
    assert "likely exact" in result.reason
    assert worst_error(result.inputs, x) < 1e-3


@pytest.mark.parametrize("part", ["0.weight", "0.bias", "2.weight"])
def test_half_precision_beside_single(part):
    """One tensor was sent in float16: what is right is not refused, and nothing wrong is exact."""
    model, x, y = client()
    gradients = fedsgd(model, x, y)
    gradients[part] = gradients[part].half()
    result = judged(model, gradients)
    assert_certified_are_right(result, x)
    assert len(result.inputs) == 5
    assert worst_error(result.inputs, x) < 0.05
    if part == "2.weight":
        assert_exact(result, x)
    else:
        assert result.outcome in (Outcome.EXACT, Outcome.PARTIAL, Outcome.APPROXIMATE)


@pytest.mark.parametrize("outputs", [1, 2, 10])
def test_the_number_of_samples_replaces_assumptions(outputs):
    model, x, _ = client(outputs=outputs)
    y = labels(5, max(2, outputs))
    targets = y[:, None].float() if outputs == 1 else y
    loss = nn.BCEWithLogitsLoss() if outputs == 1 else cross_entropy
    result = judged(model, fedsgd(model, x, targets, loss), samples=5)
    assert_exact(result, x)
    assert result.assumptions == () or outputs < 10
