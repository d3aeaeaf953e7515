"""Node 0 before any rank is started: it waits for the launchers of the other hosts, and refuses those that differ."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from shardrun.errors import LaunchError
from shardrun.run.gathering import FOLDER_S, GREETING, NAP_S, TOLD_AFTER_S, Nap, Party, Tell, differences, listed
from shardrun.run.link import Link
from shardrun.run.wire import Message, Wire


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
                    f"{listed(self._absent)} of {hosts.nnodes} did not come to {hosts.place} within {waited:.0f} s; "
                    "start every host with the same --nnodes and --rendezvous, look at firewalls, or give more time by "
                    "topology.init_timeout_s"
                )
            if waited > TOLD_AFTER_S and not told:
                told = True
                self._tell(f"waiting for {listed(self._absent)} of {hosts.nnodes} to come to {hosts.place}")
            self._nap(NAP_S)

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
        if message["say"] != GREETING or not isinstance(node, int) or not isinstance(same, dict):
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
            return f"--node-rank is {node} there, and node 0 waits for {listed(self._absent)}"
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
        end = time.monotonic() + 2 * FOLDER_S
        while len(answers) < len(self._guests) and not any(answers.values()):
            for node, wire in self._guests.items():
                for message in wire.receive():
                    answers[node] = str(message.get("problem", ""))
                wire.beat()
                if node not in answers and (wire.ended is not None or time.monotonic() > end):
                    answers[node] = f"{self._names[node]} has gone before the start: {wire.ended or 'it fell silent'}"
            self._nap(NAP_S)
        return next(filter(None, answers.values()), "")
