"""The store of the rendezvous: a file, a port of rank 0 on the address that is given and no other, or torchrun's."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from shardrun.comm.config import CommunicatorConfig
from shardrun.comm.group import listed
from shardrun.errors import CommunicatorError, LaunchError

_RECALL_S = 0.2  # a knock at a door that is not open yet


def open_store(config: CommunicatorConfig, place: str, deadline: float) -> Store:
    """The store of the rendezvous, named `place` in messages: rank 0 holds it, unless it is a file or torchrun's.

    Raises LaunchError if it cannot listen where it should, CommunicatorError if nobody has opened it by `deadline`.
    """
    if config.init_file is not None:
        return FileStore(str(config.init_file), config.world_size)
    assert config.master_port is not None  # checked by the config
    is_master = config.rank == 0 and not config.agent_store
    listen_fd = None
    if is_master:
        # TCPStore listens on all addresses even when given 127.0.0.1; a socket that is already bound restricts it.
        listen_fd = config.store_fd if config.store_fd is not None else listening_socket(config)
    else:
        _knock(config, place, deadline)
    try:
        return TCPStore(
            config.master_addr,
            config.master_port,
            config.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except RuntimeError as error:
        raise CommunicatorError(
            f"the store of the rendezvous at {place} does not answer rank {config.rank}: {str(error).splitlines()[0]}"
        ) from error


def listening_socket(config: CommunicatorConfig) -> int:
    """A descriptor that listens on the address of the rendezvous and on no other."""
    address = (config.master_addr, config.master_port)
    try:
        family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        return listener.detach()
    except OSError as error:
        raise LaunchError(
            f"the store of the rendezvous cannot listen on {address[0]}:{address[1]}: {error.strerror}; "
            "another run may have the port, or the address is not one of this machine"
        ) from error


def _knock(config: CommunicatorConfig, place: str, deadline: float) -> None:
    """Wait until the store listens: torch's client would fill the screen with its tries."""
    while True:
        with suppress(OSError):
            socket.create_connection((config.master_addr, config.master_port or 0), 5.0).close()
            return
        if time.monotonic() > deadline:
            raise not_come(config, [0], place)
        time.sleep(_RECALL_S)


def not_come(config: CommunicatorConfig, absent: list[int], place: str) -> CommunicatorError:
    """The error of a rank that waited for the `absent` ones in vain."""
    who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {listed(absent)} have"
    return CommunicatorError(
        f"{who} not come to the rendezvous at {place} within {config.init_timeout_s:.0f} s (rank {config.rank} of "
        f"{config.world_size} waited); see the logs of those ranks, or give more time by init_timeout_s"
    )
