"""Kill runs that write results, again and again, and count what was lost.

    python tools/faults.py --kills 200

Each run is killed, or its disk filled, until it has come to its end; then all rows and pictures are
compared, in everything but times and origin, with those of a run that nobody disturbed. Runs are real
inversions in forked processes, which start at once.

- points: SIGKILL before and after system calls that write, and in the middle of a write
- full:   the disk is full at such a write, and has room again afterwards
- random: SIGKILL, SIGINT or SIGTERM after a random delay
- report: the same while a report is written again and again

Prints one line a kind; exit code 1 if anything was lost, differs, or was left behind, or no run died.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import spear
from spear.federated import fedsgd, mlp
from spear.report import Report, Table, load
from spear.trials import Measured, RowFile, Step, Trial
from spear.trials.inline import InlineEngine

EXPERIMENT, TRIALS, VERSIONS = "fault", 2, 4
CALLS = ("open", "write", "fsync", "replace", "unlink", "close", "ftruncate", "truncate", "mkdir")
_CALLS, _WRITES = 30, 10  # that a run makes, about
SURVIVED = 4  # exit code of a run whose fault did it no harm
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
Job = Callable[[Path, Callable[[str], None]], None]
Fault = Callable[[], Callable[[], bool]]  # puts the fault in place; gives whether it has come


@dataclasses.dataclass
class Count:
    runs: int = 0
    killed: int = 0  # the others came to their end before
    rows_kept: int = 0
    rows_lost: int = 0  # said to be on disk, and not there afterwards
    rows_differing: int = 0  # from an undisturbed run, or twice
    unreadable: int = 0  # files
    leftover_files: int = 0  # after a run that came to its end

    @property
    def bad(self) -> bool:
        return any(dataclasses.astuple(self)[3:])


def work(trial: Trial, report: Callable[[Step], None]) -> Measured:
    """A real inversion, known down to its last bit, with its bits as a picture."""
    generator = torch.Generator().manual_seed(trial.seed)
    b, m = trial.settings["b"], trial.settings["m"]
    model = mlp(12, 4, width=m, depth=2, seed=trial.seed)
    x, y = torch.randn(b, 12, generator=generator), torch.randint(4, (b,), generator=generator)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    bits = result.inputs.numpy().tobytes()
    metrics = {"bits": hashlib.sha256(bits).hexdigest(), "match": result.match}
    return Measured(result.outcome.name, metrics, 0.0, {}, {"inputs": bits})


def rows(folder: Path, done: Callable[[str], None]) -> None:
    """What `spear reproduce` and `spear audit` do: trials without a row, each row on disk at once."""
    trials = [Trial(EXPERIMENT, {"b": 2 + i % 2, "m": 24}, i) for i in range(TRIALS)]
    with RowFile(folder, EXPERIMENT).writing() as file:
        there = file.rows()
        left = [trial for trial in trials if trial.key not in there]
        for row, pictures in InlineEngine().run(left, work, lambda step: None):
            file.append(row, pictures)
            done(row.key)


def reports(folder: Path, done: Callable[[str], None]) -> None:
    """A report, again and again, as an audit of a federation writes it."""
    table = Table("t", ("a", "b"), tuple((i, "x" * 200) for i in range(200)))
    for version in range(VERSIONS):
        made = Report.new("audit", f"version {version}", "So far.", tables=[table])
        made.save(folder / "report.json")
        made.save_page(folder / "report.html")
        done(str(version))


def start(job: Job, folder: Path, fault: Fault = lambda: lambda: False) -> tuple[int, int]:
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
        say = os.write
        came = fault()
        say(tell, b"!")
        job(folder, lambda name: say(tell, f"{name}\n".encode()) and None)
        code = SURVIVED if came() else 0
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


def dying(number: int, *, after: bool) -> Fault:
    """SIGKILL at the given call of those that write; a write is done by half, or whole if `after`."""
    count = 0

    def arm() -> Callable[[], bool]:
        write = os.write

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

        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        return lambda: count >= number

    return arm


def filling(number: int) -> Fault:
    """At the given write or sync the disk is full; half of the write still goes there."""
    count = 0

    def arm() -> Callable[[], bool]:
        def full(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(handle: int, *content: Any) -> Any:
                nonlocal count
                count += 1
                if count != number:
                    return real(handle, *content)
                if content:
                    real(handle, content[0][: len(content[0]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")

            return call

        os.write, os.fsync = full(os.write), full(os.fsync)
        return lambda: count >= number

    return arm


class Campaign:
    """Runs of one kind in a folder, each compared with one that nobody disturbed."""

    def __init__(self, folder: Path, kills: int, chance: Random) -> None:
        self.own, self.kills, self.chance, self.count = folder / "own", kills, chance, Count()
        torch.set_num_threads(1)
        for job in (rows, reports):  # what is loaded here is not loaded by each
            job(folder / "warm", lambda name: None)
        began = time.monotonic()
        code, said = ended(*start(rows, folder / "whole"))
        assert (code, len(said)) == (0, TRIALS)
        self.usual, self.expected = time.monotonic() - began, results(folder / "whole")

    def points(self) -> None:
        """A kill at some of the calls; the next run goes on from there."""
        for number in sorted(
            self.chance.sample(range(1, _CALLS + 1), min(_CALLS, self.kills // 2))
        ):
            for after in (False, True):
                self.fresh()
                self.look(*ended(*start(rows, self.own, dying(number, after=after))))
                self.finish()

    def full(self) -> None:
        """A full disk at some of the writes, then room again."""
        for number in sorted(self.chance.sample(range(1, _WRITES + 1), min(_WRITES, self.kills))):
            self.fresh()
            code, said = ended(*start(rows, self.own, filling(number)))
            assert code in (0, 2, SURVIVED), code
            self.look(code, said)
            self.count.leftover_files += len(strange_files(self.own))
            self.finish()

    def random(self) -> None:
        """A kill after a random delay, again and again until the run is through; then a new one."""
        while self.count.runs < self.kills:
            self.fresh()
            code = -1
            while code != 0 and self.count.runs < self.kills:
                code, said = self.signalled(rows)
                self.look(code, said)
            self.finish()

    def report(self) -> None:
        """At any time the file is one of the report's versions."""
        for _ in range(2):  # the first also compiles and loads, and takes longer
            began = time.monotonic()
            ended(*start(reports, self.own))
            self.usual = time.monotonic() - began
        while self.count.runs < self.kills:
            self.fresh()
            code, said = self.signalled(reports)
            self.count.runs += 1
            self.count.killed += code != 0
            self.count.rows_kept += len(said)
            for name, title in (
                ("report.json", lambda p: load(p).title),
                ("report.html", page_title),
            ):
                try:
                    version = title(self.own / name) if (self.own / name).exists() else "none"
                    late = said and (version == "none" or version < f"version {said[-1]}")
                    self.count.rows_lost += bool(late)
                except Exception as error:
                    print(f"unreadable: {error}")
                    self.count.unreadable += 1
            ended(*start(reports, self.own))
            self.count.leftover_files += len(strange_files(self.own))

    def fresh(self) -> None:
        shutil.rmtree(self.own, ignore_errors=True)

    def signalled(self, job: Job) -> tuple[int, list[str]]:
        pid, told = start(job, self.own)
        time.sleep(self.chance.uniform(0, self.usual))
        os.kill(pid, self.chance.choice(SIGNALS))
        code, said = ended(pid, told)
        assert code != 3, "the run itself went wrong"
        return code, said

    def look(self, code: int, said: list[str]) -> None:
        """After a kill: is all there that was said to be, and is it right?"""
        self.count.runs += 1
        self.count.killed += code != 0
        try:
            there = results(self.own)
        except Exception as error:
            print(f"unreadable: {error}")
            self.count.unreadable += 1
            return
        self.count.rows_kept += len(there)
        self.count.rows_lost += len(set(said) - set(there))
        self.count.rows_differing += sum(self.expected[k] != found for k, found in there.items())

    def finish(self) -> None:
        """Run to the end: the same rows, once each, and nothing else."""
        code, _ = ended(*start(rows, self.own))
        assert code == 0, code
        there = results(self.own)
        self.count.rows_lost += len(set(self.expected) - set(there))
        self.count.rows_differing += sum(self.expected[k] != found for k, found in there.items())
        lines = (self.own / f"{EXPERIMENT}.jsonl").read_bytes().count(b"\n")
        self.count.rows_differing += lines - len(there)
        self.count.leftover_files += len(strange_files(self.own))


def results(folder: Path) -> dict[str, Any]:
    """Everything but times and origin of all rows, and the bytes of their pictures."""
    file = RowFile(folder, EXPERIMENT)
    return {
        key: (row.result, [file.picture(name).read_bytes() for name in row.pictures.values()])
        for key, row in file.rows().items()
    }


def strange_files(folder: Path) -> list[Path]:
    """Files that no finished run leaves behind."""
    usual = {".jsonl", ".lock", ".png", ".json", ".html"}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix not in usual or path.name.startswith(".")]


def page_title(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>"), "the page is cut off"
    return text.partition("<title>")[2].partition(" –")[0]


def campaign(kind: str, kills: int, seed: int = 0) -> Count:
    """What a number of kills, about, did to runs of a kind: points, full, random or report."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Campaign(Path(folder), kills, Random(f"{seed} {kind}"))
        getattr(runs, kind)()
    return runs.count


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=40, help="of each kind, about")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    bad = False
    for kind in ("points", "full", "random", "report"):
        count = campaign(kind, given.kills, given.seed)
        print(kind, count, flush=True)
        bad = bad or count.bad or count.killed < 2  # a campaign that harms nobody shows nothing
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
