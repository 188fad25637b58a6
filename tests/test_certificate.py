"""The judge: what it must certify, and what it must never certify."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import spear
from planted import plant, worst_error
from spear import Outcome, Proof
from spear.directions import Directions, unit
from spear.factors import factorise
from spear.federated import fedsgd
from spear.judge.certificate import certify
from spear.judge.layer import pattern_holds, predicted_error
from spear.judge.replay import Replay
from spear.judge.selection import _Matching


def selection_of(planted, factors, mixing=None, firm=2):
    """The selection a finder would hand over: true directions, or some of them mixed."""
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T)
    if mixing is not None:
        Q = Q @ mixing
    Q = Q / Q.norm(dim=0)
    zeros = (factors.outputs.basis @ Q).abs() <= factors.zero
    b = Q.shape[1]
    pool = Directions(factors.outputs, Q, zeros, torch.full((b,), firm))
    return _Matching(factors, pool).selection(list(range(b)))  # in the order of the samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_certified_both_ways(seed, dtype):
    planted = plant(6, m=90, seed=seed, dtype=dtype)
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    by_pattern = certify(factors, selection)
    assert by_pattern.whole
    assert by_pattern.proof is Proof.PATTERN
    by_replay = certify(factors, selection, model=planted.model)
    assert by_replay.whole
    assert by_replay.proof is Proof.REPLAY
    assert torch.equal(by_replay.labels, planted.labels)


@pytest.mark.parametrize("share", [1.0, 0.3, 0.01, 0.001])
@pytest.mark.parametrize("with_model", [True, False])
def test_a_mixed_direction_spoils_those_it_mixes_and_no_others(share, with_model):
    """q_0 is replaced by q_0 + share q_1: c_1 is then wrong, however small the share."""
    planted = plant(6, m=120)
    factors = factorise(planted.view)
    mixing = torch.eye(6, dtype=torch.float64)
    mixing[1, 0] = share
    selection = selection_of(planted, factors, mixing)
    model = planted.model if with_model else None
    certificate = certify(factors, selection, model=model)
    assert not certificate.whole
    assert not bool(certificate.certified[1])
    recovered = factors.reconstruct(selection.C)
    error = (recovered - planted.inputs).abs().amax(1)
    assert bool((error[certificate.certified] < 1e-4).all())
    if with_model:
        assert int(certificate.certified.sum()) >= 4


def test_samples_outside_a_sparse_mix_are_certified_without_a_model():
    planted = plant(5, m=200)
    factors = factorise(planted.view)
    mixing = torch.eye(5, dtype=torch.float64)
    mixing[1, 0] = 1.5
    selection = selection_of(planted, factors, mixing)
    sound, doubts = pattern_holds(factors, selection)
    assert sound.tolist() == [False, False, True, True, True]
    assert "2 of 5" in doubts[0]


def test_a_wrong_model_certifies_nothing():
    planted, other = plant(5, m=90), plant(5, m=90, seed=1)
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    assert not bool(certify(factors, selection, model=other.model).certified.any())


def test_a_wrong_loss_certifies_nothing():
    planted = plant(
        5, m=90, loss=lambda z, y: nn.functional.cross_entropy(z, y, label_smoothing=0.3)
    )
    result = spear.invert(planted.view, model=planted.model)
    assert result.outcome is Outcome.FAILED
    assert not bool(result.certified.any())
    assert "matches no label" in result.reason
    smooth = nn.CrossEntropyLoss(label_smoothing=0.3)
    assert spear.invert(planted.view, model=planted.model, loss=smooth).outcome is Outcome.EXACT


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_and_means_are_alike(reduction):
    loss = nn.CrossEntropyLoss(reduction=reduction)
    planted = plant(5, m=90, loss=loss)
    assert spear.invert(planted.view, model=planted.model, loss=loss).outcome is Outcome.EXACT
    assert spear.invert(planted.view, model=planted.model).outcome is Outcome.EXACT


def test_per_sample_clipping_leaves_recovery_exact():
    planted = plant(6, m=90)
    total = None
    for x, y, c in zip(planted.inputs, planted.labels, [1, 0.2, 0.9, 0.05, 0.5, 1], strict=True):
        loss = c * nn.functional.cross_entropy(planted.model(x[None]), y[None]) / 6
        grads = torch.autograd.grad(loss, list(planted.model.parameters()))
        total = grads if total is None else [t + g for t, g in zip(total, grads, strict=True)]
    result = spear.invert(spear.observe(planted.model, total), model=planted.model)
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 1e-4


def test_an_update_stitched_from_two_clients_fails_the_replay():
    planted, other = plant(5, m=90), plant(5, m=90, inputs=torch.randn(5, 50) * 2)
    stitched = {**other.gradients}
    for name in ("0.weight", "0.bias"):
        stitched[name] = planted.gradients[name]
    view = spear.observe(planted.model, stitched)
    result = spear.invert(view, model=planted.model)
    assert result.outcome is not Outcome.EXACT
    assert "the replayed gradient of '2.weight' is off" in result.reason


def test_the_bias_gradient_of_another_batch_is_noticed():
    planted, other = plant(5, m=90), plant(5, m=90, inputs=torch.randn(5, 50) * 3)
    mixed = {**planted.gradients, "0.bias": other.gradients["0.bias"]}
    result = spear.invert(spear.observe(planted.model, mixed), max_seconds=2)
    assert result.outcome in (Outcome.FAILED, Outcome.PARTIAL)
    assert not bool(result.certified.any())


def test_a_layer_without_spare_rows_proves_nothing_without_a_model():
    planted = plant(6, m=14, n=60, dtype=torch.float64)
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    certificate = certify(factors, selection)
    assert certificate.proof is Proof.NONE
    assert "prove nothing" in certificate.doubts[0]
    assert certify(factors, selection, model=planted.model).whole


def test_the_predicted_error_is_of_the_right_size():
    planted = plant(8, m=150, n=300)
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    actual = (factors.combine(selection.C / factors.singular_values) - planted.inputs).square()
    ratio = actual.mean(1).sqrt() / predicted_error(factors, selection)
    assert bool((ratio < 5).all())
    assert bool((ratio > 0.02).all())


def test_a_bypassed_layer_cannot_be_replayed_and_says_so():
    class Bypass(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head, self.side = nn.Linear(40, 90), nn.Linear(90, 5), nn.Linear(40, 5)

        def forward(self, x):
            return self.head(torch.relu(self.layer(x))) + self.side(x)

    model, x = Bypass(), torch.randn(4, 40)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 3]))
    view = spear.observe(model, torch.autograd.grad(loss, list(model.parameters())))
    result = spear.invert(view, model=model)
    assert result.outcome is Outcome.EXACT
    assert result.proof is Proof.PATTERN
    assert result.labels is None


def test_a_layer_given_directly_has_no_model_to_replay():
    planted = plant(4, m=60)
    view = spear.LayerUpdate(
        weight=planted.model[0].weight.detach(),
        bias=planted.model[0].bias.detach(),
        weight_grad=planted.gradients["0.weight"],
        bias_grad=planted.gradients["0.bias"],
    )
    result = spear.invert(view, model=planted.model)
    assert result.proof is Proof.PATTERN
    assert result.outcome is Outcome.EXACT


@pytest.mark.parametrize("seed", range(3))
def test_a_hidden_neuron_on_the_other_side_of_its_threshold_is_found(seed):
    """The client's rounding put a hidden neuron off that is on by 1e-6 in the replay."""
    planted = plant(6, m=90, n=50, depth=4, seed=seed)
    model = planted.model
    with torch.no_grad():
        hidden = model[:5](planted.inputs)  # preactivations of the third layer, (b, m)
        active = hidden[0].argmax()  # on for sample 0; put it on the threshold
        model[4].bias[active] -= hidden[0, active]
        size = float(hidden.std())
        seen = copy.deepcopy(model)
        seen[4].bias[active] += 2e-6 * size
        model[4].bias[active] -= 2e-6 * size
    gradients = fedsgd(model, planted.inputs, planted.labels)
    result = spear.invert(spear.observe(seen, gradients), model=seen)
    assert result.outcome is spear.Outcome.EXACT
    assert result.proof is Proof.REPLAY


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
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    replay = Replay.prepare(factors, selection, planted.model, None, torch.full((5,), 1e-6))
    expected, near = replay.nearest_labels(replay.Z)
    network = replay.network
    replay.network = lambda z: network(_Once.apply(z))
    assert replay._likeliest(replay.Z, replay.D).tolist() == [0] * 5  # nothing is known
    labels, distance = replay.nearest_labels(replay.Z)
    assert torch.equal(labels, expected)
    assert torch.allclose(distance, near)


def test_what_is_said_to_be_clipped_apart_is_not_certified():
    planted = plant(5, m=200)
    view = dataclasses.replace(planted.view, clipped_apart=True)
    factors = factorise(view)
    selection = selection_of(planted, factors)
    sound, doubts = pattern_holds(factors, selection)
    assert not sound.any()
    assert "does not give a sample's scale" in doubts[0]
    assert not certify(factors, selection, model=planted.model).certified.any()


class Inputs:
    """A finder that knows the inputs of a hidden layer, or mixes of two with the zeros they share."""

    def __init__(self, hidden):
        self.hidden = hidden

    def search(self, factors, *, generator, watch):
        R = factors.combine(torch.diag(1 / factors.singular_values))
        vectors = unit((self.hidden @ R.T / factors.singular_values).T, 0)
        zeros = (self.hidden == 0).T[factors.live_columns]
        yield Directions(factors.inputs, vectors, zeros, torch.full((len(self.hidden),), 2))

    def satisfied(self, factors, match):
        return match >= 1


def test_between_two_relus_the_output_gradient_must_fit_inputs_too():
    """A mean of two inputs is no input, though it has no negative entry: the other side tells."""
    planted = plant(4, m=60, n=60, depth=3)
    hidden = planted.model[:2](planted.inputs).detach().double()
    right = spear.invert(planted.layer("2"), finder=Inputs(hidden))
    assert (right.outcome, right.proof) == (Outcome.EXACT, Proof.PATTERN)
    mixed = hidden.clone()
    mixed[0] = (hidden[0] + hidden[1]) / 2
    wrong = spear.invert(planted.layer("2"), finder=Inputs(mixed))
    assert wrong.match == 1  # nothing negative
    assert wrong.outcome is not Outcome.EXACT
    recovered = torch.cdist(wrong.inputs[wrong.certified].double(), hidden)
    assert bool((recovered.min(1).values < 1e-3).all())


class _NoSecond(torch.autograd.Function):
    """The identity, whose gradient has no derivative."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return _Refuses.apply(gradient)


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError("the second derivative")


def test_labels_are_found_where_a_second_derivative_is_refused():
    planted = plant(5, m=90, n=50)
    factors = factorise(planted.view)
    selection = selection_of(planted, factors)
    replay = Replay.prepare(factors, selection, planted.model, None, torch.full((5,), 1e-6))
    network = replay.network
    replay.network = lambda z: network(_NoSecond.apply(z))
    labels, _ = replay.nearest_labels(replay.Z)
    assert torch.equal(labels, planted.labels)
