"""The command `spear`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def main() -> None:
    """Run the command line, or say what to install for it. Ctrl-C ends it with code 130."""
    try:
        with _orderly_end():
            _imported()()
    except KeyboardInterrupt:
        sys.exit(130)


def _imported() -> Callable[[], None]:
    """The command line. Importing torch takes seconds, and turns Ctrl-C into errors of its own."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from spear.cli.app import run
    except ImportError as error:
        if error.name not in ("typer", "rich", "jinja2", "PIL", "skimage"):
            raise
        sys.exit(
            f"spear: the command line needs {error.name}: pip install 'spear-fl[cli]', "
            "or in a clone pip install -e '.[cli]'"
        )
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return run


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"spear: interrupted\n")
    os._exit(130)  # nothing has been begun


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Within, whoever ends the process (kill, a closed terminal) has it clean up: as Ctrl-C does."""
    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ours = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]  # nohup means it
    for number in ours:
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
