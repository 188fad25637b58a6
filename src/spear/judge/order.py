"""The order in which a client took its samples, epoch by epoch, from what the training left.

A column of what came back is the sum of one sample's gradients, each at the weights that its step saw.
So it depends on who came before whom. Take any order, and swap two samples of different steps wherever
the columns then come nearer to those sent. While steps are short, swaps hardly disturb one another, and
this ends at the client's own order, or at one that a few random swaps lead on from: the training then
repeats to rounding. After long steps, or many epochs, it ends elsewhere, and nothing is proved.

An order is no loophole: it is a few bits for each sample and epoch, against m numbers in each column.

Orders are simulated side by side (`torch.func.vmap`), as many as fit into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from spear.tolerances import TRAINING_CLOSELY
from spear.update import Protocol

Parameters = Mapping[str, Tensor]

_ENTRIES = 1 << 21  # of the parameters of all orders at once: 16 MB in float64
_WIDEST = 64  # orders at once: more are no faster
_TRIES = 4  # the first or second found most orders (CIFAR-10, 10 to 30 samples, 2 to 5 epochs)
_MOST_STEPS = 1 << 17  # simulated in all orders together: half a minute where parameters are few
_SWEEPS = 8  # over all swaps, until the order is found or stays as it is; 3 to 12 were seen


@dataclass(frozen=True, eq=False)
class OrderSearch:
    """Looks for the order of mini-batches that leads to what was sent.

    Args:
        loss: of some samples (k,) with these parameters.
        start: the parameters that the client was sent, the layer's among them as "weight" (m, b).
        protocol: epochs, samples in a step, and the rest of the local training.
        sent: summed gradients of every sample (m, b).
        Q: what takes summed gradients of "weight" to those of samples (b, b).
        check_time: raises if there is none left.
    """

    loss: Callable[[Parameters, Tensor], Tensor]
    start: Parameters
    protocol: Protocol
    sent: Tensor
    Q: Tensor
    check_time: Callable[[], None]

    @property
    def b(self) -> int:
        return self.sent.shape[1]

    @property
    def epochs(self) -> int:
        return self.protocol.epochs or 1

    @property
    def size(self) -> int:
        return self.protocol.local_batch_size or self.b

    def run(self) -> list[Tensor] | None:
        """The samples of every step; None if no order leads there, or if there are too many to try."""
        generator = torch.Generator().manual_seed(0)
        steps = self.epochs * -(-self.b // self.size)
        sweep = steps * self.epochs * len(self._swaps())
        drawn = [torch.randperm(self.b, generator=generator) for _ in range(_WIDEST * self.epochs)]
        starts = torch.stack(drawn).view(_WIDEST, self.epochs, self.b).to(self.sent.device)
        order, error = starts[0], math.inf
        for _ in range(min(_TRIES, _MOST_STEPS // (_SWEEPS * sweep))):
            other, its_error = self._descended(starts)
            if its_error < error:
                order, error = other, its_error
            if error <= TRAINING_CLOSELY**2:
                return [batch for each in order for batch in torch.split(each, self.size)]
            starts = torch.stack([self._shaken(order, generator) for _ in range(_WIDEST)])
        return None

    def _descended(self, starts: Tensor) -> tuple[Tensor, float]:
        """The order (epochs, b) at which no swap helps, from the best of these, and its error."""
        order, error = self._best(starts)
        before = math.inf
        while TRAINING_CLOSELY**2 < error < before:
            before = error
            for epoch in range(self.epochs):
                order, error = self._swapped(order, error, epoch)
        return order, error

    def _shaken(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The order after b / 2 swaps at random: far enough from where no swap helps."""
        for _ in range(self.b // 2):
            epoch = int(torch.randint(self.epochs, (1,), generator=generator))
            positions = torch.randperm(self.b, generator=generator)[:2].to(order.device)
            order = _with_swap(order, epoch, positions)
        return order

    def _swaps(self) -> Tensor:
        """Positions (k, 2) of two samples in different steps of an epoch."""
        pairs = combinations(range(self.b), 2)
        apart = [pair for pair in pairs if pair[0] // self.size != pair[1] // self.size]
        return torch.tensor(apart, device=self.sent.device)

    def _swapped(self, order: Tensor, error: float, epoch: int) -> tuple[Tensor, float]:
        """The order (epochs, b) after the swaps in one epoch that bring it nearer, and its error.

        Every swap is tried alone. Of those that help, the best that share no sample are made together,
        as many of them as help together.
        """
        swaps = self._swaps()
        errors = self._errors(torch.stack([_with_swap(order, epoch, swap) for swap in swaps]))
        made, orders = set[int](), [order]
        for index in errors.argsort().tolist():
            pair = set(swaps[index].tolist())
            if not float(errors[index]) < error:
                break
            if not pair & made:
                made |= pair
                orders.append(_with_swap(orders[-1], epoch, swaps[index]))
        return self._best(torch.stack(orders))

    def _best(self, orders: Tensor) -> tuple[Tensor, float]:
        errors = self._errors(orders)
        best = int(errors.argmin())
        return orders[best], float(errors[best])

    def _errors(self, orders: Tensor) -> Tensor:
        """Mean squared relative error (k,) of the columns, by orders (k, epochs, b)."""
        entries = sum(p.numel() for p in self.start.values())
        width = max(1, min(_WIDEST, _ENTRIES // entries))
        return torch.cat([self._errors_at_once(some) for some in torch.split(orders, width)])

    def _errors_at_once(self, orders: Tensor) -> Tensor:
        slope = vmap(grad(self.loss))
        many = {
            name: nn.Parameter(p.expand(len(orders), *p.shape).clone())
            for name, p in self.start.items()
        }
        decaying = [self.protocol.decays(p) for p in self.start.values()]
        optimiser = self.protocol.optimiser(list(many.values()), decaying)
        steps = [batch for each in orders.unbind(1) for batch in torch.split(each, self.size, 1)]
        for rate, batch in zip(self.protocol.rates(len(steps)), steps, strict=True):
            self.check_time()
            slopes = slope({name: p.detach() for name, p in many.items()}, batch)
            for name, p in many.items():
                p.grad = slopes[name]
            self.protocol.local_step(many, optimiser, self.start, rate)
        weight = self.start["weight"]
        kept = self.protocol.weight_decay_factor(len(steps), weight)
        moved = (kept * weight - many["weight"].detach()) / self.protocol.rate  # (k, m, b)
        off = (moved @ self.Q - self.sent).square().sum(1) / self.sent.square().sum(0)  # (k, b)
        return off.mean(1)


def _with_swap(order: Tensor, epoch: int, positions: Tensor) -> Tensor:
    """The order (epochs, b) with two positions (2,) of an epoch exchanged."""
    swapped = order.clone()
    swapped[epoch, positions] = order[epoch, positions.flip(0)]
    return swapped
