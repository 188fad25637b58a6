"""In every Python that tests start: what would leave this machine is refused, and written down.

Python imports a module of this name by itself; conftest.py puts this folder in front of its path.
"""

import ipaddress
import os
import socket
import sys

LOG = "SPEAR_NETWORK_LOG"
_TO = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
_NAMED = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
# How NVFlare looks for ports that are free on all interfaces (it listens on loopback then), and for the
# address of this machine (by a UDP socket that sends nothing).
_PROBES = {
    "socket.bind": {"get_open_ports", "check_tcp_port"},
    "socket.connect": {"_get_client_ip"},
}
_OWN = {"", "localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname()}


def leaves(host):
    """Is it another machine, or a port that others reach?"""
    if host is None:
        return False
    name = host.decode() if isinstance(host, bytes) else str(host)
    try:
        address = ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return name not in _OWN
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


def asked_for(event, arguments):
    """The host that an event of Python's audit is about; None where it is none."""
    if event in _TO:
        address = arguments[1]
        internet = arguments[0].family in (socket.AF_INET, socket.AF_INET6)
        if not internet or not isinstance(address, tuple):
            return None
        return address[0] or "0.0.0.0"  # "" binds to all of them
    return arguments[0] if event in _NAMED else None


def only_probes(event):
    caller = sys._getframe(2).f_code
    return "nvflare" in caller.co_filename and caller.co_name in _PROBES.get(event, ())


def guard(event, arguments):
    if not event.startswith("socket."):
        return
    host = asked_for(event, arguments)
    if leaves(host) and not only_probes(event):
        path = os.environ.get(LOG)
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{event} {host} by {' '.join(sys.argv)[:200]}\n")
        raise ConnectionRefusedError(f"{event} {host}: tests stay on this machine")


if os.environ.get(LOG):
    sys.addaudithook(guard)
