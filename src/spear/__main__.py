"""The command `spear`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def main() -> None:
    """Run the command line, or say what to install for it. Ctrl-C ends it with code 130."""
    try:
        _imported()()
    except KeyboardInterrupt:
        sys.exit(130)


def _imported() -> Callable[[], None]:
    """The command line. Importing torch takes seconds, and turns Ctrl-C into errors of its own."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from spear.cli import run
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


if __name__ == "__main__":
    main()
