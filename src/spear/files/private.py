"""Files with private content: written whole or not at all, and readable by their owner only."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spear.errors import InvalidOption

_UNFINISHED = ".spear-partial"
_SAFE_OPEN_FILES = 200  # open files that every system allows


def write_private(path: Path, content: bytes) -> None:
    """Write a file at once: a reader sees the old one or the new one, never half of it."""
    write_all_private({path: content})


def write_all_private(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: if there is no room for one of them, none is written.

    Half-written files that a killed process left in the same folders are removed first.
    """
    for path in contents:
        check_replaceable(path)
        make_private(path.parent)
    for folder in {path.parent for path in contents}:
        remove_unfinished(folder)
    replace_private(contents)


def check_replaceable(path: Path) -> None:
    """Refuse to replace anything but a regular file: a device would be gone."""
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "the folder" if os.path.isdir(path) else "the device or pipe"
        raise InvalidOption(f"expected the name of a file to write, got {kind} {path}")


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, accessible to their owner only."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # a file in its place, or a link to nowhere, is an error


def replace_private(contents: Mapping[Path, bytes]) -> None:
    """As `write_all_private`, for folders that exist, and without cleaning them up."""
    begun: dict[Path, tuple[int, str]] = {}  # open and locked until all have their names
    _let_open(len(contents))
    path = None
    try:
        for path, content in contents.items():
            begun[path] = _begun(path)
            _write_all(begun[path][0], content)
            os.fsync(begun[path][0])
        for path, (handle, partial) in list(begun.items()):
            if sys.platform == "win32":  # there the name is free only once it is closed
                os.close(handle)
            os.replace(partial, path)
            if sys.platform != "win32":
                os.close(handle)
            del begun[path]
    except OSError as error:
        if error.filename is None or os.path.basename(error.filename)[:1] == ".":
            error.filename = str(path)  # not the partial file, whose name means nothing to the user
        raise
    finally:
        for handle, partial in begun.values():
            with suppress(OSError):  # an interrupt may come after it was closed, or got its name
                os.close(handle)
            with suppress(FileNotFoundError):
                os.unlink(partial)
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _let_open(count: int) -> None:
    """Raise this process's limit of open files by this many, as far as the system allows."""
    if sys.platform != "win32" and count > _SAFE_OPEN_FILES:
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 1024
        if most != resource.RLIM_INFINITY:
            wanted = min(wanted, most)
        if now != resource.RLIM_INFINITY and now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def remove_unfinished(folder: Path) -> None:
    """Remove half-written files of killed processes: they hold private data, and nobody else would."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        with suppress(OSError):  # others may remove it at the same time, or own it
            handle = os.open(left, os.O_RDWR)
            try:
                if _locked(handle):
                    os.unlink(left)
            finally:
                os.close(handle)


def _begun(path: Path) -> tuple[int, str]:
    """An empty file of ours beside the path: open, mode 0600, and locked so nobody cleans it up."""
    while True:
        prefix = f".{path.name[:60]}."  # names end at 255 bytes
        handle, partial = tempfile.mkstemp(_UNFINISHED, prefix, path.parent)
        if _locked(handle) and os.fstat(handle).st_nlink:
            return handle, partial
        os.close(handle)  # another process cleaned it up first: try again


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _locked(handle: int) -> bool:
    """Lock the file; False if another process holds it. The lock ends with its process."""
    if sys.platform == "win32":
        return True  # an open file cannot be removed there anyway
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where folders can be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
