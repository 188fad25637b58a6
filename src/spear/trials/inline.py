"""Trials in this very process: for notebooks, whose functions no worker could import, and for tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spear.trials.trial import OnStep, Row, Trial, Work, measure


@contextmanager
def reraise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if there was a Ctrl-C within, whoever caught it.

    `invert` gives back what it has by then. As a row that would look like a result, and the run that
    goes on later would not repeat it.
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
    """One trial after another, here, on one thread as a worker would."""

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
