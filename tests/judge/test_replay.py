"""Which loss explains an update: the one told, cross-entropy, soft labels, any, or none."""

import pytest
import torch
from torch import nn

import spear
from spear.federated import fedsgd
from spear.judge.fit import Fit, LossKind
from spear.judge.fitting import fit_losses
from spear.judge.losses import compares_numbers
from spear.judge.replay import Replay
from support.planted import (
    Planted,
    fit_of,
    gaussian,
    labels,
    net,
    plant,
    recovered,
    seeded,
    with_model,
)

cross_entropy = nn.functional.cross_entropy


def found_for(loss, targets, outputs=10, **options):
    x, model = gaussian(5, 60), net(60, outputs, **options)
    planted = Planted(model, x, targets, fedsgd(model, x, targets, loss))
    return planted, recovered(planted)


def test_cross_entropy_is_tried_first_if_nothing_was_told():
    y = labels(5)
    _, found = found_for(cross_entropy, y)
    fit = fit_of(found)
    assert (fit.loss, fit.told, fit.agrees) == (LossKind.CROSS_ENTROPY, False, True)
    assert torch.equal(fit.labels, y)
    assert torch.allclose(fit.weights, torch.ones(5, dtype=torch.float64), atol=1e-4)
    assert fit.dimensions == 9


def test_the_loss_that_was_told_comes_first():
    y = labels(5)
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10))
    _, found = found_for(loss, y)
    fit = fit_of(found, loss)
    assert (fit.loss, fit.told, fit.agrees) == (LossKind.TOLD, True, True)
    # Class weights are divided out: these are single samples.
    assert torch.allclose(fit.weights, torch.ones(5, dtype=torch.float64), atol=1e-4)


def test_a_loss_that_was_told_wrongly_gives_way():
    y = labels(5)
    _, found = found_for(cross_entropy, y)
    fit = fit_of(found, nn.MultiMarginLoss())
    assert (fit.loss, fit.told) == (LossKind.CROSS_ENTROPY, False)
    assert torch.equal(fit.labels, y)


@pytest.mark.parametrize("kind", ["smoothed", "mixed"])
def test_soft_labels_are_recognised_and_give_weights(kind):
    hard = nn.functional.one_hot(labels(5), 10).float()
    targets = 0.9 * hard + 0.01 if kind == "smoothed" else 0.7 * hard + 0.3 * hard.roll(1, 0)
    _, found = found_for(cross_entropy, targets)
    fit = fit_of(found)
    assert fit.loss is LossKind.SOFT_LABELS
    assert fit.labels is None
    assert bool(((fit.weights - 1).abs() <= fit.weight_error).all())
    assert fit.agrees
    outputs = net(60, 10)(gaussian(5, 60))
    assert torch.allclose(fit.slopes.float() * 5, outputs.softmax(1) - targets, atol=1e-3)


def test_soft_labels_of_a_sample_that_is_there_twice_weigh_two():
    targets = 0.9 * nn.functional.one_hot(labels(5), 10).float() + 0.01
    x = gaussian(5, 60)
    model = net(60, 10)
    gradients = fedsgd(
        model, torch.cat([x, x[:1]]), torch.cat([targets, targets[:1]]), cross_entropy
    )
    fit = fit_of(recovered(Planted(model, x, targets, gradients)))
    relative = fit.weights / fit.weights[1]
    assert relative.tolist() == pytest.approx([2, 1, 1, 1, 1], rel=1e-3)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("told", [True, False])
def test_free_targets_are_solved_for(loss, told):
    targets = gaussian(5, 10, 100)
    targets = targets if isinstance(loss, nn.MSELoss) else (targets > 0).float()
    planted, found = found_for(loss, targets)
    fit = fit_of(found, loss if told else None)
    assert (fit.told, fit.labels, fit.agrees, fit.dimensions) == (told, None, True, 10)
    if isinstance(loss, nn.MSELoss):
        assert fit.loss is (LossKind.TOLD if told else LossKind.ANY)
        assert fit.weights is None
    else:  # every output has a label of its own, and so the weights are known
        assert fit.loss is LossKind.SEVERAL_LABELS
        assert fit.weights.tolist() == pytest.approx([1.0] * 5, rel=1e-4)
    outputs = planted.model(planted.inputs).detach().requires_grad_()
    (slopes,) = torch.autograd.grad(loss(outputs, targets), outputs)
    assert torch.allclose(fit.slopes.float(), slopes, atol=1e-5)


def test_too_many_outputs_say_nothing():
    _, found = found_for(nn.MSELoss(), gaussian(5, 40, 100), outputs=40, width=90)
    replay = Replay.prepare(found, None, torch.full((5,), 1e-6))
    assert replay.with_free_targets(LossKind.ANY, False) is None


def test_another_network_explains_nothing():
    _, found = found_for(cross_entropy, labels(5))
    other = net(60, 10, seed=50)
    fit = fit_losses(with_model(found, other), None, generator=seeded(0))
    assert isinstance(fit, Fit)
    assert not fit.usable
    assert not bool(fit.matched.any())


def test_a_network_that_cannot_be_run_is_told():
    planted, found = found_for(cross_entropy, labels(5))
    broken = nn.Sequential(planted.model[0], nn.ReLU(), nn.Linear(7, 3))
    declined = fit_losses(with_model(found, broken), None, generator=seeded(0))
    assert "failed" in declined.reason


@pytest.mark.parametrize("batches", [0, 1, 2, 4, 8, 10])
def test_a_network_that_fails_at_any_point_costs_the_replay_alone(batches):
    x, y, model = gaussian(5, 60), labels(5), net(60, 10)
    view = spear.observe(model, fedsgd(model, x, y))
    left = [batches]

    def run(*_):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the disk is full")

    model[-1].register_forward_hook(run)
    result = spear.invert(view.with_model(model))
    assert left[0] < 0
    assert result.outcome is spear.Outcome.EXACT
    assert result.proof is spear.Proof.PATTERN
    assert "OSError: the disk is full" in result.explanation


def test_faults_of_ours_are_not_taken_for_the_models(monkeypatch):
    planted = plant(5, m=60, n=40)
    view = spear.observe(planted.model, planted.gradients)
    monkeypatch.setattr(Replay, "tolerance", lambda self, labels: undefined)  # noqa: F821
    with pytest.raises(NameError):
        spear.invert(view)


@pytest.mark.parametrize("part", ["2.weight", "2.bias"])
def test_a_later_layer_that_disagrees_is_named(part):
    y = labels(5)
    planted, _ = found_for(cross_entropy, y)
    altered = {**planted.gradients, part: 1.001 * planted.gradients[part]}
    fit = fit_of(recovered(planted, view=spear.observe(planted.model, altered)))
    assert not fit.agrees
    assert not fit.usable
    name = part.replace("2.", "")
    assert any(name in words and "1.0e-03" in words for words in fit.disagreements)


@pytest.mark.parametrize(("outputs", "dimensions"), [(1, 1), (2, 1), (3, 2)])
def test_dimensions_of_gradients_within_a_cell(outputs, dimensions):
    y = labels(5, max(2, outputs))
    targets = y[:, None].float() if outputs == 1 else y
    loss = nn.BCEWithLogitsLoss() if outputs == 1 else cross_entropy
    _, found = found_for(loss, targets, outputs=outputs)
    assert fit_of(found).dimensions == dimensions


def test_a_narrow_neck_behind_the_layer_leaves_one_dimension():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 120), nn.ReLU(), nn.Linear(120, 1), nn.Linear(1, 10))
    x, y = gaussian(5, 60), labels(5)
    found = recovered(Planted(model, x, y, fedsgd(model, x, y)))
    assert fit_of(found).dimensions == 1


def test_another_scale_is_as_far_off_as_its_gradient():
    planted, found = found_for(cross_entropy, labels(5))
    fit = fit_of(found)
    ones = torch.ones(5, dtype=torch.float64)
    assert bool((fit.off_at(ones) <= 1).all())
    assert bool((fit.off_at(1.01 * ones) > 1).all())
    assert fit.update_off_at(ones, biases=True) <= 1
    assert fit.update_off_at(1.01 * ones, biases=True) > 1
    assert bool((fit.alone_off_at(1.01 * ones, ones > 0) > 1).all())
    assert torch.allclose(fit.weights_at(ones), fit.weights)
    Z = (planted.model[0].weight @ (2 * planted.inputs).T).T + planted.model[0].bias
    assert torch.allclose(fit.replay.scaled(2 * ones).float(), Z, atol=1e-4)


def test_which_losses_compare_numbers():
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.functional.huber_loss):
        assert compares_numbers(loss)
    for loss in (None, nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), cross_entropy):
        assert not compares_numbers(loss)


# Labels, where derivatives are hard to have.


class _Once(torch.autograd.Function):
    """The identity, which can be differentiated once only."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):
        return gradient.clone()


def test_labels_are_found_without_a_second_derivative():
    planted = plant(5, m=90, n=50)
    found = recovered(planted)
    replay = Replay.prepare(found, None, torch.full((5,), 1e-6))
    expected, near = replay.nearest_labels(replay.Z)
    network = replay.network
    replay.network = lambda z: network(_Once.apply(z))
    assert torch.equal(replay._likeliest(replay.Z, replay.D), planted.labels)
    found_labels, distance = replay.nearest_labels(replay.Z)
    assert torch.equal(found_labels, expected)
    assert torch.equal(found_labels, planted.labels)
    assert torch.allclose(distance, near)
