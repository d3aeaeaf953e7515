"""The launcher of any host but node 0's before any rank is started: it comes to node 0 and is compared with it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from shardrun.errors import LaunchError, UsageError
from shardrun.run.gathering import FOLDER_S, GREETING, NAP_S, TOLD_AFTER_S, Nap, Party, Tell
from shardrun.run.link import Link
from shardrun.run.wire import Message, Wire

_RECALL_S = 0.25


def join(party: Party, tell: Tell, nap: Nap) -> Link:
    """Come to node 0 and be compared with it. LaunchError if it does not answer, UsageError if it refuses this host."""
    hosts = party.hosts
    wire = _connected(party, tell, nap)
    try:
        wire.trusted = True
        wire.send(GREETING, node=hosts.node_rank, nnodes=hosts.nnodes, host=socket.gethostname(), same=dict(party.same))
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
            connection = socket.create_connection((hosts.address, hosts.port), timeout=TOLD_AFTER_S)
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
        if waited > TOLD_AFTER_S and not told:
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
        nap(NAP_S)


def _look_for(party: Party, name: str, welcome: Message, nap: Nap) -> str:
    """What is wrong if the file that node 0 wrote is not in this host's folder of the run; "" if it is."""
    path, end = party.run_dir / Path(welcome["file"]).name, time.monotonic() + FOLDER_S
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
        nap(NAP_S)
