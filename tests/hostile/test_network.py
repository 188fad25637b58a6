"""Nothing talks to another machine: Python's own audit, an empty network, and what the kernel saw."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUARDED = """
import socket, sys
def attempt():
    {attempt}
try:
    attempt()
except ConnectionRefusedError as error:
    sys.exit(7 if "stay on this machine" in str(error) else 0)
except OSError:
    pass
"""
UDP = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"


def guarded(attempt, log):
    environment = {**os.environ, "SPEAR_NETWORK_LOG": str(log)}
    code = GUARDED.format(attempt=attempt)
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('192.0.2.1', 80), 1)",
        f"{UDP}.connect(('8.8.8.8', 53))",
        f"{UDP}.sendto(b'x', ('192.0.2.1', 53))",
        "socket.getaddrinfo('example.org', 443)",
        "socket.socket().bind(('', 0))",
        "socket.socket(socket.AF_INET6).connect(('2001:db8::1', 80))",
        "__import__('urllib.request').request.urlopen('http://192.0.2.1/', timeout=1)",
    ],
)
def test_the_guard_refuses_and_writes_down_what_leaves(attempt, tmp_path):
    log = tmp_path / "log"
    ended = guarded(attempt, log)
    assert log.read_text().startswith("socket.")
    assert ended == (0 if "urlopen" in attempt else 7)  # urllib wraps the error in one of its own


@pytest.mark.parametrize(
    "attempt",
    [
        "a = socket.create_server(('127.0.0.1', 0)); socket.create_connection(a.getsockname()).close()",
        "socket.getaddrinfo('localhost', 80)",
        "socket.socketpair()",
        "socket.socket(socket.AF_INET6).connect(('::1', 9))",
    ],
)
def test_the_guard_lets_this_machine_talk_to_itself(attempt, tmp_path):
    assert guarded(attempt, tmp_path / "log") == 0
    assert not (tmp_path / "log").exists()


def test_this_process_is_guarded_too():
    import socket

    log = Path(os.environ["SPEAR_NETWORK_LOG"])
    with pytest.raises(ConnectionRefusedError, match="stay on this machine"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    assert "192.0.2.1" in log.read_text()
    log.write_text("")  # as planned


def test_every_command_works_without_a_network_and_asks_for_none(tour):
    assert tour.network == []
    if tour.traced:  # the kernel's word, native code and child processes included
        calls = tour.traced.read_text(errors="replace")
        foreign = re.findall(r"^.*(?:sin_addr|sin6_addr|inet_pton).*$", calls, re.MULTILINE)
        assert [
            line for line in foreign if not re.search(r'"(::1|127\.\d+\.\d+\.\d+)"', line)
        ] == []
        assert "AF_UNIX" in calls or "socketpair" in calls or not foreign
