"""RoundHistory: the last rounds of several clients, compressed and bounded, in memory only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from spear.errors import InvalidOption
from spear.factors.combining import Combination
from spear.update import LayerUpdate

_MEGABYTE = 2**20


@dataclass(eq=False)
class RoundHistory:
    """What `combine` needs of the last rounds of each client.

    It is the clients' data in another form, so it stays in memory: nothing is written to disk, and a
    pickle or a copy of it starts empty. Weights of a round are held once for all clients.

    Args:
        rounds: of one client, at most; the oldest go first.
        megabytes: of all clients together, at most. If there is no room, clients with the fewest rounds
            go first, and `crowded_out` names them; a client that is alone loses its oldest rounds.

    >>> import torch
    >>> from torch import nn
    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(60, 20), nn.ReLU(), nn.Linear(20, 5))
    >>> history = RoundHistory(rounds=2)
    >>> for number in range(1, 4):
    ...     gradients = torch.autograd.grad(net(torch.randn(4, 60)).sum(), list(net.parameters()))
    ...     _ = history.add("a client", number, observe(net, gradients))
    >>> history.count("a client"), history.count("another")
    (2, 0)
    """

    rounds: int = 20
    megabytes: float = 1024.0
    crowded_out: set[Hashable] = field(default_factory=set, init=False)
    _kept: dict[Hashable, Combination] = field(default_factory=dict, init=False, repr=False)
    # Memory by its address: bytes held for each client, and how many clients hold it.
    _held: dict[Hashable, dict[int, int]] = field(default_factory=dict, init=False, repr=False)
    _holders: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    _bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) or isinstance(self.rounds, bool) or self.rounds < 1:
            raise InvalidOption(f"expected a history of 1 round or more, got {self.rounds!r}")
        if not self.megabytes > 0:
            raise InvalidOption(f"expected a history of > 0 megabytes, got {self.megabytes!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RoundHistory, (self.rounds, self.megabytes)

    @property
    def used(self) -> float:
        """Megabytes that are held now."""
        return self._bytes / _MEGABYTE

    def count(self, client: Hashable) -> int:
        """Rounds that are kept of a client."""
        return len(self._kept[client]) if client in self._kept else 0

    def add(self, client: Hashable, number: int, view: LayerUpdate) -> str:
        """Keep a round of a client, under its number; or say why it cannot be combined."""
        kept = self._kept.setdefault(client, Combination())
        why = kept.add(view, number)
        while len(kept) > self.rounds:
            kept.forget_oldest()
        self._count_bytes(client)
        while self.used > self.megabytes:
            self._make_room()
        return why

    def view(self, client: Hashable) -> LayerUpdate:
        """All kept rounds of a client as one view."""
        return self._kept[client].view()

    def clear(self) -> None:
        """Forget everything."""
        for client in list(self._kept):
            self._forget(client)

    def _make_room(self) -> None:
        """Forget the client with the fewest rounds; among equals, the latest that came."""
        fewest = min(reversed(self._kept), key=self.count)
        self.crowded_out.add(fewest)
        if len(self._kept) > 1 or self.count(fewest) < 2:
            self._forget(fewest)
        else:
            self._kept[fewest].forget_oldest()
            self._count_bytes(fewest)

    def _forget(self, client: Hashable) -> None:
        del self._kept[client]
        self._count_bytes(client)

    def _count_bytes(self, client: Hashable) -> None:
        """Bring the count up to date with what is held for a client now."""
        for address, size in self._held.pop(client, {}).items():
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address]
                self._bytes -= size
        if client not in self._kept:
            return
        self._held[client] = self._kept[client].sizes()
        for address, size in self._held[client].items():
            self._bytes += 0 if self._holders[address] else size
            self._holders[address] += 1
