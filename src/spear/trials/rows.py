"""Rows on disk: one line of JSON each, appended as they come, never rewritten."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from spear.errors import DataError, MissingExtra
from spear.files import LARGEST_ROWS, bytes_of, make_private, remove_unfinished, replace_private
from spear.trials.trial import Row


class RowFile:
    """The rows of one experiment, `<folder>/<experiment>.jsonl`, and their pictures beside them.

    If a trial has several rows, the last one counts. A last line that was cut off (power cut, full
    disk) is not a row: it is dropped when the next run starts to write.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / f"{experiment}.jsonl"

    def rows(self) -> dict[str, Row]:
        """The rows by the key of their trial, in the order in which they were first written."""
        if not self.path.exists():
            return {}
        *lines, torn = self._content().split(b"\n")
        found: dict[str, Row] = {}
        for number, line in enumerate([*lines, torn], 1):
            try:
                row = Row.of_line(line.decode())
            except (ValueError, TypeError, KeyError) as error:
                if number > len(lines):
                    break
                raise DataError(
                    f"{self.path}, line {number}: expected a row as `spear reproduce` writes them "
                    f"({error}): restore the file, or remove the line to run its trial again"
                ) from error
            found[row.key] = row
        return found

    def _content(self) -> bytes:
        try:
            return bytes_of(self.path, LARGEST_ROWS)
        except ValueError as error:
            raise DataError(
                f"{self.path}: expected rows as `spear reproduce` writes them: {error}"
            ) from error

    def picture(self, name: str) -> Path:
        return self.folder / "pictures" / name

    @contextmanager
    def writing(self) -> Iterator[RowFile]:
        """Within this context, no other process writes to the file."""
        with exclusive_lock(self.path):
            self._drop_torn_line()
            if self.picture("").is_dir():
                remove_unfinished(self.picture(""))
            yield self

    def append(self, row: Row, pictures: Mapping[str, bytes]) -> None:
        """Write one line: afterwards either all of it is there or nothing."""
        for name, image in pictures.items():
            if not self.picture(name).exists():  # named for its content
                make_private(self.picture(name).parent)
                replace_private({self.picture(name): image})
        append_line(self.path, row.line())

    def _drop_torn_line(self) -> None:
        mend_last_line(self.path, lambda line: Row.of_line(line.decode()))


def append_line(path: Path, line: str) -> None:
    """Append to a file that nobody else writes to: either all of the line gets to disk, or nothing."""
    whole = (line + "\n").encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)  # Windows
    handle = os.open(path, flags, 0o600)
    try:
        _for_owner_only(handle)
        size = os.fstat(handle).st_size
        try:
            written = os.write(handle, whole)
            if written < len(whole):
                raise OSError(
                    errno.ENOSPC, f"the disk took {written} of {len(whole)} bytes", str(path)
                )
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def _for_owner_only(handle: int) -> None:
    """Make a file accessible to its owner only, unless it belongs to another user."""
    if sys.platform != "win32" and os.fstat(handle).st_mode & 0o077:
        with suppress(PermissionError):
            os.fchmod(handle, 0o600)


def mend_last_line(path: Path, read: Callable[[bytes], object]) -> None:
    """End the last line of a file if it can be read; drop it if it was cut off in the middle."""
    if not path.exists():
        return
    try:
        content = bytes_of(path, LARGEST_ROWS)
    except ValueError as error:
        raise DataError(f"{path}: expected rows of JSON: {error}") from error
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        read(content[start:])
    except (ValueError, TypeError, KeyError):
        os.truncate(path, start)
    else:
        with path.open("ab") as file:
            file.write(b"\n")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Within this context, no other process writes to the file; raises at once if one already does."""
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise MissingExtra("filelock", "cli") from error
    make_private(path.parent)
    lock = FileLock(path.with_suffix(".lock"), timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise DataError(
            f"another run is writing to {path}: wait for it, or name another folder with --results"
        ) from error
    except NotImplementedError as error:  # what filelock raises there
        raise DataError(
            f"{path.parent} is on a disk that cannot lock files, so two runs might mix their "
            "rows: name another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
