"""Runs in forked processes, which start at once: killed hundreds of times in a minute."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import victims
from count import Count, results, strange_files
from spear.report import load

CALLS = ("open", "write", "fsync", "replace", "unlink", "close", "ftruncate", "truncate", "mkdir")
_CALLS, _WRITES = 60, 20  # that a run makes, about
SURVIVED = 4  # exit code of a run whose fault did it no harm
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
Job = Callable[[Path, Callable[[str], None]], None]


def _rows(folder: Path, done: Callable[[str], None]) -> None:
    victims.run(folder, done=done)


def start(
    job: Job, folder: Path, before: Callable[[], Callable[[], bool]] = lambda: lambda: False
) -> tuple[int, int]:
    """A job in a process of its own; its id, and a pipe in which it says what is on disk."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.read(told, 1)  # it is up
        return pid, told
    code = 3
    try:
        os.close(told)
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
        say, raw = os.write, tell
        fired = before()
        say(raw, b"!")
        job(folder, lambda name: say(raw, f"{name}\n".encode()))
        code = SURVIVED if fired() else 0
    except (KeyboardInterrupt, OSError) as error:
        code = 2 if isinstance(error, OSError) else 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, told: int) -> tuple[int, list[str]]:
    """Its exit code, negative for a signal, and what it said."""
    with os.fdopen(told) as pipe:
        said = pipe.read().split()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def undisturbed(folder: Path) -> dict[str, Any]:
    """The rows of a run that nobody kills."""
    torch.set_num_threads(1)
    victims.work(
        victims.trials()[0], lambda step: None
    )  # what is loaded here is not loaded by each
    code, said = ended(*start(_rows, folder))
    assert code == 0, code
    assert len(said) == victims.TRIALS
    return results(folder)


def dying(number: int, *, after: bool) -> Callable[[], Callable[[], bool]]:
    """SIGKILL at the given call of those that write; a write is done by half, or whole if `after`."""
    count = 0

    def arm() -> Callable[[], bool]:
        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count != number:
                    return real(*arguments, **options)
                if after:
                    real(*arguments, **options)
                elif real is write:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError("we should be dead")

            return call

        write = os.write
        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        return lambda: count >= number

    return arm


def filling(number: int) -> Callable[[], Callable[[], bool]]:
    """At the given write, and the given sync, half of it goes to disk and no more."""
    count = 0

    def arm() -> Callable[[], bool]:
        write, sync = os.write, os.fsync

        def full_write(handle: int, content: Any) -> int:
            nonlocal count
            count += 1
            if count != number:
                return write(handle, content)
            write(handle, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        def full_sync(handle: int) -> None:
            nonlocal count
            count += 1
            if count == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(handle)

        os.write, os.fsync = full_write, full_sync  # type: ignore[assignment]
        return lambda: count >= number

    return arm


def points(folder: Path, kills: int, chance: Random) -> Count:
    """A kill at every call, or at some of them; the next run goes on from there."""
    expected, count = undisturbed(folder / "whole"), Count()
    own = folder / "own"
    for number in sorted(chance.sample(range(1, _CALLS + 1), min(_CALLS, kills // 2))):
        for after in (False, True):
            shutil.rmtree(own, ignore_errors=True)
            _killed(_rows, own, dying(number, after=after), count, expected)
            _finish(own, count, expected)
    return count


def full(folder: Path, kills: int, chance: Random) -> Count:
    """A full disk at every write in turn, then room again."""
    expected, count = undisturbed(folder / "whole"), Count()
    own = folder / "own"
    for number in sorted(chance.sample(range(1, _WRITES + 1), min(_WRITES, kills))):
        shutil.rmtree(own, ignore_errors=True)
        code = _killed(_rows, own, filling(number), count, expected)
        assert code in (0, 2, SURVIVED), code
        count.leftover_files += len(strange_files(own)) if own.exists() else 0
        _finish(own, count, expected)
    return count


def inline(folder: Path, kills: int, chance: Random) -> Count:
    """A kill after a random delay, again and again until the run is through; then a new one."""
    undisturbed(folder / "warm")
    began = time.monotonic()
    expected, count = undisturbed(folder / "whole"), Count()
    usual = time.monotonic() - began
    own = folder / "own"
    while count.runs < kills:
        shutil.rmtree(own, ignore_errors=True)
        code = -1
        while code != 0 and count.runs < kills:
            code = _signalled(_rows, own, count, chance, usual, expected)
        _finish(own, count, expected)
    return count


def report(folder: Path, kills: int, chance: Random) -> Count:
    """A report that is written again and again: at any time the file is one of its versions."""
    began = time.monotonic()
    ended(*start(victims.save, folder / "whole"))
    usual, count = time.monotonic() - began, Count()
    own = folder / "own"
    while count.runs < kills:
        shutil.rmtree(own, ignore_errors=True)
        said = _signalled(victims.save, own, count, chance, usual)
        count.rows_kept += len(said)
        for name, read in (("report.json", load), ("report.html", _Page)):
            try:
                version = read(own / name).title if (own / name).exists() else "none"
                late = said and (version == "none" or version < f"version {said[-1]}")
                count.rows_lost += bool(late)
            except Exception as error:
                print(f"unreadable: {error}")
                count.unreadable += 1
        ended(*start(victims.save, own))
        count.leftover_files += len(strange_files(own))
    return count


class _Page:
    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text.rstrip().endswith("</html>"), "the page is cut off"
        self.title = text.partition("<title>")[2].partition(" –")[0]


def _killed(
    job: Job,
    folder: Path,
    before: Callable[[], Callable[[], bool]],
    count: Count,
    expected: dict[str, Any],
) -> int:
    code, said = ended(*start(job, folder, before))
    count.runs += 1
    count.killed += code != 0
    count.look(folder, said, expected)
    return code


def _signalled(
    job: Job,
    folder: Path,
    count: Count,
    chance: Random,
    usual: float,
    expected: dict[str, Any] | None = None,
) -> Any:
    """Its exit code where rows are expected, what it said where none are."""
    pid, told = start(job, folder)
    time.sleep(chance.uniform(0, usual))
    os.kill(pid, chance.choice(SIGNALS))
    code, said = ended(pid, told)
    count.runs += 1
    count.killed += code != 0
    assert code != 3, "the run itself went wrong"
    if expected is None:
        return said
    count.look(folder, said, expected)
    return code


def _finish(folder: Path, count: Count, expected: dict[str, Any]) -> None:
    code, _ = ended(*start(_rows, folder))
    assert code == 0, code
    count.end(folder, expected)
