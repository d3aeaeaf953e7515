"""From a config to objects: the only place where the config document meets torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shardrun.comm.communicator import Communicator
from shardrun.comm.config import CommunicatorConfig
from shardrun.config.groups import replica_sets
from shardrun.config.matrices import Factory
from shardrun.config.schedule import Schedule as ScheduleConfig
from shardrun.config.schema import Config
from shardrun.data.loader import MicroBatchLoader
from shardrun.data.order import windows_per_epoch
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import ConfigError, LaunchError, SelectionError, ShardrunError, UsageError
from shardrun.run import model as models
from shardrun.run.compiling import require_compiler
from shardrun.run.groups import (
    TrainedGroup,
    members,
    open_world,
    record_name,
    replica_set,
    require_apart,
    select_groups,
)
from shardrun.run.optimizer import Placement, shard_optimizer
from shardrun.run.recipe import Recipe, World, load_recipe
from shardrun.run.schedule import Schedule
from shardrun.shard.selection import Selection, name_globally
from shardrun.step.agreement import MissingGradientPolicy
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.zero2 import SelectedZero2

_VAL_MICRO_BATCHES = 8  # of each rank in a window of the validation


@dataclass
class Built:
    """Everything that one worker trains with."""

    config: Config
    comm: Communicator
    world: World
    recipe: Recipe
    model: nn.Module
    groups: list[TrainedGroup]
    """What is trained, in the order of the config."""
    loader: MicroBatchLoader
    val_loader: MicroBatchLoader | None
    """Goes over the val split in order; None where no validation is asked for."""
    missing: MissingGradientPolicy
    autocast: bool
    notes: list[str]
    in_parts: bool
    """Whether the ranks have different parts of the model, trained or not; the same on all ranks."""
    buffer_forms: dict[str, str]
    """Shape and dtype of every buffer as the recipe built it: what a restore can put back."""

    @property
    def selected(self) -> dict[str, nn.Parameter]:
        """Path -> parameter, of all groups."""
        return {path: p for group in self.groups for path, p in group.selection.parameters.items()}

    @property
    def spread(self) -> list[tuple[Communicator, Collection[str]]]:
        """What only some ranks train alike: their communicator and the paths."""
        return [(group.comm, group.selection.parameters) for group in self.groups if group.spread]

    @property
    def exchanging(self) -> bool:
        """Whether ranks talk inside the model, so that each has to run the same number of micro-batches."""
        return self.config.topology.exchanging

    @property
    def streaming(self) -> SelectedZero2 | None:
        """The session whose gradients are reduced inside backward; None if they are kept for the step."""
        first = self.groups[0].sharded
        return first if isinstance(first, SelectedZero2) and first.streams else None

    @property
    def accumulates_sharded(self) -> bool:
        """Whether each micro-batch is reduced by itself; a rank alone has nothing to gain from it."""
        return self.config.train.accumulate == "sharded" and self.comm.world_size > 1

    @property
    def stop_position(self) -> int | None:
        """The data position at which the run ends, if its length is given in epochs."""
        return None if self.config.train.epochs is None else self.config.train.epochs * self.loader.samples


def backend_of(config: Config) -> str:
    """What the ranks would talk by if the run were started on this machine: "gloo" or "nccl"; local."""
    if config.topology.backend != "auto":
        return config.topology.backend
    return "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"


def open_communicator(config: Config) -> Communicator:
    """Join the world that the environment describes, as the config's topology says. Every rank calls it."""
    torch.set_num_threads(config.topology.threads_per_rank)
    torch.set_float32_matmul_precision(config.precision.matmul)
    topology, backend = config.topology, backend_of(config)
    if backend == "nccl" and not torch.cuda.is_available():
        raise LaunchError("topology.backend is nccl, but this machine shows no GPU; use gloo or auto")
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    joined = CommunicatorConfig.from_env(
        backend=backend,
        timeout_s=topology.timeout_s,
        init_timeout_s=topology.init_timeout_s,
        allow_non_loopback=topology.allow_non_loopback,
        shared_memory=topology.shared_memory,
    )
    if joined.world_size != topology.world_size:
        raise ConfigError(
            f"topology.world_size is {topology.world_size}, but {joined.world_size} ranks were started; make them equal"
        )
    return Communicator.open(joined)


def build(config: Config, comm: Communicator, saved: Mapping[str, Placement] | None = None) -> Built:
    """Recipe, model, groups and data of this rank. Collective; differences are refused.

    `saved` has the placement of each group's parameters in the checkpoint to go on from: a model that defines its
    parameters in another order than the one that was saved is the same model.
    """
    recipe = load_recipe(config.recipe, config.recipe_args)
    world = open_world(comm, config)
    seed_all(derive_seed(Purpose.MODEL, config.run.seed))
    model = make_model(recipe, world)
    models.refuse_unfit(model)
    # Before the cast, which would part tensors that share memory without a word.
    selections = select_groups(comm, model, config.parts)
    dtype = models.PARAMETER_DTYPES[config.precision.parameters]
    models.place_model(model, dtype, comm.device)
    notes = _model_notes(model, dtype)
    names = models.all_names(comm, model)
    if config.init_from is not None:
        models.init_from(model, config.init_from, names or ())
    selected = {path for selection in selections.values() for path in selection.parameters}
    unselected = models.freeze_unselected(model, selected)
    notes += [note for name, selection in selections.items() for note in selection_notes(name, selection, config)]
    if names is not None and recipe.on_save is not None:
        notes.append(
            "on_save of the recipe is given the part of the model that rank 0 has; `shardrun export` writes all"
        )
    apart = bool(world.axes) or len(members(config)) > len(config.parts)
    differed = models.compare_unselected(comm, model, unselected, config.topology.sync_unselected, apart=apart)
    if differed:
        notes.append(f"{differed} unselected tensors differed between ranks and were overwritten by rank 0's")
    checkpointed = models.checkpoint_activations(model, config.train.activation_checkpointing)
    if checkpointed:
        notes.append(f"activations of {checkpointed} modules are computed again in backward")
    if config.train.compile:
        require_compiler(comm)
        recipe.compile(deterministic=config.run.deterministic)
        notes.append("model and loss are compiled at their first batch, and again for every other shape of one")
    loader = training_loader(config, recipe, comm)
    groups = [_group(name, config, comm, model, selections[name], recipe, loader, saved or {}) for name in config.parts]
    require_apart(comm, groups)
    notes += _factory_notes(config)
    return Built(
        config=config,
        comm=comm,
        world=world,
        recipe=recipe,
        model=model,
        groups=groups,
        loader=loader,
        val_loader=_val_loader(config, recipe, comm),
        missing=MissingGradientPolicy(config.train.missing_gradients),
        autocast=config.precision.autocast == "bf16",
        notes=notes,
        in_parts=names is not None,
        buffer_forms=models.buffer_forms(model),
    )


def make_model(recipe: Recipe, world: World) -> nn.Module:
    """The recipe's model, or this rank's part of it, known by the names that it has in the whole one."""
    model = recipe.build_model(world)
    if recipe.global_name is not None:
        name_globally(model, partial(_global_name, recipe.global_name, world))
    return model


def _global_name(named: Callable[[str, World], str], world: World, path: str) -> str:
    return named(path, world)


def _group(
    name: str,
    config: Config,
    comm: Communicator,
    model: nn.Module,
    selection: Selection,
    recipe: Recipe,
    loader: MicroBatchLoader,
    saved: Mapping[str, Placement],
) -> TrainedGroup:
    asked = config.parts[name]
    own = replica_set(comm, config, asked)
    sets = replica_sets(asked.replicas, config.topology.axes, comm.world_size)
    part = sets.index(own.ranks) if own is not comm else 0
    name_on_disk = record_name(name, part, len(sets))
    placement = saved.get(name_on_disk)
    try:
        session = SelectedDataParallel(own, model, selection, None if placement is None else placement.order)
        sharded = shard_optimizer(name_on_disk, asked.optimizer, config, session, recipe, placement)
    except ShardrunError as error:
        error.agreed &= own is comm  # a replica set has agreed on it, the rest of the world has not heard of it
        raise
    schedule = schedule_of(config, asked.schedule or config.schedule, loader)
    exchanging = config.topology.exchanging or own is not comm
    return TrainedGroup(name, asked, own, selection, sharded, schedule, exchanging)


def _model_notes(model: nn.Module, dtype: torch.dtype) -> list[str]:
    notes = []
    kept = [module for module in model.modules() if models.keeps_format(module)] if dtype != torch.float32 else []
    if kept:
        notes.append(f"parameters of {len(kept)} norms with running statistics keep their format, as the buffers do")
    if not model.training:
        notes.append("build_model left the model in eval mode, and so it is trained: without dropout, for example")
    return notes


def selection_notes(name: str, selection: Selection, config: Config) -> list[str]:
    """What a user should know of a group's selection; SelectionError if it trains nothing."""
    where = f"groups.{name}: " if config.groups else ""
    trainable = [path for path, parameter in selection.parameters.items() if parameter.requires_grad]
    if not trainable:
        raise SelectionError(f"{where}select: nothing that is selected is trainable; the recipe froze all of it")
    notes = [f"{where}{path} is selected as another name of a selected tensor" for path in selection.added]
    frozen = len(selection.parameters) - len(trainable)
    if frozen:
        notes.append(f"{where}{frozen} selected parameters are frozen by the recipe: kept as they are, not sharded")
    return notes


def _factory_notes(config: Config) -> list[str]:
    factories = [part.optimizer for part in config.parts.values() if isinstance(part.optimizer, Factory)]
    return [
        f"optimizer: {asked.factory} of the recipe is declared {asked.kind}; a few small tensors were stepped to check "
        "that, which finds the usual mistakes and is no proof"
        for asked in factories
    ]


def training_loader(config: Config, recipe: Recipe, comm: Communicator) -> MicroBatchLoader:
    """What feeds this rank with the train split; local."""
    return MicroBatchLoader(
        recipe.build_data("train"),
        recipe.collate,
        seed=config.run.seed,
        rank=comm.rank,
        world_size=comm.world_size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin=comm.device.type == "cuda",
    )


def _val_loader(config: Config, recipe: Recipe, comm: Communicator) -> MicroBatchLoader | None:
    """Made before the first step, so that a val split that is not there is told at once and not hours later."""
    if config.eval.every is None and not config.eval.at_end:
        return None
    try:
        return MicroBatchLoader(
            recipe.build_data("val"),
            recipe.collate,
            seed=config.run.seed,
            rank=comm.rank,
            world_size=comm.world_size,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.micro_batch_size * comm.world_size * _VAL_MICRO_BATCHES,
            shuffle=False,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            pin=comm.device.type == "cuda",
        )
    except UsageError as error:
        raise UsageError(f"val split (eval.every, eval.at_end): {error}") from error


def schedule_of(config: Config, asked: ScheduleConfig, loader: MicroBatchLoader) -> Schedule:
    """The learning rate over the updates, stretched over the length of the run where `asked` gives none; local."""
    train = config.train
    total = asked.total_steps or train.steps
    if total is None and train.epochs is not None:
        total = train.epochs * windows_per_epoch(loader.samples, train.global_batch_size, config.data.drop_last)
    if total is None and asked.name != "constant":
        raise ConfigError(
            f"schedule.total_steps: null, but a {asked.name} schedule over train.tokens needs the number of updates"
        )
    return Schedule(asked.name, asked.warmup_steps, asked.min_lr_ratio, total or 1)
