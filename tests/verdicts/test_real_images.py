"""The claims, on real images: batches of CIFAR-10, MNIST and TinyImageNet."""

import pytest
import torch

import spear
from spear import Outcome, data
from spear.federated import defences, fedsgd, mlp
from spear.metrics import score
from support.planted import gaussian, real_batch


def inverted(model, x, y, **options):
    return spear.invert(spear.observe(model, fedsgd(model, x, y)), **options)


@pytest.mark.parametrize(
    ("name", "b", "normalise"),
    [("cifar10", 12, True), ("mnist", 8, True), ("mnist", 8, False), ("tiny_imagenet", 8, False)],
)
def test_sampling_recovers_whole_batches(name, b, normalise, data_root):
    images, model, x, y = real_batch(data_root, name, b, normalise=normalise)
    result = inverted(model, x, y, finder="sampling")
    assert_all_there(images, result, x, y, normalise)


def assert_all_there(images, result, x, y, normalise=True):
    """Every image to 100 dB, and its label."""
    shown = (images.to_pixels(some, normalised=normalise) for some in (result.inputs, x))
    found = score(*shown)
    assert result.outcome is Outcome.EXACT
    assert found.exact
    assert found.worst > 100
    assert torch.equal(result.labels, y[found.truth])


@pytest.mark.parametrize(
    ("name", "b", "width", "normalise"),
    [
        ("cifar10", 20, 200, True),
        ("mnist", 20, 200, False),
        ("tiny_imagenet", 20, 200, True),
        ("tiny_imagenet", 20, 200, False),
        ("cifar10", 40, 200, True),
        ("cifar10", 64, 400, False),  # raw pixels leave fewer rows that tell samples apart
    ],
)
def test_the_cascade_recovers_whole_batches(name, b, width, normalise, data_root):
    images, model, x, y = real_batch(data_root, name, b, width, normalise=normalise)
    assert_all_there(images, inverted(model, x, y), x, y, normalise)


def test_a_hundred_images(data_root):
    images, model, x, y = real_batch(data_root, "tiny_imagenet", 100, 600, seed=3)
    assert_all_there(images, inverted(model, x, y), x, y)


@pytest.mark.parametrize("shift", [0.3, 0.03])
def test_near_duplicate_images(shift, data_root):
    """One image twice, the second time with a little noise."""
    _, model, x, y = real_batch(data_root, "cifar10")
    x[1] = x[0] + shift * gaussian(1, x.shape[1], 1)[0]
    y[1] = y[0]
    result = inverted(model, x, y)
    assert int(result.certified.sum()) >= 18
    found = score(result.inputs, x)
    assert bool((found.psnr[result.certified] > 100).all())
    assert (result.outcome is Outcome.EXACT) == found.exact or result.outcome is Outcome.PARTIAL


def test_large_photos_come_back(data_root):
    """The 720 x 720 photos of the paper, here at 128 pixels."""
    images = data.imagenet(data_root, pixels=128)
    assert len(images) > 300
    x, y = images.batch(range(0, 40, 2))
    model = mlp(x.shape[1], images.classes, width=200, seed=0)
    assert_all_there(images, inverted(model, x, y), x, y)


def test_a_search_that_finds_nothing_ends_in_a_verdict(data_root):
    """Pruning by 1 % once left a round of estimates empty, and raised an IndexError."""
    _, model, x, y = real_batch(data_root, "mnist")
    update = defences.prune(fedsgd(model, x, y), 0.01)
    result = spear.invert(spear.observe(model, update), model=model, max_seconds=3)
    assert (result.outcome, len(result.inputs)) == (Outcome.INCONCLUSIVE, 0)
