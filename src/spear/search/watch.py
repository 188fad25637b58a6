"""The clock of one inversion: deadline, progress, seconds per stage, counters, workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from spear.search.deadline import Deadline, TimeIsUp
from spear.search.parallel import ParallelMap, Piece, worth_distributing

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What `on_progress` is called with, a few times a second."""

    stage: str  # "factorise", "search", "judge"
    done: int = 0  # submatrices sampled so far
    expected: float | None = None  # how many the theory expects; None in the cascade
    found: int = 0  # directions found
    batch_size: int | None = None
    seconds: float = 0.0
    detail: str = ""  # what the judge is at


@dataclass(eq=False)
class Watch:
    """Deadline, progress, seconds per stage, counters and workers of one inversion."""

    on_progress: Callable[[Progress], None] | None = None
    max_seconds: float | None = None
    started: float = field(default_factory=time.monotonic)
    stats: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    parallel: ParallelMap = field(default_factory=ParallelMap)
    _inner: float = 0.0  # seconds of the stages inside the current one
    _kept: float = 0.0  # share of the time that is kept for what comes after the current stage
    _too_little: bool = False  # was there less left in it than the next step needs?

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def deadline(self) -> Deadline:
        """Of the current stage."""
        if self.max_seconds is None:
            return Deadline()
        return Deadline(self.started + self.max_seconds * (1 - self._kept))

    @property
    def seconds_left(self) -> float | None:
        return self.deadline.seconds_left

    @property
    def expired(self) -> bool:
        return self._too_little or self.deadline.expired

    def check(self, needed: float = 0.0) -> None:
        """Raise `TimeIsUp` if it is: for loops that have nothing to return before they end.

        Or, before a step that cannot be cut, if it takes all that is left; that counts as expired.
        """
        left = self.seconds_left
        if left is not None and left <= needed:
            self._too_little = True
            raise TimeIsUp

    @contextmanager
    def keeping(self, share: float) -> Iterator[None]:
        """Within, the time is up earlier by this share of it, which is kept for what comes after."""
        before, self._kept = self._kept, share
        try:
            yield
        finally:
            self._kept, self._too_little = before, False

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the stage, without those of nested stages."""
        began, outer, self._inner = time.monotonic(), self._inner, 0.0
        self.stats.setdefault(name, 0.0)
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self.stats[name] += spent - self._inner
            self._inner = outer + spent

    def count(self, name: str, amount: int = 1) -> int:
        self.stats[name] = int(self.stats.get(name, 0)) + amount
        return int(self.stats[name])

    def map(
        self,
        function: Callable[..., T],
        shared: Piece,
        pieces: Iterable[Piece],
        *,
        multiplications: float = math.inf,
        complete: bool = False,
    ) -> Iterator[T]:
        """`function(*shared, *piece)` for every piece, in order, by workers where that is worth it.

        Once the time is up the rest is left out; or `TimeIsUp` is raised, if it must be complete or if
        there is nothing yet. See `ParallelMap.run`.
        """
        parallel = self.parallel if worth_distributing(multiplications) else ParallelMap()
        deadline = self.deadline
        return parallel.run(
            function, shared, pieces, lambda: deadline.seconds_left, complete=complete
        )

    def remark(self, words: str) -> None:
        """What the finder says about how it ended; goes into the result's details."""
        self.remarks.append(words)

    def report(
        self,
        stage: str,
        *,
        done: int = 0,
        expected: float | None = None,
        found: int = 0,
        batch_size: int | None = None,
        detail: str = "",
    ) -> None:
        if self.on_progress is not None:
            self.on_progress(
                Progress(stage, done, expected, found, batch_size, self.seconds, detail)
            )
