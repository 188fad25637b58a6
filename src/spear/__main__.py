"""The command `spear`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def main() -> None:
    """Run the command line, or say what to install for it. Ctrl-C ends it with code 130."""
    try:
        with _orderly_end():
            try:
                from spear.cli.app import run
            except ImportError as error:
                if error.name not in ("typer", "rich"):
                    raise
                sys.exit(
                    f"spear: the command line needs {error.name}: pip install 'spear-fl[cli]', "
                    "or in a clone pip install -e '.[cli]'"
                )
            run()
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Within, a kill or a closed terminal raises and so cleans up, as Ctrl-C does."""
    handlers: dict[str, tuple[Any, Any]] = {  # what Python has by default, and ours
        "SIGINT": (signal.default_int_handler, _interrupted),
        "SIGTERM": (signal.SIG_DFL, _ended),
        "SIGHUP": (signal.SIG_DFL, _ended),
    }
    known = handlers if threading.current_thread() is threading.main_thread() else {}
    numbers = {getattr(signal, name): pair for name, pair in known.items() if hasattr(signal, name)}
    # A handler that somebody else chose stays: nohup means it.
    ours = {n: pair for n, pair in numbers.items() if signal.getsignal(n) is pair[0]}
    for number, (_, handler) in ours.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, (usual, _) in ours.items():
            signal.signal(number, usual)


def _ended(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; but torch and numpy, while they import, turn that into other errors."""
    while frame is not None:
        name, code = frame.f_globals.get("__name__"), frame.f_code.co_name
        if name in ("torch", "numpy") and code == "<module>":
            # Over the line that says what is being done, which has hidden the cursor.
            clear = b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b""
            os.write(2, clear + b"spear: interrupted\n")
            os._exit(130)  # commands import torch before they begin anything
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
