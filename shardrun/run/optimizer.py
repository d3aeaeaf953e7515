"""The optimizer of a run: from its section in the config to the sharded object that steps the session."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardrun.config.elementwise import Matched
from shardrun.config.groups import replica_sets
from shardrun.config.matrices import Factory, FactoryOptionGroup, Muon
from shardrun.config.optimizers import Optimizer
from shardrun.config.rest import RestAdamW
from shardrun.config.schema import Config
from shardrun.errors import ConfigError
from shardrun.optim.kinds import Declared, Kind, any_kind, takes
from shardrun.run.model import matching, option_groups
from shardrun.run.recipe import Recipe
from shardrun.shard.contract import Contract
from shardrun.shard.layout import FlatLayout, closing_numel
from shardrun.shard.owners import planned_order
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.draft import BUCKET_BYTES, Draft, draft_zero1, draft_zero2
from shardrun.step.joint_step import StepResult
from shardrun.step.owned import OwnedOptimizer
from shardrun.step.zero1 import SelectedZero1
from shardrun.step.zero2 import SelectedZero2

Sharded = SelectedZero1 | SelectedZero2
"""Both are a ShardedOptimizer; together they are all that a run can step with."""


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint has the parameters, so that a run that goes on places them alike."""

    order: list[str]
    """Trainable paths in an order that gives the same flat buffers."""
    owners: Mapping[str, int] | None = None
    """Path -> rank, under zero1."""
    bucket_bytes: int | None = None
    """Under zero2, at which buckets close as they do there."""

    @staticmethod
    def of(group: Mapping[str, Any]) -> Placement:
        """From a group of a manifest; LookupError or TypeError if it is none."""
        spaces = FlatLayout.from_json(group["layout"]).spaces
        owners = group["optimizer"].get("owners")
        if owners is None:
            order = [placed.path for space in spaces for placed in space.parameters]
            return Placement(order, bucket_bytes=4 * closing_numel(spaces))
        buckets = [planned_order(space, bucket, owners) for space in spaces for bucket in space.buckets]
        return Placement([placed.path for members in buckets for placed in members], dict(owners))


def shard_optimizer(
    name: str,
    asked: Optimizer,
    config: Config,
    session: SelectedDataParallel,
    recipe: Recipe,
    saved: Placement | None = None,
) -> Sharded:
    """The optimizer that is `asked` for over the session's trainable parameters; collective over its group.

    Owners and buckets are those of `saved`, if it is about these parameters and ranks.
    """
    optimizer, given = _arguments(asked, config, session.contract, session.order, recipe)
    if asked.strategy == "zero2":
        given["bucket_bytes"] = _saved_buckets(saved, session) or given["bucket_bytes"]
        return SelectedZero2(session, optimizer, name=name, **given)
    return SelectedZero1(session, optimizer, name=name, owners=_saved_owners(saved, session), **given)


def draft_optimizer(
    asked: Optimizer, config: Config, contract: Contract, order: Sequence[str], recipe: Recipe
) -> Draft:
    """What `shard_optimizer` makes its sharded optimizer from; local, and without memory."""
    optimizer, given = _arguments(asked, config, contract, order, recipe)
    return (draft_zero2 if asked.strategy == "zero2" else draft_zero1)(contract, order, optimizer, **given)


def streams_gradients(config: Config, asked: Optimizer) -> bool:
    """Whether gradients are reduced inside backward and not kept, as a run never tries a window again.

    Not where the config asks to keep them, nor where sessions or the model itself have exchanges of their own, whose
    order in a backward nobody knows. ConfigError where they would have to be.
    """
    parts, topology = list(config.parts.values()), config.topology
    sets = [replica_sets(part.replicas, topology.axes, topology.world_size) for part in parts]
    alone = sum(map(len, sets)) == 1 and parts[0].reduce == "mean" and not topology.exchanging
    streams = alone and asked.strategy == "zero2" and config.train.stream_gradients
    if config.train.accumulate == "sharded" and not streams:
        found = f"strategy {asked.strategy}"
        if not alone:
            found = f"{len(parts)} groups in {sum(map(len, sets))} replica sets, axes {topology.axes or 'none'}"
        raise ConfigError(
            f"train.accumulate: sharded is for one group of all ranks under zero2 that is reduced by its mean, without "
            f"axes; found {found}; use local"
        )
    return streams


def _arguments(
    asked: Optimizer, config: Config, contract: Contract, order: Sequence[str], recipe: Recipe
) -> tuple[str | Declared, dict[str, Any]]:
    """The optimizer as the step takes it, and what goes with it."""
    optimizer = _declared(asked, recipe) if isinstance(asked, Factory) else asked.name
    given = {
        "option_groups": option_groups([(g.match, _group_options(g), g.lr_scale) for g in asked.options], contract),
        "masters": config.precision.master_weights,
        **_options(asked),
    }
    if asked.strategy == "zero2":
        # Over sockets every bucket takes messages to all ranks and their answers, however small it is.
        bucket_bytes = None if config.topology.shared_memory else BUCKET_BYTES
        return optimizer, {**given, "stream_gradients": streams_gradients(config, asked), "bucket_bytes": bucket_bytes}
    rest = (asked.rest if isinstance(asked, Muon | Factory) else None) or RestAdamW(name="adamw")
    left = matching(rest.match, contract, "optimizer.rest.match") if rest.match else frozenset()
    _require_any(optimizer, contract, order, left)
    rest_options = rest.model_dump(exclude={"name", "match"}) | {"lr": asked.lr if rest.lr is None else rest.lr}
    return optimizer, {**given, "rest": rest.name, "rest_options": rest_options, "rest_paths": left}


def _saved_owners(saved: Placement | None, session: SelectedDataParallel) -> Mapping[str, int] | None:
    if saved is None or saved.owners is None or saved.owners.keys() != set(session.order):
        return None
    return saved.owners if all(rank in range(session.comm.world_size) for rank in saved.owners.values()) else None


def _saved_buckets(saved: Placement | None, session: SelectedDataParallel) -> int | None:
    return saved.bucket_bytes if saved is not None and set(saved.order) == set(session.order) else None


def mean_step(sharded: Sharded) -> Callable[..., StepResult]:
    """The step by the exact mean, whose gradients stay FP32 where there are masters for them, under any strategy."""
    return sharded.step_fp32 if isinstance(sharded, SelectedZero1) and sharded.masters else sharded.step


@dataclass(frozen=True)
class Share:
    """One optimizer of a session, and what it steps, on whichever rank."""

    kind: Kind
    optimizer: torch.optim.Optimizer
    """The live object over what this rank steps."""
    paths: list[list[str]]
    """The parameters of each of its param groups."""


def shares(sharded: Sharded) -> list[Share]:
    """The optimizers of the session: one, or under zero1 that of the rest as well."""
    stepper = sharded.stepper
    kinds, optimizers = [sharded.kind], [stepper.optimizer]
    if isinstance(stepper, OwnedOptimizer):
        told, optimizers = stepper.summary(), stepper.optimizers
        kinds += [any_kind(told["rest"])] if "rest" in told else []
    members: dict[int, list[str]] = {}
    for space in sharded.layout.spaces:
        members.setdefault(space.option_group, []).extend(placed.path for placed in space.parameters)
    found, begin = [], 0
    for kind, optimizer in zip(kinds, optimizers, strict=True):
        end = begin + len(optimizer.param_groups)
        found.append(Share(kind, optimizer, [members.get(group, []) for group in range(begin, end)]))
        begin = end
    return found


def state_keys(sharded: Sharded, name: str, options: Mapping[str, Any]) -> Sequence[str]:
    """State tensors that the session's optimizer `name` keeps under `options`; none of those that only a step shows."""
    kind = next((share.kind for share in shares(sharded) if share.kind.name == name), None) or any_kind(name)
    return () if kind.declared is not None else kind.keys(options)


def _declared(asked: Factory, recipe: Recipe) -> Declared:
    make = recipe.factory(asked.factory)
    return Declared(make, asked.kind, asked.factory, _is_matrix if asked.takes == "matrices" else None)


def _is_matrix(shape: Sequence[int]) -> bool:
    return len(shape) == 2


def _options(asked: Optimizer) -> dict[str, Any]:
    if not isinstance(asked, Factory):
        return asked.model_dump(exclude={"name", "strategy", "options", "rest"})
    ours = {*inspect.signature(SelectedZero1).parameters, *inspect.signature(SelectedZero2).parameters}
    if taken := sorted(ours & asked.factory_options.keys()):
        raise ConfigError(
            f"optimizer.factory_options.{taken[0]}: a name of shardrun's own, which cannot be handed to "
            f"{asked.factory}; give its argument another name in the recipe"
        )
    return {"lr": asked.lr, **asked.factory_options}


def _group_options(asked: Matched) -> dict[str, Any]:
    if isinstance(asked, FactoryOptionGroup):
        return dict(asked.factory_options)
    return asked.model_dump(exclude={"match", "lr_scale"}, exclude_none=True)


def _require_any(optimizer: str | Declared, contract: Contract, order: Sequence[str], left: frozenset[str]) -> None:
    """An optimizer that would have nothing to step is a mistake, and the rest alone needs none beside it."""
    kind = any_kind(optimizer)
    trainable = set(order)
    specs = [spec for spec in contract.distinct() if spec.path in trainable]
    if not any(takes(kind, spec.shape) for spec in specs if spec.path not in left):
        raise ConfigError(
            f"optimizer: {kind.name} has nothing to step: none of the {len(specs)} selected trainable parameters is "
            "one that it takes and that is not left to the rest; write the optimizer of the rest alone"
        )
