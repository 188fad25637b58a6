"""LPIPS v0.1 (Zhang et al., 2018): how different two images look to a trained AlexNet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from spear.errors import DataError, InvalidFile, InvalidOption
from spear.files import read_tensors
from spear.metrics.pixels import check_pairs

FEATURES, HEADS = "alexnet_features.pth", "lpips_alex_heads.pth"
# torchvision's index of each convolution, its weights' shape, stride, padding, pooling before it.
LAYERS = (
    (0, (64, 3, 11, 11), 4, 2, False),
    (3, (192, 64, 5, 5), 1, 2, True),
    (6, (384, 192, 3, 3), 1, 1, True),
    (8, (256, 384, 3, 3), 1, 1, False),
    (10, (256, 256, 3, 3), 1, 1, False),
)
# LPIPS' own scaling of [-1, 1] to what AlexNet was trained on.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
SMALLEST = 31  # pixels: below it the second pooling has nothing to pool
_AT_ONCE = 16  # images; bounds the memory


@dataclass(frozen=True)
class NotMeasured:
    """Why a score is None.

    >>> print(NotMeasured("weights not found in weights"))
    not computed: weights not found in weights
    """

    reason: str

    def __str__(self) -> str:
        return f"not computed: {self.reason}"


@dataclass(frozen=True, eq=False)
class Lpips:
    """The perceptual distance: 0 for equal images, about 0.7 for unrelated ones.

    >>> print(Lpips.find(Path("nowhere")))
    not computed: weights not found in nowhere: expected alexnet_features.pth, lpips_alex_heads.pth
    """

    convolutions: tuple[tuple[Tensor, Tensor], ...] = field(repr=False)  # weight and bias of each
    heads: tuple[Tensor, ...] = field(repr=False)  # (1, C, 1, 1) each

    @staticmethod
    def load(folder: Path) -> Lpips:
        """Read AlexNet's convolutions and the linear heads; raises `DataError` if they are missing."""
        absent = [name for name in (FEATURES, HEADS) if not (Path(folder) / name).is_file()]
        if absent:
            raise DataError(f"weights not found in {folder}: expected {', '.join(absent)}")
        stack, heads = _tensors(Path(folder) / FEATURES), _tensors(Path(folder) / HEADS)
        convolutions = tuple(
            (
                _taken(stack, f"features.{index}.weight", shape, FEATURES),
                _taken(stack, f"features.{index}.bias", shape[:1], FEATURES),
            )
            for index, shape, *_ in LAYERS
        )
        return Lpips(
            convolutions,
            tuple(
                _taken(heads, f"lin{i}.model.1.weight", (1, shape[0], 1, 1), HEADS)
                for i, (_, shape, *_) in enumerate(LAYERS)
            ),
        )

    @staticmethod
    def find(folder: Path) -> Lpips | NotMeasured:
        """Read the weights, or say why LPIPS cannot be computed; for `score_images(lpips=...)`."""
        try:
            return Lpips.load(folder)
        except DataError as error:
            return NotMeasured(str(error))

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """Distance of each pair of images in [0, 1], not clipped: (k, C, H, W) to (k,), float64.

        Grey images are repeated to three channels. Images under 31 x 31 pixels (MNIST) are refused:
        AlexNet's pooling leaves nothing of them, and enlarged ones would be other images.
        """
        check_pairs(recovered, truth)
        problem = unfit(recovered)
        if problem:
            raise InvalidOption(problem)
        with torch.no_grad():
            starts = range(0, max(len(truth), 1), _AT_ONCE)
            chunks = [slice(start, start + _AT_ONCE) for start in starts]
            return torch.cat([self._distance(recovered[part], truth[part]) for part in chunks])

    def features(self, images: Tensor) -> list[Tensor]:
        """The features of images (k, C, H, W) in [0, 1] at each of the five layers, (k, c, h, w)."""
        problem = unfit(images)
        if problem:
            raise InvalidOption(problem)
        weight, _ = self.convolutions[0]
        x = images.detach().to(weight).expand(-1, 3, -1, -1)
        shift = torch.tensor(SHIFT).to(weight).view(3, 1, 1)
        x = (2 * x - 1 - shift) / torch.tensor(SCALE).to(weight).view(3, 1, 1)
        seen = []
        for (weight, bias), (_, _, stride, padding, pooled) in zip(
            self.convolutions, LAYERS, strict=True
        ):
            x = max_pool2d(x, 3, 2) if pooled else x
            x = conv2d(x, weight, bias, stride, padding).relu()
            seen.append(x)
        return seen

    def _distance(self, recovered: Tensor, truth: Tensor) -> Tensor:
        total = torch.zeros(len(recovered), dtype=torch.float64)
        layers = zip(self.features(recovered), self.features(truth), self.heads, strict=True)
        for x, y, head in layers:
            difference = (_unit(x) - _unit(y)).square()  # (k, c, h, w)
            total += conv2d(difference, head).double().mean((1, 2, 3)).cpu()
        return total


def unfit(images: Tensor) -> str:
    """Why LPIPS cannot be computed on these images; empty if it can."""
    if images.ndim == 4 and images.shape[1] in (1, 3) and min(images.shape[2:]) >= SMALLEST:
        return ""
    return (
        f"LPIPS takes images (k, 1 or 3, H, W) of at least {SMALLEST} x {SMALLEST} pixels, "
        f"got {tuple(images.shape)}"
    )


def _unit(features: Tensor) -> Tensor:
    """Channels scaled to length one at every position; LPIPS adds 1e-10 to the length."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except (InvalidFile, OSError) as error:
        raise DataError(
            f"{path}: expected tensors by name ({error}); the file may be incomplete, copy it again"
        ) from error


def _taken(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], file: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape or not tensor.is_floating_point():
        came = (
            "nothing of that name" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        )
        raise DataError(f"{file}: expected {name} of shape {shape}, got {came}")
    return tensor
