"""The terminal. Names of files and tensors are shown, never obeyed as control characters."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from spear.errors import InvalidOption

# Control characters except tab and newline, and those that change the direction of writing.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
LARGEST_SEED = 2**32 - 1
MOST_WORKERS, MOST_TRIALS = 1024, 10**6  # more is a slip of the keyboard
_LONGEST = 2000  # characters of a complaint
_NARROWEST, _WIDEST = 20, 1000  # columns


def as_option(argument: str) -> str:
    """The command line's name of an argument of the library.

    >>> as_option("max_seconds")
    '--max-seconds'
    """
    return f"--{argument.replace('_', '-')}"


def shown(text: str) -> str:
    """Text with its control characters spelled out.

    >>> shown("a\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainConsole(Console):
    """A console that spells control characters out, and leaves `:name:` as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)
        self.width = max(self.width, _NARROWEST)

    def render_str(self, text: str, **options: Any) -> Text:
        """All text passes through here, that of tables too."""
        return super().render_str(shown(text), **options)

    @property
    def folds(self) -> bool:
        """Is a width known? A pipe has none unless COLUMNS says so."""
        return self.is_terminal or os.environ.get("COLUMNS", "").isdigit()

    def unfolded(self) -> PlainConsole:
        """This console; where no width is known, one that is wide enough for any table."""
        return self if self.folds else PlainConsole(file=self.file, width=_WIDEST)

    def say(self, words: str, *, lead: str = "") -> None:
        """A paragraph of markup, folded at words where a width is known.

        Args:
            words: of the paragraph.
            lead: stands before the first line; the others are indented as far.
        """
        begin, text = self.render_str(lead), self.render_str(words)
        if not self.folds:
            self.print(begin + text, soft_wrap=True)
            return
        for line in text.wrap(self, max(_NARROWEST, self.width - begin.cell_len)):
            line.rstrip()
            self.print(begin + line, soft_wrap=True)
            begin = Text(" " * begin.cell_len)


def complain(error: BaseException) -> None:
    """Say what went wrong, in one line on the standard error."""
    words = " ".join(_words(error).split())
    more = " ..." if len(words) > _LONGEST else ""
    PlainConsole(stderr=True).say(escape(words[:_LONGEST] + more), lead="[red]spear:[/red] ")


def give_up_stdout() -> None:
    """Drop what a full disk or a closed pipe did not take: at its end Python would try again."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _words(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    where = f"{name}: " if name is not None else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{where}there is no room to write it: free some, or name another place"
    if isinstance(error, PermissionError):
        return f"{where}it may not be read or written: change its permissions, or name another"
    if isinstance(error, OSError) and error.strerror:
        return f"{where}{error.strerror}: name another file or folder"
    if isinstance(error, MemoryError):
        return "there is not enough memory for it: make it smaller, or use a larger machine"
    return error.worded(as_option) if isinstance(error, InvalidOption) else str(error)
