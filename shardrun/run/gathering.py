"""How the launchers of several hosts find each other before any rank is started, or refuse to start together."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.comm.config import is_loopback
from shardrun.errors import LaunchError, UsageError
from shardrun.run.hosts import Hosts
from shardrun.run.link import Link
from shardrun.run.wire import Message, Wire

_GREETING = "shardrun-hosts-1"
_NAP_S = 0.05
_RECALL_S = 0.25
_TOLD_AFTER_S = 2.0
_FOLDER_S = 15.0  # a network file system may show a new file late
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


# ---- node 0 ----------------------------------------------------------------------------------------------------------


class Reception:
    """Node 0 while it waits for the others."""

    def __init__(self, party: Party, listener: socket.socket, tell: Tell, nap: Nap) -> None:
        self._party = party
        self._listener = listener
        self._tell = tell
        self._nap = nap
        self._strangers: list[Wire] = []
        self._guests: dict[int, Wire] = {}
        self._names = {0: f"node 0 ({socket.gethostname()}, {party.hosts.address})"}

    def gather(self) -> Link:
        """Wait for all hosts and compare with them. LaunchError if one does not come in time or has another folder."""
        try:
            self._wait_for_all()
            self._check_folder()
        except BaseException:
            for wire in self._guests.values():
                wire.drop()
            raise
        finally:
            for wire in self._strangers:
                wire.drop()
        return Link(0, dict(sorted(self._names.items())), self._guests, self._party.patience_s)

    @property
    def _absent(self) -> list[int]:
        return [node for node in range(1, self._party.hosts.nnodes) if node not in self._guests]

    def _wait_for_all(self) -> None:
        hosts, began, told = self._party.hosts, time.monotonic(), False
        while True:
            self._answer_the_door()
            self._look_around()
            if not self._absent:
                return
            waited = time.monotonic() - began
            if waited > self._party.wait_s:
                raise LaunchError(
                    f"{_listed(self._absent)} of {hosts.nnodes} did not come to {hosts.place} within {waited:.0f} s; "
                    "start every host with the same --nnodes and --rendezvous, look at firewalls, or give more time by "
                    "topology.init_timeout_s"
                )
            if waited > _TOLD_AFTER_S and not told:
                told = True
                self._tell(f"waiting for {_listed(self._absent)} of {hosts.nnodes} to come to {hosts.place}")
            self._nap(_NAP_S)

    def _answer_the_door(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(Wire(self._listener.accept()[0]))

    def _look_around(self) -> None:
        for wire in list(self._strangers):
            messages = wire.receive()
            if messages or wire.ended is not None:
                self._strangers.remove(wire)
                if not (messages and self._greet(wire, messages[0])):
                    wire.drop()
        for node, wire in list(self._guests.items()):
            wire.receive()
            wire.beat()
            if wire.ended is not None:  # it may come again
                del self._guests[node]
                wire.drop()

    def _greet(self, wire: Wire, message: Message) -> bool:
        """Let a host in, or tell it why not; False for what is none."""
        node, same = message.get("node"), message.get("same")
        if message["say"] != _GREETING or not isinstance(node, int) or not isinstance(same, dict):
            return False
        wire.trusted = True
        name = f"{str(message.get('host'))[:100]}, {wire.far_address}"
        refusal = self._refusal(node, message.get("nnodes"), same)
        if refusal is None:
            self._guests[node] = wire
            self._names[node] = f"node {node} ({name})"
            return True
        self._tell(f"node {node} ({name}) is refused: {refusal}")
        wire.send("refused", error=refusal, usage=True)
        wire.close()
        return True

    def _refusal(self, node: int, nnodes: object, same: Mapping[str, Any]) -> str | None:
        hosts = self._party.hosts
        if nnodes != hosts.nnodes:
            return f"--nnodes is {nnodes} there and {hosts.nnodes} on node 0; give the same on all hosts"
        if not 0 < node < hosts.nnodes:
            return f"--node-rank is {node} there, and node 0 waits for {_listed(self._absent)}"
        if node in self._guests:
            return f"--node-rank {node} is taken by {self._names[node]}; give every host another one"
        if different := differences(same, self._party.same):
            return f"it would run something else than node 0 (there / on node 0): {'; '.join(different)}"
        return None

    def _check_folder(self) -> None:
        """Every host must find in the run's folder what node 0 wrote there; else all refuse, and say who did not."""
        path, nonce = self._party.run_dir / f".hosts-{secrets.token_hex(4)}", secrets.token_hex(16)
        try:
            path.write_text(nonce)
            for wire in self._guests.values():
                wire.send("welcome", names=list(self._names.items()), file=path.name, nonce=nonce)
            problem = self._folder_problem()
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        for wire in self._guests.values():
            if problem:
                wire.send("refused", error=problem, usage=False)
                wire.close()
            else:
                wire.send("agreed")
        if problem:
            raise LaunchError(problem)

    def _folder_problem(self) -> str:
        """The first problem of any host; "" if all found the file."""
        answers: dict[int, str] = {}
        end = time.monotonic() + 2 * _FOLDER_S
        while len(answers) < len(self._guests) and not any(answers.values()):
            for node, wire in self._guests.items():
                for message in wire.receive():
                    answers[node] = str(message.get("problem", ""))
                wire.beat()
                if node not in answers and (wire.ended is not None or time.monotonic() > end):
                    answers[node] = f"{self._names[node]} has gone before the start: {wire.ended or 'it fell silent'}"
            self._nap(_NAP_S)
        return next(filter(None, answers.values()), "")


# ---- the others ------------------------------------------------------------------------------------------------------


def join(party: Party, tell: Tell, nap: Nap) -> Link:
    """Come to node 0 and be compared with it. LaunchError if it does not answer, UsageError if it refuses this host."""
    hosts = party.hosts
    wire = _connected(party, tell, nap)
    try:
        wire.trusted = True
        wire.send(
            _GREETING, node=hosts.node_rank, nnodes=hosts.nnodes, host=socket.gethostname(), same=dict(party.same)
        )
        welcome = _answer(wire, party, nap)
        names = {int(node): str(name) for node, name in welcome["names"]}
        wire.send("ready", problem=_look_for(party, names[hosts.node_rank], welcome, nap))
        _answer(wire, party, nap)
    except BaseException:
        wire.drop()
        raise
    return Link(hosts.node_rank, names, {0: wire}, party.patience_s)


def _connected(party: Party, tell: Tell, nap: Nap) -> Wire:
    hosts, began, told = party.hosts, time.monotonic(), False
    while True:
        try:
            connection = socket.create_connection((hosts.address, hosts.port), timeout=_TOLD_AFTER_S)
            if connection.getsockname() != connection.getpeername():
                return Wire(connection)
            connection.close()  # on one machine, a connection to a port where nobody listens may meet itself
            why = "nobody listens there"
        except socket.gaierror as error:
            raise LaunchError(
                f"--rendezvous {hosts.place}: {hosts.address} has no address here: {error.strerror}"
            ) from error
        except OSError as error:
            why = error.strerror or str(error)
        waited = time.monotonic() - began
        if waited > party.wait_s:
            raise LaunchError(
                f"node 0 did not answer at {hosts.place} within {waited:.0f} s: {why}; start it with --node-rank 0 "
                "and the same --rendezvous, look at firewalls, or give more time by topology.init_timeout_s"
            )
        if waited > _TOLD_AFTER_S and not told:
            told = True
            tell(f"waiting for node 0 at {hosts.place}: {why}")
        nap(_RECALL_S)


def _answer(wire: Wire, party: Party, nap: Nap) -> Message:
    """What node 0 says next; while it waits for other hosts, this one waits with it."""
    while True:
        if (message := wire.next()) is not None:
            if message["say"] == "refused":
                raise (UsageError if message["usage"] else LaunchError)(f"node 0 refuses: {message['error']}")
            return message
        wire.beat()
        if wire.ended is not None:
            raise LaunchError(
                f"what listens at {party.hosts.place} is no launcher that waits for hosts, or has left: {wire.ended}; "
                "see the screen of node 0; if a run is under way there, wait for its end"
            )
        if time.monotonic() - wire.heard_at > party.wait_s:
            raise LaunchError(
                f"node 0 at {party.hosts.place} has been silent for {party.wait_s:.0f} s before the start"
            )
        nap(_NAP_S)


def _look_for(party: Party, name: str, welcome: Message, nap: Nap) -> str:
    """What is wrong if the file that node 0 wrote is not in this host's folder of the run; "" if it is."""
    path, end = party.run_dir / Path(welcome["file"]).name, time.monotonic() + _FOLDER_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(party.run_dir)  # makes a network file system look again
            if path.read_text() == welcome["nonce"]:
                return ""
        if time.monotonic() > end:
            return (
                f"{name} does not find in {party.run_dir} what node 0 wrote there ({path.name}): the run's folder must "
                "be the same for all hosts, on a file system that they share; choose it with run.dir=..."
            )
        nap(_NAP_S)


# ---- what is equal ---------------------------------------------------------------------------------------------------


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The names whose values differ, with both; at most eight, and how many more."""
    absent = "not there"
    found = [
        f"{name}: {there.get(name, absent)} / {here.get(name, absent)}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name, absent) != here.get(name, absent)
    ]
    return [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else found


def _listed(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
