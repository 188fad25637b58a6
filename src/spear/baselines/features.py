"""From features back to images: what a network's convolutions keep of a photo.

SPEAR recovers the inputs of a convolutional network's first linear layer, its features. Feature
inversion (FI, as in the cocktail party attack, Kariyappa et al., ICML 2023) looks for images with these
features, which are smooth (total variation), by Adam. Each image is sought on its own; what pooling
and ReLUs lost does not come back. The images can start gradient matching:
`GeipingAttack.invert(..., initial=result.inputs)`.

Departures from Kariyappa et al.: Adam moves an image's frequencies, and the higher ones by smaller
steps, as photos hold less of them. Moving pixels ends in noise that has the features, too, and the more
exactly the features are known, the more closely it fits them. And the distance is Euclidean, not the
angle: a feature's size tells of contrast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spear.baselines.attack import (
    Bounds,
    Clock,
    approximate,
    bound_problems,
    started_from,
    total_variation,
)
from spear.errors import InvalidOption
from spear.inversion import Inversion
from spear.search import Progress

_START = 0.01  # standard deviation of each frequency at the start, around the mean image


@dataclass(frozen=True)
class FeatureInversion:
    """Options of feature inversion.

    Args:
        iterations: steps of Adam.
        lr: Adam's step for the lowest frequencies, in units of normalised pixels; it ends at zero along
            half a cosine.
        total_variation: weight of the prior that images are smooth.
        decay: steps for f waves across the image are smaller by f to this power; 0 treats all alike.

    >>> FeatureInversion(iterations=0)
    Traceback (most recent call last):
    spear.errors.InvalidOption: expected iterations >= 1, got 0
    """

    iterations: int = 1000
    lr: float = 0.02
    total_variation: float = 1.0
    decay: float = 1.5

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InvalidOption(f"expected iterations >= 1, got {self.iterations}")
        if not 0 < self.lr < math.inf:
            raise InvalidOption(f"expected lr > 0, got {self.lr}")
        if not 0 <= self.total_variation < math.inf:
            raise InvalidOption(f"expected total_variation >= 0, got {self.total_variation}")
        if not 0 <= self.decay <= 4:
            raise InvalidOption(f"expected 0 <= decay <= 4, got {self.decay}")


def invert_features(
    network: nn.Module,
    features: Tensor,
    *,
    shape: Sequence[int],
    bounds: Bounds | None = None,
    options: FeatureInversion | None = None,
    initial: Tensor | None = None,
    generator: torch.Generator | None = None,
    max_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Inversion:
    """Approximate the images that a network maps to these features.

    Args:
        network: from images (k, *shape) to features, `spear.update.network_before(model, layer)`; it is
            not changed.
        features: (k, n), such as `spear.invert(...).inputs` of that layer. Their scale counts.
        shape: of one image, such as (3, 224, 224).
        bounds: lowest and highest value of an input, see `pixel_bounds`; images stay within.
        options: iterations and weights.
        initial: images (k, ...) to start from; nearly grey ones unless given.
        generator: randomness of the start.
        max_seconds: stop after this long and return the images as they are. Ctrl-C does the same.
        on_progress: called with a `Progress` a few times a second.

    Returns:
        Images (k, ...) flattened, in the order of the features, none certified.

    >>> _ = torch.manual_seed(0)
    >>> before = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten())
    >>> x = torch.rand(2, 1, 6, 6)
    >>> plain = FeatureInversion(total_variation=0)
    >>> known = {"shape": (1, 6, 6), "bounds": (0.0, 1.0), "options": plain}
    >>> result = invert_features(before, before(x), **known)
    >>> result.outcome.name, bool((result.inputs - x.flatten(1)).abs().mean() < 0.15)
    ('APPROXIMATE', True)
    """
    options = options or FeatureInversion()
    sizes = tuple(shape)
    _check(features, sizes, bounds)
    clock = Clock(on_progress, max_seconds)
    generator = generator or torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), clock.watch.stage("optimise"):
        wanted = features.detach().clone()  # (k, n)
        waves = _Waves.of(sizes, options.decay, wanted)
        grey = waves.parameters(wanted.new_zeros(len(wanted), *sizes))
        start = torch.randn(grey.shape, generator=generator, device=generator.device)
        P = _START * start.to(grey)
        if initial is not None:
            P = waves.parameters(_within(started_from(initial, waves.images(P)), bounds))
        P.requires_grad_()
        distance = _distance(network, wanted)
        _try(distance, waves.images(P))
        try:
            _descend(P, waves, distance, bounds=bounds, options=options, clock=clock)
        except KeyboardInterrupt:
            clock.watch.count("interrupted")
        with torch.no_grad():
            X = _within(waves.images(P), bounds)
            left = float(distance(X).mean())
    clock.watch.stats["loss"] = left
    reason = (
        f"{len(X)} images whose features are {left:.1e} from the given ones (squared, relative) "
        f"after {int(clock.watch.stats.get('iterations', 0))} iterations{clock.ending()}: many images "
        "share their features, so nothing is proved"
    )
    return approximate(X, batch_size=len(X), labels=None, stats=clock.watch.stats, reason=reason)


Distances = Callable[[Tensor], Tensor]
"""|f - z|^2 / |z|^2 for features f of images (k, *shape) and features z wanted (k,)."""


def _distance(network: nn.Module, wanted: Tensor) -> Distances:
    # Detached parameters, so that no gradient is taken for them; the caller's buffers stay as they are.
    state = {name: p.detach() for name, p in network.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    size = wanted.square().sum(1).clamp_min(torch.finfo(wanted.dtype).tiny)  # (k,)

    def distance(X: Tensor) -> Tensor:
        seen: Tensor = functional_call(network, {**state, **buffers}, (X,)).flatten(1)
        return (seen - wanted).square().sum(1) / size

    return distance


@dataclass(frozen=True, eq=False)
class _Waves:
    """Images (k, ..., h, w) by parameters P (k, ..., h, w // 2 + 1, 2), one pair a frequency."""

    size: tuple[int, ...]  # h, w
    weight: Tensor  # (h, w // 2 + 1)

    @staticmethod
    def of(shape: tuple[int, ...], decay: float, like: Tensor) -> _Waves:
        h, w = shape[-2:]
        down, across = h * torch.fft.fftfreq(h), w * torch.fft.rfftfreq(w)  # waves a side
        waves = torch.hypot(down[:, None], across).clamp_min(1)
        return _Waves((h, w), (waves**-decay).to(like))

    def images(self, P: Tensor) -> Tensor:
        spectrum = torch.view_as_complex(P) * self.weight
        X: Tensor = torch.fft.irfft2(spectrum, s=self.size, norm="forward")
        return X

    def parameters(self, X: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.rfft2(X, norm="forward") / self.weight)


def _descend(
    P: Tensor,
    waves: _Waves,
    distance: Distances,
    *,
    bounds: Bounds | None,
    options: FeatureInversion,
    clock: Clock,
) -> None:
    """Adam on the images' frequencies, in place."""
    adam = torch.optim.Adam([P], lr=options.lr)
    for step in range(options.iterations):
        if not clock.tick(expected=options.iterations, batch_size=len(P)):
            return
        cosine = math.cos(math.pi * step / options.iterations)
        adam.param_groups[0]["lr"] = options.lr * (1 + cosine) / 2
        X = waves.images(P)
        # Means over the batch, so that the prior weighs the same per image in a batch of any size.
        value = distance(X).mean() + options.total_variation * total_variation(X)
        (P.grad,) = torch.autograd.grad(value, P)
        adam.step()
        if bounds is not None:
            with torch.no_grad():
                P.copy_(waves.parameters(_within(waves.images(P), bounds)))


def _within(X: Tensor, bounds: Bounds | None) -> Tensor:
    return X if bounds is None else X.clamp(*(torch.as_tensor(b).to(X) for b in bounds))


def _check(features: Tensor, shape: tuple[int, ...], bounds: Bounds | None) -> None:
    problems = []
    if features.ndim != 2 or not len(features) or not features.is_floating_point():
        problems.append(
            f"expected features (k, n) of floats, got {tuple(features.shape)} of {features.dtype}"
        )
    elif not bool(features.isfinite().all()):
        problems.append("expected finite features, got NaN or infinity")
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        problems.append(f"expected shape of sizes >= 1, such as (3, 224, 224), got {shape}")
    elif len(shape) < 2:
        problems.append(f"expected shape (..., height, width), got {shape}")
    elif bounds is not None:
        problems += bound_problems(bounds, shape)
    if problems:
        raise InvalidOption("; ".join(problems))


def _try(distance: Distances, X: Tensor) -> None:
    """The first run of the user's network, which may raise anything."""
    try:
        with torch.no_grad():
            distance(X)
    except Exception as error:
        raise InvalidOption(
            f"the network does not map images {tuple(X.shape)} to the features given "
            f"({type(error).__name__}: {str(error)[:120]}); check shape= and the layer"
        ) from error
