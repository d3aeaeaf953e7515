"""Several groups of parameters: what each trains, on which ranks it is replicated, and by which optimizer.

[Note: replica sets] The ranks are numbered over the axes of the topology, the last axis fastest. A group is replicated
over its replica sets: `world` is one set of all ranks; the name of an axis gives one set for each place on that axis,
whose members are the ranks that stand there. With axes {replicas: 2, experts: 2} and `replicas: experts`, ranks 0 and 2
hold the same experts, and ranks 1 and 3 the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from shardrun.config.optimizers import Optimizer
from shardrun.config.schedule import Schedule
from shardrun.config.section import Broken, Count, Patterns, Section

WORLD = "world"
GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=50)]
Axes = Annotated[dict[GroupName, Count], Field(strict=False)]
RankSets = tuple[tuple[int, ...], ...]
Ranks = Annotated[tuple[int, ...], Field(strict=False)]
RankLists = Annotated[tuple[Ranks, ...], Field(strict=False)]


class Select(Section):
    """The parameters that are trained; all others are frozen."""

    include: Patterns = ("*",)
    """Globs over dotted parameter paths, or re:... for a regular expression."""
    exclude: Patterns = ()
    """Taken out of what include matched."""


class Group(Section):
    """One group of parameters, trained alike and replicated on the same ranks."""

    select: Select = Select()
    """The parameters of the group; every trained parameter is in one group."""
    replicas: str | RankLists = WORLD
    """Where it is replicated: world; an axis, at each of whose places other parameters are; or lists of ranks."""
    reduce: Literal["mean", "sum"] = "mean"
    """mean: divided by the weight of the whole world; sum: not divided, for losses that carry their denominator."""
    optimizer: Optimizer
    """Its optimizer, with options of its own for some of its parameters."""
    schedule: Schedule | None = None
    """Its own learning rate over the updates; null: that of the run."""


def rank_of(coordinates: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """The rank at a place, see [Note: replica sets]."""
    rank = 0
    for axis, size in axes.items():
        rank = rank * size + coordinates[axis]
    return rank


def places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    """The place of every rank, by rank."""
    return [dict(zip(axes, at, strict=True)) for at in product(*(range(size) for size in axes.values()))]


def axis_lines(axis: str, axes: Mapping[str, int]) -> RankSets:
    """The ranks that differ in `axis` only: those that exchange what the axis spreads; one set for each other place."""
    return _sets(axes, [other for other in axes if other != axis])


def replica_sets(replicas: str | Sequence[Sequence[int]], axes: Mapping[str, int], world_size: int) -> RankSets:
    """The replica sets of a group, disjoint and all ranks together."""
    if not isinstance(replicas, str):
        return tuple(tuple(ranks) for ranks in replicas)
    return (tuple(range(world_size)),) if replicas == WORLD else _sets(axes, [replicas])


def _sets(axes: Mapping[str, int], fixed: Sequence[str]) -> RankSets:
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(axes)):
        sets.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
    return tuple(tuple(ranks) for ranks in sets.values())


def replica_problems(given: Any, axes: Mapping[str, int], world_size: int) -> Iterator[str]:
    """What is wrong with the `replicas` of a group, as it was written."""
    if isinstance(given, str):
        if given != WORLD and given not in axes:
            known = ", ".join([WORLD, *axes])
            yield f"{given!r} is no axis of the topology; allowed: {known}, or lists of ranks"
        return
    if not (isinstance(given, list | tuple) and all(isinstance(ranks, list | tuple) for ranks in given)):
        return  # pydantic says so
    ranks = [rank for one in given for rank in one]
    if not all(type(rank) is int for rank in ranks):
        return
    if sorted(ranks) != [*range(world_size)]:
        yield f"{list(map(list, given))} is no partition of the {world_size} ranks; name each of them once"
    elif any(list(one) != sorted(one) for one in given):
        yield f"{list(map(list, given))} has ranks out of order; write each set in rising order"
    elif not all(given):
        yield f"{list(map(list, given))} has an empty set of ranks; leave it out"


def axes_problem(axes: Any, world_size: Any) -> Broken | None:
    """Sizes that do not make up the world."""
    if not isinstance(axes, Mapping) or type(world_size) is not int:
        return None
    count = 1
    for size in axes.values():
        if type(size) is not int:
            return None
        count *= size
    if axes and count != world_size:
        told = " x ".join(f"{name} {size}" for name, size in axes.items())
        return Broken("axes", f"{told} are {count} ranks, but topology.world_size is {world_size}; make them equal")
    return Broken("axes", f"{WORLD} is not the name of an axis; it stands for all ranks") if WORLD in axes else None
