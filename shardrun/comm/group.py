"""Which ranks talk to each other, how a message names them, and torch's handle of their connections."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch.distributed as dist

from shardrun.comm.board import Board
from shardrun.errors import UsageError

_NAMED = 8  # a longer list of ranks is shortened in messages


class Group:
    """The ranks of a communicator. Ranks are numbered 0..size-1 inside it; `ranks` has their numbers in the world."""

    def __init__(self, rank: int, ranks: Sequence[int], handle: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.handle = handle
        """None is torch's default group: the world's."""
        self.under_way: list[list[dist.Work]] = []
        """What was begun and is not waited for yet."""
        self._board: Board | None = None
        self._whole = self
        self.suffix = ""
        """What messages append to "ranks" or "group", empty for a world."""

    @staticmethod
    def subgroup(members: Sequence[int], world: Group, handle: dist.ProcessGroup | None) -> Group:
        """The group of `members` (ranks of the world), seen by one of them."""
        group = Group(members.index(world.rank), members, handle)
        if len(members) == world.size:
            group._whole = world  # the same ranks and connections: they meet, whichever of the two each is in
        group.suffix = f" of the subgroup {listed(members)}"
        return group

    @property
    def size(self) -> int:
        """How many ranks talk."""
        return len(self.ranks)

    @property
    def board(self) -> Board | None:
        """Where the ranks signal each other, if they share a host and memory."""
        return self._whole._board

    @board.setter
    def board(self, board: Board | None) -> None:
        self._whole._board = board

    @property
    def talks(self) -> bool:
        """Whether torch has a group for it: a rank alone has nobody to talk to."""
        return self.size > 1

    def named(self, rank: int) -> str:
        """A rank of this group as messages name it: by its number in the world, then by that in the subgroup."""
        return f"rank {self.ranks[rank]} (rank {rank}{self.suffix})" if self.suffix else f"rank {rank}"

    def release(self) -> None:
        """Let go of torch's group: gloo closes the connections of a destroyed group when its last owner is gone."""
        self.handle = None
        for works in self.under_way:
            works.clear()
        self.under_way.clear()
        if self.board is not None:
            self.board.close()
            self.board = None


def listed(ranks: Sequence[int]) -> str:
    """Ranks as messages list them: "2,3", or "0,8,16,24,32,40,48,..,504 (64 ranks)" where they are many."""
    if len(ranks) <= _NAMED:
        return ",".join(map(str, ranks))
    return f"{','.join(map(str, ranks[: _NAMED - 1]))},..,{ranks[-1]} ({len(ranks)} ranks)"


def member_ranks(ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
    """`ranks` as the members of a subgroup; raises UsageError unless 0 <= first < second < ... < world_size."""
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise UsageError(f"subgroup takes a list of ranks, not {ranks!r}; write subgroup([0, 1])") from None
    if not members:
        raise UsageError("the list of a subgroup's ranks is empty; name at least one rank")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise UsageError(
            f"rank {outside[0]} is not in this world of {world_size}; a subgroup takes 0 to {world_size - 1}"
        )
    for before, after in pairwise(members):
        if before >= after:
            way_out = ",".join(map(str, sorted(set(members))))
            raise UsageError(
                f"{before} comes before {after} in a subgroup's ranks, which must strictly increase; write {way_out}"
            )
    return members
