"""Dataset readers for the layouts people already have on disk; the photos of the demo."""

from spear.data.adult import adult
from spear.data.images import ImageData, cifar10, imagenet, mnist, tiny_imagenet
from spear.data.tabular import Column, TabularData

__all__ = [
    "Column",
    "ImageData",
    "TabularData",
    "adult",
    "cifar10",
    "imagenet",
    "mnist",
    "tiny_imagenet",
]
