"""Trials on a Ray cluster: one task per trial, one core and one thread per task.

Ray runs a trial again when its worker or machine dies; rows come back as they finish. Every machine
needs the same version of spear-fl and the datasets at the same path. The command runs on a machine
that belongs to the cluster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from spear.errors import ClusterError, InvalidOption, MissingExtra, SpearError
from spear.trials import OnStep, Row, Status, Step, Trial, Work, measure, row_without_result

try:
    import ray
except ImportError as error:
    raise MissingExtra("ray", "ray") from error

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from spear.integrations.ray_session import THREADS, session

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NAME = "ray"
_RETRIES = 2  # of a trial whose worker died
_WINDOW = 4  # tasks per core that Ray has at a time: the others take no memory yet
_POLL_SECONDS = 0.5
_QUEUE_TIMEOUT = 0.1  # seconds to wait for the progress queue
_DIED = (WorkerCrashedError, NodeDiedError, OutOfMemoryError, ObjectLostError)


@dataclass(frozen=True)
class RayEngine:
    """Tasks on a Ray cluster.

    Args:
        address: of a cluster that this machine belongs to, as host:port, or "auto" for the one running
            here; it is left running. Without it and without RAY_ADDRESS, one is started here and
            stopped afterwards.
        workers: trials at a time; one per core of the cluster unless given.
        max_seconds: a trial that runs longer is stopped, and its row says so.

    >>> RayEngine(address="10.0.0.1:6379").max_seconds is None
    True
    """

    address: str | None = None
    workers: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InvalidOption(f"expected workers >= 1, got {self.workers}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise InvalidOption(f"expected max_seconds > 0, got {self.max_seconds}")

    def run(
        self, trials: Sequence[Trial], work: Work, on_step: OnStep
    ) -> Iterator[tuple[Row, Mapping[str, bytes]]]:
        """Rows with their pictures, in the order in which they finish."""
        with session(self.address, self.workers):
            task, board = _task(_attempt), _Reader(on_step)
            waiting = deque(trials)
            running: dict[Any, _Run] = {}  # by the reference to their result
            try:
                while waiting or running:
                    while waiting and len(running) < self._window():
                        trial = waiting.popleft()
                        running[task.remote(trial, work, board.actor)] = _Run(trial)
                    done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                    board.read({run.trial.key: run for run in running.values()})
                    for reference in done:
                        yield _row(reference, running.pop(reference))
                    for reference, words, status in self._given_up(running):
                        ray.cancel(reference, force=True)
                        run = running.pop(reference)
                        yield row_without_result(run.trial, status, words, run.took, _NAME), {}
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)
                ray.kill(board.actor)

    def _window(self) -> int:
        """Tasks under way; asked each time, because machines come and go."""
        return self.workers or max(1, int(_WINDOW * ray.cluster_resources().get("CPU", 0)))

    def _given_up(self, running: Mapping[Any, _Run]) -> list[tuple[Any, str, Status]]:
        found = []
        for reference, run in running.items():
            if run.attempts > 1 + _RETRIES:  # Ray itself never gives up when memory runs out
                found.append((reference, _died(run.attempts - 1), Status.FAILED))
            elif self.max_seconds is not None and run.took > self.max_seconds:
                words = f"stopped after {self.max_seconds:g} s"
                found.append((reference, words, Status.TIMED_OUT))
        return found


@dataclass
class _Run:
    """A trial that Ray runs, and what we know about it."""

    trial: Trial
    attempts: int = 0
    began: float | None = None  # None while it waits for a core

    @property
    def took(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


@dataclass(frozen=True)
class _Began:
    """An attempt at a trial has started."""

    key: str


class _ProgressQueue:
    """Where trials report how far they are, in a process of its own."""

    def __init__(self) -> None:
        self.told: list[Step | _Began] = []

    def tell(self, message: Step | _Began) -> None:
        self.told.append(message)

    def take(self) -> list[Step | _Began]:
        told, self.told = self.told, []
        return told


class _Reader:
    """Reads the queue, and never waits for it for long."""

    def __init__(self, on_step: OnStep) -> None:
        here = ray.get_runtime_context().get_node_id()  # the queue lives and dies with this machine
        place = NodeAffinitySchedulingStrategy(here, soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": place}
        self.actor: Any = ray.remote(_ProgressQueue).options(**options).remote()
        self.on_step = on_step
        self.asked: Any = None

    def read(self, runs: Mapping[str, _Run]) -> None:
        """Pass steps on, and note which trials have begun."""
        self.asked = self.asked or self.actor.take.remote()
        if not ray.wait([self.asked], timeout=_QUEUE_TIMEOUT)[0]:
            return  # its process is not up yet
        told: list[Step | _Began] = []
        with suppress(RayError):  # it died and will come back: only steps are lost
            told = ray.get(self.asked)
        self.asked = None
        for message in told:
            run = runs.get(message.key)
            if run is None:
                continue
            if isinstance(message, Step):
                self.on_step(message)
            else:
                run.attempts, run.began = run.attempts + 1, time.monotonic()


def _task(function: Callable[..., Any]) -> Any:
    """A remote function with one core and one thread, retried if its worker dies."""
    options = {"num_cpus": 1, "max_retries": _RETRIES, "runtime_env": {"env_vars": THREADS}}
    return ray.remote(function).options(**options)


def _attempt(trial: Trial, work: Work, board: Any) -> tuple[Row, Mapping[str, bytes]]:
    """One trial, on the machine that Ray chose."""
    import torch

    torch.set_num_threads(1)
    board.tell.remote(_Began(trial.key))
    return measure(trial, work, board.tell.remote, _NAME)


def _row(reference: Any, run: _Run) -> tuple[Row, Mapping[str, bytes]]:
    try:
        row: tuple[Row, Mapping[str, bytes]] = ray.get(reference)
        return row
    except _DIED as error:
        words = f"{_died(1 + _RETRIES)} ({type(error).__name__})"
        return row_without_result(run.trial, Status.FAILED, words, run.took, _NAME), {}
    except RayError as error:
        raise _unwrapped(error) from error


def _died(times: int) -> str:
    return f"its worker died {times} times"


def _unwrapped(error: RayError) -> Exception:
    """Our own error that a task raised, or what kept Ray from running it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, SpearError):
        return cause
    first = (str(cause).strip() or "no reason given").splitlines()[0]
    cure = (
        "expected the same version of spear-fl on every machine as here"
        if isinstance(error, RayTaskError)  # the task ran and failed
        else "see Ray's logs, then run the command again: finished rows are kept"
    )
    return ClusterError(f"a trial could not run on Ray ({type(cause).__name__}: {first}): {cure}")


@dataclass(eq=False)
class RayExecutor(Executor):
    """`concurrent.futures` on a Ray cluster: `submit` makes a task of one core and one thread.

    Args:
        address: as for RayEngine.
        workers: cores of a cluster that is started here.
    """

    address: str | None = None
    workers: int | None = None
    _open: ExitStack = field(default_factory=ExitStack, init=False, repr=False)
    _references: dict[Future[Any], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._open.enter_context(session(self.address, self.workers))
        self._task = _task(_call)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """The future raises what the function raised, as it was."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        reference = self._references[future] = self._task.remote(fn, args, kwargs)
        reference.future().add_done_callback(lambda done: self._settle(future, done))
        return future

    def _settle(self, future: Future[Any], done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, RayTaskError):
            future.set_exception(error.cause)
        else:
            future.set_exception(ClusterError(f"its task did not end ({type(error).__name__})"))
        self._references.pop(future, None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for running tasks whatever `wait` says: without the connection they would be lost."""
        for future, reference in list(self._references.items()):
            if cancel_futures:
                ray.cancel(reference, force=True)
            future.exception()
        self._open.close()


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    import torch

    torch.set_num_threads(1)
    return function(*args, **kwargs)
