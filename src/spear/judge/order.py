"""The order in which a client took its samples, epoch by epoch, from what the training left.

A column of what came back is the sum of one sample's gradients, each at the weights that its step saw.
So it depends on who came before whom. Take any order, and swap two samples of different steps wherever
the columns then come nearer to those sent. While steps are short, swaps hardly disturb one another, and
this ends at the client's own order, or at one that a few random swaps lead on from: the training then
repeats to rounding. After long steps, or many epochs, it ends elsewhere, and nothing is proved.

An order is no loophole: it is a few bits for each sample and epoch, against m numbers in each column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from spear.judge.side_by_side import SideBySide
from spear.tolerances import TRAINING_CLOSELY
from spear.update import Protocol

_STARTS = 64  # orders at random, of which the best is improved
_TRIES = 4  # the first or second found most orders (CIFAR-10, 10 to 30 samples, 2 to 5 epochs)
_MOST_STEPS = 1 << 17  # simulated in all orders together: half a minute where parameters are few
_SWEEPS = 8  # over all swaps, until the order is found or stays as it is; 3 to 12 were seen


@dataclass(frozen=True, eq=False)
class OrderSearch:
    """Looks for the order of mini-batches that leads to what was sent.

    Args:
        training: the client's, with the layer's weights as "weight" (m, b).
        sent: summed gradients of every sample (m, b).
        Q: what takes summed gradients of "weight" to those of samples (b, b).
    """

    training: SideBySide
    sent: Tensor
    Q: Tensor

    @property
    def protocol(self) -> Protocol:
        return self.training.protocol

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
        drawn = [torch.randperm(self.b, generator=generator) for _ in range(_STARTS * self.epochs)]
        starts = torch.stack(drawn).view(_STARTS, self.epochs, self.b).to(self.sent.device)
        order, error = starts[0], math.inf
        for _ in range(min(_TRIES, _MOST_STEPS // (_SWEEPS * sweep))):
            other, its_error = self._descended(starts)
            if its_error < error:
                order, error = other, its_error
            if error <= TRAINING_CLOSELY**2:
                return [batch for each in order for batch in torch.split(each, self.size)]
            starts = torch.stack([self._shaken(order, generator) for _ in range(_STARTS)])
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
        return torch.cat([self._errors_at_once(some) for some in self.training.split(orders)])

    def _errors_at_once(self, orders: Tensor) -> Tensor:
        steps = [batch for each in orders.unbind(1) for batch in torch.split(each, self.size, 1)]
        moved = self.training.run(steps)["weight"]  # (k, m, b)
        off = (moved @ self.Q - self.sent).square().sum(1) / self.sent.square().sum(0)  # (k, b)
        return off.mean(1)


def _with_swap(order: Tensor, epoch: int, positions: Tensor) -> Tensor:
    """The order (epochs, b) with two positions (2,) of an epoch exchanged."""
    swapped = order.clone()
    swapped[epoch, positions] = order[epoch, positions.flip(0)]
    return swapped
