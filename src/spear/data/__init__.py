"""Dataset readers for the layouts people already have on disk; the photos of the demo."""

from spear.data.images import ImageData, cifar10, imagenet, mnist, tiny_imagenet

__all__ = ["ImageData", "cifar10", "imagenet", "mnist", "tiny_imagenet"]
