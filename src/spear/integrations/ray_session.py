"""A connection to a Ray cluster: the one given, or one of our own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from spear.errors import ClusterError, InvalidOption

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_REACHED = 5.0  # seconds after which a machine counts as not there
_JOINED = 60.0  # seconds after which a cluster counts as not there; joining takes 2 to 10
_PREFIX, _INSIDE = "ray-", "r"  # of a cluster's folder, and what Ray gets of it
_SHORT = 30  # characters of the folder's name: Ray adds to it, and a socket's may have 107
_QUIET: Any = {"log_to_driver": False, "logging_level": "ERROR"}
# A process keeps the first token that Ray saw, so all clusters we start share one.
_TOKEN = secrets.token_hex(32)


@contextmanager
def session(address: str | None, workers: int | None) -> Iterator[None]:
    """Connected inside; afterwards a cluster of our own is stopped, any other is left running."""
    if ray.is_initialized():
        if address is not None:
            raise InvalidOption(
                "expected no address beside the Ray cluster that this process uses already, got "
                f"{address!r}: leave it out, or call ray.shutdown() first"
            )
        yield  # the caller's, who also ends it
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports to its makers
    # As newer versions do; otherwise it warns.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        with _own(workers):
            yield
        return
    _check(address)
    try:
        ray.init(address=address, **_QUIET)
        yield
    finally:
        ray.shutdown()  # of the connection


@contextmanager
def _own(workers: int | None) -> Iterator[None]:
    """A cluster on this machine alone; its files go with it."""
    # Other users of this machine can reach its ports, but do not have the token.
    ours = os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN) is _TOKEN
    with loopback_cluster() as folder:
        try:
            _start(folder, workers)
            yield
        finally:
            ray.shutdown()
            if ours:
                os.environ.pop("RAY_AUTH_TOKEN", None)


@contextmanager
def loopback_cluster() -> Iterator[str]:
    """Inside, a Ray that is started here talks to this machine only, and keeps its files private.

    Ray has no public option for that. On Linux it takes 127.0.0.1 for the machine's own address and
    listens there; on macOS and Windows a constant decides. Its dashboard process, even when left
    out, asks the metadata services of three clouds where it is, also with usage reports switched
    off. And its logs and spilled objects lie readable for all in a folder that stays.
    """
    from ray._private import node, ray_constants

    def not_started(_: object, **__: object) -> None:
        """No dashboard."""

    short = tempfile.gettempdir() if len(tempfile.gettempdir()) < _SHORT else "/tmp"  # noqa: S108
    _remove_abandoned(Path(short))
    with ExitStack() as stack:
        ours = stack.enter_context(
            tempfile.TemporaryDirectory("", _PREFIX, short, ignore_cleanup_errors=True)
        )
        stack.enter_context(_held(Path(ours)))
        folder = os.path.join(ours, _INSIDE)  # Ray opens this one to all; the outer one is closed
        os.mkdir(folder)
        stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
        stack.enter_context(_replaced(node.Node, "start_api_server", not_started))
        for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_TMPDIR", folder)):
            stack.enter_context(_environment(name, value))  # of its processes
        yield folder


@contextmanager
def _replaced(place: Any, name: str, value: object) -> Iterator[None]:
    kept = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, kept)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    kept = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if kept is not None:
            os.environ[name] = kept


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Is nobody else using the folder? Inside it is ours, as long as this process lives."""
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _remove_abandoned(place: Path) -> None:
    """Remove files of clusters whose owner was killed: nobody else does."""
    for folder in place.glob(f"{_PREFIX}*/{_INSIDE}"):
        with suppress(OSError), _held(folder.parent) as free:
            if free and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder.parent, ignore_errors=True)


def _start(folder: str, workers: int | None) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            **_QUIET,
        )
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ClusterError(
            f"Ray does not start on this machine ({first}): use --engine local, or give --address"
        ) from error


def _check(address: str) -> None:
    """Ray itself tries a wrong address for minutes and may end the process, so ask first.

    First whether anybody listens, then whether it is Ray, in a process that can be killed.
    """
    if address != "auto":
        _reach(address)
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False, logging_level='ERROR')"
    try:
        tried = subprocess.run(  # noqa: S603
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JOINED,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(_words(address, f"no answer in {_JOINED:g} s")) from error
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        raise ClusterError(_words(address, said[-1]))


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise InvalidOption(
            f"expected the address of a Ray cluster as host:port, or auto, got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ClusterError(_words(address, str(error))) from error


def _words(address: str, reason: str) -> str:
    return (
        f"no Ray cluster at {address} that this machine belongs to ({reason}): start one with "
        "`ray start --head`, and join it here with `ray start --address=HOST:PORT`"
    )
