"""Files with private content: written whole or not at all, and readable by their owner only."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_UNFINISHED = ".spear-partial"


def keep_private() -> None:
    """Whatever this process and its children write from now on is their owner's, libraries' files too.

    A crash leaves no image of the memory: that holds what was recovered.
    """
    os.umask(0o077)
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def write_private(path: Path, content: bytes) -> None:
    """Write a file at once: a reader sees the old one or the new one, never half of it.

    What a killed process left half-written in the same folder is removed on the way.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        path.write_bytes(content)  # to a pipe or a device, in whose place no file belongs
        return
    make_private(path.parent)
    remove_unfinished(path.parent)
    replace_private(path, content)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner only."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # a file in its place, or a link to nowhere, is an error


def replace_private(path: Path, content: bytes) -> None:
    """The same in a folder that is there, without a look at what others left."""
    handle, partial = _begun(path)
    try:
        try:
            _write_all(handle, content)
            os.fsync(handle)
            if sys.platform != "win32":  # there the name is free only once it is closed
                os.replace(partial, path)
        finally:
            os.close(handle)
        if sys.platform == "win32":
            os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):  # an interrupt may come after it got its name
            os.unlink(partial)
        raise
    _sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove files that a killed process began: they hold private data, and nobody else would."""
    for left in folder.glob(f".*{_UNFINISHED}"):
        with suppress(OSError):  # others may remove it at the same time, or own it
            handle = os.open(left, os.O_RDWR)
            try:
                if _locked(handle):
                    os.unlink(left)
            finally:
                os.close(handle)


def _begun(path: Path) -> tuple[int, str]:
    """An empty file beside the path that is ours: open, mode 0600, and not taken for a leftover."""
    while True:
        prefix = f".{path.name[:60]}."  # names end at 255 bytes
        handle, partial = tempfile.mkstemp(_UNFINISHED, prefix, path.parent)
        if _locked(handle) and os.fstat(handle).st_nlink:
            return handle, partial
        os.close(handle)  # somebody who cleans up was quicker


def _write_all(handle: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _locked(handle: int) -> bool:
    """Does the file belong to nobody else? The lock ends with the process that holds it."""
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
