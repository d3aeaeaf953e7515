"""What the kernel tells of processes that it killed."""

from __future__ import annotations

from pathlib import Path

_COUNTS = Path("/proc/vmstat")


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
