"""Several rounds of each client while a federation runs: when to attack them together.

A server sees the same clients round after round. Their rounds are attacked together only when that may
show more than is known already, and less often where it took long and failed.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from spear.factors import RoundHistory
from spear.inversion import Outcome
from spear.report import Finding
from spear.theory import rounds_needed
from spear.update import LayerUpdate

_LONG = 0.5  # of its time limit: an attack that takes longer and fails is tried less often


@dataclass(eq=False)
class _Known:
    """What is known of one client."""

    beside: Any = None  # what the caller keeps with its last round
    alone: tuple[int, int] = (0, 0)  # samples proved, and recovered, of its best single round
    complete: int = 0  # samples of which every single one was recovered
    skip: int = 0  # rounds to wait for before the next attack
    gap: int = 1  # and how many after the next that takes long and fails
    open: bool = False  # may an attack on what is kept show more?


class SeveralRounds:
    """The last rounds of each client, or cohort, and which of them to attack together.

    Everything is in memory, and a pickle or a copy starts empty: see `RoundHistory`.

    Args:
        rounds: of one client, at most.
        megabytes: of all clients together, at most.
        max_seconds: that an attack may take.
    """

    def __init__(self, rounds: int, megabytes: float, max_seconds: float) -> None:
        self.history, self.max_seconds = RoundHistory(rounds, megabytes), max_seconds
        self.refused = ""  # why a round could not be combined with others; the last reason
        self._known: dict[Hashable, _Known] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SeveralRounds, (self.history.rounds, self.history.megabytes, self.max_seconds)

    def cohort(self, members: frozenset[int]) -> tuple[frozenset[int], str]:
        """The cohort that these belong to, some may be missing this time; and what to call it."""
        known = [one for one in self._known if isinstance(one, frozenset)]
        whole = next((one for one in known if members <= one), members)
        number = known.index(whole) + 1 if whole in known else len(known) + 1
        label = f"all {len(whole)} clients"
        return whole, label if number == 1 else f"{label} of cohort {number}"

    def due(self, client: Hashable) -> bool:
        """May the client's next round lead to an attack on all its rounds?"""
        return self.history.count(client) > 0 and self._of(client).skip == 0

    def best_alone(self, client: Hashable) -> tuple[int, int]:
        """Samples proved, and recovered, of the client's best single round."""
        return self._of(client).alone

    def take(
        self,
        client: Hashable,
        number: int,
        view: LayerUpdate,
        alone: Finding,
        *,
        reported: float | None = None,
        beside: Any = None,
    ) -> LayerUpdate | None:
        """Keep a round, unless it gave everything away by itself; all rounds if now is the time.

        Args:
            client: whose round it is.
            number: of the round.
            view: what the server saw.
            alone: what the round gave away by itself.
            reported: samples that the client says it has.
            beside: kept with the round, and returned by `last`.
        """
        known = self._of(client)
        known.alone = max(known.alone, samples(alone))
        if alone.outcome is Outcome.EXACT:
            known.complete = max(known.complete, alone.recovered)
            return None
        refused = self.history.add(client, number, view)
        if refused:
            self.refused = refused
            return None
        known.beside, known.open = beside, True
        if known.skip:
            known.skip -= 1
            return None
        rounds = self.history.count(client)
        least = 1 if reported is None else int(reported)
        if rounds < 2 or not _enough(rounds, least, view.outputs, view.inputs):
            return None
        began = time.monotonic()
        together = self.history.view(client)
        if self._worth_attacking(known, together):
            return together
        self._wait(known, (time.monotonic() - began) / self.max_seconds)
        return None

    def _worth_attacking(self, known: _Known, view: LayerUpdate) -> bool:
        """May these rounds of a client show more than is known of it?"""
        if view.rounds is None or view.rounds.batch_size is None:
            return False
        count = view.rounds.batch_size
        known.open = count > known.complete
        return known.open and _enough(len(view.rounds), count, view.rounds.width, view.inputs)

    def learn(self, client: Hashable, found: Finding, share: float) -> None:
        """Take note of what a client's rounds gave away, and of how much of its time that took."""
        known = self._of(client)
        likely = found.outcome is Outcome.EXACT or found.is_likely
        if likely and found.recovered == found.batch_size:
            known.complete, known.open, known.gap = found.recovered, False, 1
            return
        known.open = share > _LONG  # with more time, the same rounds may show more
        self._wait(known, share)

    def _wait(self, known: _Known, share: float) -> None:
        """Let more and more rounds pass after attempts that take long in vain."""
        if share > _LONG:
            known.skip, known.gap = known.gap - 1, 2 * known.gap

    def unfinished(self) -> list[Hashable]:
        """Clients of whose rounds an attack may still show more, those with the most rounds first."""
        several = [c for c in self._known if self._known[c].open and self.history.count(c) > 1]
        return sorted(several, key=self.history.count, reverse=True)

    def last(self, client: Hashable) -> tuple[LayerUpdate, Any]:
        """All rounds of a client, and what was kept beside the last of them."""
        return self.history.view(client), self._of(client).beside

    def clear(self) -> None:
        """Forget every round."""
        self.history.clear()
        self._known.clear()

    def _of(self, client: Hashable) -> _Known:
        return self._known.setdefault(client, _Known())


def _enough(rounds: int, count: int, width: int, inputs: int) -> bool:
    """Can so many rounds show so many samples through a layer of this width?"""
    needed = rounds_needed(count, width, inputs=inputs)
    return needed is not None and needed <= rounds


def samples(found: Finding) -> tuple[int, int]:
    """How many samples were proved, and how many recovered."""
    return sum(found.certified), found.recovered


def listed(numbers: list[int]) -> str:
    """Rounds in words.

    >>> listed([1, 2, 3]), listed([2, 5, 6])
    ('rounds 1 to 3', 'rounds 2, 5, 6')
    """
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"rounds {numbers[0]} to {numbers[-1]}"
    return f"rounds {', '.join(map(str, numbers))}"
