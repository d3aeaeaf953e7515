"""The hosts of a run as the command line names them, checked before any socket is opened; and who is who among them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from shardrun.comm.config import is_loopback
from shardrun.errors import UsageError


@dataclass(frozen=True)
class Hosts:
    """`nnodes` hosts that meet at `address`:`port` on the host of node 0; this one is node `node_rank`."""

    nnodes: int
    node_rank: int
    address: str
    port: int

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.node_rank == 0

    @property
    def place(self) -> str:
        """The meeting point as messages name it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def ranks(self, world_size: int, node: int) -> range:
        """The ranks of a world that run on a host."""
        each = world_size // self.nnodes
        return range(node * each, (node + 1) * each)


def hosts_of(
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    *,
    world_size: int,
    allow_non_loopback: bool,
    environ: Mapping[str, str],
) -> Hosts | None:
    """The hosts that the options name; None if there is one only. UsageError where they cannot be meant.

    As a task of SLURM, `node_rank` is SLURM_NODEID unless it is given.
    """
    if nnodes is None or nnodes == 1:
        if node_rank:
            raise UsageError(f"--node-rank {node_rank} without --nnodes: with one host there is only node 0")
        return None
    if "RANK" in environ:
        raise UsageError(
            f"--nnodes {nnodes} starts the ranks of this host, but this process is a rank itself: the environment has "
            f"RANK={environ['RANK']}; leave --nnodes out, or start it without torchrun"
        )
    if node_rank is None and "SLURM_STEP_NODELIST" in environ:
        node_rank = int(environ["SLURM_NODEID"])
    if node_rank is None or rendezvous is None:
        raise UsageError(
            f"--nnodes {nnodes} needs --node-rank (0 to {nnodes - 1}, another one on each host) and --rendezvous "
            "HOST:PORT (an address of node 0's host, the same on all)"
        )
    if not 0 <= node_rank < nnodes:
        raise UsageError(f"--node-rank is {node_rank}; with --nnodes {nnodes} it must be 0 to {nnodes - 1}")
    if world_size % nnodes:
        raise UsageError(
            f"topology.world_size is {world_size}, which {nnodes} hosts cannot share equally; "
            "make it a multiple of --nnodes: every host starts the same number of ranks"
        )
    address, port = split_address(rendezvous)
    if not is_loopback(address) and not allow_non_loopback:
        raise UsageError(
            f"--rendezvous {rendezvous} is not on the loopback address, and the rendezvous has neither authentication "
            "nor encryption: set topology.allow_non_loopback=true if you trust everybody on that network"
        )
    return Hosts(nnodes, node_rank, address, port)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPV6]:PORT; UsageError for anything else."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise UsageError(f"--rendezvous is {text!r}; it must be HOST:PORT, or [ADDRESS]:PORT for IPv6")
    if not 0 < int(port) < 65536:
        raise UsageError(f"--rendezvous {text}: port {port} must be 1 to 65535")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise UsageError(
            f"--rendezvous {text} means all addresses; give the one address of node 0's host that the others reach"
        )
    return host, int(port)
