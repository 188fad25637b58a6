"""Trials in real processes, killed and resumed, and rows on a real disk."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear.errors import DataError, InvalidOption, MissingExtra
from spear.trials import LocalEngine, Row, RowFile, Status
from spear.trials.trial import measure, row_without_result
from support.trial_work import grid, run, trial, wait_for, work

pytest.importorskip("filelock", reason="needs the cli extra")
TESTS = Path(__file__).resolve().parents[1]
WORDS = st.text(max_size=20)
NUMBERS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
)
JSON = st.dictionaries(WORDS, NUMBERS | st.lists(NUMBERS, max_size=3), max_size=4)


def silent(step):
    """Nobody listens."""


def rows_here(trials, job):
    """Those of this process."""
    rows = [measure(each, job, silent, "local") for each in trials]
    return {row.key: (row.result, dict(pictures)) for row, pictures in rows}


def rows_of(engine, trials, job=work, on_step=silent):
    rows = list(engine.run(trials, job, on_step))
    assert sorted(row.key for row, _ in rows) == sorted(each.key for each in trials)
    return {row.key: (row.result, dict(pictures)) for row, pictures in rows}


def row(seed=0, words="as told"):
    return row_without_result(trial(seed), Status.FAILED, words, 0.5, "local")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Killed and not yet waited for by whoever is process 1 here.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def script(words, **options):
    """Python in a process of its own, which has the test's modules."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, "-c", words], env=environment, text=True, stderr=subprocess.PIPE, **options
    )


def test_a_killed_worker_s_trial_runs_again_and_one_that_always_dies_fails(tmp_path):
    """All others have the rows that this process gives them."""
    trials, killed = [trial(0, "killed once"), trial(1, "dies"), *grid(5)[2:]], []

    def kill(step):
        if step.share is None:
            (tmp_path / "killed").touch()
            killed.append(int(step.words))
            os.kill(killed[-1], signal.SIGKILL)

    job = partial(work, folder=str(tmp_path))
    rows = rows_of(LocalEngine(1), trials, job, kill)  # every process takes seconds to start
    assert len(killed) == 1
    failed, _ = rows.pop(trials[1].key)
    assert failed["status"] is Status.FAILED
    assert failed["error"] == "its worker died 2 times (exit code -9)"
    assert {row["outcome"] for row, _ in rows.values()} == {"EXACT"}
    assert rows == rows_here([trials[0], *trials[2:]], job)


def test_what_goes_wrong_is_a_row_and_time_is_limited():
    trials = [trial(0, "raises"), trial(1, "hangs"), *grid(4)[2:]]
    began = time.monotonic()
    rows = [row for row, _ in LocalEngine(2, max_seconds=6).run(trials, work, silent)]
    assert time.monotonic() - began < 200
    assert {row.seed: (row.status, row.error) for row in rows} == {
        0: (Status.FAILED, "ValueError: no such thing"),
        1: (Status.TIMED_OUT, "stopped after 6 s"),
        2: (Status.DONE, None),
        3: (Status.DONE, None),
    }
    assert next(row for row in rows if row.seed == 1).took >= 6


def test_what_is_missing_comes_up_and_leaves_no_worker(tmp_path):
    job = partial(work, folder=str(tmp_path))
    with pytest.raises(DataError, match=r"^expected the moon, got nothing: fetch it$"):
        list(LocalEngine(2).run([trial(0, "no data"), trial(1, "hangs")], job, silent))
    pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert pids
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("bad", [{"workers": 0}, {"max_seconds": -1}])
def test_options_are_checked(bad):
    with pytest.raises(InvalidOption, match=f"expected {next(iter(bad))}"):
        LocalEngine(**bad)


def test_without_ray_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "spear.integrations.ray", raising=False)
    with pytest.raises(MissingExtra, match=r"needs ray, .*spear-fl\[ray\]"):
        importlib.import_module("spear.integrations.ray")


def test_a_run_that_is_killed_goes_on_where_it_stopped(tmp_path, capfd):
    n = 8
    file = tmp_path / "tiny.jsonl"

    def lines():
        return file.read_bytes().count(b"\n") if file.exists() else 0

    words = f"run({str(tmp_path)!r}, {n}, 2, [trial(99, 'hangs')])"
    # One worker is busy for minutes when the run is killed.
    process = script(f"from support.trial_work import run, trial; {words}")
    wait_for(lambda: lines() >= 3)
    process.kill()
    process.wait()
    process.stderr.close()
    assert lines() < n
    run(str(tmp_path), n, 1)
    assert capfd.readouterr().err == ""
    keys = [json.loads(line)["key"] for line in file.read_text().splitlines()]
    trials = grid(n, seconds=0.1)
    assert sorted(keys) == sorted(each.key for each in trials)
    for each in trials:
        undisturbed, pictures = measure(each, work, silent, "local")
        kept = RowFile(tmp_path, "tiny")
        assert kept.rows()[each.key].result == undisturbed.result
        for name, image in pictures.items():
            assert kept.picture(name).read_bytes() == image
    pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert pids
    wait_for(lambda: all(gone(pid) for pid in pids), seconds=20)


@given(JSON, JSON, WORDS, st.sampled_from(Status), st.floats(0, 1e6), st.integers(0))
def test_a_row_is_the_same_after_a_line(settings, metrics, words, status, took, seed):
    stages = {words: took}
    row = Row(
        "key", words, settings, seed, status, words or None, metrics, took, stages, took, words
    )
    line = row.line()
    assert "\n" not in line
    assert Row.of_line(line) == row


def test_words_that_are_no_text_are_kept(tmp_path):
    odd = row(words="file \udcff\u2028\n is missing")
    with RowFile(tmp_path, "tiny").writing() as file:
        file.append(odd, {})
        assert file.rows() == {odd.key: odd}


def test_the_latest_row_of_a_trial_counts(tmp_path):
    with RowFile(tmp_path, "tiny").writing() as file:
        for words in ("first", "second"):
            file.append(row(0, words), {})
            file.append(row(1, words), {})
    assert [each.error for each in file.rows().values()] == ["second", "second"]
    assert [each.seed for each in file.rows().values()] == [0, 1]


@pytest.mark.parametrize("cut", [1, 5, 300])
def test_a_torn_last_line_is_no_row_and_is_dropped(tmp_path, cut):
    file = RowFile(tmp_path, "tiny")
    with file.writing():
        for seed in range(3):
            file.append(row(seed), {})
    whole = file.path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    file.path.write_bytes(whole[: last + cut])
    assert [each.seed for each in file.rows().values()] == [0, 1]
    with file.writing():
        file.append(row(2), {})
    assert file.path.read_bytes() == whole


def test_a_last_line_that_only_lacks_its_end_is_a_row(tmp_path):
    file = RowFile(tmp_path, "tiny")
    with file.writing():
        file.append(row(0), {})
    file.path.write_bytes(file.path.read_bytes()[:-1])
    assert [each.seed for each in file.rows().values()] == [0]
    with file.writing():
        file.append(row(1), {})
    assert [each.seed for each in file.rows().values()] == [0, 1]


@pytest.mark.parametrize("bad", [b"{", b"5", b"", b"\xff", b'{"status": "done"}'])
def test_a_bad_line_in_the_middle_is_told_with_its_number(tmp_path, bad):
    file = RowFile(tmp_path, "tiny")
    line = row().line().encode()
    file.path.write_bytes(b"\n".join([line, bad, line, b""]))
    with pytest.raises(DataError, match=r"tiny\.jsonl, line 2: expected a row"):
        file.rows()


def test_two_runs_do_not_write_at_the_same_time(tmp_path):
    words = (
        "import sys, time; from pathlib import Path; from spear.trials import RowFile\n"
        f"with RowFile(Path({str(tmp_path)!r}), 'tiny').writing() as file:\n"
        "    (file.folder / 'held').touch(); time.sleep(300)"
    )
    other = script(words)
    try:
        wait_for((tmp_path / "held").exists)
        with (
            pytest.raises(DataError, match="another run is writing"),
            RowFile(tmp_path, "tiny").writing(),
        ):
            pass
    finally:
        other.kill()
        other.communicate()
    with RowFile(tmp_path, "tiny").writing() as file:  # it died, and its lock with it
        file.append(row(), {})
    assert len(file.rows()) == 1


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_the_file_whole(tmp_path):
    file = RowFile(tmp_path, "tiny")
    with file.writing():
        file.append(row(0), {})
    before = file.path.read_bytes()
    resource = pytest.importorskip("resource", reason="limits of a process are a matter of Unix")
    _, hard = soft_and_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = len(before) + 100  # the kernel takes 100 bytes of the next line and no more
    with file.writing():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError, match="took 100 of"):
                file.append(row(1), {})
            with pytest.raises(OSError, match="too large"):
                file.append(row(1), {"big.png": bytes(2 * room)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
        assert file.path.read_bytes() == before
        assert not list(tmp_path.glob("pictures/*"))
        file.append(row(1), {"big.png": bytes(2 * room)})
    assert [each.seed for each in file.rows().values()] == [0, 1]
    assert file.picture("big.png").read_bytes() == bytes(2 * room)
