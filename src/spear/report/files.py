"""Files with private content: written whole or not at all, and readable by their owner only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from spear.errors import InvalidOption


def write_private(path: Path, content: bytes) -> None:
    """Write a file at once: a reader sees the old one or the new one, never half of it."""
    write_all_private({path: content})


def write_all_private(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: where one of them finds no room, none is written."""
    partial: dict[Path, str] = {}
    try:
        for path, content in contents.items():
            check_replaceable(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial[path] = _staged(path, content)
        for path in list(partial):
            os.replace(partial[path], path)
            del partial[path]
    except OSError as error:
        if error.filename is None or os.path.basename(error.filename)[:1] == ".":
            error.filename = str(path)  # not the partial one, which nobody knows
        raise
    finally:
        for name in partial.values():
            os.unlink(name)


def check_replaceable(path: Path) -> None:
    """Refuse what is no regular file: a device would be replaced by one, and gone."""
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "the folder" if os.path.isdir(path) else "the device or pipe"
        raise InvalidOption(f"expected the name of a file to write, got {kind} {path}")


def _staged(path: Path, content: bytes) -> str:
    """The content in a file beside the one it is for."""
    prefix = f".{path.name[:40]}."  # names have an end
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return name
