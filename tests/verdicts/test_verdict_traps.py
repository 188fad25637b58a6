"""Honest updates that deceive: whatever the verdict, nothing wrong may be called exact.

Every trap is told truthfully, and judged with the model that was observed. What is certified must be
in the batch, and EXACT must be all of it. Where a weaker verdict has one right cause, it is asked for.
"""

from functools import partial

import pytest
import torch
from torch import nn

import spear
from spear import Cause, Outcome, data
from spear.federated import fedavg, fedsgd
from spear.judge.rivals import NOT_ALL_MERGED, NOT_SCALED
from support.judgements import assert_certified_are_right, judged
from support.planted import clipped_sum, gaussian, labels, net, seeded, weighed, worst_error

cross_entropy = nn.functional.cross_entropy
SEEDS = pytest.mark.parametrize("seed", range(2))


def binary(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())


def loss_of(outputs):
    """Of two classes: one output, or two."""
    return binary if outputs == 1 else cross_entropy


def assert_nothing_unknown_is_exact(result, x):
    """The same, but a sample may be missing that equals another to within the claimed error."""
    distance = torch.cdist(result.inputs[result.certified], x, p=float("inf"))
    tolerance = 1e-3 * float(x.max() - x.min())
    assert bool((distance.min(1).values <= tolerance).all())
    if result.outcome is Outcome.EXACT:
        assert bool((distance.min(0).values <= tolerance).all())


# A. Samples in one cell: one output or two classes, one trace.


def adult_raw(people, b, seed):
    """People of UCI ADULT with their numbers as they are, ages beside census weights."""
    chosen = torch.randperm(len(people), generator=seeded(seed))[:b].tolist()
    x, y = people.batch(chosen)
    at = 0
    for i, column in enumerate(people.columns):
        if not column.discrete:
            x[:, at] = people.values[chosen, i].float()
        at += column.width
    return x, y


@pytest.fixture(scope="module")
def people(data_root):
    return partial(adult_raw, data.adult(data_root))


@pytest.mark.parametrize(("outputs", "seed"), [(1, 0), (2, 1)])
def test_raw_numbers_of_adult_merge_into_one_trace(people, outputs, seed):
    x, y = people(8, seed)
    model = net(x.shape[1], outputs, width=100, seed=seed)
    result = judged(model, fedsgd(model, x, y, loss_of(outputs)))
    assert result.outcome is not Outcome.EXACT
    assert_certified_are_right(result, x)


@pytest.mark.parametrize(("b", "outputs", "seed"), [(2, 1, 0), (2, 2, 1), (8, 1, 1), (8, 2, 0)])
def test_features_far_from_zero_merge(b, outputs, seed):
    """300 plus or minus one: the sign of every neuron is that of its mean."""
    x, y = 300 + gaussian(b, 40, seed), labels(b, 2, seed)
    model = net(40, outputs, seed=seed)
    result = judged(model, fedsgd(model, x, y, loss_of(outputs)))
    assert not bool(result.certified.any())
    assert result.outcome is not Outcome.EXACT


@pytest.mark.parametrize(("b", "seed"), [(2, 0), (8, 1)])
def test_a_column_in_the_millions_decides_every_sign(b, seed):
    x = gaussian(b, 40, seed)
    x[:, 0] = 1e6 * (1 + torch.rand(b, generator=seeded(seed)))
    model = net(40, 1, seed=seed)
    result = judged(model, fedsgd(model, x, labels(b, 2, seed), binary))
    assert result.outcome is not Outcome.EXACT
    assert_certified_are_right(result, x)


@pytest.mark.parametrize(("count", "outputs", "seed"), [(1, 1, 0), (1, 2, 1), (4, 1, 1), (4, 2, 0)])
def test_a_darker_copy_without_biases_is_in_the_same_cell(count, outputs, seed):
    x, y = gaussian(count, 40, seed), labels(count, 2, seed)
    x, y = torch.cat([x, 0.6 * x]), torch.cat([y, y])
    model = net(40, outputs, seed=seed, zero=True)
    result = judged(model, fedsgd(model, x, y, loss_of(outputs)))
    assert not bool(result.certified.any())


@SEEDS
def test_a_copy_of_every_sample_rests_on_an_assumption_that_is_listed(seed):
    """Open question: EXACT here for 146 of 480 updates, all means; told of eight samples, never."""
    x, y = gaussian(4, 60, seed), labels(4, 2, seed)
    x, y = torch.cat([x, 0.9 * x]), torch.cat([y, y])
    model = net(60, 1, seed=seed, zero=True)
    gradients = fedsgd(model, x, y, binary)
    untold = judged(model, gradients)
    assert not bool(untold.certified.any()) or NOT_ALL_MERGED in untold.assumptions
    told = judged(model, gradients, samples=8)
    assert told.outcome is not Outcome.EXACT


@pytest.mark.parametrize(("b", "seed"), [(2, 0), (6, 1)])
def test_tiny_features_leave_the_cell_to_the_biases(b, seed):
    """Ten classes, all samples of one: near-duplicates, as far as the outputs can tell."""
    x = 1e-5 * gaussian(b, 40, seed)
    model = net(40, 10, seed=seed)
    result = judged(model, fedsgd(model, x, torch.full((b,), 3)))
    assert_certified_are_right(result, x)
    assert result.outcome is not Outcome.EXACT


@SEEDS
def test_one_trace_of_one_output_is_one_sample_only_if_that_was_told(seed):
    """The update cannot tell one person from the mean of several; `samples=` can."""
    x, y = gaussian(1, 40, seed), torch.ones(1)
    model = net(40, 1, seed=seed)
    gradients = fedsgd(model, x, y, binary)
    alone = judged(model, gradients)
    assert (alone.outcome, alone.cause) == (Outcome.APPROXIMATE, Cause.MERGED)
    assert "samples=" in alone.reason
    told = judged(model, gradients, samples=1)
    assert told.outcome is Outcome.EXACT
    assert worst_error(told.inputs, x) < 1e-4


# B. Scales that nothing fixes.


def with_biases_times(factor, gradients):
    return {k: factor * g if k.endswith("bias") else g for k, g in gradients.items()}


@pytest.mark.parametrize("factor", [2.0, 1.1, 1.002])
@pytest.mark.parametrize(("outputs", "depth", "seed"), [(1, 3, 1), (10, 2, 0)])
def test_a_learning_rate_of_their_own_for_biases_that_are_zero(factor, outputs, depth, seed):
    x, y = gaussian(5, 60, seed), labels(5, max(2, outputs), seed)
    model = net(60, outputs, depth=depth, seed=seed, zero=True)
    gradients = with_biases_times(factor, fedsgd(model, x, y, loss_of(outputs)))
    assert_certified_are_right(judged(model, gradients), x)


@pytest.mark.parametrize(("factor", "seed"), [(2.0, 0), (1.1, 1), (1.002, 0)])
def test_the_same_under_squared_error(factor, seed):
    """Free targets follow any scale: where the network is homogeneous nothing may be certified."""
    x, targets = gaussian(5, 60, seed), gaussian(5, 10, seed + 100)
    model = net(60, 10, seed=seed, zero=True)
    gradients = with_biases_times(factor, fedsgd(model, x, targets, nn.MSELoss()))
    for loss in (None, nn.MSELoss()):
        result = judged(model, gradients, loss=loss)
        assert not bool(result.certified.any())
        assert_certified_are_right(result, x)


# C. Uneven weights, with a near-duplicate among the samples.


def with_darker(share):
    x, y = gaussian(5, 60), labels(5)
    return torch.cat([x, (1 - share) * x[:1]]), torch.cat([y, y[:1]])


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("weighed", ["evenly", "by class", "by class, untold"])
def test_a_darker_copy(share, weighed):
    x, y = with_darker(share)
    model = net(60, 10)
    weight = None if weighed == "evenly" else torch.linspace(0.5, 2, 10)
    loss = nn.CrossEntropyLoss(weight=weight)
    gradients = fedsgd(model, x, y, loss)
    result = judged(model, gradients, loss=loss if weighed == "by class" else None)
    assert_certified_are_right(result, x)
    if weighed == "evenly" and result.batch_size == 6:
        assert result.outcome is not Outcome.FAILED


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("clipped", [True, False])
def test_a_darker_copy_among_samples_of_any_weight(share, clipped):
    x, y = with_darker(share)
    model = net(60, 10)
    weights = torch.rand(6, generator=seeded(0)) + 0.5
    by_weight = fedsgd(model, x, y, weighed(weights))
    sent = clipped_sum(model, x, y, 0.7) if clipped else by_weight
    assert_nothing_unknown_is_exact(judged(model, sent), x)


@pytest.mark.parametrize("share", [0.003, 0.03])
def test_every_sample_with_a_darker_copy(share):
    """Weights are as even as those of single samples: only the assumption says otherwise."""
    x, y = gaussian(4, 60), labels(4)
    x, y = torch.cat([x, (1 - share) * x]), torch.cat([y, y])
    model = net(60, 10)
    assert_certified_are_right(judged(model, fedsgd(model, x, y), samples=8), x)


# D and G. Two classes, and mixes by cancellation.


@pytest.mark.parametrize("factor", [0.5, 0.8, 2.0])
@pytest.mark.parametrize("zero", [True, False])
def test_two_classes_with_a_copy_of_the_other_label(factor, zero):
    x, y = gaussian(4, 60), labels(4, 2)
    x, y = torch.cat([x, factor * x[:1]]), torch.cat([y, 1 - y[:1]])
    model = net(60, 2, zero=zero)
    assert_certified_are_right(judged(model, fedsgd(model, x, y)), x)


@pytest.mark.parametrize(("b", "width", "seed"), [(6, 60, 0), (10, 100, 1)])
@pytest.mark.parametrize("told", [True, False])
def test_one_output_cancels_where_two_samples_are_on(b, width, told, seed):
    x, y = gaussian(b, 60, seed), labels(b, 2, seed)[:, None].float()
    model, loss = net(60, 1, width=width, seed=seed), nn.BCEWithLogitsLoss()
    result = judged(model, fedsgd(model, x, y, loss), loss=loss if told else None)
    assert_certified_are_right(result, x)


# E. What lies just beyond 60 dB.


@pytest.mark.parametrize("apart", [0.006, 0.024])
@pytest.mark.parametrize("darker", [True, False])
def test_pairs_under_squared_error(apart, darker):
    x, targets = gaussian(5, 60), gaussian(5, 10, 100)
    twin = (1 - apart) * x[:1] if darker else x[:1] + apart * gaussian(1, 60, 200)
    x, targets = torch.cat([x, twin]), torch.cat([targets, targets[:1]])
    model = net(60, 10)
    gradients = fedsgd(model, x, targets, nn.MSELoss())
    assert_certified_are_right(judged(model, gradients, loss=nn.MSELoss()), x)


# A wrong verdict: this fails at 0.01 until the radius within which samples of free targets merge knows
# of a factor that nobody told. `Replay.bent` takes the curvature of a mean over the batch, so an update
# divided by 100 seems to leave 100 times less unexplained, and pairs seem a tenth as far apart.
@pytest.mark.parametrize("factor", [1.0, 0.01])
@pytest.mark.parametrize("apart", [0.012, 0.02])
@pytest.mark.parametrize("numbers", [True, False], ids=["squared", "multi-label"])
def test_pairs_with_free_targets_and_a_factor_that_nobody_told(factor, apart, numbers):
    x, targets = 0.1 * gaussian(5, 60), gaussian(5, 10, 100)
    targets = targets if numbers else (targets > 0.5).float()
    x, targets = torch.cat([x, (1 - apart) * x[:1]]), torch.cat([targets, targets[:1]])
    model, loss = net(60, 10), nn.MSELoss() if numbers else nn.BCEWithLogitsLoss()
    gradients = {k: factor * g for k, g in fedsgd(model, x, targets, loss).items()}
    result = judged(model, gradients, loss=loss)
    if numbers and factor < 1:  # nothing shows the factor, so it is said what was assumed
        assert NOT_SCALED in result.assumptions or not bool(result.certified.any())
    else:
        assert_certified_are_right(result, x)


@pytest.mark.parametrize("factor", [1.001, 1.05, 0.99])
@pytest.mark.parametrize("epochs", [2, 10])
def test_several_epochs_with_a_slightly_wrong_learning_rate(factor, epochs):
    x, y = gaussian(4, 60, epochs), labels(4, seed=epochs)
    model = net(60, 10, seed=epochs)
    after = fedavg(model, x, y, lr=0.05, epochs=epochs)
    view = spear.observe(model, after=after, lr=0.05 * factor, epochs=epochs)
    assert_certified_are_right(spear.invert(view, max_seconds=20), x)


@pytest.mark.parametrize("b", [2, 5])
@pytest.mark.parametrize("pixels", [True, False])
def test_autocast_rounds_inputs_before_the_layer_sees_them(b, pixels):
    x = torch.rand(b, 60, generator=seeded(0)) if pixels else gaussian(b, 60)
    y = labels(b)
    model = net(60, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    result = judged(model, torch.autograd.grad(loss, list(model.parameters())))
    assert result.outcome is not Outcome.EXACT
    assert_certified_are_right(result, x)


@pytest.mark.parametrize("kept", [0.99, 0.5])
def test_masked_columns_are_not_the_samples(kept):
    x, y = gaussian(5, 60), labels(5)
    model = net(60, 10)
    gradients = fedsgd(model, x, y)
    mask = torch.rand(60, generator=seeded(0)) < kept
    mask[0] = False
    gradients["0.weight"] = gradients["0.weight"] * mask
    result = judged(model, gradients)
    assert not bool(result.certified.any())
    assert result.outcome is not Outcome.EXACT


@pytest.mark.parametrize("kept", [0.95, 0.5])
@pytest.mark.parametrize("biases", [True, False])
def test_masked_rows_take_nothing_from_the_samples(kept, biases):
    x, y = gaussian(5, 60), labels(5)
    model = net(60, 10, width=160)
    gradients = fedsgd(model, x, y)
    mask = torch.rand(160, generator=seeded(0)) < kept
    gradients["0.weight"] = gradients["0.weight"] * mask[:, None]
    if biases:
        gradients["0.bias"] = gradients["0.bias"] * mask
    result = judged(model, gradients)
    assert_certified_are_right(result, x)
    assert result.outcome is Outcome.EXACT


# Numbers of samples that were told.


@pytest.mark.parametrize("more", [1, 5])
@pytest.mark.parametrize("outputs", [1, 10])
def test_more_samples_told_than_show_are_missing(more, outputs):
    x, y = gaussian(5, 60), labels(5, max(2, outputs))
    model = net(60, outputs)
    gradients = fedsgd(model, x, y, loss_of(outputs))
    result = judged(model, gradients, samples=5 + more)
    assert result.outcome is not Outcome.EXACT
    assert_certified_are_right(result, x)
    if outputs == 10:
        assert (result.outcome, result.cause) == (Outcome.PARTIAL, Cause.MISSING)
        assert f"computed from {5 + more} samples" in result.reason


@pytest.mark.parametrize("apart", [0.003, 0.03])
def test_pairs_only_are_not_certified_where_the_number_is_told(apart):
    """Every sample has a twin: each trace weighs as one of three does, and six were told."""
    x, y = gaussian(3, 60), labels(3)
    x, y = torch.cat([x, x + apart * gaussian(3, 60, 50)]), torch.cat([y, y])
    model = net(60, 10)
    result = judged(model, fedsgd(model, x, y), samples=6)
    assert_certified_are_right(result, x)
    assert result.batch_size == 6 or result.outcome is not Outcome.EXACT
