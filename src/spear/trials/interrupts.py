"""Ctrl-C in a trial: an attack takes it for \"that is enough\", a run of trials has to end at it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if there was a Ctrl-C within, whoever caught it.

    `invert` gives back what it has by then. As a row that would look like a result, and the run that
    goes on later would not repeat it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it is nobody's here, or not for us to hear
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
