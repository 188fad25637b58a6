"""The same local training in many orders of mini-batches, side by side (`torch.func.vmap`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from spear.judge.losses import UserCodeFailed, users_code
from spear.update import Protocol

Parameters = Mapping[str, Tensor]

AS_TOLD: Mapping[str, float] = MappingProxyType({})

_ENTRIES = 1 << 21  # of the parameters of all orders at once: 16 MB in float64
_WIDEST = 64  # orders at once: more are no faster


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Trains from one start in many orders.

    Args:
        loss: of some samples (k,) with these parameters.
        start: the parameters that the client was sent.
        protocol: of the local training.
        check_time: raises if there is none left.
    """

    loss: Callable[[Parameters, Tensor], Tensor]
    start: Parameters
    protocol: Protocol
    check_time: Callable[[], None]

    @property
    def entries(self) -> int:
        return sum(p.numel() for p in self.start.values())

    def split(self, orders: Tensor) -> Iterator[Tensor]:
        """The orders (k, ...), as many at a time as fit into the cache."""
        yield from torch.split(orders, max(1, min(_WIDEST, _ENTRIES // self.entries)))

    def run(
        self,
        steps: Sequence[Tensor],
        watch: Callable[[Parameters, Tensor], None] = lambda parameters, batch: None,
        rates: Mapping[str, float] = AS_TOLD,
    ) -> dict[str, Tensor]:
        """The sums of gradients (k, ...) that `observe` would read off the weights, by name.

        Args:
            steps: the samples (k, size) of every step, in k orders.
            watch: gets the parameters (k, ...) and samples before every step.
            rates: of some parameters, in units of the one that was told.
        """
        many = {
            name: nn.Parameter(p.expand(len(steps[0]), *p.shape).clone())
            for name, p in self.start.items()
        }
        decaying = [self.protocol.decays(p) for p in self.start.values()]
        optimiser = self.protocol.optimiser(list(many.values()), decaying)
        for rate, batch in zip(self.protocol.rates(len(steps)), steps, strict=True):
            self.check_time()
            parameters = {name: p.detach() for name, p in many.items()}
            watch(parameters, batch)
            slopes = self._slopes(parameters, batch)
            for name, p in many.items():
                p.grad = slopes[name] * rates.get(name, 1.0)
            self.protocol.local_step(many, optimiser, self.start, rate)
        kept = self.protocol.weight_decay_factor
        return {
            name: (kept(len(steps), p) * p - many[name].detach()) / self.protocol.rate
            for name, p in self.start.items()
        }

    def _slopes(self, parameters: dict[str, Tensor], batch: Tensor) -> dict[str, Tensor]:
        """Gradients (k, ...); one order after the other if the network cannot be run side by side."""
        slope = grad(self.loss)
        try:
            with users_code():
                slopes: dict[str, Tensor] = vmap(slope)(parameters, batch)
        except UserCodeFailed:
            with users_code():
                each = [
                    slope({name: p[k] for name, p in parameters.items()}, some)
                    for k, some in enumerate(batch)
                ]
            slopes = {name: torch.stack([one[name] for one in each]) for name in parameters}
        return slopes
