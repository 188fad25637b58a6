"""From features back to images: what a network's convolutions keep of a photo.

SPEAR recovers the inputs of a convolutional network's first linear layer, its features. Feature
inversion looks for images with these features: cosine distance plus total variation, by Adam on the
gradient's sign, as in the cocktail party attack (Kariyappa et al., ICML 2023). Each image is sought
on its own; what pooling and ReLUs lost does not come back. The images can start gradient matching:
`GeipingAttack.invert(..., initial=result.inputs)`.
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
    decayed,
    total_variation,
)
from spear.errors import InvalidOption
from spear.inversion import Inversion
from spear.search import Progress


@dataclass(frozen=True)
class FeatureInversion:
    """Options of feature inversion.

    Args:
        iterations: steps of Adam.
        lr: Adam's step, in units of normalised pixels; divided by ten three times on the way.
        total_variation: weight of the prior that images are smooth.
        spread: standard deviation of the random start around zero, the mean image.

    >>> FeatureInversion(iterations=0)
    Traceback (most recent call last):
    spear.errors.InvalidOption: expected iterations >= 1, got 0
    """

    iterations: int = 1000
    lr: float = 0.1
    total_variation: float = 1.0
    spread: float = 0.1

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InvalidOption(f"expected iterations >= 1, got {self.iterations}")
        if not 0 < self.lr < math.inf:
            raise InvalidOption(f"expected lr > 0, got {self.lr}")
        for name in ("total_variation", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidOption(f"expected {name} >= 0, got {getattr(self, name)}")


def invert_features(
    network: nn.Module,
    features: Tensor,
    *,
    shape: Sequence[int],
    bounds: Bounds | None = None,
    options: FeatureInversion | None = None,
    generator: torch.Generator | None = None,
    max_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Inversion:
    """Approximate the images that a network maps to these features.

    Args:
        network: from images (k, *shape) to features, `spear.update.network_before(model, layer)`; it is
            not changed.
        features: (k, n), such as `spear.invert(...).inputs` of that layer. Their scale does not matter.
        shape: of one image, such as (3, 224, 224).
        bounds: lowest and highest value of an input, see `pixel_bounds`; images stay within.
        options: iterations and weights.
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
    _check(features, sizes, bounds, options)
    clock = Clock(on_progress, max_seconds)
    generator = generator or torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), clock.watch.stage("optimise"):
        wanted = features.detach().clone()  # (k, n)
        size = (len(wanted), *sizes)
        start = torch.randn(size, generator=generator, device=generator.device).to(wanted)
        X = (options.spread * start).requires_grad_()  # (k, *shape)
        distance = _distance(network, wanted)
        _try(distance, X)
        try:
            _descend(X, distance, bounds, options, clock)
        except KeyboardInterrupt:
            clock.watch.count("interrupted")
        with torch.no_grad():
            left = float(distance(X).mean())
    clock.watch.stats["loss"] = left
    reason = (
        f"{len(X)} images whose features are {left:.1e} from the given ones (1 - cosine, on average) "
        f"after {int(clock.watch.stats.get('iterations', 0))} iterations{clock.ending()}: many images "
        "share their features, so nothing is proved"
    )
    return approximate(X, batch_size=len(X), labels=None, stats=clock.watch.stats, reason=reason)


Distances = Callable[[Tensor], Tensor]
"""1 - cosine to the features wanted (k,), for images (k, *shape)."""


def _distance(network: nn.Module, wanted: Tensor) -> Distances:
    # Detached parameters, so that no gradient is taken for them; the caller's buffers stay as they are.
    state = {name: p.detach() for name, p in network.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}

    def distance(X: Tensor) -> Tensor:
        seen = functional_call(network, {**state, **buffers}, (X,)).flatten(1)
        return 1 - nn.functional.cosine_similarity(seen, wanted, dim=1)

    return distance


def _descend(
    X: Tensor,
    distance: Distances,
    bounds: Bounds | None,
    options: FeatureInversion,
    clock: Clock,
) -> None:
    """Signed Adam on the images, in place."""
    low, high = (torch.as_tensor(b).to(X) for b in bounds) if bounds else (None, None)
    adam = torch.optim.Adam([X], lr=options.lr)
    for step in range(options.iterations):
        if not clock.tick(expected=options.iterations, batch_size=len(X)):
            return
        adam.param_groups[0]["lr"] = decayed(options.lr, step, options.iterations)
        # Means over the batch, so that the prior weighs the same per image in a batch of any size.
        value = distance(X).mean() + options.total_variation * total_variation(X)
        (slope,) = torch.autograd.grad(value, X)
        X.grad = slope.sign()
        adam.step()
        if low is not None:
            with torch.no_grad():
                X.clamp_(low, high)


def _check(
    features: Tensor, shape: tuple[int, ...], bounds: Bounds | None, options: FeatureInversion
) -> None:
    problems = []
    if features.ndim != 2 or not len(features) or not features.is_floating_point():
        problems.append(
            f"expected features (k, n) of floats, got {tuple(features.shape)} of {features.dtype}"
        )
    elif not bool(features.isfinite().all()):
        problems.append("expected finite features, got NaN or infinity")
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        problems.append(f"expected shape of sizes >= 1, such as (3, 224, 224), got {shape}")
    elif options.total_variation > 0 and len(shape) < 2:
        problems.append(f"expected shape (..., height, width) for total variation, got {shape}")
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
