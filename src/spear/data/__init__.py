"""Dataset readers for the layouts people already have on disk, and the photos of the demo."""

from spear.data.adult import adult
from spear.data.folders import imagenet, tiny_imagenet
from spear.data.images import ImageData, cifar10, mnist
from spear.data.photos import PHOTOS, photo_crops
from spear.data.survey import Found, State, catalogue, survey
from spear.data.tabular import Column, TabularData

__all__ = [
    "PHOTOS",
    "Column",
    "Found",
    "ImageData",
    "State",
    "TabularData",
    "adult",
    "catalogue",
    "cifar10",
    "imagenet",
    "mnist",
    "photo_crops",
    "survey",
    "tiny_imagenet",
]
