"""Typed errors, whose messages say what was expected, what came and what to do; and `Declined`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear.inversion import Inversion


@dataclass(frozen=True)
class Declined:
    """Why something could not be done, where that is an answer and not an error."""

    reason: str
    """One line that reads well after "no replay: "."""


class SpearError(Exception):
    """Base of every error that SPEAR raises on purpose."""


class InvalidUpdate(SpearError, ValueError):
    """The update cannot be read: shapes, dtypes, devices, NaN, missing parts; all problems at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (list(self.problems),)


class NothingToAttack(SpearError, ValueError):
    """There is nothing here to attack, so nobody can say whether data leaks.

    The command line reports INCONCLUSIVE: nobody made a mistake that they could mend.
    """


class NoAttackableLayer(NothingToAttack):
    """The model has no linear layer next to a ReLU whose gradient is in the update."""


class NoUpdate(NothingToAttack, InvalidUpdate):
    """What was given as the update is the model itself: the client did not train."""


class InvalidOption(SpearError, ValueError):
    """An option is unknown or out of range.

    Args:
        words: the message, with an argument written as `{argument}`.
        arguments: those it names: Python callers read their names, users of the command line options.

    >>> error = InvalidOption("expected {max_seconds} > 0, got -1", arguments=["max_seconds"])
    >>> str(error)
    'expected max_seconds > 0, got -1'
    >>> error.worded(lambda name: f"--{name.replace('_', '-')}")
    'expected --max-seconds > 0, got -1'
    """

    def __init__(self, words: str, *, arguments: Iterable[str] = ()) -> None:
        self.words, self.arguments = words, tuple(arguments)
        super().__init__(self.worded(str))

    def worded(self, name: Callable[[str], str]) -> str:
        """The message with each argument called what `name` calls it."""
        words = self.words
        for argument in self.arguments:
            words = words.replace(f"{{{argument}}}", name(argument))
        return words

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), arguments=self.arguments), (self.words,)


class InvalidExtension(SpearError, TypeError):
    """Code that a user adds (a finder, an attack, an experiment) is not what was expected.

    The message says where, what was expected, and what came. In a run of many trials it makes a failed
    row, and the others go on.
    """


class NotExact(SpearError):
    """`invert(..., throw=True)` did not end in `Outcome.EXACT`; `.result` holds what was found."""

    def __init__(self, result: Inversion) -> None:
        self.result = result
        super().__init__(f"{result.outcome.name}: {result.reason}")


class MissingExtra(SpearError, ImportError):
    """A part outside the core needs a package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"this needs {package}, which is not installed: pip install 'spear-fl[{extra}]'"
        )

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.package, self.extra)


class DataError(SpearError):
    """A dataset is missing, incomplete or not in the expected layout."""


class NoDataFolder(DataError):
    """The folder given for the datasets does not exist, or is not a folder."""


class MissingData(DataError):
    """A dataset, or the part asked for, is not there; the message says where to get it."""


class DamagedData(DataError):
    """A dataset is wrong or only half copied; the message says which file and what to do."""


class InvalidReport(SpearError, ValueError):
    """A file is not one of our reports, is damaged, or comes from a newer version."""


class InvalidFile(SpearError, ValueError):
    """A file of weights or of an update cannot be read; the message says what was expected."""


class ClusterError(SpearError):
    """The machines that trials should run on cannot be reached, or cannot run them."""
