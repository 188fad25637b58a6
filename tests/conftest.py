from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from support.datasets_on_disk import write_tiny_imagenet

# Started in the background, a shell has its children ignore these; commands under test must not.
for _name, _usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if signal.getsignal(getattr(signal, _name, signal.SIGTERM)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _usual)

# Readline, which pytest imports, sets these for children: a pipe would be taken to have a width.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
    os.unsetenv(_name)

# Ray reads these when it is imported. It listens on the network: only these tests have the token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # pytest-xdist runs a process per core


@pytest.fixture(scope="session")
def data_root() -> Path:
    folder = os.environ.get("SPEAR_DATA")
    if not folder:
        pytest.skip("real data: set SPEAR_DATA to the folder with CIFAR-10, MNIST and TinyImageNet")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory) -> Path:
    pytest.importorskip("PIL", reason="needs the cli extra")
    folder = tmp_path_factory.mktemp("source")
    write_tiny_imagenet(folder)
    return folder


@pytest.fixture
def tiny(tiny_source, tmp_path) -> Path:
    """A small TinyImageNet of one's own, to be damaged."""
    return shutil.copytree(tiny_source, tmp_path / "tiny-imagenet-200")


@dataclass(frozen=True)
class Tour:
    """What a tour through all commands left behind, in folders of its own."""

    folder: Path
    """With `home`, `tmp` and `work`, where it was run."""
    network: list[str]
    """Attempts to leave this machine, as Python told them."""
    traced: Path | None
    """What the kernel saw of its network calls; None where that cannot be had."""


def _works(*command: str) -> bool:
    return (
        bool(shutil.which(command[0]))
        and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )


@pytest.fixture(scope="session")
def tour(tmp_path_factory) -> Tour:
    pytest.importorskip("typer", reason="needs the cli extra")
    folder = tmp_path_factory.mktemp("tour")
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir()
    traced, log = folder / "calls", folder / "log"
    empty = ["unshare", "-rn"] if _works("unshare", "-rn") else []  # a network of nothing
    # With this filter the kernel stops at those calls alone, and not at each of all the others.
    watched = ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=%network", "-o"]
    watched = [*watched, str(traced)] if _works(*watched, "/dev/null") else []
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))
    }
    environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    tests = Path(__file__).parent
    paths = [environment["PYTHONPATH"], str(tests), str(tests.parent / "src")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment |= {"SPEAR_NETWORK_LOG": str(log), "OMP_NUM_THREADS": "1"}
    script = tests / "support" / "tour.py"
    told = subprocess.run(
        [*empty, *watched, sys.executable, str(script)],
        cwd=folder / "work",
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-4000:]
    attempts = log.read_text().splitlines() if log.exists() else []
    return Tour(folder, attempts, traced if watched else None)
