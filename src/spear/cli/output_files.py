"""What commands write: checked before the work begins, and written when it is done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spear.errors import InvalidOption
from spear.files import check_replaceable
from spear.report import ImageFormat, Report


def parse_image_format(shape: str, mean: str, std: str) -> ImageFormat:
    """`3x32x32`, `0.5,0.5,0.5` and `0.25` as an ImageFormat."""
    try:
        sizes = tuple(int(part) for part in shape.lower().split("x"))
        means = tuple(float(part) for part in mean.split(","))
        stds = tuple(float(part) for part in std.split(","))
    except ValueError as error:
        raise InvalidOption(
            "expected --shape like 3x32x32, --mean and --std like 0.5 or 0.49,0.48,0.45; "
            f"got {shape!r}, {mean!r}, {std!r}"
        ) from error
    if len(sizes) == 2:
        sizes = (1, *sizes)
    if len(sizes) != 3:
        raise InvalidOption(f"expected --shape as channels x height x width, got {shape!r}")
    return ImageFormat((sizes[0], sizes[1], sizes[2]), means, stds)


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
    check_replaceable(path)
    existing = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    as_we_are = os.access in os.supports_effective_ids
    if not existing.is_dir() or not os.access(existing, os.W_OK, effective_ids=as_we_are):
        raise InvalidOption(f"cannot write {path}: {existing} is no folder that can be written to")


def apart(json: Path | None, report: Path | None) -> None:
    """Raise if both would be written to one file."""
    if json is not None and report is not None and json.absolute() == report.absolute():
        raise InvalidOption(f"expected two files for --json and --report, got {json} twice")


def write(made: Report, json: Path | None, report: Path | None) -> list[Path]:
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
    return written
