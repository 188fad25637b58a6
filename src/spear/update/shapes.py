"""What one input of a model may look like, by the look of its first layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

_SIDES = (32, 28, 64, 224, 96)  # of the pictures tried on a model that starts with a convolution
_TOKENS = 16  # a sentence's length, where a model reads words
_SMALLEST_PICTURE = 16  # pixels per side; smaller inputs are not taken for pictures


def input_shapes(model: nn.Module, layer: str | None = None) -> Iterator[tuple[int, ...]]:
    """Shapes of one input that a model may take, by its first module with parameters.

    If that says nothing, by the inputs of a linear layer.

    >>> list(input_shapes(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))))
    [(784,), (1, 28, 28), (16, 784)]
    """
    first = next(
        (m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None
    )
    if isinstance(first, nn.modules.conv._ConvNd):
        dimensions = len(first.kernel_size)
        sides = [(side,) * dimensions for side in _SIDES]
        yield from ((first.in_channels, *pixels) for pixels in sides)
        # Models that move or add the channels themselves.
        yield from ((*pixels, first.in_channels) for pixels in sides)
        yield from sides if first.in_channels == 1 else ()
        return
    if embedding_of(model) is not None:
        yield (_TOKENS,)
        return
    if not isinstance(first, nn.Linear):
        linear = (m for m in model.modules() if isinstance(m, nn.Linear))
        first = next(linear, None) if layer is None else model.get_submodule(layer)
    n = int(getattr(first, "in_features", 0))
    if not n:
        return
    yield (n,)
    if (square := picture((n,))) is not None:
        yield square
    yield (_TOKENS, n)


def picture(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Channels, height and width of inputs that may be pictures: with channels first, last or none.

    >>> picture((3072,)), picture((1, 28, 28)), picture((32, 32, 3)), picture((108,))
    ((3, 32, 32), (1, 28, 28), (3, 32, 32), None)
    """
    if len(shape) == 2 and shape[0] == shape[1] >= _SMALLEST_PICTURE:
        return (1, shape[0], shape[1])
    if len(shape) == 3:
        first, second, third = shape
        return (third, first, second) if channels_last(shape) else (first, second, third)
    n = shape[0] if len(shape) == 1 else 0
    for channels in (3, 1):
        side = math.isqrt(n // channels)
        if channels * side * side == n and side >= _SMALLEST_PICTURE:
            return (channels, side, side)
    return None


def channels_last(shape: tuple[int, ...]) -> bool:
    """Is this a picture's height, width and channels, in this order?"""
    return len(shape) == 3 and shape[2] < min(shape[:2])


def embedding_of(model: nn.Module) -> nn.Embedding | nn.EmbeddingBag | None:
    """The table of a model that reads words."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return next((m for m in model.modules() if isinstance(m, kinds)), None)
