"""The groups of a run: the ranks on which each is replicated, the parameters it trains, and their common step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.config.groups import Group, axis_lines, places, replica_sets
from shardrun.config.schema import Config
from shardrun.errors import SelectionError, by_all
from shardrun.run.optimizer import Sharded, mean_step, streams_gradients
from shardrun.run.recipe import World
from shardrun.run.schedule import Schedule
from shardrun.shard.selection import Selection, select_parameters
from shardrun.step.agreement import MissingGradientPolicy
from shardrun.step.joint_step import take_step


@dataclass(frozen=True)
class TrainedGroup:
    """One group of the config on this rank."""

    name: str
    asked: Group
    comm: Communicator
    """The replica set that this rank is in: the world, or a subgroup of it."""
    selection: Selection
    sharded: Sharded
    """The optimizer over its trainable parameters, which steps them; named as `record_name` says."""
    schedule: Schedule
    exchanging: bool
    """Whether its gradients may come from the samples of other ranks too, as ranks talk inside the model."""

    @property
    def record_name(self) -> str:
        """As checkpoints name what this rank's replica set holds."""
        return self.sharded.name

    @property
    def spread(self) -> bool:
        """Whether other ranks hold other parameters under this name."""
        return self.comm.parent is not None

    def lr(self, updates: int) -> float:
        """The base learning rate of the update after so many."""
        return self.asked.optimizer.lr * self.schedule.factor(updates)


@dataclass(frozen=True)
class Stepped:
    """What came of one step of all groups."""

    grad_norm: float | None
    absent: list[str]
    """Trainable parameters of this rank without a gradient on any rank that has them."""
    moved: bool
    """Whether any parameter of this rank had one."""


def record_name(name: str, part: int, parts: int) -> str:
    """As checkpoints name what one of `parts` replica sets of a group holds."""
    return f"{name}-{part}" if parts > 1 else name


def members(config: Config) -> dict[str, list[int]]:
    """Ranks of every replica set of every group, by the name of its record."""
    found: dict[str, list[int]] = {}
    for name, group in config.parts.items():
        sets = replica_sets(group.replicas, config.topology.axes, config.topology.world_size)
        found |= {record_name(name, part, len(sets)): list(ranks) for part, ranks in enumerate(sets)}
    return found


def open_world(comm: Communicator, config: Config) -> World:
    """What recipes are told of the ranks, with a process group along each axis; collective."""
    axes = config.topology.axes
    groups = {axis: _own(comm, axis_lines(axis, axes)).process_group for axis, size in axes.items() if size > 1}
    return World(comm.rank, comm.world_size, dict(axes), places(axes)[comm.rank] if axes else {}, groups)


def replica_set(comm: Communicator, config: Config, group: Group) -> Communicator:
    """The communicator of the ranks that hold the same parameters of `group` as this one; collective."""
    sets = replica_sets(group.replicas, config.topology.axes, comm.world_size)
    return comm if len(sets) == 1 else _own(comm, sets)


def _own(comm: Communicator, sets: Sequence[Sequence[int]]) -> Communicator:
    """The subgroup that this rank is in, of those that all ranks make in the same order."""
    made = [comm.subgroup(ranks) for ranks in sets]
    return next(one for one in made if one is not None)


def select_groups(comm: Communicator, model: nn.Module, parts: Mapping[str, Group]) -> dict[str, Selection]:
    """What each group selects on this rank; SelectionError on all ranks for what is wrong on any. Collective."""
    found: dict[str, Selection] = {}
    problem: SelectionError | None = None
    try:
        found = find_groups(model, parts)
    except SelectionError as error:
        problem = error
    comm.agree("selection", error=problem)
    return found


def find_groups(model: nn.Module, parts: Mapping[str, Group], *, shapes_only: bool = False) -> dict[str, Selection]:
    """What each group selects of this rank's model; local. `shapes_only`: of a model that may be on the meta device."""
    found = {name: _select(name, model, part, len(parts) > 1, shapes_only) for name, part in parts.items()}
    _require_one_group_each(found)
    return found


def _select(name: str, model: nn.Module, part: Group, several: bool, shapes_only: bool) -> Selection:
    try:
        return select_parameters(model, part.select.include, part.select.exclude, shapes_only=shapes_only)
    except SelectionError as error:
        raise SelectionError(f"groups.{name}.{error}") from None if several else error


def _require_one_group_each(selections: Mapping[str, Selection]) -> None:
    """A parameter in two groups would be stepped twice."""
    taken: dict[str, str] = {}
    for name, selection in selections.items():
        for path in selection.parameters:
            if path in taken:
                raise SelectionError(
                    f"groups: {path} is selected by {taken[path]} and by {name}; exclude it from one of them"
                )
            taken[path] = name


def require_apart(comm: Communicator, groups: Sequence[TrainedGroup]) -> None:
    """What different replica sets of a group train are different tensors, with paths of their own; collective.

    SelectionError on all ranks otherwise: only one of two tensors of one name could be saved.
    """
    spread = {group.record_name: sorted(group.selection.parameters) for group in groups if group.spread}
    if any(comm.agree("spread groups", bool(spread))):
        try:
            refuse_shared_paths(comm.agree("paths of spread groups", spread))
        except SelectionError as error:
            raise by_all(error) from None


def refuse_shared_paths(held: Iterable[Mapping[str, Sequence[str]]]) -> None:
    """SelectionError for a path that records of different names train; each of `held`: name -> its paths."""
    taken: dict[str, str] = {}
    for one in held:
        for name, paths in one.items():
            for path in paths:
                if taken.setdefault(path, name) != name:
                    raise SelectionError(
                        f"groups: {path} is trained by {taken[path]} and by {name}, which are on different ranks; "
                        "give every part of the model the path that it has in the whole one: by global_name"
                    )


def rounds_per_step(config: Config) -> int:
    """All-reduces of a few integers in which a rank takes part for one window, as long as nothing is refused.

    One each for the agreement, norm and finiteness, the vote, and the sums of the log; a joint step has two for the
    agreement of the world, and one more in every group. Where gradients are streamed, one before each backward in which
    they are.
    """
    world_size, axes, parts = config.topology.world_size, config.topology.axes, config.parts.values()
    if world_size == 1:
        return 0
    largest = [max(map(len, replica_sets(one.replicas, axes, world_size))) for one in parts]
    alone = largest == [world_size] and not config.topology.exchanging and all(one.reduce == "mean" for one in parts)
    if not alone:
        return 5 + sum(size > 1 for size in largest)
    (asked,) = (part.optimizer for part in parts)
    return 4 + (reductions_per_step(config) if streams_gradients(config, asked) else 0)


def reductions_per_step(config: Config) -> int:
    """How often the gradients of one window are reduced: once, or for each micro-batch of the rank that has most."""
    sharded = config.train.accumulate == "sharded" and config.topology.world_size > 1
    return micro_batches_of(config) if sharded else 1


def micro_batches_of(config: Config) -> int:
    """Micro-batches of a window on the rank that has most of them."""
    train = config.train
    return micro_batches(train.global_batch_size, train.micro_batch_size, config.topology.world_size)


def micro_batches(window: int, size: int, ranks: int) -> int:
    """The same of a window of so many samples, in micro-batches of `size`."""
    return -(-window // (size * ranks))


def step_groups(
    groups: Sequence[TrainedGroup],
    weight: int | Tensor,
    updates: int,
    missing: MissingGradientPolicy,
    max_grad_norm: float | None,
) -> Stepped:
    """Take one step of all groups, on every rank or on none; collective over the world. Raises what a step raises.

    Where ranks talk inside the model, a rank has gradients of samples of other ranks: it contributes them whatever its
    own weight is.
    """
    rates = {group.record_name: group.lr(updates) for group in groups}
    if len(groups) == 1 and not groups[0].exchanging and groups[0].asked.reduce == "mean":
        sharded = groups[0].sharded
        results = {
            sharded.name: mean_step(sharded)(
                local_weight=weight, lr=rates[sharded.name], missing=missing, max_grad_norm=max_grad_norm
            )
        }
    else:
        results = take_step(
            [group.sharded for group in groups],
            local_weight=weight,
            local_active={g.record_name: g.exchanging or int(weight) > 0 for g in groups if g.asked.reduce == "sum"},
            local_contributes={g.record_name: True for g in groups if g.asked.reduce == "mean" and g.exchanging},
            lr=rates,
            missing=missing,
            max_grad_norm=max_grad_norm,
        )
    absent = [path for result in results.values() for path in result.absent]
    trainable = sum(len(group.sharded.trainable_parameters) for group in groups)
    norm = next(iter(results.values())).grad_norm
    return Stepped(norm, absent, len(absent) < trainable)
