"""The judge as a whole: what it must certify, what it must never certify, and how rulings compose."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import spear
from spear import Cause, Outcome, Proof
from spear.errors import Declined
from spear.factors import factorise
from spear.federated import defences, fedsgd
from spear.judge import certificate as judge
from spear.judge.certificate import certify
from spear.judge.rivals import Ruling
from spear.judge.training import Retrained
from spear.search.directions import Directions
from spear.search.kernels import unit
from support.planted import (
    bare,
    module,
    plant,
    recovered,
    seeded,
    selection_of,
    weighed,
    worst_error,
)

ALL = [True] * 5


def certified_of(planted, mixing=None, view=None):
    found = recovered(planted, mixing, view)
    return certify(found.factors, found.selection)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_truth_is_certified_both_ways(dtype):
    planted = plant(6, m=90, dtype=dtype)
    by_pattern = certified_of(planted, view=bare(planted.view))
    assert by_pattern.whole
    assert (by_pattern.proof, by_pattern.labels) == (Proof.PATTERN, None)
    assert len(by_pattern.assumptions) == 2  # what no layer alone can show
    by_replay = certified_of(planted)
    assert by_replay.whole
    assert (by_replay.proof, by_replay.cause) == (Proof.REPLAY, Cause.PROVED)
    assert torch.equal(by_replay.labels, planted.labels)


@pytest.mark.parametrize("share", [1.5, 0.01, 0.001])
@pytest.mark.parametrize("with_model", [True, False])
def test_a_mixed_direction_spoils_those_it_mixes_and_no_others(share, with_model):
    """q_0 is replaced by q_0 + share q_1: c_1 is then wrong, however small the share."""
    planted = plant(6, m=120)
    mixing = torch.eye(6, dtype=torch.float64)
    mixing[1, 0] = share
    view = planted.view if with_model else bare(planted.view)
    found = recovered(planted, mixing, view)
    judged = certify(found.factors, found.selection)
    assert not judged.whole
    assert not bool(judged.certified[1])
    # No rows hold a direction that is wrong by much: its share in every sample is unbounded.
    assert not bool(judged.certified[0]) or share < 1
    assert judged.cause is Cause.MIXED
    error = (found.X - planted.inputs).abs().amax(1)
    assert bool((error[judged.certified] < 1e-4).all())


def test_an_update_stitched_from_two_clients_fails_the_replay():
    planted, other = plant(5, m=90), plant(5, m=90, inputs=torch.randn(5, 50) * 2)
    stitched = {**other.gradients}
    for name in ("0.weight", "0.bias"):
        stitched[name] = planted.gradients[name]
    result = spear.invert(spear.observe(planted.model, stitched))
    assert result.outcome is Outcome.APPROXIMATE
    assert result.cause in (Cause.UNFIT, Cause.SCALE)
    assert worst_error(result.inputs, planted.inputs) < 1e-4


def test_the_bias_gradient_of_another_batch_is_noticed():
    planted, other = plant(5, m=90), plant(5, m=90, inputs=torch.randn(5, 50) * 3)
    mixed = {**planted.gradients, "0.bias": other.gradients["0.bias"]}
    result = spear.invert(spear.observe(planted.model, mixed), max_seconds=2)
    assert not bool(result.certified.any())


def test_a_layer_without_spare_rows_proves_nothing_without_a_model():
    planted = plant(6, m=14, n=60, dtype=torch.float64)
    judged = certified_of(planted, view=bare(planted.view))
    assert judged.proof is Proof.NONE
    assert any("prove nothing" in words for words in judged.doubts)


def test_a_bypassed_layer_cannot_be_replayed_and_says_so():
    def forward(self, x):
        return self.head(torch.relu(self.layer(x))) + self.side(x)

    linear = {"layer": nn.Linear(40, 90), "head": nn.Linear(90, 5), "side": nn.Linear(40, 5)}
    model = module(forward, **linear)
    result = spear.invert(spear.observe(model, fedsgd(model, torch.randn(4, 40), torch.arange(4))))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    assert result.labels is None


def test_a_layer_given_directly_has_no_name_to_replay_from():
    planted = plant(4, m=60)
    result = spear.invert(bare(planted.view), model=planted.model)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    assert len(result.assumptions) == 2


def test_a_hidden_neuron_on_the_other_side_of_its_threshold_is_found():
    """In the client's rounding a hidden neuron is off that is on by 1e-6 in the replay."""
    planted = plant(6, m=90, n=50, depth=4)
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
    result = spear.invert(spear.observe(seen, gradients))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)


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
    """The mean of two inputs has no negative entry either: only the output gradient gives it away."""
    planted = plant(4, m=60, n=60, depth=3)
    hidden = planted.model[:2](planted.inputs).detach().double()
    right = spear.invert(planted.layer("2"), finder=Inputs(hidden))
    assert (right.outcome, right.proof) == (Outcome.EXACT, Proof.REPLAY)
    mixed = hidden.clone()
    mixed[0] = (hidden[0] + hidden[1]) / 2
    wrong = spear.invert(planted.layer("2"), finder=Inputs(mixed))
    assert wrong.match == 1  # nothing negative
    assert wrong.outcome is not Outcome.EXACT
    recovered = torch.cdist(wrong.inputs[wrong.certified].double(), hidden)
    assert bool((recovered.min(1).values < 1e-3).all())


# How rulings compose.


def flags(*wrong):
    """Five samples: true but for those named."""
    return torch.tensor([i not in wrong for i in range(5)])


def composed(*rulings, samples=None):
    planted = plant(5, m=200)
    found = recovered(planted, view=planted.view.told(samples=samples))
    return judge._composed(found, list(rulings), Proof.REPLAY)


def ruling(cause, *lost, **more):
    return Ruling(cause, flags(*lost), f"lost to {cause.value}", **more)


def test_a_sample_is_certified_if_every_rival_fails():
    done = composed(ruling(Cause.MIXED), ruling(Cause.SCALE))
    assert (done.certified.tolist(), done.whole, done.cause) == (ALL, True, Cause.PROVED)
    assert (done.doubts, done.proof) == ((), Proof.REPLAY)


def test_the_first_rival_that_does_not_fail_is_the_cause():
    done = composed(ruling(Cause.MIXED), ruling(Cause.SCALE, 1, 2), ruling(Cause.MERGED, 2, 4))
    assert done.certified.tolist() == flags(1, 2, 4).tolist()
    assert (done.cause, done.whole) == (Cause.SCALE, False)
    assert done.doubts == ("2 of 5 samples lost to scale", "2 of 5 samples lost to merged")


def test_what_is_missing_leaves_certified_samples_but_no_whole():
    done = composed(ruling(Cause.MERGED, missing="a sixth"))
    assert (done.certified.tolist(), done.whole, done.cause) == (ALL, False, Cause.MISSING)
    assert done.doubts == ("a sixth",)
    told = composed(ruling(Cause.MERGED), samples=6)
    assert (told.certified.tolist(), told.whole, told.cause) == (ALL, False, Cause.MISSING)
    assert composed(ruling(Cause.MERGED, 0), samples=6).cause is Cause.MERGED


def test_assumptions_are_listed_once_and_nothing_certified_has_no_proof():
    done = composed(
        ruling(Cause.MIXED, assumptions=("a", "b")), ruling(Cause.SCALE, assumptions=("b",))
    )
    assert done.assumptions == ("a", "b")
    assert composed(ruling(Cause.MIXED, *range(5))).proof is Proof.NONE


# Local training.


def of_training(monkeypatch, mixed=False, redundancy=2, **changes):
    shown = {"labels": torch.arange(5), "matched": flags(), "recognised": flags()}
    shown |= {
        "closely": ~flags(),
        "epochs": 3,
        "objections": (),
        "dimensions": 9,
        "other_rate": None,
    }
    shown |= {"off": torch.zeros(5, dtype=torch.float64), **changes}
    monkeypatch.setattr(judge, "retrain", lambda *_: Retrained(**shown))
    mixing = torch.eye(5, dtype=torch.float64)
    if mixed:
        mixing[1, 0] = 1.5  # direction 0 is wrong, and the input of sample 1 with it
    found = recovered(plant(5, m=200), mixing)
    spare = torch.tensor([redundancy, 1, 1, 1, 1])
    directions = dataclasses.replace(found.selection.directions, redundancy=spare)
    selection = dataclasses.replace(found.selection, directions=directions)
    found = dataclasses.replace(found, selection=selection)
    found.__dict__["precise"] = flags()  # a mix would be called too faint otherwise
    return judge._of_training(found, None)


def test_repeated_training_proves_all(monkeypatch):
    done = of_training(monkeypatch)
    assert (done.certified.tolist(), done.proof, done.whole) == (ALL, Proof.REPLAY, True)
    assert done.remark == "3 local epochs repeated"
    assert of_training(monkeypatch, epochs=1).remark == "1 local epoch repeated"


def test_training_that_cannot_be_repeated_proves_nothing(monkeypatch):
    monkeypatch.setattr(judge, "retrain", lambda *_: Declined("the moon is full"))
    done = judge._of_training(recovered(plant(5, m=200)), None)
    assert not bool(done.certified.any())
    assert (done.proof, done.cause) == (Proof.NONE, Cause.TRAINING)
    assert done.doubts[0].endswith("are proved by repeating them, and the moon is full")


def test_one_sample_that_training_does_not_confirm(monkeypatch):
    done = of_training(monkeypatch, matched=flags(2))
    assert done.certified.tolist() == flags(2).tolist()
    assert (done.cause, done.whole) == (Cause.TRAINING, False)
    assert done.labels.tolist() == [0, 1, -1, 3, 4]


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"matched": flags(0), "recognised": flags(0)}, (0, 1)),
        # Recognised but for a neuron or two: a right direction, which spoils no other.
        ({"matched": flags(0)}, (0,)),
        # Without zeros to spare, unless the sums agree better than those of any mix would.
        ({"redundancy": 0}, (0, 1)),
        ({"redundancy": 0, "closely": flags()}, ()),
    ],
)
def test_training_certifies_nothing_that_a_wrong_direction_is_mixed_with(
    changes, lost, monkeypatch
):
    done = of_training(monkeypatch, mixed=True, **changes)
    assert done.certified.tolist() == flags(*lost).tolist()


def test_an_objection_to_the_training_takes_everything(monkeypatch):
    done = of_training(monkeypatch, objections=("the bias moved otherwise",))
    assert (bool(done.certified.any()), done.proof) == (False, Proof.NONE)
    assert "the bias moved otherwise" in done.doubts[0]


# Noise.


def with_noise(factors, relative):
    return dataclasses.replace(factors, noise=factors.noise * relative / factors.relative_noise)


def test_noise_that_leaves_nothing_precise_is_told_as_such():
    found = recovered(plant(5, m=200))
    done = certify(with_noise(found.factors, 2e-2), found.selection)
    assert (done.proof, done.cause, done.whole) == (Proof.NONE, Cause.IMPRECISE, False)
    assert not bool(done.precise.any())
    assert not bool(done.certified.any())


def test_the_loudest_samples_are_certified_under_noise():
    """One of five gradients is forty times the others': its input is known that much better."""
    weights = torch.tensor([40.0, 1.0, 1.0, 1.0, 1.0])
    planted = plant(5, m=200, loss=weighed(weights, total=True))
    factors = with_noise(factorise(bare(planted.view)), 5e-4)
    done = certify(factors, selection_of(planted, factors))
    assert factors.noisy
    assert done.precise.tolist() == [True] + [False] * 4
    assert bool((done.certified <= done.precise).all())


def test_errors_are_measured_against_the_data_s_amplitude():
    """Noise that leaves more than 70 dB: 2e-4 of a sample's size, less than that of its amplitude."""
    planted = plant(4, m=200, n=400, seed=1)
    noisy = defences.add_noise(planted.gradients, 8e-6)
    result = spear.invert(spear.observe(planted.model, noisy))
    size = planted.inputs.square().mean().sqrt()
    assert 2e-4 * size < float(result.predicted_error.max()) < 1.6e-3 * size
    assert result.outcome in (Outcome.EXACT, Outcome.APPROXIMATE, Outcome.PARTIAL)
    assert worst_error(result.inputs, planted.inputs) < 8e-3  # of a range of eight


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_later_layer_that_is_hardly_off_is_noticed_whatever_the_size_of_inputs(size):
    """The tolerance of a replay follows from the error relative to the inputs."""
    planted = plant(5, m=200, inputs=size * torch.randn(5, 50, generator=seeded(0)))
    assert certified_of(planted).whole
    altered = {**planted.gradients, "4.weight": 1.0001 * planted.gradients["4.weight"]}
    done = certified_of(planted, view=spear.observe(planted.model, altered))
    assert not bool(done.certified.any())
    assert any("is off by 1.0e-04" in words for words in done.doubts)


def test_labels_alone_are_no_replay():
    """Without the gradient of a later layer there is nothing to compare."""
    planted = plant(5, m=200)
    alone = {name: g for name, g in planted.gradients.items() if name.startswith("0.")}
    done = certified_of(planted, view=spear.observe(planted.model, alone))
    assert (done.proof, done.whole) == (Proof.PATTERN, True)
    assert torch.equal(done.labels, planted.labels)


def test_a_next_layer_that_is_noisy_itself_is_no_witness():
    """Its own noise turns its span by more than a thousandth."""
    planted = plant(5, m=150, n=300, seed=2)
    gradient = planted.gradients["2.weight"]
    noise = torch.randn(gradient.shape, generator=seeded(0))
    noise *= torch.linalg.svdvals(gradient)[4] / 150 / torch.linalg.matrix_norm(noise, 2)
    noisy = {**planted.gradients, "2.weight": gradient + noise}
    view = spear.observe(planted.model, noisy)
    alone = dataclasses.replace(view, model=None)
    assert spear.invert(alone).outcome is Outcome.EXACT
