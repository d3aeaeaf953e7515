"""What the kernel tells of processes that it killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_COUNTS = Path("/proc/vmstat")
_LATELY_S = 10.0  # a large process takes seconds to die


def out_of_memory_kills() -> int | None:
    """How many processes of this machine the kernel has killed for want of memory; None where it does not say."""
    try:
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return None


class RecentKills:
    """Whether the kernel has killed for want of memory in the last seconds, not whenever since a start days ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._before = self._latest = out_of_memory_kills()

    def look(self) -> None:
        """To be called again and again while nothing has happened."""
        if self._clock() - self._looked_at > _LATELY_S:
            self._looked_at = self._clock()
            self._before, self._latest = self._latest, out_of_memory_kills()

    def any(self) -> bool:
        """Whether it has killed any process of this machine, 10 to 20 s back."""
        return out_of_memory_kills() != self._before
