"""Flower as it is deployed: a SuperLink and two SuperNodes, each of its own processes, on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra")
pytest.importorskip("skimage", reason="needs the cli extra")

import psutil

import spear
from spear.inversion import Outcome

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def running(folder, environment, *command):
    """A process, and all that it starts, until the end of the block."""
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        own = psutil.Process(process.pid)
        family = [own, *own.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)


def until_it_listens(port, process):
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"nothing listens on port {port}")


@pytest.fixture
def environment(tmp_path):
    """Of all processes: a home of their own, and nothing that asks the network."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_the_example_is_audited_where_it_is_deployed(tmp_path, environment):
    link, *nodes = free_ports(3)
    server = tmp_path / "server"
    config = f'[superlink.here]\naddress = "{HOST}:{link}"\ninsecure = true\n'
    (tmp_path / "home" / "config.toml").write_text(config)
    common = ["--insecure", "--host", HOST, "--port"]
    with ExitStack() as stack:
        options = [*common, str(link), "--disable-runtime-dependency-installation"]
        started = running(server, environment, "flower-superlink", *options)
        until_it_listens(link, stack.enter_context(started))
        for number, port in enumerate(nodes):
            own = ["--superlink", f"{HOST}:{link}", "--node-config", f"partition-id={number}"]
            node = ["flower-supernode", *common, str(port), *own]
            stack.enter_context(running(tmp_path / f"node-{number}", environment, *node))
        app = str(ROOT / "examples" / "flower_audit")
        told = subprocess.run(
            ["flwr", "run", app, "here", "--stream", "--run-config", "num-server-rounds=1"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    log = (server / "log").read_text()
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:] + log[-4000:]
    assert "Of 2 audited replies, 2 gave away every sample, exactly and proved" in told.stdout
    report = spear.load(server / "report.json")
    assert [finding.outcome for finding in report.findings] == [Outcome.EXACT] * 2
    assert all(min(finding.truth.psnr) >= 60 for finding in report.findings)
    for file in ("report.json", "report.html"):
        assert (server / file).stat().st_mode & 0o077 == 0
