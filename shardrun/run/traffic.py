"""What a step reads and writes in the memory of a rank, beside what it sends: bytes, from a plan alone."""

from __future__ import annotations

from shardrun.run.plan import PlannedGroup
from shardrun.shard.flat_buffer import DTYPES
from shardrun.step.footprint import RankBytes


def memory_traffic(group: PlannedGroup, held: RankBytes) -> int:
    """Bytes that the step of a group reads and writes in the memory of one rank, beside what it sends.

    On its slice: normalise (read, write) and norm (read) of the gradient; the proposal (gradient, parameters and state
    read, new parameters written); the commit (all read, parameters and state written). Then staging to parameters. A
    group of one rank has neither proposal nor staging. Scratch stays in the cache and is not counted.
    """
    share, weights = _share(group, held), _weights(group)
    gradient, own = 4 * group.elements * share, weights * share
    alone = 3 * gradient + committed_traffic(group, held)
    return int(alone if len(group.ranks) == 1 else alone + (gradient + held.state + 2 * own) + 2 * weights)


def committed_traffic(group: PlannedGroup, held: RankBytes) -> float:
    """What the optimizer reads and writes in place on a rank's slice."""
    share = _share(group, held)
    return 4 * group.elements * share + 2 * (_weights(group) * share + held.state)


def _share(group: PlannedGroup, held: RankBytes) -> float:
    """A rank's part of the reduced gradients of its group."""
    return held.in_step / max(1, sum(one.in_step for one in group.footprint.held))


def _weights(group: PlannedGroup) -> int:
    """Bytes of the trained parameters."""
    return sum(spec.numel * DTYPES[spec.dtype].itemsize for spec in group.footprint.draft.specs.values())
