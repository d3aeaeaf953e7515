"""What a step reads and writes in the memory of a rank, beside what it sends: bytes, from a plan alone."""

from __future__ import annotations

from shardrun.run.plan import PlannedGroup
from shardrun.shard.flat_buffer import DTYPES


def memory_traffic(group: PlannedGroup, number: int) -> int:
    """Bytes that the step of a group reads and writes in the memory of its rank `number`, beside what it sends.

    On its slice: normalise (read, write) and norm (read) of the gradient; the proposal (gradient, parameters and state
    read, new parameters written); the commit (all read, parameters and state written). Then staging to parameters. A
    group of one rank has neither proposal nor staging. Scratch stays in the cache and is not counted.
    """
    gradient, own, state = _slice(group, number)
    alone = 3 * gradient + gradient + 2 * (own + state)
    if len(group.ranks) == 1:
        return alone
    return alone + (gradient + state + 2 * own) + 2 * _weights(group)


def committed_traffic(group: PlannedGroup, number: int) -> int:
    """What the optimizer reads and writes in place on the slice of the group's rank `number`."""
    gradient, own, state = _slice(group, number)
    return gradient + 2 * (own + state)


def _slice(group: PlannedGroup, number: int) -> tuple[int, int, int]:
    """Bytes of gradient, parameters and optimizer state of a rank's slice."""
    owned = sum(stop - start for start, stop in group.footprint.fragments(number).values())
    return 4 * owned, owned * _weights(group) // group.elements, group.footprint.held[number].state


def _weights(group: PlannedGroup) -> int:
    """Bytes of the trained parameters."""
    return sum(spec.numel * DTYPES[spec.dtype].itemsize for spec in group.footprint.draft.specs.values())
