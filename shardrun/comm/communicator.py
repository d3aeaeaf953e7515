"""A group of ranks that agree before they act, and that is closed for good by its first failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardrun.comm.agreement import Comparison
from shardrun.comm.config import (
    DEFAULT_INIT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    MAX_TIMEOUT_S,
    CommunicatorConfig,
    is_timeout,
)
from shardrun.comm.data_plane import DataPlane
from shardrun.comm.group import Group, listed, member_ranks
from shardrun.comm.last_words import LastWords
from shardrun.comm.process_group import device_of, open_process_group, open_subgroup
from shardrun.comm.world_state import Failure, Observer, WorldState
from shardrun.errors import CallMismatch, UsageError, by_all

__all__ = ["Communicator", "Comparison", "Failure", "Observer"]


class Communicator(DataPlane):
    """Ranks 0..world_size-1 that hold replicas of the same selected parameters: a world, or a subgroup of one.

    Made by `single()`, `from_env()`, `open(config)` or `subgroup(ranks)`. Collective, that is called by every rank in
    the same order, are `compare`, `agree`, `texts`, `vote`, `broadcast_`, `reduce_slice`, `gather_slices`, `exchanges`,
    `sum_integers`, `flat_zeros` and `subgroup`. The first failed collective poisons the communicator and closes its
    connections; every later call is refused at once with the first cause. In all this a world and its subgroups are
    one: a failure in any of them closes all, and `phase`, `collective`, `observer` and `close` are the same on each.
    """

    def __init__(
        self,
        group: Group,
        state: WorldState,
        backend: str,
        device: torch.device,
        parent: Communicator | None = None,
        number: int = 0,
        *,
        shares_memory: bool = True,
    ) -> None:
        """For the ways named above."""
        super().__init__(group, state, backend, device, shares_memory)
        self._shares_memory = shares_memory
        self.parent = parent
        """The world that this subgroup was made from; None for a world."""
        self._number = number
        self._sessions = self._subgroups = 0

    @staticmethod
    def single() -> Communicator:
        """A world of one: no process group, no socket, nothing sent."""
        group = Group(0, range(1))
        return Communicator(group, WorldState(group, DEFAULT_TIMEOUT_S), "gloo", torch.device("cpu"))

    @staticmethod
    def open(config: CommunicatorConfig) -> Communicator:
        """Join the world of `config`. Every rank must call it; a world of one opens nothing."""
        device = device_of(config)
        group = Group(config.rank, range(config.world_size))
        words, watch = None, None
        if config.world_size > 1:
            meeting, watch = open_process_group(config)
            words = LastWords(meeting.store, config.rank, config.world_size, meeting.keeper)
        state = WorldState(group, config.timeout_s, words, watch)
        return Communicator(group, state, config.backend, device, shares_memory=config.shared_memory)

    @staticmethod
    def from_env(
        *,
        backend: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        init_timeout_s: float = DEFAULT_INIT_TIMEOUT_S,
        allow_non_loopback: bool = False,
        shared_memory: bool = True,
    ) -> Communicator:
        """Join the world that torchrun's environment describes; NCCL where every local rank has a GPU, else gloo."""
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        return Communicator.open(
            CommunicatorConfig.from_env(
                backend=backend,
                timeout_s=timeout_s,
                init_timeout_s=init_timeout_s,
                allow_non_loopback=allow_non_loopback,
                shared_memory=shared_memory,
            )
        )

    def subgroup(self, ranks: Iterable[int]) -> Communicator | None:
        """A communicator of some ranks of this world, or None on a rank that is not among them.

        `ranks` strictly increase; a member's rank in the subgroup is its index in them. Every rank of the world must
        call it with the same list, in the same order of calls, also those that are no members. Other lists are refused
        by all ranks: UsageError (a list that cannot be meant) or CallMismatch (lists that differ). A subgroup of one
        member sends nothing. Subgroups may overlap; then the ranks must take turns in the same order.
        """
        self.require_open()
        if self.parent is not None:
            raise by_all(
                UsageError(
                    f"a subgroup cannot be cut again: this is the subgroup {listed(self.ranks)}; call "
                    "parent.subgroup(...) on every rank of the world, with the ranks' numbers in the world"
                )
            )
        members = self._agreed_members(ranks)
        self._subgroups += 1
        handle = None
        if 1 < len(members) < self.world_size:
            with self._guard(f"connecting the subgroup {listed(members)}", ranks=members):
                handle = open_subgroup(members, self.backend, self._state.timeout_s)
        if self.rank not in members:
            return None
        group = Group.subgroup(members, self._group, handle)
        self._state.add(group)
        shares = self._shares_memory
        return Communicator(group, self._state, self.backend, self.device, self, self._subgroups, shares_memory=shares)

    def _agreed_members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The list that all ranks gave, or the same error on all."""
        members: tuple[int, ...] = ()
        problem = None
        try:
            members = member_ranks(ranks, self.world_size)
        except UsageError as error:
            problem = error
        text = ",".join(map(str, members))
        found = self.compare("subgroup", "", {"ranks": text}, [int(problem is not None)])
        if found.sums[0]:
            self.agree("subgroup", error=problem)
        if found.differing:
            asked = "; ".join(f"rank {rank} for {text}" for rank, text in enumerate(self._texts(listed(members))))
            raise by_all(
                CallMismatch(
                    f"the ranks ask for different subgroups and none was made: {asked}. Every rank of the world, "
                    "member or not, must call subgroup with the same list"
                )
            )
        return members

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members by their rank in the parent, in the order of their ranks here; a world: 0..world_size-1."""
        return self._group.ranks

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's handle, for collectives of a model's own; closed by the first failure. None where nothing is sent."""
        return (self._group.handle or dist.group.WORLD) if self._group.talks else None

    @property
    def is_poisoned(self) -> bool:
        """Whether an earlier failure has closed this communicator."""
        return self._state.is_poisoned

    @property
    def failure(self) -> Failure | None:
        """The first failure, with the ranks that are missing or to blame where that is known; None while it is open."""
        return self._state.failure

    def history(self) -> list[dict[str, Any]]:
        """The last 64 collectives of this rank in the world and all its subgroups, oldest first, as plain data.

        Each has its number, phase, name, the compared fingerprint, the ranks (of the world), sizes, when it started and
        ended (seconds of the epoch, or "unfinished") and how many microseconds it took. Local, also after a failure.
        """
        return [call.plain() for call in self._state.history.calls()]

    def history_text(self) -> str:
        """The same as a table for a log, empty where nothing was sent; with the file of NCCL's flight recorder."""
        table, device = self._state.history.text(), self._state.device
        if device is None or not device.trace_file:
            return table
        return f"{table}\nflight recorder of NCCL, if there was a failure: {device.trace_file}"

    @property
    def timeout_s(self) -> float:
        """How long a collective that begins now may take."""
        return self._state.timeout_s

    @contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """Give the collectives of this block `seconds` each, in the world and all its subgroups; the old time after it.

        Local: every rank says it for itself, and only what this rank waits for changes. Costs some microseconds.
        """
        if not is_timeout(seconds):
            raise UsageError(f"timeout is {seconds}; it must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds")
        before = self._state.timeout_s
        self._state.set_timeout(seconds)
        try:
            yield
        finally:
            self._state.set_timeout(before)

    @property
    def phase(self) -> str:
        """The phase of the step that this rank is in."""
        return self._state.phase

    @property
    def collective(self) -> int:
        """How many collectives this rank has begun, in the world and all its subgroups."""
        return self._state.collective

    @property
    def observer(self) -> Observer | None:
        """Called as observer(phase, collective) whenever a phase or a collective begins (status file, tests)."""
        return self._state.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._state.observer = observer

    def named(self, rank: int) -> str:
        """A rank of this communicator as messages name it: "rank 2", or "rank 2 (rank 0 of the subgroup 2,3)"."""
        return self._group.named(rank)

    def number_session(self) -> str:
        """The number by which all ranks know the session that they have just made together here; local.

        "1" is the first of the world, "2.1" the first of its second subgroup: the members may be the same.
        """
        self._sessions += 1
        return f"{self._number}.{self._sessions}" if self._number else str(self._sessions)

    def enter(self, phase: str, *, cannot_fail: bool = False) -> None:
        """Mark the beginning of a phase of the step; local. In a phase that cannot fail the observer cannot either."""
        self._state.enter(phase, cannot_fail=cannot_fail)

    def poison(self, cause: str, keep_alive: object = None) -> None:
        """Refuse every later call with `cause` and close the connections, which frees waiting peers; local."""
        self._state.poison(cause, keep_alive)

    def close(self) -> None:
        """Leave the world; local, idempotent."""
        self._state.close("it was closed")
