"""Rows on disk: a line of JSON each, appended as they come, never rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spear.errors import DataError, MissingExtra
from spear.stored.json_text import LARGEST_ROWS, bytes_of, parsed
from spear.trials.trial import Row


class RowFile:
    """The rows of one experiment, `<folder>/<experiment>.jsonl`, and their pictures beside them.

    Of several rows of one trial the last counts. A line that was cut off in the middle (power cut,
    full disk) is no row: it is dropped when the next run starts to write.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / f"{experiment}.jsonl"

    def rows(self) -> dict[str, Row]:
        """By the key of their trial, in the order in which they were first written."""
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
        """Nobody else may write meanwhile."""
        try:
            from filelock import FileLock, Timeout
        except ImportError as error:
            raise MissingExtra("filelock", "cli") from error
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise DataError(
                f"another run is writing to {self.path}: wait for it, or name another folder "
                "with --results"
            ) from error
        try:
            self._drop_torn_line()
            yield self
        finally:
            lock.release()

    def append(self, row: Row, pictures: Mapping[str, bytes]) -> None:
        """One line, at once: either all of it is there afterwards or nothing."""
        for name, image in pictures.items():
            self._keep(self.picture(name), image)
        line = (row.line() + "\n").encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)  # Windows
        handle = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(handle).st_size
            try:
                written = os.write(handle, line)
                if written < len(line):
                    raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes")
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)

    def _keep(self, path: Path, content: bytes) -> None:
        if path.exists():
            return  # named for its content
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _drop_torn_line(self) -> None:
        if not self.path.exists():
            return
        content = self._content()
        if not content or content.endswith(b"\n"):
            return
        start = content.rfind(b"\n") + 1
        try:
            parsed(content[start:])
        except ValueError:
            os.truncate(self.path, start)
        else:
            with self.path.open("ab") as file:
                file.write(b"\n")
