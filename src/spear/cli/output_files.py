"""Files that commands read and write: checked before torch is imported, written at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spear.errors import InvalidFile, InvalidOption

if TYPE_CHECKING:
    from spear.inversion import Outcome
    from spear.report import ImageFormat, Report

_KINDS = (".safetensors", ".npz", ".pt", ".pth")


def existing(*given: Path | str | None) -> None:
    """Raise unless these files exist; what names no file, such as package.nets:Net, is not checked.

    A command calls it before it imports torch, so that a wrong name is told at once.
    """
    for path in filter(None, map(_named_file, given)):
        if path.is_dir():
            kinds = path.suffix or ", ".join(_KINDS)
            raise InvalidFile(f"{path} is a folder: expected a file named {kinds}")
        if not path.exists():
            link = ", it is a link to nowhere" if path.is_symlink() else ""
            raise InvalidFile(f"{path} does not exist{link}: check its name")


def _named_file(given: Path | str | None) -> Path | None:
    """The file that a path, net.py:Net or data.npz names; None for the name of a module or dataset.

    >>> [_named_file(name) is None for name in ("net.py:Net", "data.npz", "package.nets:Net", "mnist")]
    [False, False, True, True]
    """
    if not isinstance(given, str):
        return given
    source, colon, _ = given.rpartition(":")
    path = Path(source if colon else given)
    return path if path.suffix in ((".py",) if colon else _KINDS) else None


def parse_image_format(shape: str, mean: str, std: str) -> ImageFormat:
    """`3x32x32`, `0.5,0.5,0.5` and `0.25` as an ImageFormat."""
    from spear.report import ImageFormat

    try:
        sizes = tuple(int(part) for part in shape.lower().split("x"))
        means = tuple(float(part) for part in mean.split(","))
        stds = tuple(float(part) for part in std.split(","))
    except ValueError as error:
        raise InvalidOption(
            "expected --shape like 3x32x32, --mean and --std like 0.5 or 0.49,0.48,0.45; "
            f"got {shape!r}, {mean!r}, {std!r}"
        ) from error
    return ImageFormat.of(sizes, means, stds)


def writable(path: Path | None, *inputs: Path | None) -> None:
    """Raise unless a file can be written there: better now than after a long attack.

    Args:
        path: where, if at all; - is the terminal.
        inputs: what is read, which nothing may be written over.
    """
    if path is None or str(path) == "-":
        return
    for given in inputs:
        if given is not None and path.exists() and given.exists() and path.samefile(given):
            raise InvalidOption(f"expected another file to write than {path}, which is read")
    if path.exists() and not path.is_file():  # a device would be replaced by a file, and gone
        kind = "the folder" if path.is_dir() else "the device or pipe"
        raise InvalidOption(f"expected the name of a file to write, got {kind} {path}")
    folder = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    as_we_are = os.access in os.supports_effective_ids
    if not folder.is_dir() or not os.access(folder, os.W_OK, effective_ids=as_we_are):
        raise InvalidOption(f"cannot write {path}: {folder} is no folder that can be written to")


def apart(**files: Path | None) -> None:
    """Raise if two would be written to one file, or any but --json to the terminal.

    >>> apart(json=Path("a"), report=Path("a"))
    Traceback (most recent call last):
    spear.errors.InvalidOption: expected two files for --json and --report, got a twice
    """
    known: dict[Path, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        if str(path) == "-" and name != "json":
            raise InvalidOption(f"expected the name of a file for --{name}: only --json can be -")
        other = known.setdefault(path.absolute(), name)
        if other != name:
            raise InvalidOption(f"expected two files for --{other} and --{name}, got {path} twice")


def write(
    made: Report,
    json: Path | None,
    report: Path | None,
    *,
    junit: Path | None = None,
    sarif: Path | None = None,
    fail_on: str | None = None,
) -> list[Path]:
    """The files of a report that were asked for."""
    written = []
    if json is not None and str(json) == "-":
        sys.stdout.write(made.json() + "\n")
    elif json is not None:
        made.save(json)
        written.append(json)
    if report is not None:
        made.save_page(report)
        written.append(report)
    if junit is not None:
        made.save_junit(junit, _limit(fail_on))
        written.append(junit)
    if sarif is not None:
        made.save_sarif(sarif)
        written.append(sarif)
    return written


def exit_code(made: Report, fail_on: str | None, usual: int) -> int:
    """With --fail-on: 1 if the worst verdict is that bad or worse, else 0. Without: the usual one."""
    from spear.report import at_least

    limit, worst = _limit(fail_on), made.worst
    if limit is None:
        return usual
    return int(worst is None or at_least(worst, limit))


def _limit(fail_on: str | None) -> Outcome | None:
    from spear.inversion import Outcome

    return None if fail_on is None else Outcome(fail_on)
