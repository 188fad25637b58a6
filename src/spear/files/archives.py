"""Untrusted zip archives: their entries are checked before anything is unpacked."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spear.errors import InvalidFile
from spear.files.limits import check_unpacked, looks_like

_MOST_ENTRIES = 100_000
# What zipfile and the unpackers raise for damaged archives; RuntimeError for encrypted ones.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
    OSError,
)


@contextmanager
def archive(path: Path, kind: str) -> Iterator[zipfile.ZipFile]:
    """An open archive that is not a zip bomb; damage in it is reported in one sentence.

    Args:
        path: of a regular file.
        kind: in words, for messages.
    """
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as opened:
                _check(path, opened)
                yield opened
        except InvalidFile:
            raise
        except DAMAGE as error:
            raise InvalidFile(
                f"{path} is not a {kind}, or a damaged one ({str(error)[:200] or type(error).__name__})"
                f"{looks_like(path) if isinstance(error, zipfile.BadZipFile) else ''}"
            ) from error


def _check(path: Path, opened: zipfile.ZipFile) -> None:
    entries = opened.infolist()
    if len(entries) > _MOST_ENTRIES:
        raise InvalidFile(
            f"{path}: expected at most {_MOST_ENTRIES:,} entries, got {len(entries):,}"
        )
    if len({entry.filename for entry in entries}) < len(entries):
        raise InvalidFile(f"{path}: expected each name once, got one twice: write the file again")
    check_unpacked(path, sum(entry.file_size for entry in entries))  # overlapping ones count twice
