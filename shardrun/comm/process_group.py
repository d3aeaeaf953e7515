"""Opens and closes torch's process groups: data sockets on loopback unless told otherwise."""

from __future__ import annotations

import atexit
import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardrun.comm.config import CommunicatorConfig
from shardrun.comm.device import DeviceWatch, prepare_environment, trace_file
from shardrun.comm.nccl import NcclBackend
from shardrun.comm.rendezvous import Meeting, meet
from shardrun.errors import CommunicatorError, LaunchError

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way there is the way out


def device_of(config: CommunicatorConfig) -> torch.device:
    """The device whose memory the collectives of this rank use."""
    if config.backend != "nccl":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if config.local_rank >= count:
        raise LaunchError(
            f"rank {config.rank} wants GPU {config.local_rank}, but this machine shows {count}; "
            "NCCL needs one GPU per rank: lower world_size or use topology.backend: gloo"
        )
    return torch.device("cuda", config.local_rank)


def open_process_group(config: CommunicatorConfig) -> tuple[Meeting, DeviceWatch | None]:
    """Join the world as the default process group. Every rank must call it.

    Raises LaunchError where this rank does not belong, CommunicatorError naming the ranks that have not come after
    `init_timeout_s`.
    """
    if dist.is_initialized():
        raise CommunicatorError(
            "this process already has a default process group; a second world cannot be opened beside it"
        )
    _choose_interface(config)
    watch = None
    device_id = device_of(config) if config.backend == "nccl" else None
    if device_id is not None:
        prepare_environment(os.environ, Path(tempfile.gettempdir()), config.run_id or "run")
        written = trace_file(os.environ, config.rank)
        watch = DeviceWatch(NcclBackend(device_id, written), written)
        torch.cuda.set_device(device_id)
    meeting = meet(config)
    atexit.register(close_process_groups, watch)  # a process that ends with open gloo connections aborts
    try:
        dist.init_process_group(
            _backends(config.backend),
            store=meeting.store,
            rank=config.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=_opening_timeout_s(config)),
            device_id=device_id,
        )
        set_group_timeout(None, config.timeout_s)
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        raise CommunicatorError(
            f"rank {config.rank} found all {config.world_size} ranks at {meeting.place}, but could not connect with "
            f"them: {told}"
        ) from error
    meeting.await_all("connected")  # a rank that fails at once must not break the connecting of the others
    return meeting, watch


def _opening_timeout_s(config: CommunicatorConfig) -> float:
    """How long connecting may take; torch's own checks of every call keep it for ever, see set_group_timeout."""
    detail = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
    return config.timeout_s if detail else config.init_timeout_s


def open_subgroup(members: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Connect `members` (ranks of the world) with each other; every rank of the world must call it, in the same order.

    What a rank gets that is no member is of no use to it.
    """
    timeout = timedelta(seconds=timeout_s)
    handle: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout, backend=_backends(backend))
    return handle


def set_group_timeout(handle: dist.ProcessGroup | None, seconds: float) -> None:
    """How long a collective of the group (None: the default one) may take from now on; local.

    Not for isend and irecv over gloo, whose `wait` takes its own. Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch's own
    checks keep the time with which the group was made.
    """
    group = handle or c10d._get_default_group()
    timeout = timedelta(seconds=seconds)
    if hasattr(group, "set_timeout"):
        group.set_timeout(timeout)
    else:
        c10d._set_pg_timeout(timeout, group)


def _backends(backend: str) -> str:
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend  # see [Note: control plane]


def close_process_groups(watch: DeviceWatch | None, *, dump: bool = False) -> str:
    """Close the connections of all groups; peers that wait for this rank are freed at once, see [Note: letting go].

    With a device its collectives are aborted after that, and before that written down if `dump`; returns what could not
    be done in time.
    """
    if not dist.is_initialized():
        return ""
    if watch is None:
        dist.destroy_process_group()
        return ""
    watch.take_over()
    forget_process_groups()
    return watch.abort(dump=dump)


def forget_process_groups() -> None:
    """As torch's destroy_process_group, but without its `shutdown`, which on NCCL waits for the device.

    What is left of the groups is freed with its last owner: gloo closes its connections at once. The owner of NCCL's
    part has taken it over before.
    """
    world = c10d._world
    c10d._update_default_pg(None)
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    world.group_count = 0


def _choose_interface(config: CommunicatorConfig) -> None:
    """Have gloo and NCCL listen on loopback, or else where the rendezvous is reached; a user's own choice stays."""
    if config.loopback:
        if config.agent_store and "GLOO_SOCKET_IFNAME" in os.environ:
            return
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
        return
    # Left alone, gloo asks what this machine's name resolves to, which is often 127.0.1.1 or nothing.
    interface = None if config.init_file is not None else interface_towards(config.master_addr)
    if interface == LOOPBACK_INTERFACE and not config.one_host:  # the other hosts have to reach this one
        interface = interface_towards(_ELSEWHERE)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_towards(address: str) -> str | None:
    """The network interface of this machine from which `address` is reached; None if it cannot be told."""
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(name) == own:
                return name
    return None


def _address_of(interface: str) -> str | None:
    """Its IPv4 address (Linux)."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
    return None
