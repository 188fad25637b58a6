"""Losses that would stretch a target to another shape, and compute something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

_COMPARING = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
}


class NoBroadcasting(TorchFunctionMode):
    """Within, they raise where torch only warns. It holds for one thread, as no warnings filter does.

    >>> import torch
    >>> with NoBroadcasting():
    ...     functional.mse_loss(torch.zeros(2, 1), torch.zeros(2))
    Traceback (most recent call last):
    ValueError: expected a target of the output's shape (2, 1), got (2,)
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _COMPARING and args[0].shape != args[1].shape:
            raise ValueError(
                f"expected a target of the output's shape {tuple(args[0].shape)}, got "
                f"{tuple(args[1].shape)}"
            )
        return func(*args, **(kwargs or {}))
