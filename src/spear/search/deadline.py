"""By when work has to end, and the check that long loops make, here and in workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic


class TimeIsUp(BaseException):
    """Ends whatever is under way once the time is up; `invert` returns what there is by then.

    It is no `Exception`, so that code that guards against whatever a model raises lets it pass.
    """


@dataclass(frozen=True)
class Deadline:
    """A moment by which work has to end. To a worker it goes as the seconds that are left.

    >>> Deadline().check()
    >>> Deadline.after(60).expired, Deadline.after(0).expired
    (False, True)
    """

    at: float | None = None  # on the clock of this process; None for never

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        return Deadline(None if seconds is None else monotonic() + seconds)

    @property
    def seconds_left(self) -> float | None:
        return None if self.at is None else self.at - monotonic()

    @property
    def expired(self) -> bool:
        return self.at is not None and monotonic() >= self.at

    def check(self) -> None:
        """Raise `TimeIsUp` if it is."""
        if self.expired:
            raise TimeIsUp

    def __reduce__(self) -> tuple[Callable[[float | None], Deadline], tuple[float | None]]:
        return Deadline.after, (self.seconds_left,)


NEVER = Deadline()
