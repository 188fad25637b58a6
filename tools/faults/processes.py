"""Runs with processes of their own, killed as people and machines do it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from count import Count, results, strange_files
from forked import undisturbed

HERE = Path(__file__).resolve().parent
_PATIENCE = 90.0  # seconds until a process counts as left behind: two agents of Ray take 60
_DISK = 256  # kB


def local(folder: Path, kills: int, chance: Random) -> Count:
    return _campaign(folder, kills, chance, "local")


def ray(folder: Path, kills: int, chance: Random) -> Count:
    return _campaign(folder, kills, chance, "ray")


def _campaign(folder: Path, kills: int, chance: Random, engine: str) -> Count:
    command = [sys.executable, str(HERE / "victims.py"), engine]
    expected, count = undisturbed(folder / "whole"), Count()
    began = time.monotonic()
    _end(_begin([*command, str(folder / "timed")]))
    usual, own = time.monotonic() - began, folder / "own"
    while count.runs < kills:
        shutil.rmtree(own, ignore_errors=True)
        code = -1
        while code != 0 and count.runs < kills:
            code, said = _killed([*command, str(own)], count, chance, usual)
            count.look(own, said, expected)
        _end(_begin([*command, str(own)]))
        count.end(own, expected)
    return count


def audit(folder: Path, kills: int, chance: Random) -> Count:
    """The command itself, as a user gives it: rows, examples, JSON and page."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((40, 12)).astype("f4"), rng.integers(0, 3, 40)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels)
    fixed = ["--data", str(folder / "data.npz"), "-b", "2,3", "--repeats", "2"]
    fixed += ["--training-rounds", "0"]
    command = [sys.executable, "-m", "spear", "audit", *fixed, "--workers", "2", "-q"]

    def args(name: str) -> list[str]:
        out = folder / name
        return [*command, "--out", str(out), "--json", str(out / "report.json")]

    began = time.monotonic()
    _end(_begin(args("whole")), codes=(0, 10, 20))
    usual, count = time.monotonic() - began, Count()
    expected = results(folder / "whole", "leakage")
    while count.runs < kills:
        shutil.rmtree(folder / "own", ignore_errors=True)
        code = -1
        while code not in (0, 10, 20) and count.runs < kills:
            code, _ = _killed(args("own"), count, chance, usual, done=(0, 10, 20))
            there = results(folder / "own", "leakage")
            count.rows_kept += len(there)
            count.rows_differing += sum(expected[key] != row for key, row in there.items())
        _end(_begin(args("own")), codes=(0, 10, 20))
        count.end(folder / "own", expected, "leakage")
    return count


def disk(folder: Path, kills: int, chance: Random) -> Count:
    """A file system that is full: of somebody else's file, then with room again."""
    count = Count()
    expected = undisturbed(folder / "whole")
    with _small_disk(folder / "small") as small:
        for _ in range(kills):
            own, big = small / "own", small / "big"
            shutil.rmtree(own, ignore_errors=True)
            big.write_bytes(bytes(chance.randrange(0, _DISK * 1024 - 8192)))
            with suppress(OSError), big.open("ab") as file:
                file.write(bytes(4096 * chance.randrange(0, _DISK // 4)))
            own.mkdir()
            done = subprocess.run(_inline(own), capture_output=True, text=True, check=False)
            count.runs += 1
            count.killed += done.returncode != 0
            count.look(own, done.stdout.split(), expected)
            count.leftover_files += len(strange_files(own))
            big.unlink()
            _end(_begin(_inline(own)))
            count.end(own, expected)
    return count


def together(folder: Path, kills: int, chance: Random) -> Count:
    """Two runs on one folder at the same moment: one of them writes, or one after the other."""
    expected, count = undisturbed(folder / "whole"), Count()
    for engine in ("inline", "local"):
        for _ in range(max(1, kills // 4)):
            own = folder / "own"
            shutil.rmtree(own, ignore_errors=True)
            command = [sys.executable, str(HERE / "victims.py"), engine, str(own)]
            both = [_begin(command), _begin(command)]
            codes = []
            for process in both:
                process.communicate()
                codes.append(process.returncode)
            count.runs += 2
            count.killed += sum(code != 0 for code in codes)
            if 0 not in codes:
                count.rows_lost += 1
            count.end(own, expected)
    return count


def _inline(folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "victims.py"), "inline", str(folder)]


def _begin(command: list[str]) -> subprocess.Popen[str]:
    """In a session of its own, as from a terminal of its own."""
    paths = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str], codes: tuple[int, ...] = (0,)) -> None:
    _, words = process.communicate(timeout=600)
    assert process.returncode in codes, words


def _killed(
    command: list[str],
    count: Count,
    chance: Random,
    usual: float,
    done: tuple[int, ...] = (0,),
) -> tuple[int, list[str]]:
    process = _begin(command)
    time.sleep(chance.uniform(0.1, 1.0) * usual)
    children = _session(process.pid)
    chance.choice(WAYS)(process.pid)
    output, _ = process.communicate(timeout=600)
    count.runs += 1
    count.killed += process.returncode not in done
    until = time.monotonic() + _PATIENCE
    while any(map(_alive, children)) and time.monotonic() < until:
        time.sleep(0.1)
    count.leftover_processes += sum(map(_alive, children))
    return process.returncode, output.split()


def _kill(number: int) -> Callable[[int], None]:
    def kill(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    return kill


def _impatient(pid: int) -> None:
    """Ctrl-C as a terminal sends it, to all processes of the group, and once more."""
    for _ in range(2):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGINT)
        time.sleep(0.3)


WAYS = (
    _kill(signal.SIGKILL),
    _kill(signal.SIGKILL),
    _kill(signal.SIGTERM),
    _kill(signal.SIGHUP),
    _kill(signal.SIGINT),
    _impatient,
)


def _session(leader: int) -> list[tuple[int, str]]:
    """Processes that the leader has started, and theirs, with the moment when they began."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, new = [], [leader]
    while new:
        own = parents.get(new.pop(), [])
        found += own
        new += own
    return [(pid, _began(pid)) for pid in found]


def _began(pid: int) -> str:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _alive(process: tuple[int, str]) -> bool:
    pid, began = process
    return bool(began) and _began(pid) == began


@contextmanager
def _small_disk(place: Path) -> Any:
    place.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK}k", "tmpfs", str(place)], check=True
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
