"""Real Ray: a cluster of two raylets on this machine, workers and a machine killed in the middle."""

import gc
import ipaddress
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ray = pytest.importorskip("ray", reason="needs the ray extra")
psutil = pytest.importorskip("psutil", reason="comes with the docs extra")

import spear
from spear.errors import ClusterError, DataError, InvalidOption
from spear.integrations import ray_session
from spear.integrations.ray import RayEngine, RayExecutor
from spear.search import parallel
from spear.trials import RowFile, Status, Trial
from spear.trials.trial import measure
from support.judgements import bits
from support.planted import plant, seeded
from support.trial_work import attack, grid, squared, trial, wait_for, work
from support.user_files import write_files

ROOT = Path(__file__).resolve().parents[2]
TINY = """
from support.trial_work import attack
from spear.experiments.common import Experiment, Section, table
from spear.trials import Trial

EXPERIMENT = Experiment(
    place="Table 0",
    title="Small batches",
    batches=2,
    cells=[{"b": 3}, {"b": 4}],
    measure=lambda case: attack(Trial("tiny", case.settings, case.seed), lambda step: None),
    draw=lambda rows: Section([table("rows", [[str(len(rows["tiny"]))]])]),
)
"""


class Cluster:
    """Machines of a Ray cluster, each a `ray start` of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        # The machines have an installation of their own, with one experiment more.
        shutil.copytree(ROOT / "src", folder / "src")
        (folder / "src" / "spear" / "experiments" / "tiny.py").write_text(TINY)
        paths = os.pathsep.join([str(folder / "src"), str(ROOT / "tests")])
        self.environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
        # Even so it asks clouds where it is and reports that it does not report: to a closed port.
        self.environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
        self.environment |= {"no_proxy": "", "NO_PROXY": ""}

    def start(self, name: str, *options: str) -> None:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
            *("--num-cpus=1", "--object-store-memory=100000000", f'--resources={{"{name}":1}}'),
            *("--min-worker-port=0", "--max-worker-port=0"),  # two on one machine: any ports
        ]
        log = self.folder / f"{name}.log"
        with log.open("w") as out:
            self.nodes[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )
        self.wait(name, log)

    def wait(self, name: str, log: Path) -> None:
        until = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            if self.nodes[name].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} did not start:\n{log.read_text()}")
            time.sleep(0.1)

    def head(self) -> None:
        # A machine that is lost is noticed in seconds instead of a minute.
        health = '{"health_check_period_ms":500,"health_check_failure_threshold":10}'
        port = self.address.split(":")[1]
        self.start(
            "head",
            *("--head", f"--port={port}", "--include-dashboard=false"),
            *(f"--temp-dir={self.folder}", f"--system-config={health}"),
        )

    def second(self) -> None:
        self.start("second", f"--address={self.address}")

    def kill(self, name: str) -> None:
        """All its processes at once, as a power cut does."""
        process = self.nodes.pop(name)
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def reached(processes):
    """The addresses at which processes listen, and those that they are connected to."""
    found = set()
    for pid in processes:
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("inet"):
                found |= {end.ip.removeprefix("::ffff:") for end in (one.laddr, one.raddr) if end}
    return found


def descendants(pid):
    """A process and all it started. Ray 2.55 leaves one that has ended unreaped: it does not count."""
    found = [pid]
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


@pytest.fixture(scope="module")
def cluster():
    # pytest's own folders have names too long for sockets.
    short = "/tmp" if os.name == "posix" else None
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=short))
    machines = Cluster(folder)
    try:
        machines.head()
        machines.second()
        yield machines
    finally:
        ray.shutdown()
        for name in list(machines.nodes):
            machines.kill(name)
        shutil.rmtree(folder, ignore_errors=True)


def results(engine, trials, job=work, on_step=lambda step: None):
    """By the trial's key: what does not depend on where it ran, and its pictures."""
    rows = list(engine.run(trials, job, on_step))
    found = {row.key: (row.result, dict(pictures)) for row, pictures in rows}
    assert len(found) == len(rows) == len(trials)
    return found


def at_once(trials, job):
    """The same, in this process."""
    rows = [measure(each, job, lambda step: None, "here") for each in trials]
    return {row.key: (row.result, dict(pictures)) for row, pictures in rows}


def test_reproduce_runs_on_a_cluster_and_gives_the_rows_of_this_process(cluster, tmp_path):
    command = [sys.executable, "-m", "spear", "reproduce", "tiny", "--data", str(tmp_path)]
    command += [
        "--engine",
        "ray",
        "--address",
        cluster.address,
        "--results",
        str(tmp_path / "rows"),
    ]
    options = {"env": cluster.environment, "cwd": tmp_path, "timeout": 120}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert "tiny: 4 of 4" in done.stderr
    ours = ("tiny: ", "spear: ")
    assert all(line.startswith(ours) for line in done.stderr.splitlines())  # Ray is quiet
    rows = RowFile(tmp_path / "rows", "tiny").rows()
    assert {row.engine for row in rows.values()} == {"ray"}
    pictures = {name for row in rows.values() for name in row.pictures.values()}
    assert {path.name for path in (tmp_path / "rows" / "pictures").iterdir()} == pictures
    trials = [Trial("tiny", {"b": b}, seed) for b in (3, 4) for seed in (0, 1)]
    here = at_once(trials, attack)
    assert {key: row.result for key, row in rows.items()} == {
        k: row for k, (row, _) in here.items()
    }


def test_a_users_table_and_finder_run_on_a_cluster(cluster, tmp_path):
    """Their files are with the command only; what they import is beside them."""
    write_files(tmp_path)
    command = [sys.executable, "-m", "spear", "reproduce", "my_table.py", "--batches", "1"]
    command += ["--finder", "my_finder.py:Mine", "--engine", "ray", "--address", cluster.address]
    options = {"env": cluster.environment, "cwd": tmp_path, "timeout": 120}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    rows = RowFile(tmp_path / "spear-results", "my_table").rows().values()
    assert [(row.engine, row.outcome, row.metrics["mine"]) for row in rows] == [
        ("ray", "EXACT", 1)
    ] * 2


def test_a_wrong_address_is_told_in_one_sentence(cluster, tmp_path, monkeypatch):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        wrong = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"^no Ray cluster at {wrong}.*refused"):
            list(RayEngine(wrong).run(grid(1), work, print))
        mute.listen()
        monkeypatch.setattr(ray_session, "_JOINED", 3.0)
        with pytest.raises(ClusterError, match="no answer in 3 s"):
            list(RayEngine(wrong).run(grid(1), work, print))
    for wrong in ("nonsense", "ray://127.0.0.1:1"):
        with pytest.raises(InvalidOption, match="host:port"):
            list(RayEngine(wrong).run(grid(1), work, print))


@pytest.mark.parametrize("bad", [{"workers": 0}, {"max_seconds": 0}])
def test_options_are_checked(bad):
    with pytest.raises(InvalidOption, match=f"expected {next(iter(bad))}"):
        RayEngine(**bad)


# Ray 2.55 does not wait for a process of its own.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_without_an_address_one_is_started_here_and_stopped(cluster, tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setenv("PYTHONPATH", cluster.environment["PYTHONPATH"])
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    before = set(descendants(os.getpid()))
    rows, hosts, folders, modes = [], set(), set(), set()
    for row, _ in RayEngine(workers=1).run(grid(2), work, lambda step: None):
        rows.append(row)
        hosts |= reached(set(descendants(os.getpid())) - before)
        folders.add(Path(os.environ["RAY_TMPDIR"]).parent)
        modes |= {stat.S_IMODE(folder.stat().st_mode) for folder in folders}
    assert [row.status for row in rows] == [Status.DONE] * 2
    assert hosts, "Ray talks to itself"
    assert all(ipaddress.ip_address(host).is_loopback for host in hosts), hosts
    (folder,) = folders
    assert modes == {0o700}
    assert not folder.exists()
    assert "RAY_TMPDIR" not in os.environ
    assert not ray.is_initialized()
    wait_for(lambda: set(descendants(os.getpid())) <= before, seconds=10)
    gc.collect()  # while the warning is ignored


def test_the_executor_gives_futures(cluster):
    with RayExecutor(cluster.address) as executor:
        futures = {executor.submit(squared, x): x for x in (2, 3, -1)}
        done = {futures[future]: future for future in as_completed(futures, timeout=60)}
    assert done[2].result() == (4, 1)
    assert done[3].result() == (9, 1)
    assert type(done[-1].exception()) is ValueError
    assert str(done[-1].exception()) == "expected x >= 0, got -1"
    assert not ray.is_initialized()


def test_one_inversion_over_ray_gives_the_same_bits(cluster, monkeypatch):
    monkeypatch.setattr(parallel, "MIN_PARALLEL_WORK", 1)  # a large one takes a minute
    planted = plant(24, m=120)
    alone = spear.invert(planted.view, generator=seeded(1))
    with RayExecutor(cluster.address) as executor:
        sent = MagicMock(wraps=executor.submit)
        monkeypatch.setattr(executor, "submit", sent)
        result = spear.invert(planted.view, generator=seeded(1), executor=executor)
    assert sent.call_count > 4
    assert alone.outcome is spear.Outcome.EXACT
    assert bits(result) == bits(alone)
    assert not any("worker failed" in words for words in result.details)


@pytest.fixture(scope="module")
def joined(cluster):
    """A connection of the caller's own, which an engine uses and leaves."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    assert sum(machine["Alive"] for machine in ray.nodes()) == 2
    yield cluster
    assert ray.is_initialized()
    ray.shutdown()


def test_a_connection_that_is_there_is_not_swapped(joined):
    with pytest.raises(InvalidOption, match="uses already"):
        list(RayEngine(joined.address).run(grid(1), work, print))


def test_rows_are_those_of_this_process_and_come_from_both_machines(joined, tmp_path):
    trials = [trial(0, "meets"), trial(1, "meets"), *grid(4)[2:]]
    said = []
    job = partial(work, folder=str(tmp_path))
    there = results(RayEngine(), trials, job, said.append)
    assert len(list(tmp_path.glob("at-*"))) == 2
    assert there == at_once(trials, partial(work, folder=str(tmp_path)))
    assert {row["outcome"] for row, _ in there.values()} == {"EXACT"}
    assert {row["metrics"]["threads"] for row, _ in there.values()} == {1}
    assert {step.key for step in said} <= set(there)


def test_a_trial_whose_worker_is_killed_runs_again_and_what_goes_wrong_is_a_row(joined, tmp_path):
    wrong = [trial(2, "dies"), trial(3, "raises")]
    trials, killed = [trial(0, "killed once"), trial(1)], []

    def kill(step):
        if step.share is None:
            killed.append(int(step.words.split()[0]))
            (tmp_path / "killed").touch()
            os.kill(killed[-1], signal.SIGKILL)

    job = partial(work, folder=str(tmp_path))
    there = results(RayEngine(), [*trials, *wrong], job, kill)
    assert len(killed) == 1
    failed = [there.pop(each.key)[0] for each in wrong]
    assert there == at_once(trials, job)
    assert [(row["status"], row["error"]) for row in failed] == [
        (Status.FAILED, "its worker died 3 times (WorkerCrashedError)"),
        (Status.FAILED, "ValueError: no such thing"),
    ]


def test_a_trial_that_hangs_is_stopped(joined):
    # Alone: on a busy machine the start of a worker counts against a trial that another one killed.
    ((row, _),) = RayEngine(max_seconds=2).run([trial(0, "hangs")], work, lambda step: None)
    assert (row.seed, row.engine) == (0, "ray")
    assert (row.status, row.error) == (Status.TIMED_OUT, "stopped after 2 s")


def test_what_is_missing_comes_up(joined):
    trials = [trial(0, "no data"), trial(1)]
    with pytest.raises(DataError, match=r"^expected the moon, got nothing: fetch it$"):
        list(RayEngine().run(trials, work, lambda step: None))


def test_a_machine_is_lost_in_the_middle_and_the_run_ends(joined, tmp_path):
    home = ray.get_runtime_context().get_node_id()
    heads = [m["NodeID"] for m in ray.nodes() if "head" in m["Resources"]]
    assert heads == [home]  # the machine to be lost is the other

    def lose(step):
        if step.share is None:
            assert step.words.split()[1] != home
            joined.kill("second")
            (tmp_path / "lost").touch()

    trials = grid(4, how="away")
    job = partial(work, folder=str(tmp_path), home=home)
    assert results(RayEngine(), trials, job, lose) == at_once(trials, job)
    assert (tmp_path / "lost").exists()
    wait_for(lambda: sum(machine["Alive"] for machine in ray.nodes()) == 1)
