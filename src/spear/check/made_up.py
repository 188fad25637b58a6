"""Made-up private data for a rehearsal: inputs of the model's shape, labels, and a loss.

What comes back under noise depends on the data: images with pixels in [0, 1] differ little from each
other, and drawings are mostly background. So there are several kinds, and a rehearsal tries all that
fit. The constants are chosen so that batches of 20 have the singular values of batches from CIFAR-10,
MNIST and ADULT; `spear docs check` says how well they predict what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.judge import main_tensor
from spear.update import channels_last, embedding_of, picture

_MOST_CATEGORIES = 28  # of a table's column


@dataclass(frozen=True)
class Kind:
    """One kind of made-up data."""

    name: str
    words: str
    make: Callable[[int, tuple[int, ...], torch.Generator], Tensor]
    """Takes the number of samples, the shape of one and a generator."""


def kinds_for(model: nn.Module, shape: tuple[int, ...], told: str | None = None) -> list[Kind]:
    """The kinds of data that inputs of this shape may be, or only the one asked for.

    >>> [kind.name for kind in kinds_for(nn.Linear(784, 10), (784,))]
    ['photos', 'pixels', 'drawings']
    >>> [kind.name for kind in kinds_for(nn.Linear(14, 2), (14,))]
    ['table', 'numbers']
    """
    if told is not None:
        if told not in KINDS:
            raise InvalidOption(
                f"expected {{data}} to be one of {', '.join(KINDS)}, got {told!r}",
                arguments=("data",),
            )
        return [KINDS[told]]
    table = embedding_of(model)
    if table is not None:
        return [Kind("words", "random words", _words(table.num_embeddings))]
    if picture(shape) is not None:
        return [KINDS["photos"], KINDS["pixels"], KINDS["drawings"]]
    return [KINDS["table"], KINDS["numbers"]] if len(shape) == 1 else [KINDS["numbers"]]


def targets_for(outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Random classes; for a single output, random numbers, or zeros and ones if it is a probability."""
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return torch.randint(outputs.shape[1], (len(outputs),), generator=generator)
    numbers = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    inside = bool(((outputs > 0) & (outputs < 1)).all())
    return ((numbers > 0).double() if inside else numbers).to(outputs.dtype)


def loss_of(outputs: object, targets: Tensor) -> Tensor:
    """Cross-entropy for classes, squared error for numbers."""
    predicted = predictions(outputs, len(targets))
    if targets.is_floating_point():
        return nn.functional.mse_loss(predicted.reshape(targets.shape), targets.to(predicted))
    return nn.functional.cross_entropy(predicted, targets.to(predicted.device))


def predictions(outputs: object, samples: int) -> Tensor:
    """The tensor to compute the loss on, a row for each sample even if the model squeezes it.

    >>> predictions((torch.zeros(10), None), 1).shape
    torch.Size([1, 10])
    """
    main = main_tensor(outputs)
    return main if main.shape[:1] == (samples,) else main.reshape(samples, -1)


def _words(count: int) -> Callable[[int, tuple[int, ...], torch.Generator], Tensor]:
    return lambda samples, shape, generator: torch.randint(
        count, (samples, *shape), generator=generator
    )


def _photos(samples: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Smooth random pictures of differing contrast, whose channels are mostly alike."""
    channels, height, width = picture(shape) or (1, 1, math.prod(shape))
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)
    frequency = (rows.square() + columns.square()).sqrt().clamp_min(0.5 / max(height, width))
    own = torch.randn(samples, channels, height, width, generator=generator)
    common = torch.randn(samples, 1, height, width, generator=generator)
    white = math.sqrt(0.9) * common + math.sqrt(0.1) * own
    smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(white) / frequency**1.2).real
    contrast = torch.exp(0.35 * torch.randn(samples, 1, 1, 1, generator=generator))
    photos = 0.85 * contrast * smooth / smooth.std()
    return _arranged(photos.clamp(-2, 2), shape)


def _pixels(samples: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return (0.47 + 0.25 * _photos(samples, shape, generator)).clamp(0, 1)


def _drawings(samples: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One curved stroke in the middle of an empty sheet."""
    channels, height, width = picture(shape) or (1, 1, math.prod(shape))
    turn, waves = torch.linspace(0, 1.5 * math.pi, 48), torch.tensor([[1.0], [2.0]])
    start = 2 * math.pi * torch.rand(samples, 2, 2, 1, generator=generator)
    size = torch.rand(samples, 2, 2, 1, generator=generator) / waves
    path = (size * torch.cos(waves * turn + start)).sum(2)  # (samples, 2, points)
    path = 0.65 * path / path.abs().amax((1, 2), keepdim=True)
    up = (torch.linspace(-1, 1, height)[:, None] - path[:, :1]).square()  # (samples, h, points)
    across = (torch.linspace(-1, 1, width)[:, None] - path[:, 1:]).square()
    rows = [(across + up[:, i, None]).amin(-1) for i in range(height)]
    ink = (2 - torch.stack(rows, 1) / 0.1**2).clamp(0, 1)  # (samples, h, w)
    ink = (ink - ink.mean()) / ink.std()
    return _arranged(ink[:, None].expand(-1, channels, -1, -1), shape)


def _arranged(pictures: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pictures (samples, channels, height, width) as the model reads them (samples, *shape)."""
    if channels_last(shape):
        return pictures.movedim(1, -1)
    return pictures.reshape(len(pictures), *shape)


def _table(samples: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A few standardised numbers, then one-hot columns of categories, most of them rare."""
    n = math.prod(shape)
    start = max(1, n // 18)
    rows = torch.zeros(samples, n)
    rows[:, :start] = torch.randn(samples, start, generator=generator)
    while start < n:
        drawn = int(torch.randint(2, _MOST_CATEGORIES + 1, (), generator=generator))
        count = min(drawn, n - start)
        chosen = (torch.rand(samples, generator=generator) ** 6 * count).long()
        rows[torch.arange(samples), start + chosen] = 1
        start += count
    return rows.reshape(samples, *shape)


def _numbers(samples: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(samples, *shape, generator=generator)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("photos", "normalised photo-like inputs", _photos),
        Kind("pixels", "photo-like pixels in [0, 1]", _pixels),
        Kind("drawings", "normalised line drawings", _drawings),
        Kind("table", "table rows, numbers and categories", _table),
        Kind("numbers", "standard normal numbers", _numbers),
    )
}
