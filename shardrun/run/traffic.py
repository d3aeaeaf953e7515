"""What a step reads and writes in the memory of a rank, beside what it sends: bytes, from a plan alone."""

from __future__ import annotations

from shardrun.run.plan import PlannedGroup
from shardrun.shard.flat_buffer import DTYPES


def memory_traffic(group: PlannedGroup, number: int) -> int:
    """Bytes that the step of a group reads and writes in the memory of its rank `number`, beside what it sends or reads
    of others.

    Each reduction: gradients copied from where torch has left them to where they are reduced from (read, write), and
    summed there to judge them if they are streamed; sums of later ones added on the slice (two read, one written). On
    the slice: normalise (read, write) and norm (read) of the gradient; the proposal (gradient, parameters and state
    read, new parameters written); the commit (all read, parameters and state written), and of the other slices of the
    parameters the copy from where they have arrived. A group of one rank has no proposal and nothing that arrives.
    Scratch stays in the cache and is not counted.
    """
    gradient, own, state = _slice(group, number)
    collected = group.reductions * (2 + group.streams) * 4 * group.elements + (group.reductions - 1) * 3 * gradient
    alone = collected + 3 * gradient + committed_traffic(group, number)
    if len(group.ranks) == 1:
        return alone
    return alone + (gradient + state + 2 * own) + 2 * (_weights(group) - own)


def committed_traffic(group: PlannedGroup, number: int) -> int:
    """What the optimizer reads and writes in place on the slice of the group's rank `number`."""
    gradient, own, state = _slice(group, number)
    return gradient + 2 * (own + state)


def _slice(group: PlannedGroup, number: int) -> tuple[int, int, int]:
    """Bytes of gradient, parameters and optimizer state of a rank's slice."""
    owned = sum(stop - start for start, stop in group.footprint.fragments(number).values())
    return 4 * owned, owned * _weights(group) // group.elements, group.held[number].state


def _weights(group: PlannedGroup) -> int:
    """Bytes of the trained parameters."""
    return sum(spec.numel * DTYPES[spec.dtype].itemsize for spec in group.footprint.draft.specs.values())
