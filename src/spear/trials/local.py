"""Trials on this machine: one process per worker, one thread per trial.

With one thread, the bits of a result depend on the trial alone, not on how many workers there are. If
a worker dies, its trial is tried once more; the second time it counts as failed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

from spear.errors import ClusterError, InvalidOption
from spear.trials.trial import OnStep, Row, Status, Step, Trial, Work, measure, row_without_result

_NAME = "local"
_ATTEMPTS = 2
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MAX_WORKERS_WINDOWS = 61  # Windows cannot wait for more at once
_POLL_SECONDS = 0.5  # between two checks of the time limit
_CONTEXT = multiprocessing.get_context("spawn")  # as on Windows and macOS: no locks are inherited


@dataclass(frozen=True)
class LocalEngine:
    """Worker processes on this machine.

    Args:
        workers: how many; one per core unless given.
        max_seconds: a trial that runs longer is stopped, and its row says so.
    """

    workers: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InvalidOption(
                f"expected {{workers}} >= 1, got {self.workers}", arguments=("workers",)
            )
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise InvalidOption(
                f"expected {{max_seconds}} > 0, got {self.max_seconds}", arguments=("max_seconds",)
            )

    def run(
        self, trials: Sequence[Trial], work: Work, on_step: OnStep
    ) -> Iterator[tuple[Row, Mapping[str, bytes]]]:
        """Rows with their pictures, in the order in which they are done."""
        workers = self.workers or min(os.cpu_count() or 1, _MAX_WORKERS_WINDOWS)
        waiting = deque((trial, 1) for trial in trials)
        busy: list[_Worker] = []
        idle: list[_Worker] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < workers:
                    worker = idle.pop() if idle else _Worker(work)
                    worker.start(*waiting.popleft())
                    busy.append(worker)
                wait([w.pipe for w in busy], timeout=_POLL_SECONDS)
                for worker in list(busy):
                    done = worker.poll(on_step, self.max_seconds)
                    if done is None:
                        continue
                    busy.remove(worker)
                    if worker.alive:
                        idle.append(worker)
                    if isinstance(done, Trial):  # its worker died: try it once more
                        waiting.append((done, worker.attempt + 1))
                    else:
                        yield done
        finally:
            for worker in busy + idle:
                worker.stop()


class _Worker:
    """One process, and the trial it is running."""

    def __init__(self, work: Work) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, work), daemon=True)
        with _worker_environment():
            self.process.start()
        theirs.close()
        self.trial: Trial
        self.attempt = 0
        self.began: float | None = None  # None until the process is up

    @property
    def alive(self) -> bool:
        return not self.pipe.closed

    @property
    def took(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began

    def start(self, trial: Trial, attempt: int) -> None:
        self.trial, self.attempt, self.began = trial, attempt, None
        with suppress(OSError):  # it died while idle: poll() will notice
            self.pipe.send(trial)

    def poll(
        self, on_step: OnStep, max_seconds: float | None
    ) -> tuple[Row, Mapping[str, bytes]] | Trial | None:
        """The row if it is done, the trial itself if the worker died, None if it is still running."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if message is None:
                    self.began = time.monotonic()
                elif isinstance(message, Step):
                    on_step(message)
                elif isinstance(message, Exception):
                    raise message
                else:
                    row: tuple[Row, Mapping[str, bytes]] = message
                    return row
        except (EOFError, OSError):
            return self._died()
        if max_seconds is not None and self.took > max_seconds:
            self.stop()
            words = f"stopped after {max_seconds:g} s"
            return row_without_result(self.trial, Status.TIMED_OUT, words, self.took, _NAME), {}
        return None

    def _died(self) -> tuple[Row, Mapping[str, bytes]] | Trial:
        self.stop()
        if self.attempt < _ATTEMPTS:
            return self.trial
        if self.began is None:
            raise ClusterError(
                f"worker processes do not start (exit code {self.process.exitcode}): expected one to "
                "import torch and spear; a script that runs them needs `if __name__ == '__main__':`"
            )
        words = f"its worker died {self.attempt} times (exit code {self.process.exitcode})"
        return row_without_result(self.trial, Status.FAILED, words, self.took, _NAME), {}

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, work: Work) -> None:
    """A worker's loop: trials in, steps and rows out, until the pipe is closed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows it is not inherited
    torch.set_num_threads(1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    while True:
        try:
            trial: Trial = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(None)  # the trial's time starts now
            pipe.send(measure(trial, work, pipe.send, _NAME))
        except Exception as error:  # the parent raises it
            pipe.send(error)


def _leave_with_parent() -> None:
    """Exit with the parent, so that a killed run leaves no worker behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Workers start with one thread, and ignore Ctrl-C: their parent handles it."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        with _sigint_blocked():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Hold back a Ctrl-C until the end; processes that are started meanwhile never get one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows: workers ignore it themselves
        yield
        return
    resource_tracker.ensure_running()  # if started later, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
