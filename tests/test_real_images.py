"""The claims, on real images: batches of CIFAR-10, MNIST and TinyImageNet."""

import pytest
import torch

import spear
from spear import Outcome, data
from spear.federated import fedsgd, mlp
from spear.metrics import score


def real_batch(name, root, b, seed, normalise=True):
    images = getattr(data, name)(root)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(order[:b].tolist(), normalise=normalise)
    model = mlp(x.shape[1], images.classes, width=200, depth=6, seed=seed)
    return images, model, x, y


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("b", [8, 12])
@pytest.mark.parametrize("name", ["cifar10", "mnist", "tiny_imagenet"])
def test_whole_batches_come_back(name, b, seed, data_root):
    images, model, x, y = real_batch(name, data_root, b, seed)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model, finder="sampling")
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    assert result.outcome is Outcome.EXACT
    assert found.exact
    assert found.mean > 120
    assert torch.equal(result.labels, y[found.truth])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cifar10", "mnist", "tiny_imagenet"])
def test_raw_pixels_come_back(name, seed, data_root):
    _, model, x, y = real_batch(name, data_root, 8, seed, normalise=False)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), finder="sampling")
    assert result.outcome is Outcome.EXACT
    assert score(result.inputs, x).exact


def test_one_class_only(data_root):
    images = data.tiny_imagenet(data_root)
    same = (images.labels == images.labels[0]).nonzero().flatten()[:10].tolist()
    x, y = images.batch(same)
    model = mlp(x.shape[1], 200, width=200, seed=0)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    assert result.outcome is Outcome.EXACT
    assert score(images.to_pixels(result.inputs), images.to_pixels(x)).exact


def test_a_batch_of_twenty(data_root):
    """The paper's own size, at a width that keeps the sampling short."""
    images = data.cifar10(data_root)
    x, y = images.batch(range(20))
    model = mlp(x.shape[1], 10, width=600, seed=1)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    assert result.outcome is Outcome.EXACT
    assert score(images.to_pixels(result.inputs), images.to_pixels(x)).exact
