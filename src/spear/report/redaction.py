"""A redacted report keeps the names of files but drops their folders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

# A path within a text: absolute, from ~ or a drive, with leading dots, or folders and a file.
_PATH = re.compile(
    r"""(?<![\w/\\.~])
    (?: (?:[A-Za-z]:|~\w*|\.{1,2})?[/\\] [^\s'"(),;:=]*
      | [\w.@+-]+(?:[/\\][\w.@+-]+)*[/\\][\w@+-]+\.\w+ )""",
    re.VERBOSE,
)


def without_folders(value: Any) -> Any:
    """The value with each path cut to its last part; in a command line, word by word.

    >>> without_folders("the weights that /home/ann/nets.py:Net gave, and/or 3/4 of them")
    'the weights that nets.py:Net gave, and/or 3/4 of them'
    >>> without_folders({"command": "spear invert --update 'ward 3/ann.pt' --json=/tmp/r.json"})
    {'command': 'spear invert --update ann.pt --json=r.json'}
    """
    if isinstance(value, Mapping):
        return {
            name: command_without_folders(part)
            if name == "command" and isinstance(part, str)
            else without_folders(part)
            for name, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(without_folders(part) for part in value)
    if isinstance(value, str):
        return _PATH.sub(lambda found: _last(found[0]), value)
    return _last(str(value)) if hasattr(value, "__fspath__") else value


def command_without_folders(line: str) -> str:
    """A command line with each path in it cut to its last part."""
    try:
        words = shlex.split(line)
    except ValueError:  # not a command line after all
        return str(without_folders(line))
    return shlex.join(_word(word) for word in words)


def _word(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={_last(value)}" if equals and option.startswith("-") else _last(word)


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "."
