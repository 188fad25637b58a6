"""Structural similarity of images (Wang et al., 2004)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from spear.errors import InvalidOption
from spear.metrics.pixels import check_pairs

# All from the paper of Wang et al.: the window, and K1, K2 for values in [0, 1].
WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2


def ssim(recovered: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity of each pair of images in [0, 1]: (k, C, H, W) to (k,), float64.

    The mean over channels and over every place where the window fits, as scikit-image's
    `structural_similarity(gaussian_weights=True, use_sample_covariance=False, data_range=1)`.

    >>> x = torch.rand(2, 3, 16, 16)
    >>> ssim(x, x).tolist()
    [1.0, 1.0]
    """
    check_pairs(recovered, truth)
    if recovered.ndim != 4 or min(recovered.shape[2:]) < WINDOW:
        raise InvalidOption(
            f"expected images (k, C, H, W) of at least {WINDOW} x {WINDOW} pixels, the size of the "
            f"window, got {tuple(recovered.shape)}"
        )
    x, y = recovered.detach().double().cpu(), truth.detach().double().cpu()
    x_mean, y_mean = _blurred(x), _blurred(y)  # (k, C, H - 10, W - 10)
    x_variance = _blurred(x * x) - x_mean * x_mean
    y_variance = _blurred(y * y) - y_mean * y_mean
    covariance = _blurred(x * y) - x_mean * y_mean
    alike = (2 * x_mean * y_mean + C1) * (2 * covariance + C2)
    most = (x_mean.square() + y_mean.square() + C1) * (x_variance + y_variance + C2)
    return (alike / most).flatten(1).mean(1)


def _blurred(images: Tensor) -> Tensor:
    """Gaussian means wherever the whole window fits: rows, then columns."""
    offsets = torch.arange(WINDOW, dtype=images.dtype) - WINDOW // 2
    window = torch.exp(-offsets.square() / (2 * SIGMA**2))
    window = window / window.sum()
    planes = images.flatten(0, 1)[:, None]  # (k C, 1, H, W)
    blurred = conv2d(conv2d(planes, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    return blurred.view(*images.shape[:2], *blurred.shape[2:])
