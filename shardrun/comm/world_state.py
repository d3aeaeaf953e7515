"""What all communicators of one world share: its first failure, its phase, the number of its collectives, its observer.

[Note: letting go] gloo closes the connections of a destroyed group only when the last Python object that owns it is
gone: a handle, a pending work, the frame of a traceback that has one of them. A peer that waits for this rank alone
would then wait until this process ends (measured: worlds of 4 and more). So the first failure lets go of every group
and clears the frames below it. The buffers of failed collectives are what must stay, and are kept by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shardrun.comm.group import Group
from shardrun.comm.process_group import close_process_group
from shardrun.errors import CommunicatorError

Observer = Callable[[str, int], None]


class WorldState:
    """Held by a world's communicator and by every subgroup made from it, so that each speaks for all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.observer: Observer | None = None
        self.phase = "start-up"
        self.collective = 0
        self._poison: str | None = None
        self._kept_alive: list[object] = []
        self._groups: list[Group] = []

    @property
    def is_poisoned(self) -> bool:
        """Whether a failure has closed the world."""
        return self._poison is not None

    def add(self, group: Group) -> None:
        """Have `group` closed with the world."""
        self._groups.append(group)

    def enter(self, phase: str, *, cannot_fail: bool = False) -> None:
        """Mark the beginning of a phase."""
        self.phase = phase
        if self.observer is not None:
            with suppress(*([Exception] if cannot_fail else [])):
                self.observer(phase, self.collective)

    def poison(self, cause: str, keep_alive: object = None) -> None:
        """Close every connection of every group; the first cause wins."""
        if self._poison is not None:
            return
        self._poison = cause
        # gloo cannot cancel: a buffer of a failed collective stays in use and must never be freed or reused.
        self._kept_alive.append(keep_alive)
        if self.world_size > 1:
            for group in self._groups:
                group.release()
            close_process_group()

    def require_open(self) -> None:
        """Raise if the world is closed."""
        if self._poison is not None:
            raise CommunicatorError(f"communicator is closed since its first failure: {self._poison}")

    @contextmanager
    def guard(self, what: str, group: Group, *buffers: object) -> Iterator[None]:
        """Count and announce a collective of `group`; whatever goes wrong in it closes the world."""
        self.require_open()
        self.collective += 1
        try:
            if self.observer is not None:
                self.observer(self.phase, self.collective)
            yield
        except BaseException as error:
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            where = f"collective {self.collective} ({what}, phase {self.phase})"
            cause = f"{where} failed on {group.named(group.rank)}: {first_line}"
            self.poison(cause, (buffers, error))
            _let_go(error)
            if isinstance(error, Exception):
                raise CommunicatorError(f"communicator closed at {cause}") from error
            raise


def _let_go(error: BaseException) -> None:
    """Clear the frames that a failed collective has left, see [Note: letting go]; those still running stay."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
