"""Guards while a user's model and loss run: in this thread only, unlike warning filters and seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_COMPARING = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
}
# Parts of the names of functions that draw random numbers; one name too many does no harm.
_RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "binomial", "rrelu"),
    *("uniform", "exponential", "geometric", "cauchy", "gumbel", "fractional", "sample"),
)


class TorchGuard(TorchFunctionMode):
    """Refuses targets of another shape than the outputs, and leaves the global random state alone.

    Torch only warns of a target's shape and then computes another loss; here it raises. The random
    state is restored only if numbers were drawn: other threads may be drawing from it.

    >>> with TorchGuard():
    ...     functional.mse_loss(torch.zeros(2, 1), torch.zeros(2))
    Traceback (most recent call last):
    ValueError: expected a target of the output's shape (2, 1), got (2,)
    >>> before = torch.get_rng_state()
    >>> with TorchGuard():
    ...     noise = torch.randn(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: Tensor | None = None

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
        options, name = kwargs or {}, getattr(func, "__name__", "")
        drawing = options.get("generator") is None and any(part in name for part in _RANDOM)
        if drawing and self._state is None:
            self._state = torch.get_rng_state()
        return func(*args, **options)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._state is not None:
            torch.set_rng_state(self._state)
