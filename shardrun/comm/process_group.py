"""Opens and closes torch's process group: store and data sockets on loopback unless told otherwise."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from shardrun.comm.config import CommunicatorConfig
from shardrun.errors import CommunicatorError, LaunchError

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


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


def open_process_group(config: CommunicatorConfig) -> None:
    """Join the world as the default process group. Every rank must call it; raises after `timeout_s`."""
    if dist.is_initialized():
        raise CommunicatorError(
            "this process already has a default process group; a second world cannot be opened beside it"
        )
    if config.loopback and not (config.agent_store and "GLOO_SOCKET_IFNAME" in os.environ):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    timeout = timedelta(seconds=config.timeout_s)
    device_id = device_of(config) if config.backend == "nccl" else None
    backend = _backends(config.backend)
    if device_id is not None:
        torch.cuda.set_device(device_id)
    atexit.register(close_process_group)  # a process that ends with open gloo connections aborts
    if config.agent_store:
        dist.init_process_group(backend, init_method="env://", timeout=timeout, device_id=device_id)
        return
    store = _store(config, timeout)
    _check_run_id(config, store)
    dist.init_process_group(
        backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=timeout,
        device_id=device_id,
    )


def open_subgroup(members: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Connect `members` (ranks of the world) with each other; every rank of the world must call it, in the same order.

    What a rank gets that is no member is of no use to it.
    """
    timeout = timedelta(seconds=timeout_s)
    handle: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout, backend=_backends(backend))
    return handle


def _backends(backend: str) -> str:
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend  # see [Note: control plane]


def close_process_group() -> None:
    """Close the connections of all groups; peers that wait for this rank are freed at once, see [Note: letting go]."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(config: CommunicatorConfig, timeout: timedelta) -> Store:
    if config.init_file is not None:
        store = FileStore(str(config.init_file), config.world_size)
        store.set_timeout(timeout)
        return store
    assert config.master_port is not None  # checked by the config
    is_master = config.rank == 0
    # TCPStore listens on all addresses even when given 127.0.0.1; a socket that is already bound restricts it.
    listen_fd = config.store_fd if config.store_fd is not None else (_bound_socket(config) if is_master else None)
    return TCPStore(
        config.master_addr,
        config.master_port,
        config.world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd if is_master else None,
    )


def _bound_socket(config: CommunicatorConfig) -> int:
    import socket

    family = socket.AF_INET6 if ":" in config.master_addr else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.master_addr, config.master_port))
    listener.listen(1024)
    return listener.detach()


def _check_run_id(config: CommunicatorConfig, store: Store) -> None:
    if not config.run_id:
        return
    if config.rank == 0:
        store.set("shardrun/run_id", config.run_id)
    found = store.get("shardrun/run_id").decode()
    if found != config.run_id:
        raise LaunchError(
            f"the rendezvous belongs to run {found!r}, this rank is of run {config.run_id!r}: check address and port"
        )
