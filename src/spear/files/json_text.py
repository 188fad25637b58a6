"""Untrusted JSON: text that is nested too deeply, repeats a key or is too large is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

LARGEST_ROWS = 2**28  # bytes: a quarter of a million rows


def parsed(text: str | bytes, **options: Any) -> Any:
    """The content of JSON text; ValueError for anything else.

    Args:
        text: the JSON; bytes are read as UTF-8.
        options: passed on to `json.loads`.

    >>> parsed('{"b": 20}')
    {'b': 20}
    """
    try:
        return json.loads(text, object_pairs_hook=_once, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def mapping(
    text: str | bytes, fields: Mapping[str, Callable[[Any], bool]], optional: Collection[str] = ()
) -> dict[str, Any]:
    """A JSON object whose fields pass these checks; ValueError otherwise.

    Args:
        text: one line.
        fields: for each name, whether a value is right.
        optional: names that may be missing.
    """
    content = parsed(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping, got a {type(content).__name__}")
    for name, right in fields.items():
        if not (right(content[name]) if name in content else name in optional):
            raise ValueError(f"{name!r} is missing or has the wrong type")
    return content


def bytes_of(path: Path, most: int) -> bytes:
    """The bytes of a regular file; ValueError for anything else, or if it has more than `most`."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise ValueError("expected a file, got a folder, a pipe or a device")
    if status.st_size > most:
        raise ValueError(f"expected at most {most:,} bytes, got {status.st_size:,}")
    return path.read_bytes()


def is_number(value: Any) -> bool:
    """Is it a number, and not a bool?"""
    return isinstance(value, int | float) and not isinstance(value, bool)


def maybe(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The same check, but None passes too."""
    return lambda value: value is None or right(value)


def kind(*kinds: type) -> Callable[[Any], bool]:
    """Is it of one of these kinds?"""
    return lambda value: isinstance(value, kinds)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name occurs twice")
    return content
