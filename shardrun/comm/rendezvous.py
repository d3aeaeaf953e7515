"""Where the ranks of a run find each other: the store, who belongs to the run, and who has not come.

[Note: a store may hold yesterday's world] A file may be left over, and torchrun keeps one store over all restarts of
its workers: a rank that reads an address there may read that of a process that is gone (pytorch issue 135712). So
nothing is read that this world has not written: each rank puts down a random token; rank 0 publishes a name for this
world, with the tokens that it has seen, again and again until all have come; and a rank takes the name only from a page
that has its own token. Everything else stands in the store under that name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from shardrun.comm.config import CommunicatorConfig
from shardrun.comm.store import not_come, open_store
from shardrun.errors import CommunicatorError, LaunchError

_PAGE = "shardrun/world"
_LATEST_NAP_S = 0.02  # of a small world; grows with it, so that the store of a large one is not drowned


class Meeting:
    """Where the ranks of a world meet: its own part of the store, and who has come to which point."""

    def __init__(self, config: CommunicatorConfig, store: Store, place: str, deadline: float) -> None:
        """For `meet`, which gives it the name of the world."""
        self.config = config
        self.place = place
        """As messages name it: "127.0.0.1:2345" or the path of the file."""
        self.keeper: tuple[str, int] | None = None
        """Address of the store if it lives in the process of rank 0, and ends with it."""
        if config.init_file is None and not config.agent_store:
            assert config.master_port is not None  # checked by the config
            self.keeper = config.master_addr, config.master_port
        self.store = store
        self._deadline = deadline

    def come(self, point: str) -> int:
        """Say that this rank has come to `point`; returns how often somebody said so for this rank."""
        times: int = self.store.add(f"{point}/{self.config.rank}", 1)
        if times == 1:
            self.store.add(point, 1)
        return times

    def all_have_come(self, point: str) -> bool:
        """Whether every rank has said so."""
        return bool(self.store.add(point, 0) >= self.config.world_size)

    def await_all(self, point: str) -> None:
        """Come to `point` and wait for the others; every rank must call it."""
        self.come(point)
        for _ in self.naps(lambda: self.too_late(point)):
            if self.all_have_come(point):
                return

    def too_late(self, point: str) -> CommunicatorError:
        """The error of a rank that has waited in vain at `point`."""
        others = (rank for rank in range(self.config.world_size) if rank != self.config.rank)
        return not_come(self.config, [r for r in others if not self.store.check([f"{point}/{r}"])], self.place)

    def naps(self, too_late: Callable[[], CommunicatorError]) -> Iterator[None]:
        """Turns to look again, further and further apart; raises what `too_late` says at the deadline."""
        nap = 0.001
        while True:
            yield
            if time.monotonic() > self._deadline:
                raise too_late()
            time.sleep(nap)
            nap = min(1.5 * nap, _LATEST_NAP_S * (1 + self.config.world_size / 64))


def meet(config: CommunicatorConfig) -> Meeting:
    """Open the store and wait until all ranks of this run have come. Every rank must call it.

    Raises LaunchError where this rank does not belong (another run, a rank that is there already, a port in use), and
    CommunicatorError naming the ranks that have not come within `init_timeout_s`.
    """
    deadline = time.monotonic() + config.init_timeout_s
    place = str(config.init_file) if config.init_file is not None else f"{config.master_addr}:{config.master_port}"
    store = open_store(config, place, deadline)
    store.set_timeout(timedelta(seconds=config.init_timeout_s))
    meeting = Meeting(config, store, place, deadline)
    try:
        if config.rank == 0:
            _host(meeting)
        else:
            _enter(meeting)
    except DistError as error:
        raise CommunicatorError(
            f"rank {config.rank} lost the rendezvous at {place} before all ranks had come; see the log of rank 0"
        ) from error
    return meeting


def _host(meeting: Meeting) -> None:
    """Rank 0: publish the name of this world until all have come."""
    config, outer = meeting.config, meeting.store
    world = f"shardrun/{secrets.token_hex(8)}"
    meeting.store = PrefixStore(world, outer)
    meeting.come("in")
    shown: dict[str, str] | None = None
    for _ in meeting.naps(lambda: meeting.too_late("in")):
        if shown is not None and _page(outer).get("world") != world:
            raise _twice(meeting)
        hellos = {str(rank): _hello(config.run_id, rank) for rank in range(1, config.world_size)}
        tokens = {rank: outer.get(hello).decode() for rank, hello in hellos.items() if outer.check([hello])}
        if tokens != shown:
            outer.set(_PAGE, json.dumps({"run": config.run_id, "world": world, "tokens": tokens}))
            shown = tokens
        if meeting.all_have_come("in"):
            return


def _enter(meeting: Meeting) -> None:
    """Every other rank: take the name of this world from a page that has this rank's token."""
    config, outer = meeting.config, meeting.store
    _refuse_another_run(meeting, _page(outer))
    token = secrets.token_hex(8)
    outer.set(_hello(config.run_id, config.rank), token)
    for _ in meeting.naps(lambda: _left_standing(meeting, _page(outer))):
        page = _page(outer)
        _refuse_another_run(meeting, page)
        if not page:
            continue
        meeting.store = PrefixStore(page["world"], outer)
        if page["tokens"].get(str(config.rank)) == token:
            break
        # A page that ends with rank 0 is not yesterday's: this world is complete, and without this process.
        if meeting.keeper is not None and meeting.all_have_come("in"):
            raise _twice(meeting)
    if meeting.come("in") > 1:
        raise _twice(meeting)
    for _ in meeting.naps(lambda: meeting.too_late("in")):
        if meeting.all_have_come("in"):
            return


def _page(store: Store) -> dict[str, Any]:
    """What rank 0 has published, if anything."""
    page: dict[str, Any] = json.loads(store.get(_PAGE)) if store.check([_PAGE]) else {}
    return page


def _hello(run_id: str, rank: int) -> str:
    return f"shardrun/hello/{run_id}/{rank}"


def _refuse_another_run(meeting: Meeting, page: dict[str, Any]) -> None:
    config = meeting.config
    if page.get("run", config.run_id) == config.run_id:
        return
    way_out = "give a path that no file has yet" if config.init_file is not None else "check address and port"
    raise LaunchError(
        f"the rendezvous at {meeting.place} belongs to run {page['run']!r}, rank {config.rank} here is of run "
        f"{config.run_id!r}: {way_out}"
    )


def _twice(meeting: Meeting) -> LaunchError:
    config = meeting.config
    return LaunchError(
        f"another process is rank {config.rank} of run {config.run_id!r} at {meeting.place}; every rank is started once"
    )


def _left_standing(meeting: Meeting, page: dict[str, Any]) -> CommunicatorError:
    """The error of a rank that rank 0 has not taken in."""
    config = meeting.config
    if not page:
        return not_come(config, [0], meeting.place)
    return CommunicatorError(
        f"rank 0 of run {config.run_id!r} at {meeting.place} has not taken in rank {config.rank} within "
        f"{config.init_timeout_s:.0f} s: it has gone, or another process was rank {config.rank} before"
    )
