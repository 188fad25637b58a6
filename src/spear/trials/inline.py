"""Trials in this process: for notebooks, whose functions workers cannot import, and for tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spear.trials.trial import OnStep, Row, Trial, Work, measure


@contextmanager
def reraise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if there was a Ctrl-C within, even if it was caught.

    On Ctrl-C, `invert` returns what it has so far. Kept as a row, that would look like a result, and a
    resumed run would not repeat the trial.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no Ctrl-C reaches this thread
        return
    came = False

    def noted(number: int, frame: Any) -> Any:
        nonlocal came
        came = True
        return handler(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


class InlineEngine:
    """Runs one trial after another in this process, on one thread like a worker."""

    def run(
        self, trials: Sequence[Trial], work: Work, on_step: OnStep
    ) -> Iterator[tuple[Row, Mapping[str, bytes]]]:
        """Rows with their pictures, in the order of the trials."""
        import torch

        threads = torch.get_num_threads()
        for trial in trials:
            torch.set_num_threads(1)
            try:
                with reraise_interrupts():
                    done = measure(trial, work, on_step, "inline")
            finally:
                torch.set_num_threads(threads)
            yield done
