"""What a campaign of kills counts, and what it compares with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spear.trials import RowFile
from victims import EXPERIMENT


@dataclass
class Count:
    runs: int = 0
    killed: int = 0  # the others came to their end before
    rows_kept: int = 0
    rows_lost: int = 0  # said to be on disk, and not there afterwards
    rows_differing: int = 0  # from an undisturbed run, or twice
    unreadable: int = 0  # files
    leftover_files: int = 0  # after a run that came to its end
    leftover_processes: int = 0

    @property
    def bad(self) -> bool:
        return bool(
            self.rows_lost
            or self.rows_differing
            or self.unreadable
            or self.leftover_files
            or self.leftover_processes
        )

    def look(self, folder: Path, said: Iterable[str], expected: dict[str, Any]) -> None:
        """After a kill: is all there that was said to be, and is it right?"""
        try:
            there = results(folder)
        except Exception as error:
            print(f"unreadable: {error}")
            self.unreadable += 1
            return
        self.rows_kept += len(there)
        self.rows_lost += len(set(said) - set(there))
        self.rows_differing += sum(expected[key] != found for key, found in there.items())

    def end(self, folder: Path, expected: dict[str, Any], experiment: str = EXPERIMENT) -> None:
        """After a run that came to its end: the same rows, once each, and nothing else."""
        there = results(folder, experiment)
        self.rows_lost += len(set(expected) - set(there))
        self.rows_differing += sum(expected.get(key) != found for key, found in there.items())
        lines = (folder / f"{experiment}.jsonl").read_bytes().count(b"\n")
        self.rows_differing += lines - len(there)
        self.leftover_files += len(strange_files(folder))


def results(folder: Path, experiment: str = EXPERIMENT) -> dict[str, Any]:
    """Everything but times and origin of all rows, and the bytes of their pictures."""
    file = RowFile(folder, experiment)
    return {
        key: (row.result, [file.picture(name).read_bytes() for name in row.pictures.values()])
        for key, row in file.rows().items()
    }


def strange_files(folder: Path) -> list[Path]:
    """Files that no finished run leaves behind."""
    usual = {".jsonl", ".lock", ".png", ".json", ".html"}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix not in usual or path.name.startswith(".")]
