"""The judge's parts one by one: what each piece of evidence takes away, and how it is told.

Each test notices small faults in `certificate.py` that no other test noticed (tools/mutate.py).
"""

import dataclasses

import pytest
import torch

import spear
from planted import plant
from spear import Proof
from spear.factors import factorise
from spear.judge.certificate import (
    _by_replay,
    _doubts_of,
    _faint,
    _left_out,
    _not_refuted,
    _of_training,
    certify,
)
from spear.judge.replay import Replayed
from spear.judge.training import Retrained
from test_certificate import selection_of

ALL = [True] * 5


def flags(*wrong):
    """Five samples: true but for those named."""
    return torch.tensor([i not in wrong for i in range(5)])


def scene(mixed=False, **options):
    planted = plant(5, m=200, **options)
    factors = factorise(planted.view)
    mixing = torch.eye(5, dtype=torch.float64)
    if mixed:
        mixing[1, 0] = 1.5  # direction 0 is wrong, and the input of sample 1 with it
    return planted, factors, selection_of(planted, factors, mixing)


@pytest.fixture(scope="module")
def true():
    return scene()[2]


@pytest.fixture(scope="module")
def mixed():
    return scene(mixed=True)[2]


def replayed(**changes):
    shown = {
        "labels": torch.arange(5),
        "matched": flags(),
        "objections": (),
        "compared": True,
        "merged": ~flags(),
        "vanished": 0,
    }
    return Replayed(**{**shown, **changes})


# What a replay leaves


def test_a_replay_without_objections_takes_nothing_away(true):
    certified, doubts = _by_replay(true, replayed(), flags(), ("by pattern",))
    assert certified.tolist() == ALL
    assert doubts == ()


def test_samples_that_have_vanished_are_counted(true):
    certified, (doubt,) = _by_replay(true, replayed(vanished=2), flags(), ())
    assert certified.tolist() == ALL
    assert "divided by 7, so 2 more samples than the 5 that show" in doubt


def test_merged_samples_are_not_certified_and_nothing_comes_back(true):
    certified, (pattern, merged) = _by_replay(
        true, replayed(merged=~flags(3)), flags(1), ("by pattern",)
    )
    assert certified.tolist() == flags(1, 3).tolist()
    assert pattern == "by pattern"
    assert merged.startswith("1 of the samples weighs as much as several others")


def test_an_objection_takes_everything(true):
    certified, doubts = _by_replay(true, replayed(objections=("later layers",)), flags(), ())
    assert not certified.any()
    assert doubts == ("later layers",)


def test_samples_in_a_mix_go_with_it_however_well_they_match(mixed):
    """Gradients hardly notice a share of a wrong direction in an input."""
    certified, _ = _by_replay(mixed, replayed(matched=flags(0)), flags(), ())
    assert certified.tolist() == flags(0, 1).tolist()


def test_on_the_inputs_side_every_direction_stands_alone(mixed):
    side = dataclasses.replace(mixed.directions.side, name="inputs")
    directions = dataclasses.replace(mixed.directions, side=side)
    selection = dataclasses.replace(mixed, directions=directions)
    certified, _ = _by_replay(selection, replayed(matched=flags(0)), flags(), ())
    assert certified.tolist() == flags(0).tolist()


def test_what_a_replay_does_not_show_is_told():
    assert _left_out(replayed()) == ""
    assert "targets that are numbers do not tell" in _left_out(replayed(free_targets=True))
    assert "the replay only gave labels" in _left_out(replayed(compared=False))


@pytest.mark.parametrize(
    ("lost", "certified", "expected"),
    [
        ((), (), ["objection"]),
        ((), (2,), ["pattern", "objection"]),
        (
            (2, 4),
            (2, 4),
            ["pattern", "objection", "the gradient of 2 of 5 samples matches no label"],
        ),
    ],
)
def test_doubts_of_the_pattern_stand_unless_the_replay_settles_them(lost, certified, expected):
    shown = replayed(matched=flags(*lost), objections=("objection",))
    doubts = _doubts_of(shown, flags(*certified), ("pattern",))
    assert [doubt[: len(words)] for doubt, words in zip(doubts, expected, strict=True)] == expected


def test_only_samples_that_would_be_certified_are_called_too_faint():
    assert _faint(flags(0), flags(0)) == ()
    assert _faint(flags(0), flags(0, 1, 2)) == (
        "2 of 5 samples are too faint against the update's noise",
    )
    assert _faint(flags(0, 1, 2), flags(0)) == ()


def test_without_a_model_in_invert_a_replay_may_only_take_away():
    """It is believed where most gradients are those of cross-entropy; the loss is not known."""
    shown = {"merged": ~flags(3), "vanished": 2}
    untouched = _not_refuted("no model was given", flags(1), ("before",))
    assert untouched[0].tolist() == flags(1).tolist()
    assert untouched[1:] == (("before",), True)
    unknown = _not_refuted(replayed(matched=~flags(), **shown), flags(1), ("before",))
    assert (unknown[0].tolist(), *unknown[1:]) == (flags(1).tolist(), ("before",), True)
    certified, doubts, whole = _not_refuted(
        replayed(matched=flags(0, 1), **shown), flags(1), ("before",)
    )
    assert certified.tolist() == flags(0, 1, 3).tolist()
    assert not whole
    assert doubts[:2] == ("before", "1 of them match no label, though others do")
    assert "2 more samples than the 5 that show" in doubts[2]
    assert doubts[3].startswith("1 of the samples weighs as much as several others")
    certified, doubts, whole = _not_refuted(replayed(), flags(1), ())
    assert (certified.tolist(), doubts, whole) == (flags(1).tolist(), (), True)


# What repeated training leaves


def retrained(**changes):
    shown = {"labels": torch.arange(5), "matched": flags(), "recognised": flags()}
    shown["closely"] = ~flags()
    return Retrained(**{**shown, "epochs": 3, "objections": (), **changes})


def of_training(selection, shown, precise=()):
    return _of_training(selection, shown, torch.zeros(5), flags(*precise))


def test_repeated_training_proves_all(true):
    certificate = of_training(true, retrained())
    assert certificate.certified.tolist() == ALL
    assert (certificate.proof, certificate.whole, certificate.doubts) == (Proof.REPLAY, True, ())
    assert certificate.remark == "3 local epochs repeated"
    assert certificate.labels.tolist() == [0, 1, 2, 3, 4]
    assert of_training(true, retrained(epochs=1)).remark == "1 local epoch repeated"


def test_training_that_cannot_be_repeated_proves_nothing(true):
    certificate = of_training(true, "the moon is full")
    assert not certificate.certified.any()
    assert (certificate.proof, certificate.whole, certificate.labels) == (Proof.NONE, False, None)
    assert certificate.doubts == (
        "several local steps are proved only by repeating them, and the moon is full",
    )
    assert certificate.remark == ""


def test_one_sample_that_training_does_not_confirm(true):
    certificate = of_training(true, retrained(matched=flags(2)))
    assert certificate.certified.tolist() == flags(2).tolist()
    assert (certificate.proof, certificate.whole) == (Proof.REPLAY, False)
    assert certificate.doubts[0].endswith("does not confirm 1 of 5 samples")
    assert certificate.labels.tolist() == [0, 1, -1, 3, 4]


def test_training_spoils_what_an_unknown_direction_is_mixed_with(mixed):
    shown = retrained(matched=flags(0), recognised=flags(0))
    assert of_training(mixed, shown).certified.tolist() == flags(0, 1).tolist()
    # Recognised but for a neuron or two: a right direction, which spoils no other.
    assert of_training(mixed, retrained(matched=flags(0))).certified.tolist() == flags(0).tolist()
    # Clean of the mix, but its own sum is off by a neuron or two: recognised, and not proved.
    shown = retrained(matched=flags(0, 3), recognised=flags(0))
    assert of_training(mixed, shown).certified.tolist() == flags(0, 1, 3).tolist()


def test_directions_without_spare_zeros_are_not_certified_by_training(mixed):
    firmness = torch.tensor([0, 1, 1, 1, 1])  # one zero to spare is enough
    directions = dataclasses.replace(mixed.directions, firmness=firmness)
    mixed = dataclasses.replace(mixed, directions=directions)
    # Unless the sums agree better than any mix would.
    assert of_training(mixed, retrained(closely=flags())).certified.tolist() == ALL
    certificate = of_training(mixed, retrained())
    assert certificate.certified.tolist() == flags(0, 1).tolist()
    assert certificate.doubts[0].endswith("does not confirm 1 of 5 samples")


def test_an_objection_to_the_training_takes_everything(true):
    certificate = of_training(true, retrained(objections=("the bias moved otherwise",)))
    assert not certificate.certified.any()
    assert (certificate.proof, certificate.whole) == (Proof.NONE, False)
    assert certificate.doubts == ("the bias moved otherwise",)


def test_faint_samples_are_not_certified_by_training(true):
    certificate = of_training(true, retrained(), precise=(0, 4))
    assert certificate.certified.tolist() == flags(0, 4).tolist()
    assert (certificate.proof, certificate.whole) == (Proof.REPLAY, False)
    assert certificate.doubts == ("2 of 5 samples are too faint against the update's noise",)


# The whole


def with_noise(factors, relative):
    return dataclasses.replace(factors, noise=factors.noise * relative / factors.relative_noise)


def test_noise_that_leaves_nothing_precise_is_told_as_such():
    _, factors, selection = scene()
    certificate = certify(with_noise(factors, 2e-2), selection)
    assert (certificate.proof, certificate.doubts, certificate.remark) == (Proof.NONE, (), "")
    assert not certificate.precise.any()
    assert not certificate.whole


def test_samples_can_be_too_faint_without_noise_that_is_called_so():
    """Inputs that are nearly one another's multiples: the inverse raises a little noise."""
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(50, generator=generator) + 0.02 * torch.randn(5, 50, generator=generator)
    _, factors, selection = scene(inputs=near, labels=torch.zeros(5, dtype=torch.int64))
    quiet = with_noise(factors, 9.9e-5)
    certificate = certify(quiet, selection)
    assert not quiet.noisy
    assert not certificate.precise.any()
    assert not certificate.certified.any()
    assert (certificate.proof, certificate.whole) == (Proof.NONE, False)
    assert "5 of 5 samples are too faint against the update's noise" in certificate.doubts


def test_the_loudest_samples_are_certified_under_noise():
    """One of five gradients is forty times the others': its input is known that much better."""
    weights = torch.tensor([40.0, 1.0, 1.0, 1.0, 1.0])

    def loss(outputs, targets):
        return (
            torch.nn.functional.cross_entropy(outputs, targets, reduction="none") * weights
        ).sum()

    _, factors, selection = scene(loss=loss)
    noisy = with_noise(factors, 5e-4)
    certificate = certify(noisy, selection)
    assert noisy.noisy
    assert certificate.precise.tolist() == certificate.certified.tolist() == [True] + [False] * 4
    assert (certificate.proof, certificate.whole) == (Proof.PATTERN, False)


def test_precise_is_relative_to_the_size_of_the_inputs():
    inputs = 1e2 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    _, factors, selection = scene(inputs=inputs)
    certificate = certify(factors, selection)
    assert float(certificate.predicted_error.max()) > 1e-5
    assert certificate.precise.all()


def test_a_model_that_matches_nothing_gives_no_labels():
    _, factors, selection = scene()
    certificate = certify(factors, selection, model=plant(5, m=200, seed=1).model)
    assert certificate.labels.tolist() == [-1] * 5
    assert not certificate.whole


@pytest.mark.parametrize("with_model", [True, False])
def test_part_of_a_batch_keeps_its_proof(with_model):
    planted, factors, selection = scene(mixed=True)
    certificate = certify(factors, selection, model=planted.model if with_model else None)
    assert certificate.certified.tolist() == flags(0, 1).tolist()
    assert certificate.proof is (Proof.REPLAY if with_model else Proof.PATTERN)


def test_labels_alone_are_no_replay():
    """Without the gradient of a later layer there is nothing to compare."""
    planted, _, _ = scene()
    alone = {name: g for name, g in planted.gradients.items() if name.startswith("0.")}
    factors = factorise(spear.observe(planted.model, alone))
    certificate = certify(factors, selection_of(planted, factors), model=planted.model)
    assert certificate.proof is Proof.PATTERN
    assert certificate.whole
    assert torch.equal(certificate.labels, planted.labels)
    assert "the replay only gave labels" in certificate.remark


def test_why_there_is_no_replay_is_told_to_those_who_gave_a_model():
    _, factors, selection = scene()
    assert certify(factors, selection).remark.startswith("the layer alone cannot show")
    broken = torch.nn.Sequential(torch.nn.Linear(50, 200), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    assert certify(factors, selection, model=broken).remark.startswith("no replay: ")


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_later_layer_that_is_hardly_off_is_noticed_whatever_the_size_of_inputs(size):
    """What a replay may be off by follows from the error relative to the inputs, not from both."""
    inputs = size * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    planted, factors, selection = scene(inputs=inputs)
    assert certify(factors, selection, model=planted.model).whole
    altered = {**planted.gradients, "4.weight": 1.0001 * planted.gradients["4.weight"]}
    factors = factorise(spear.observe(planted.model, altered))
    certificate = certify(factors, selection_of(planted, factors), model=planted.model)
    assert not certificate.certified.any()
    assert "the replayed gradient of '4.weight' is off by 1.0e-04" in certificate.doubts[0]
