"""A trial, what it measures, and the row that is kept of it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol

from spear.errors import DataError, InvalidOption, MissingExtra
from spear.files import commit, is_number, kind, mapping, maybe, versions


@dataclass(frozen=True)
class Trial:
    """One measurement to make.

    >>> Trial("main", {"b": 20}, seed=1).key == Trial("main", {"b": 20}, seed=1).key
    True
    >>> Trial("main", {"b": 20}, seed=1).key == Trial("main", {"b": 21}, seed=1).key
    False
    """

    experiment: str
    settings: Mapping[str, Any]  # all that its result depends on besides the seed, as JSON values
    seed: int

    @property
    def key(self) -> str:
        """Identifies the trial: other settings give another key."""
        words = json.dumps([self.experiment, self.settings, self.seed], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:16]


class Status(Enum):
    """How a trial ended, whatever it measured."""

    DONE = "done"
    FAILED = "failed"  # an exception, or a worker that died
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Measured:
    """A trial's result: the same on every machine except for the seconds, unless its time runs out."""

    outcome: str
    metrics: Mapping[str, Any]
    seconds: float  # of the attack alone
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # PNG files by name


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _files(value: Any) -> bool:
    """Are these plain file names, without paths to other folders?"""
    names = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(n, str) and n[:1] != "." and not set(n) & set("/\\:\0") for n in names)


_limit = maybe(is_number)
_OPTIONAL = ("error", "pictures", "versions", "commit", "engine")
_FIELDS = {
    **dict.fromkeys(("key", "experiment", "status"), kind(str)),
    **dict.fromkeys(("outcome", "error", "commit"), maybe(kind(str))),
    **dict.fromkeys(("metrics", "versions"), kind(dict)),
    "settings": lambda value: isinstance(value, dict) and _limit(value.get("max_seconds")),
    "engine": kind(str),
    "pictures": _files,
    "seed": kind(int),
    "seconds": maybe(is_number),
    "took": is_number,
    "stages": _numbers,
}


@dataclass(frozen=True)
class Row:
    """One line of results: a trial and what came of it."""

    key: str
    experiment: str
    settings: Mapping[str, Any]
    seed: int
    status: Status
    outcome: str | None
    metrics: Mapping[str, Any]
    seconds: float | None  # of the attack; None if it did not finish
    stages: Mapping[str, float]
    took: float  # seconds of the whole trial: data, client, attack and judging
    error: str | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)  # names of files beside the rows
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    engine: str = "local"

    def line(self) -> str:
        return json.dumps(_finite({**asdict(self), "status": self.status.value}), allow_nan=False)

    @staticmethod
    def of_line(line: str) -> Row:
        """The row of a line; ValueError or TypeError if it is not one."""
        content = mapping(line, _FIELDS, _OPTIONAL)
        return Row(**{**content, "status": Status(content["status"])})

    @property
    def cut_short(self) -> bool:
        """Did it fail, or run out of time (the engine's limit, or the setting `max_seconds`)?

        A search has only a part of `max_seconds`, so the attack's own word counts, where a row has it.
        """
        if self.metrics.get("out_of_time") is True:
            return True
        limit = self.settings.get("max_seconds")
        if self.status is not Status.DONE or limit is None or self.seconds is None:
            return self.status is not Status.DONE
        return bool(
            self.seconds - self.stages.get("guess", 0.0) >= limit
        )  # without a prior's guess

    @property
    def result(self) -> dict[str, Any]:
        """The part that does not depend on when and where it ran: the same for every engine."""
        names = ("key", "experiment", "settings", "seed", "status", "outcome", "metrics")
        return {name: getattr(self, name) for name in (*names, "pictures", "error")}


@dataclass(frozen=True)
class Step:
    """The progress of a trial."""

    key: str
    words: str
    share: float | None = None  # of the trial; None if unknown


OnStep = Callable[[Step], None]
Work = Callable[[Trial, OnStep], Measured]


class Engine(Protocol):
    """Runs trials somewhere, and yields each row with its pictures as soon as it is done."""

    def run(
        self, trials: Sequence[Trial], work: Work, on_step: OnStep
    ) -> Iterator[tuple[Row, Mapping[str, bytes]]]: ...


def measure(
    trial: Trial, work: Work, report: OnStep, engine: str
) -> tuple[Row, Mapping[str, bytes]]:
    """Run a trial in this process. An exception in it becomes a failed row.

    Errors that say nothing about the attack, such as a missing dataset or package, are raised.
    """
    began = time.monotonic()
    try:
        measured = work(trial, report)
    except (DataError, MissingExtra, InvalidOption):
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return row_without_result(trial, Status.FAILED, words, time.monotonic() - began, engine), {}
    names = {name: _file_name(image) for name, image in measured.pictures.items()}
    row = _row(
        trial,
        Status.DONE,
        time.monotonic() - began,
        engine,
        outcome=measured.outcome,
        metrics=dict(measured.metrics),
        seconds=round(measured.seconds, 4),
        stages={name: round(value, 4) for name, value in measured.stages.items()},
        pictures=names,
    )
    return row, {names[name]: image for name, image in measured.pictures.items()}


def row_without_result(trial: Trial, status: Status, error: str, took: float, engine: str) -> Row:
    """The row of a trial without a result."""
    return _row(trial, status, took, engine, error=error)


def _row(trial: Trial, status: Status, took: float, engine: str, **found: Any) -> Row:
    told = {"outcome": None, "metrics": {}, "seconds": None, "stages": {}, **found}
    return Row(
        key=trial.key,
        experiment=trial.experiment,
        settings=dict(trial.settings),
        seed=trial.seed,
        status=status,
        took=round(took, 3),
        versions=versions(),
        commit=commit(),
        engine=engine,
        **told,
    )


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def _file_name(image: bytes) -> str:
    return f"{hashlib.sha256(image).hexdigest()[:16]}.png"
