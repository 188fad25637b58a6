"""Runs that are killed, interrupted, or meet others: what was finished stays, and nothing else does."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import spear
import spear.__main__
from spear.errors import DataError, InvalidOption
from spear.files.private import replace_private, write_private
from spear.sweep import running as flow
from spear.sweep.grid import Grid
from spear.sweep.plan import Sweep
from spear.sweep.subject import Subject
from spear.sweep.utility import Training
from spear.trials import Measured, RowFile, Status
from spear.trials.inline import InlineEngine
from spear.trials.trial import row_without_result
from support.planted import plant
from support.trial_work import trial, wait_for

pytest.importorskip("filelock", reason="needs the cli extra")
fcntl = pytest.importorskip("fcntl", reason="signals and locks as Unix has them")
ROOT = Path(__file__).resolve().parents[2]
main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come elsewhere"
)


def silent(step):
    """Nobody listens."""


def test_a_campaign_of_kills_loses_nothing():
    """A quick one: `python tools/faults.py --kills 500` is the same, for longer."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, str(ROOT / "tools" / "faults.py"), "--kills", "6"]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@main_thread
def test_an_interrupt_that_an_attack_swallows_ends_the_run_and_leaves_no_row():
    planted, came = plant(4, m=60, n=40), []

    def interrupted(trial, report):
        def press(step):
            if not came:
                came.append(step)
                os.kill(os.getpid(), signal.SIGINT)

        result = spear.invert(planted.view, on_progress=press)
        came.append(result.stats.get("interrupted"))
        return Measured(result.outcome.name, {}, 0.0)

    handler = signal.getsignal(signal.SIGINT)
    rows = InlineEngine().run([trial(0), trial(1)], interrupted, silent)
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert came
    assert signal.getsignal(signal.SIGINT) is handler
    assert [row.seed for row, _ in InlineEngine().run([trial(1)], interrupted, silent)] == [1]


@main_thread
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_the_command_has_it_clean_up(number):
    before = signal.signal(number, signal.SIG_DFL)  # Ray leaves a handler of its own behind
    try:
        with pytest.raises(SystemExit) as end, spear.__main__._orderly_end():
            signal.raise_signal(number)
        assert end.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with spear.__main__._orderly_end():  # nohup
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def sweep(folder):
    rng = np.random.default_rng(0)
    inputs, labels = rng.standard_normal((30, 12)).astype("f4"), rng.integers(0, 3, 30)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels)
    subject = Subject(None, str(folder / "data.npz"))
    return Sweep(subject, Grid({"samples": (2, 3)}), repeats=2, training=Training(0, 1))


def results(out):
    return {key: row.result for key, row in RowFile(out, "leakage").rows().items()}


def descendants(pid):
    """Processes that a process has started, and those that they have."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        one for child in children for one in descendants(int(child))
    ]


def gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def run(planned, out):
    (part,) = planned.parts(out)
    return list(part.run(flow.work(planned), InlineEngine(), silent))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at Linux's processes")
def test_an_impatient_ctrl_c_keeps_the_rows_and_the_command_goes_on(tmp_path):
    planned, whole, out = sweep(tmp_path), tmp_path / "whole", tmp_path / "out"
    run(planned, whole)
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    words = [
        "audit",
        "--data",
        tmp_path / "data.npz",
        "-b",
        "2,3",
        "--repeats",
        "2",
        "--training-rounds",
    ]
    words += ["0", "--out", out, "--workers", "1", "--quiet"]
    with subprocess.Popen(
        [sys.executable, "-m", "spear", *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for((out / "leakage.lock").exists, 120)  # from here on workers come and write
        wait_for(lambda: descendants(process.pid), 60)
        workers = descendants(process.pid)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), complaints  # a shell says 130 to both
    assert "Traceback" not in complaints
    wait_for(lambda: all(gone(pid) for pid in workers), 20)
    expected = results(whole)
    assert results(out).items() <= expected.items()
    run(planned, out)
    assert results(out) == expected
    names = {
        path.name for path in out.iterdir()
    }  # the page, if there was time for it, but no pieces
    assert {"leakage.jsonl", "leakage.lock"} <= names
    assert names <= {"leakage.jsonl", "leakage.lock", "examples.json", "report.html"}


def test_a_second_run_repeats_nothing_of_the_one_before(tmp_path):
    planned, out = sweep(tmp_path), tmp_path / "out"
    assert [len(run(planned, out)) for _ in range(2)] == [4, 0]
    assert (out / "leakage.jsonl").read_text().count("\n") == 4


def test_two_experiments_keep_the_same_picture_at_the_same_moment(tmp_path):
    row = row_without_result(trial(0), Status.FAILED, "words", 0.5, "local")
    start = threading.Barrier(4)

    def write(name):
        with RowFile(tmp_path, name).writing() as file:
            for i in range(25):
                start.wait()
                file.append(row, {f"{i}.png": bytes(100_000)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    files = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert files == sorted(f"{i}.png" for i in range(25))
    assert all((tmp_path / "pictures" / name).stat().st_size == 100_000 for name in files)


def test_what_a_killed_run_began_is_removed_and_what_others_write_is_not(tmp_path):
    dead, living = (tmp_path / f".{name}.spear-partial" for name in ("a.html.x", "b.html.y"))
    dead.write_bytes(b"private")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_private(tmp_path / "report.html", b"new")
        assert living.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", living.name}
    write_private(tmp_path / "report.html", b"newer")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_bytes() == b"newer"
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600


def test_writers_and_cleaners_at_once_leave_whole_files_only(tmp_path):
    def write(worker):
        for i in range(60):
            write_private(tmp_path / f"{i % 3}", bytes([worker]) * 5000)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert all(len(set(path.read_bytes())) == 1 for path in tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    write_private(path, b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        replace_private({tmp_path / "folder": b"new"})
    with pytest.raises(TypeError):
        write_private(path, "no bytes")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "report.json"]
    assert path.read_bytes() == b"old"


def test_pipes_and_devices_are_refused_and_stay(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, Path("/dev/null")):
        with pytest.raises(InvalidOption, match="the device or pipe"):
            write_private(place, b"content")
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()


def test_a_folder_without_locks_is_told(tmp_path, monkeypatch):
    def missing(lock):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", missing)
    with pytest.raises(DataError, match="cannot lock files"), RowFile(tmp_path, "tiny").writing():
        pass


def test_one_thread_is_restored_after_an_interrupt():
    def interrupt(trial, report):
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        list(InlineEngine().run([trial(0)], interrupt, silent))
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_an_interrupted_audit_leaves_a_page_of_what_was_done(tmp_path):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 30)).astype("float32")
    np.savez(tmp_path / "d.npz", inputs=inputs, labels=rng.integers(0, 3, 40))
    command = [sys.executable, "-m", "spear", "audit", "--data", "d.npz", "--samples", "3,4,5,6"]
    command += ["--training-rounds", "0", "--repeats", "40", "--workers", "1", "--out", "o"]
    rows, page = tmp_path / "o" / "leakage.jsonl", tmp_path / "o" / "report.html"
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [*command, "--json", "r.json"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 2, 120)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "Traceback" not in complaints
    told = [line for line in (said + complaints).splitlines() if "nterrupted" in line]
    assert len(told) == 1
    assert "o/report.html has what was done; the same command goes on" in told[0]
    done = rows.read_text().count("\n")
    report = spear.load(tmp_path / "r.json")
    assert report.headline.startswith("Interrupted, so far: ")
    assert report.remarks[0].words.startswith(f"{done} of 160 attacks and training runs are in it")
    assert "Interrupted, so far: " in page.read_text()
