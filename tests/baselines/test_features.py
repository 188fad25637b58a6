"""Features before a convolutional network's first linear layer, and images from them."""

import math

import pytest
import torch
from torch import nn

import spear
from spear import InvalidOption, Outcome, Proof, data
from spear.baselines import FeatureInversion, GeipingAttack, invert_features, pixel_bounds
from spear.federated import fedsgd
from spear.federated.models import Vgg16
from spear.metrics import score_features
from spear.update.layers import network_before
from support.planted import seeded

LAYER = "classifier.0"


def vgg_batch(root, b, seed, width=512):
    images = data.imagenet(root, pixels=64)
    order = torch.randperm(len(images), generator=seeded(seed))
    x, y = images.batch(order[:b].tolist())
    model = Vgg16(images.classes, width=width, pixels=64, seed=seed).load_features(root)
    return images, model, x.view(-1, *images.shape), y


def small_convolutions():
    torch.manual_seed(0)
    features = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(6 * 36, 60), nn.ReLU(), nn.Linear(60, 4))


# Features


@pytest.mark.parametrize(("b", "seed"), [(4, 0), (16, 3)])
def test_the_features_of_real_photos_are_exact(b, seed, data_root):
    _, model, x, y = vgg_batch(data_root, b, seed)
    view = spear.observe(model, fedsgd(model, x, y), layer=LAYER)
    assert view.relu == "both"
    assert not view.reads_data
    result = spear.invert(view, model=model)
    with torch.no_grad():
        found = score_features(result.inputs, model.features(x))
    assert result.outcome is Outcome.EXACT
    assert result.proof is Proof.REPLAY
    assert result.batch_size == b
    assert (found.missing, found.surplus) == (0, 0)
    assert float(found.cosine.min()) > 1 - 1e-9
    assert torch.equal(result.labels, y[found.truth])
    assert "computed from the data" in result.explanation


def test_a_wide_layer_is_sketched_and_exact(data_root, monkeypatch):
    """Wide enough for the sketch: the whole factorisation is not called."""
    import spear.factors

    monkeypatch.setattr(spear.factors.factorisation, "left_factor", None)
    _, model, x, y = vgg_batch(data_root, 6, 0, width=1200)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y), layer=LAYER))
    with torch.no_grad():
        found = score_features(result.inputs, model.features(x))
    assert result.outcome is Outcome.EXACT
    assert result.batch_size == 6
    assert float(found.cosine.min()) > 1 - 1e-9


# Images


def test_features_of_real_photos_lead_to_images(data_root):
    images, model, x, y = vgg_batch(data_root, 2, 0)
    view = spear.observe(model, fedsgd(model, x, y), layer=LAYER)
    features = spear.invert(view).inputs
    known = {"shape": images.shape, "bounds": pixel_bounds(images.mean, images.std)}
    before = network_before(model, LAYER)
    few, many = (
        invert_features(before, features, options=FeatureInversion(iterations=n), **known)
        for n in (1, 25)
    )
    assert many.stats["loss"] < few.stats["loss"] / 2  # squared distance to the features, relative
    assert many.outcome is Outcome.APPROXIMATE
    assert many.proof is Proof.NONE
    assert not bool(many.certified.any())
    assert many.batch_size == 2
    assert "nothing is proved" in many.reason
    pixels = images.to_pixels(many.inputs)
    assert -1e-6 <= float(pixels.min())
    assert float(pixels.max()) <= 1 + 1e-6
    with torch.no_grad():
        seen = before(many.inputs.view(-1, *images.shape))
    # Each image has the features of its own row, not of the other.
    assert score_features(seen, features).truth.tolist() == [0, 1]


def test_inversion_finds_the_image_where_features_tell_it():
    model = small_convolutions()
    before = network_before(model, "3")
    x = torch.rand(3, 1, 8, 8, generator=seeded(1))
    options = FeatureInversion(iterations=800, total_variation=0)
    found = invert_features(
        before, before(x).detach(), shape=(1, 8, 8), bounds=(0.0, 1.0), options=options
    )
    assert float((found.inputs - x.flatten(1)).abs().mean()) < 0.1  # a random image: 0.33
    assert all(p.grad is None for p in model.parameters())


def test_same_seed_same_images():
    before = network_before(small_convolutions(), "3")
    features = before(torch.rand(2, 1, 8, 8)).detach()
    options = FeatureInversion(iterations=30)

    def run(f, seed):
        known = {"shape": (1, 8, 8), "options": options, "generator": seeded(seed)}
        return invert_features(before, f, **known).inputs

    assert torch.equal(run(features, 0), run(features, 0))
    assert not torch.equal(run(features, 0), run(features, 1))


def test_inversion_starts_where_it_is_told():
    before = network_before(small_convolutions(), "3")
    x = torch.rand(2, 1, 8, 8, generator=seeded(1))
    near = (x + 0.02 * torch.randn(x.shape, generator=seeded(2))).clamp(0, 1)
    kept = near.clone()
    options = FeatureInversion(iterations=1, lr=1e-6, total_variation=0)
    known = {"shape": (1, 8, 8), "bounds": (0.0, 1.0), "options": options}
    found = invert_features(before, before(x).detach(), initial=near.flatten(1), **known)
    assert torch.allclose(found.inputs, near.flatten(1), atol=1e-3)
    assert torch.equal(near, kept)
    beyond = invert_features(before, before(x).detach(), initial=near + 5, **known)
    assert float(beyond.inputs.max()) <= 1
    with pytest.raises(InvalidOption, match="expected initial inputs"):
        invert_features(before, before(x).detach(), initial=near[:1], **known)
    with pytest.raises(InvalidOption, match="finite initial"):
        invert_features(before, before(x).detach(), initial=near * math.nan, **known)


def test_images_are_smoother_where_high_frequencies_move_in_smaller_steps():
    """Of the images with these features, which are blind to the finest detail."""
    torch.manual_seed(0)
    before = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    ramp = torch.linspace(0, 1, 16)
    x = (ramp[:, None] * ramp).expand(1, 1, 16, 16)
    features = before(x).detach()

    def errors(decay):
        options = FeatureInversion(iterations=200, total_variation=0, decay=decay)
        known = {"shape": (1, 16, 16), "bounds": (0.0, 1.0), "options": options}
        found = invert_features(before, features, **known)
        return found.stats["loss"], float((found.inputs - x.flatten(1)).abs().mean())

    (noisy_loss, noisy), (loss, smooth) = errors(0), errors(1.5)
    assert max(noisy_loss, loss) < 0.02
    assert smooth < noisy / 2


def test_inversion_stops_in_time_and_on_ctrl_c():
    before = network_before(small_convolutions(), "3")
    features = before(torch.rand(2, 1, 8, 8)).detach()
    endless = FeatureInversion(iterations=10**6)
    known = {"shape": (1, 8, 8), "options": endless}
    result = invert_features(before, features, max_seconds=0.2, **known)
    assert 0 < result.stats["iterations"] < 10**5
    assert "max_seconds = 0.2 had passed" in result.reason

    def interrupt(progress):
        assert (progress.expected, progress.batch_size) == (10**6, 2)
        raise KeyboardInterrupt

    result = invert_features(before, features, on_progress=interrupt, **known)
    assert result.inputs.shape == (2, 64)
    assert "interrupted" in result.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(5)}, r"expected features \(k, n\)"),
        ({"features": torch.zeros(0, 216)}, r"expected features \(k, n\)"),
        ({"features": torch.full((2, 216), math.nan)}, "finite features"),
        ({"features": torch.zeros(2, 7)}, "does not map images"),
        ({"shape": (2, 8, 8)}, "does not map images"),
        ({"shape": (64,)}, r"\(..., height, width\)"),
        ({"shape": (1, 0, 8)}, "sizes >= 1"),
        ({"bounds": (1.0, 0.0)}, "low < high"),
        ({"max_seconds": -1}, "max_seconds > 0"),
    ],
)
def test_bad_calls_of_the_inversion_say_what_is_wrong(change, message):
    before = network_before(small_convolutions(), "3")
    call = {"features": torch.rand(2, 216), "shape": (1, 8, 8), **change}
    with pytest.raises(InvalidOption, match=message):
        invert_features(before, call.pop("features"), **call)


# Gradient matching from there


def test_geiping_starts_where_it_is_told():
    model = small_convolutions()
    x, y = torch.rand(2, 1, 8, 8), torch.tensor([0, 3])
    view = spear.observe(model, fedsgd(model, x, y))
    known = {"model": model, "labels": y, "shape": (1, 8, 8), "bounds": (0.0, 1.0)}
    near = (x + 0.02 * torch.randn(x.shape)).clamp(0, 1)
    kept = near.clone()
    attack = GeipingAttack(iterations=30, lr=0.003, total_variation=0)
    told = attack.invert(view, initial=near.flatten(1), **known)
    assert torch.equal(near, kept)
    assert told.stats["loss"] < attack.invert(view, **known).stats["loss"] / 5
    assert float((told.inputs - x.flatten(1)).abs().mean()) < 0.03
    for wrong, message in (
        (near[:1], "expected initial inputs"),
        (near[..., 1:], "expected initial inputs"),
        (near * math.nan, "finite initial"),
    ):
        with pytest.raises(InvalidOption, match=message):
            attack.invert(view, initial=wrong, **known)
