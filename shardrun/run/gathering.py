"""Who comes together to run something on several hosts, where, and what must be equal on all of them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.comm.config import is_loopback
from shardrun.errors import LaunchError
from shardrun.run.hosts import Hosts

GREETING = "shardrun-hosts-1"
NAP_S = 0.05
TOLD_AFTER_S = 2.0
FOLDER_S = 15.0
"""A network file system may show a new file late."""
_SHOWN = 8

Tell = Callable[[str], object]
Nap = Callable[[float], object]


@dataclass(frozen=True)
class Party:
    """One host that takes part. `same` has by dotted names, as plain JSON, what must be equal on all of them."""

    hosts: Hosts
    same: Mapping[str, Any]
    run_dir: Path
    patience_s: float
    """How long another host may be silent once all have come."""
    wait_s: float
    """How long this one waits for the others to come."""


@contextlib.contextmanager
def listening(hosts: Hosts) -> Iterator[socket.socket]:
    """The socket of the meeting point, on the address given and no other; the store of rank 0 takes it over later."""
    with contextlib.ExitStack() as stack:
        try:
            family, _, _, _, target = socket.getaddrinfo(hosts.address, hosts.port, type=socket.SOCK_STREAM)[0]
            if is_loopback(str(target[0])) and not is_loopback(hosts.address):
                raise LaunchError(
                    f"--rendezvous {hosts.place}: {hosts.address} is {target[0]} on this host, where no other host can "
                    "reach it; give the address as a number"
                )
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError as error:
            raise LaunchError(
                f"node 0 cannot listen on --rendezvous {hosts.place}: {error.strerror}; give an address of node "
                "0's own host, and a port that nobody uses"
            ) from error
        yield listener


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names whose values differ, with both; at most eight, and how many more."""
    absent = "not there"
    found = [
        f"{name}: {there.get(name, absent)} / {here.get(name, absent)}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name, absent) != here.get(name, absent)
    ]
    return [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else found


def listed(nodes: list[int]) -> str:
    """Nodes as messages name them."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
