"""Local work whose outcome all ranks share: an error on one rank is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrun.comm.communicator import Communicator


def together(comm: Communicator, tag: str, work: Callable[[], Any]) -> list[Any]:
    """What `work` (plain JSON) gave on every rank, in rank order; collective. If it raised on one rank, all raise."""
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    return comm.agree(tag, value, error)


def by_root(comm: Communicator, tag: str, work: Callable[[], Any]) -> Any:
    """What `work` gave on rank 0, which alone does it; collective. If it raised, all ranks raise."""
    return together(comm, tag, work if comm.rank == 0 else lambda: None)[0]
