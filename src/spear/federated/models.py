"""The networks of the paper's experiments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from spear.errors import DataError
from spear.files import read_tensors

# VGG16's convolutions by output channels; M is a 2x2 max-pooling.
_VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def mlp(
    inputs: int,
    classes: int,
    *,
    width: int = 200,
    depth: int = 6,
    seed: int | None = None,
) -> nn.Sequential:
    """A fully connected ReLU network of `depth` linear layers at PyTorch's default initialisation.

    With a seed, the weights depend on it alone, and the global random state is not changed.

    >>> [m.out_features for m in mlp(12, 3, width=5, depth=3) if isinstance(m, nn.Linear)]
    [5, 5, 3]
    """
    if min(inputs, classes, width) < 1 or depth < 2:
        raise ValueError(
            f"expected sizes >= 1 and depth >= 2, got {inputs}, {classes}, {width}, {depth}"
        )
    with _seeded(seed):
        return nn.Sequential(*_stack([inputs, *[width] * (depth - 1), classes]))


class Vgg16(nn.Module):
    """VGG16: thirteen convolutions, then three linear layers; dropout is left out.

    Args:
        classes: outputs of the last layer.
        width: width of the two hidden linear layers.
        pixels: side of the images, a multiple of 32; 224 gives the usual 25088 features.
        seed: the weights depend on it alone.

    >>> net = Vgg16(10, width=32, pixels=32, seed=0)
    >>> net.features(torch.zeros(2, 3, 32, 32)).shape, net(torch.zeros(2, 3, 32, 32)).shape
    (torch.Size([2, 512]), torch.Size([2, 10]))
    """

    def __init__(
        self, classes: int = 1000, *, width: int = 4096, pixels: int = 224, seed: int | None = None
    ) -> None:
        super().__init__()
        if pixels < 32 or pixels % 32:
            raise ValueError(f"expected pixels to be a multiple of 32, got {pixels}")
        with _seeded(seed):
            layers: list[nn.Module] = []
            channels = 3
            for entry in _VGG16:
                if isinstance(entry, int):
                    layers += [nn.Conv2d(channels, entry, 3, padding=1), nn.ReLU()]
                    channels = entry
                else:
                    layers.append(nn.MaxPool2d(2))
            self.features = nn.Sequential(*layers, nn.Flatten())
            self.classifier = nn.Sequential(
                *_stack([512 * (pixels // 32) ** 2, width, width, classes])
            )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores

    def load_features(self, root: Path) -> Vgg16:
        """Take the convolutions trained on ImageNet from `weights/vgg16_features.pth` under `root`.

        The linear layers stay as they were initialised.
        """
        path = Path(root) / "weights" / "vgg16_features.pth"
        if not path.exists():
            raise DataError(
                f"VGG16's weights are not in {root}: expected weights/vgg16_features.pth"
            )
        own = self.features.state_dict()
        found = {name.removeprefix("features."): t for name, t in read_tensors(path).items()}
        wrong = [n for n in own if getattr(found.get(n), "shape", None) != own[n].shape]
        if wrong or set(found) - set(own):
            name = wrong[0] if wrong else min(set(found) - set(own))
            raise DataError(
                f"{path}: expected VGG16's convolutions, but features.{name[:80]} does not fit: "
                "copy the file again"
            )
        self.features.load_state_dict(found)
        return self


def _stack(sizes: list[int]) -> Iterator[nn.Module]:
    """Linear layers of these sizes with ReLUs between them."""
    for i, (before, after) in enumerate(pairwise(sizes)):
        if i:
            yield nn.ReLU()
        yield nn.Linear(before, after)


_drawing = threading.RLock()  # one model at a time: all threads share torch's random state


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
