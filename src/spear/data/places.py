"""Where to find a dataset: the usual layouts, which of its files are there, and where to get it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spear.errors import DamagedData, DataError, MissingData, NoDataFolder

AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Source:
    """Where to get a dataset, and the shell command that puts it into the data folder.

    >>> print(Source("https://example.org", "tar -xzf x.tar.gz").line(Path("my data")))
    cd 'my data' && tar -xzf x.tar.gz
    """

    page: str
    command: str  # to be run in the data folder

    def line(self, root: Path | None = None) -> str:
        """The command, to be run from anywhere; without a folder, it uses SPEAR_DATA."""
        folder = '"$SPEAR_DATA"' if root is None else shlex.quote(str(root))
        return f"cd {folder} && {self.command}"


@dataclass(frozen=True)
class Dataset:
    """A dataset as people have it on disk."""

    name: str
    folders: tuple[str, ...]  # where it may be under the data folder, the usual place first
    telltales: tuple[str, ...]  # patterns; a match in a folder shows that it holds this dataset
    expected: str  # for messages: its usual files
    source: Source
    used_by: str
    own: tuple[str, ...] = ()  # fewer telltales, for folders whose name says nothing
    foreign: tuple[str, ...] = ()  # what shows that such a folder holds another dataset
    archives: tuple[str, ...] = ()  # what people download, and may have forgotten to unpack

    def find(self, root: Path) -> Path:
        """The folder that holds it: one under `root`, or `root` itself."""
        root = existing(root)
        folders = [root / name for name in self.folders]
        own_name = os.path.basename(os.path.abspath(root))
        for name in self.folders:  # root may itself be the MNIST of MNIST/raw
            first, *rest = Path(name).parts
            folders += [root.joinpath(*rest)] if first == own_name else []
        for folder in folders:
            if _shows(folder, self.telltales):
                return folder
        if _shows(root, self.own or self.telltales) and not _shows(root, self.foreign):
            return root
        there = [folder for folder in folders if os.path.lexists(folder)]
        if there:
            raise DamagedData(self._wrong(there[0]))
        raise MissingData(f"{self.name} is not in {root}: {self.advice(root)}")

    def advice(self, root: Path, expected: str = "") -> str:
        """What was looked for and where to get it."""
        looked = f"expected {expected or self.expected}"
        for name in self.archives:
            if (root / name).is_file():
                return f"{looked}, found {name}, which must be unpacked: {self.source.line(root)}"
        return f"{looked}. It is at {self.source.page}: {self.source.line(root)}"

    def split(self, root: Path, folder: Path, files: Sequence[str], split: str) -> list[Path]:
        """The files of one split; `MissingData` if all are missing, `DamagedData` if only some."""
        absent = [name for name in files if not os.path.lexists(folder / name)]
        if len(absent) == len(files):
            advice = self.advice(Path(root), f"{self.folders[0]}/{files[0]}")
            raise MissingData(f"{self.name}'s {split} set is not in {folder}: {advice}")
        if absent:
            raise DamagedData(
                f"{folder}: expected {', '.join(absent)} as well; {self.name} is half-copied, {AGAIN}"
            )
        return [folder / name for name in files]

    def _wrong(self, folder: Path) -> str:
        if not folder.exists():
            came = "is a link that leads nowhere"
        elif not folder.is_dir():
            came = "is a file"
        else:
            names = [entry.name for entry in entries(folder)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            came = f"holds {', '.join(names[:3])}{more}" if names else "is empty"
        return (
            f"{folder} {came}: expected {self.name}, that is {self.expected}; {AGAIN} "
            f"({self.source.page})"
        )


def _shows(folder: Path, patterns: Sequence[str]) -> bool:
    """Whether anything here matches these patterns, broken links included."""
    return any(
        os.path.lexists(folder / pattern) or next(folder.glob(pattern), None) is not None
        for pattern in patterns
    )


def existing(root: Path) -> Path:
    """The data folder; raises if it does not exist or is a file."""
    root = Path(root)
    if root.is_dir():
        return root
    if not os.path.lexists(root):
        raise NoDataFolder(f"the folder {root} does not exist: name the one with your datasets")
    raise NoDataFolder(f"{root} is not a folder: name the one with your datasets")


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name, without the hidden files that file managers leave."""
    try:
        with os.scandir(folder) as found:
            shown = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(shown, key=lambda entry: entry.name)


def contents(path: Path, at_most: int) -> bytes:
    """The bytes of a file; raises if it has more than `at_most`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise DamagedData(f"{path}: expected a file, got something else: {AGAIN}")
        if status.st_size > at_most:
            raise DamagedData(
                f"{path}: expected at most {at_most:,} bytes, got {status.st_size:,}: {AGAIN}"
            )
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def text_of(path: Path, at_most: int) -> str:
    """The text of a file."""
    try:
        return contents(path, at_most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path}: expected text, got bytes that are not UTF-8: {AGAIN}"
        ) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file or folder that cannot be read."""
    if isinstance(error, PermissionError):
        return DataError(f"no permission to read {path}: change its permissions")
    return DamagedData(f"{path} cannot be read ({error.strerror or error}): {AGAIN}")


def web_page(raw: bytes) -> str:
    """A remark if the file is a web page, as failed downloads leave behind; else empty."""
    start = raw[:512].lstrip().lower()
    return ", it is a web page" if start.startswith((b"<!doctype", b"<html", b"<?xml")) else ""
