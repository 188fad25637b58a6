"""What an attacker knows of images anyway, put to use after an inversion: they are smooth.

Under noise, inputs come back with noise of a known size, even over all pixels (`Inversion.noise`).
Least squares is the best without a prior. An attacker has one: a natural image has few large
coefficients in a cosine transform of small blocks, and those below the noise can go. Nothing is
trained, and nothing is tuned: the noise sets the level.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from spear.errors import InvalidOption

_EDGE = 8  # pixels of a block, as in JPEG
# Coefficients below this many deviations go: BM3D's level. From 2.5 to 3.0 the PSNR of TinyImageNet
# under the noise of the paper's Table 9 is the same to 0.1 dB.
_DEVIATIONS = 2.7


def denoise(images: Tensor, noise: Tensor | float) -> Tensor:
    """Images with the noise that an update left in them taken out, as an attacker would.

    Cosine coefficients of 8 x 8 blocks, over all channels, that the noise could have made are set to
    zero; the result is the mean over all 64 places that a grid of blocks can have. Never part of a
    verdict: what comes out is likelier, not proved.

    Args:
        images: (k, C, H, W), one or three channels, in any unit.
        noise: standard deviation of the noise in that unit, for all or (k,), as `Inversion.noise`
            has it for inputs as the client's layer got them. An image without noise stays as it is.

    >>> ramp = torch.linspace(0, 1, 32).expand(4, 1, 32, 32)
    >>> noisy = ramp + 0.1 * torch.randn(4, 1, 32, 32)
    >>> bool((denoise(noisy, 0.1) - ramp).norm() < 0.5 * (noisy - ramp).norm())
    True
    """
    deviations = _checked(images, noise)
    _, channels, height, width = images.shape
    across, within = _cosines(channels).to(images), _cosines(_EDGE).to(images)
    rows, columns = (_mirrored(size).to(images.device) for size in (height, width))
    padded = images.detach()[:, :, rows[:, None], columns]
    padded = torch.einsum("kchw,dc->kdhw", padded, across)
    total = torch.zeros_like(padded)
    for i, j in product(range(_EDGE), repeat=2):
        blocks = padded[..., i:, j:].unfold(2, _EDGE, _EDGE).unfold(3, _EDGE, _EDGE)
        coefficients = within @ blocks @ within.T  # (k, C, h, w, 8, 8)
        keep = coefficients.abs() > _DEVIATIONS * deviations
        keep[:, 0, ..., 0, 0] = True  # the mean
        smooth = within.T @ (coefficients * keep) @ within
        whole = smooth.transpose(3, 4).flatten(4, 5).flatten(2, 3)  # (k, C, 8 h, 8 w)
        total[..., i : i + whole.shape[2], j : j + whole.shape[3]] += whole
    inner = total[..., _EDGE - 1 :, _EDGE - 1 :][..., :height, :width] / _EDGE**2
    back = torch.einsum("kdhw,dc->kchw", inner, across)
    return torch.where(deviations.view(-1, 1, 1, 1) > 0, back, images.detach())


def _cosines(size: int) -> Tensor:
    """The orthonormal cosine transform, a row for each frequency (size, size)."""
    k = torch.arange(size, dtype=torch.float64)
    rows = (math.pi / size * k[:, None] * (k + 0.5)).cos() * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows


def _mirrored(size: int) -> Tensor:
    """Pixels of a line that goes on in its mirror image, so that every block has 64 places."""
    blocks = -(-(size + _EDGE - 1) // _EDGE)
    place = torch.arange(1 - _EDGE, blocks * _EDGE) % (2 * size)
    return torch.minimum(place, 2 * size - 1 - place)


def _checked(images: Tensor, noise: Tensor | float) -> Tensor:
    """The noise of each image, in the shape of its coefficients (k, 1, 1, 1, 1, 1)."""
    is_image = isinstance(images, Tensor) and images.is_floating_point() and images.ndim == 4
    if not is_image or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 1:
        got = f"{tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise InvalidOption(
            f"expected floating-point images (k, C, H, W) of 1 or 3 channels, got {got}: "
            "result.inputs.unflatten(1, (3, 64, 64)), for example"
        )
    if noise is None:
        raise InvalidOption("expected {noise}, got None: nobody knows it", arguments=["noise"])
    deviations = torch.as_tensor(noise).to(images).flatten()
    if len(deviations) not in (1, len(images)):
        raise InvalidOption(
            f"expected {{noise}} as one number or {len(images)}, one for each image, "
            f"got {len(deviations)}",
            arguments=["noise"],
        )
    if not bool((deviations.isfinite() & (deviations >= 0)).all()):
        raise InvalidOption("expected finite {noise} >= 0", arguments=["noise"])
    return deviations.expand(len(images)).view(-1, 1, 1, 1, 1, 1)
