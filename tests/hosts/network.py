"""Hosts on this machine: network namespaces with addresses of their own, joined by a bridge in one more namespace.

Nothing of it is in the machine's own network. Namespaces carry the number of the process that made them; those of a
process that is gone are removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.launching import Program, started

_PREFIX = "shardrun"
_FOLDER = Path("/run/netns")
_numbers = itertools.count()


class Network:
    """Hosts 0, 1, ... with the names h0, h1, ... and the addresses 10.77.0.1, 10.77.0.2, ..., all on one switch."""

    def __init__(self, count: int) -> None:
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.count = count

    def address(self, host: int) -> str:
        """Its address."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as a program of that host, with the host's name."""
        # No name service reaches these hosts, of which torch would tell in every run.
        setting = "unset GLOO_SOCKET_IFNAME; export TORCH_CPP_LOG_LEVEL=ERROR"
        named = ["unshare", "--uts", "sh", "-c", f'{setting}; hostname h{host} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._space(host), *named, *command]

    def cut(self, host: int) -> None:
        """Take the link of a host down, at the switch: what it sends is lost, and it is not told."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Bring the link up again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def kill(self, host: int) -> None:
        """SIGKILL every process of a host; none of them sees another one die."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in _processes(self._space(host)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def make(self) -> None:
        """Make all of it; CalledProcessError where this machine does not allow it."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in range(self.count):
            space = self._space(host)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip(
                "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._switch
            )
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")

    def remove(self) -> None:
        """End what still runs there, and remove it; what was never made is no error."""
        for name in [*(self._space(host) for host in range(self.count)), self._switch]:
            _remove(name)

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _space(self, host: int) -> str:
        return f"{self._name}-h{host}"


@contextmanager
def network(count: int) -> Iterator[Network]:
    """A network of `count` hosts; nothing of it is left afterwards."""
    _sweep()
    made = Network(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def why_not() -> str | None:
    """Why no network can be made here; None if one can."""
    for tool in ("ip", "unshare", "sh", "hostname"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = Network(1)
    try:
        probe.make()
        subprocess.run(probe.command(0, ["true"]), check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        probe.remove()
    return None


@contextmanager
def on_hosts(
    net: Network, commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[list[Program]]:
    """One running program on each host."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(net.command(host, command), folder, env))
            for host, command in enumerate(commands)
        ]


def free_port() -> int:
    """A port of the loopback address, below those that the system gives to connections by itself."""
    for port in range(20_000 + os.getpid() % 5_000, 30_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def ends(programs: Sequence[Program], timeout_s: float) -> tuple[list[int], float]:
    """The exit codes of all programs, and the seconds until the last has ended; nothing of them may be left then."""
    began = time.monotonic()
    codes = [program.wait(max(0.1, began + timeout_s - time.monotonic())) for program in programs]
    seconds = time.monotonic() - began
    assert [program.left(1.0) for program in programs] == [{} for _ in programs]
    return codes, seconds


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _processes(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _remove(name: str) -> None:
    if (_FOLDER / name).exists():
        for pid in _processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _sweep() -> None:
    """Remove what processes have left that are gone."""
    for path in _FOLDER.glob(f"{_PREFIX}-*-*") if _FOLDER.is_dir() else ():
        pid = path.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)
