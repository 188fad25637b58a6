"""Compare recovered images with the true ones: all scores at once, SSIM among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from spear.errors import InvalidOption
from spear.metrics.assignment import Assignment, assign
from spear.metrics.lpips import Lpips, NotMeasured, unfit
from spear.metrics.pixels import EXACT_DB, check_pairs, mae, mse, psnr

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
    pairs = zip(recovered.detach().double().cpu(), truth.detach().double().cpu(), strict=True)
    # One image at a time, so that its data stays in the cache.
    values = [_similarity(x, y) for x, y in pairs]
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def _similarity(x: Tensor, y: Tensor) -> Tensor:
    """SSIM of two images (C, H, W)."""
    x_mean, y_mean = _blurred(x), _blurred(y)  # (C, H - 10, W - 10)
    x_variance = _blurred(x * x) - x_mean * x_mean
    y_variance = _blurred(y * y) - y_mean * y_mean
    covariance = _blurred(x * y) - x_mean * y_mean
    alike = (2 * x_mean * y_mean + C1) * (2 * covariance + C2)
    most = (x_mean.square() + y_mean.square() + C1) * (x_variance + y_variance + C2)
    return (alike / most).mean()


def _blurred(images: Tensor) -> Tensor:
    """Gaussian means wherever the whole window fits: rows, then columns."""
    margin = WINDOW // 2
    offsets = np.arange(WINDOW) - margin
    window = np.exp(-np.square(offsets) / (2 * SIGMA**2))
    window /= window.sum()
    rows = scipy.ndimage.correlate1d(images.numpy(), window, axis=-2)[..., margin:-margin, :]
    return torch.from_numpy(scipy.ndimage.correlate1d(rows, window, axis=-1)[..., margin:-margin])


@dataclass(frozen=True, eq=False)
class ImageScore:
    """A score for each pair of images; None, with a note why, where it was not measured."""

    pairs: Assignment
    psnr: Tensor  # (p,) dB
    mse: Tensor  # (p,)
    mae: Tensor  # (p,)
    ssim: Tensor | None  # (p,)
    lpips: Tensor | None  # (p,)
    notes: Mapping[str, NotMeasured]  # why a score is None, by its name

    @property
    def exact(self) -> bool:
        complete = self.pairs.missing == 0 and self.pairs.surplus == 0 and len(self.pairs) > 0
        return complete and bool((self.psnr >= EXACT_DB).all())


def score_images(
    recovered: Tensor, truth: Tensor, *, lpips: Lpips | NotMeasured | None = None
) -> ImageScore:
    """Assign recovered images (k, C, H, W) to true ones (b, C, H, W) and measure each pair.

    Both in [0, 1], not clipped. Neither argument is changed or reordered.

    >>> import torch
    >>> x = torch.rand(3, 1, 28, 28)
    >>> found = score_images(x[1:], x)
    >>> found.psnr.tolist(), found.ssim.tolist(), found.pairs.missing
    ([400.0, 400.0], [1.0, 1.0], 1)
    >>> print(found.notes["lpips"])
    not computed: no weights were given: lpips=Lpips.find(folder)
    """
    if truth.ndim != 4:
        raise InvalidOption(f"expected images (b, C, H, W), got {tuple(truth.shape)}")
    pairs = assign(recovered, truth)
    x, y = recovered.detach()[pairs.found], truth.detach()[pairs.truth]
    notes = {}
    if min(y.shape[2:]) < WINDOW:
        size = f"{y.shape[2]} x {y.shape[3]}"
        notes["ssim"] = NotMeasured(f"{size} pixels are smaller than the window of {WINDOW}")
    if lpips is None:
        notes["lpips"] = NotMeasured("no weights were given: lpips=Lpips.find(folder)")
    elif isinstance(lpips, NotMeasured):
        notes["lpips"] = lpips
    elif unfit(y):
        notes["lpips"] = NotMeasured(unfit(y))
    return ImageScore(
        pairs,
        psnr(x, y),
        mse(x, y),
        mae(x, y),
        None if "ssim" in notes else ssim(x, y),
        lpips(x, y) if isinstance(lpips, Lpips) and "lpips" not in notes else None,
        notes,
    )
