"""What all rival attacks share: the call, the checks of its input, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption, InvalidUpdate
from spear.inversion import Inversion, Outcome
from spear.judge import Cause, Loss, Proof
from spear.search import Progress, Watch
from spear.update import LayerUpdate

Bounds = tuple[float | Tensor, float | Tensor]
"""Lowest and highest value of an input, each broadcast over a sample of the given shape."""

_REPORT_EVERY = 0.2  # seconds between two calls of on_progress


class Attack(Protocol):
    """A rival attack: options in the object, the call of `spear.invert`.

    What rivals need and `invert` does not is given beside the update. All attacks take all of it, so
    that they are called alike; none returns anything certified.
    """

    def invert(
        self,
        view: LayerUpdate,
        *,
        model: nn.Module | None = None,
        labels: Tensor | Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        bounds: Bounds | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
        max_seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Inversion:
        """An approximation of the batch.

        Args:
            view: one layer as the server sees it, from `spear.observe`.
            model: the model the client was sent; it is run on guesses, and not changed.
            labels: (b,) class indices, in any order; their number is the batch size.
            shape: of one sample, such as (3, 32, 32); needed for total variation.
            bounds: lowest and highest value of an input, see `pixel_bounds`.
            loss: the client's loss; cross-entropy unless given.
            generator: randomness of the start.
            max_seconds: stop after this long and return what there is. Ctrl-C does the same.
            on_progress: called with a `Progress` a few times a second.
        """
        ...


def pixel_bounds(mean: Sequence[float], std: Sequence[float]) -> Bounds:
    """The range of pixels in [0, 1] after the usual normalisation, per channel.

    >>> low, high = pixel_bounds((0.5, 0.4), (0.25, 0.2))
    >>> low.flatten().tolist(), high.flatten().tolist()
    ([-2.0, -2.0], [2.0, 3.0])
    """
    if len(mean) != len(std) or not len(mean) or min(std) <= 0:
        raise InvalidOption(f"expected one mean and one std > 0 a channel, got {mean} and {std}")
    centre, spread = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    return (0 - centre) / spread, (1 - centre) / spread


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute step between neighbouring pixels of (..., height, width), down plus across.

    >>> total_variation(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))
    tensor(1.)
    """
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    return down + across


class Clock:
    """A watch that reports a few times a second, however short an iteration is."""

    def __init__(
        self, on_progress: Callable[[Progress], None] | None, max_seconds: float | None
    ) -> None:
        number = isinstance(max_seconds, (int, float)) and 0 < max_seconds < float("inf")
        if max_seconds is not None and not number:
            raise InvalidOption(
                f"expected {{max_seconds}} > 0, got {max_seconds!r}", arguments=("max_seconds",)
            )
        self.watch = Watch(on_progress, max_seconds)
        self._due = 0.0

    def tick(self, *, expected: int, batch_size: int) -> bool:
        """Count one iteration; is there time for it?"""
        if self.watch.expired:
            return False
        done = self.watch.count("iterations")
        if self.watch.seconds >= self._due:
            self._due = self.watch.seconds + _REPORT_EVERY
            self.watch.report("optimise", done=done, expected=expected, batch_size=batch_size)
        return True

    def ending(self) -> str:
        """In words: what ended the work early, if anything did."""
        if "interrupted" in self.watch.stats:
            return "; it was interrupted"
        if self.watch.expired:
            return f"; max_seconds = {self.watch.max_seconds:g} had passed"
        return ""


def decayed(lr: float, step: int, iterations: int) -> float:
    """Adam's step size after `step` iterations: divided by ten three times, as Geiping et al. do.

    >>> [round(decayed(0.1, i, 8), 6) for i in (0, 2, 3, 5, 7)]
    [0.1, 0.1, 0.01, 0.001, 0.0001]
    """
    return lr * 0.1 ** sum(step >= share * iterations for share in (3 / 8, 5 / 8, 7 / 8))


def check_view(view: LayerUpdate) -> None:
    """Refuse what is no update, as `spear.invert` does."""
    if not isinstance(view, LayerUpdate):
        words = f"expected a LayerUpdate, got a {type(view).__name__}"
        raise InvalidUpdate([f"{words}: call spear.observe(model, gradients) first"])


def shape_problems(view: LayerUpdate, shape: Sequence[int] | None, variation: float) -> list[str]:
    """What is wrong with the shape of a sample, in words."""
    if shape is None:
        problems = []
        if variation > 0:
            problems.append(
                "expected shape=, such as (3, 32, 32): total variation needs rows and columns "
                "(without them, total_variation=0)"
            )
        if not view.reads_data:
            problems.append(f"expected shape=: layer {view.layer!r} does not read the data itself")
        return problems
    given = tuple(shape)
    if not given or any(not isinstance(size, int) or size < 1 for size in given):
        return [f"expected shape of sizes >= 1, such as (3, 32, 32), got {given}"]
    if view.reads_data and prod(given) != view.inputs:
        return [f"shape {given} holds {prod(given)} values, the layer reads {view.inputs}"]
    if variation > 0 and len(given) < 2:
        return [f"expected shape (..., height, width) for total variation, got {given}"]
    return []


def bound_problems(bounds: Bounds, shape: Sequence[int]) -> list[str]:
    """What is wrong with the range of the inputs, in words."""
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        return [f"expected bounds = (low, high), got {bounds!r}"]
    low, high = (torch.as_tensor(bound) for bound in bounds)
    for bound in (low, high):
        fits = bound.ndim <= len(shape) and all(
            size in (1, wanted)
            for size, wanted in zip(reversed(bound.shape), reversed(tuple(shape)), strict=False)
        )
        if not fits:
            return [f"bounds of shape {tuple(bound.shape)} do not fit a sample {tuple(shape)}"]
    return [] if bool((low < high).all()) else ["expected bounds with low < high throughout"]


def started_from(initial: Tensor, start: Tensor) -> Tensor:
    """A copy of the caller's initial inputs in the shape, dtype and place of a start (b, *shape)."""
    if initial.shape[:1] != start.shape[:1] or initial.numel() != start.numel():
        raise InvalidOption(
            f"expected initial inputs {tuple(start.shape)}, got {tuple(initial.shape)}"
        )
    if not bool(initial.isfinite().all()):
        raise InvalidOption("expected finite initial inputs, got NaN or infinity")
    return initial.detach().to(start, copy=True).view_as(start)


def approximate(
    inputs: Tensor,
    *,
    batch_size: int | None,
    labels: Tensor | None = None,
    stats: Mapping[str, float] | None = None,
    reason: str,
) -> Inversion:
    """The result of an attack that proves nothing: guesses (k, n), none certified.

    >>> approximate(torch.zeros(2, 3), batch_size=2, reason="a guess").certified.tolist()
    [False, False]
    """
    no = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    return Inversion(
        inputs=inputs.detach().flatten(1),
        batch_size=batch_size,
        certified=no,
        approximate=~no,
        proof=Proof.NONE,
        outcome=Outcome.APPROXIMATE if len(inputs) else Outcome.FAILED,
        reason=reason,
        cause=Cause.OTHER_ATTACK,
        assumptions=(),
        match=None,
        labels=labels,
        predicted_error=None,
        stats=stats or {},
    )
