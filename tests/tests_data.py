"""Small batches and real ones, for tests of the settings."""

import torch

from spear import data
from spear.federated import mlp


def batch(b=6, n=30, m=50, classes=5, seed=0, depth=3):
    """A model with random inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, n, generator=generator)
    y = torch.randint(classes, (b,), generator=generator)
    return mlp(n, classes, width=m, depth=depth, seed=seed), x, y


def real(root, name="tiny_imagenet", b=20, m=200, seed=0, depth=6, among=None):
    """Images, a model at initialisation and a batch of real images with labels."""
    images = getattr(data, name)(root)
    pool = torch.arange(len(images)) if among is None else among(images)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(pool[order[:b]].tolist())
    return images, mlp(x.shape[1], images.classes, width=m, depth=depth, seed=seed), x, y
