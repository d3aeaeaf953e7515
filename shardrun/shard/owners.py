"""Layouts in which tensors stay whole, each with one owner (ZeRO-1): who owns what, and where it stands then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardrun.shard.layout import Bucket, Entry, FlatLayout, Placed, Space, align, batches, by_space


def balanced_owners(costs: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Path -> owner: the dearest first, each to the rank that has least so far (longest processing time first).

    Follows from paths and costs alone, in whatever order they come: a reshard chooses as a session would.
    """
    load = [0] * world_size
    owners = {}
    for path, cost in sorted(costs.items(), key=lambda one: (-one[1], one[0])):
        owners[path] = min(range(world_size), key=lambda rank: load[rank])
        load[owners[path]] += cost
    return owners


def plan_owned_layout(
    entries: Iterable[Entry], owners: Mapping[str, int], bucket_numel: int, world_size: int
) -> FlatLayout:
    """Place `entries` so that every rank's slice of a bucket is the whole tensors that it owns."""
    spaces = []
    for (dtype, option_group), members in by_space(entries).items():
        space = Space(dtype, option_group, (), ())
        for batch in batches(members, bucket_numel):
            space = _with_bucket(space, batch, owners, world_size)
        spaces.append(space)
    return FlatLayout(tuple(spaces))


def planned_order(space: Space, bucket: Bucket, owners: Mapping[str, int]) -> list[Placed]:
    """The parameters of a bucket that stands in the order of owners, in an order that plans the same bucket.

    A bucket closes as soon as it is full. Whichever parameter came last when it was planned is the last one of its
    owner; of these the largest is taken, without which the bucket is not full in any case.
    """
    members = [placed for placed in space.parameters if bucket.start <= placed.offset < bucket.stop]
    ends = {owners[placed.path]: placed for placed in members}.values()
    last = max(ends, key=lambda placed: align(placed.numel))
    return [*(placed for placed in members if placed is not last), last]


def replan_owned(
    layout: FlatLayout, before: Mapping[str, int], owners: Mapping[str, int], world_size: int
) -> FlatLayout:
    """The same buckets with the same parameters in them, in the order of other owners; `before` are those of `layout`.

    It is what `plan_owned_layout` gives for `owners` if its entries come in `planned_order`.
    """
    spaces = []
    for space in layout.spaces:
        again = Space(space.dtype, space.option_group, (), ())
        for bucket in space.buckets:
            again = _with_bucket(again, planned_order(space, bucket, before), owners, world_size)
        spaces.append(again)
    return FlatLayout(tuple(spaces))


def _with_bucket(space: Space, members: Iterable[Entry | Placed], owners: Mapping[str, int], world_size: int) -> Space:
    """`space` with one more bucket at its end, in which `members` stand in the order of their owners."""
    begin = offset = space.buckets[-1].stop if space.buckets else 0
    placed, sizes = [], [0] * world_size
    for one in sorted(members, key=lambda member: owners[member.path]):
        placed.append(Placed(one.path, offset, one.numel))
        offset += align(one.numel)
        sizes[owners[one.path]] += align(one.numel)
    bucket = Bucket(begin, offset, tuple(sizes))
    return Space(space.dtype, space.option_group, (*space.parameters, *placed), (*space.buckets, bucket))
