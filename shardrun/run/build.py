"""From a config to objects: the only place where the config document meets torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn

from shardrun.comm.communicator import Communicator
from shardrun.comm.config import CommunicatorConfig
from shardrun.config.matrices import Factory
from shardrun.config.schema import Config
from shardrun.data.loader import MicroBatchLoader
from shardrun.data.order import windows_per_epoch
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import ConfigError, LaunchError, SelectionError, UsageError
from shardrun.run import model as models
from shardrun.run.optimizer import Placement, Sharded, shard_optimizer
from shardrun.run.recipe import Recipe, World, load_recipe
from shardrun.run.schedule import Schedule
from shardrun.shard.selection import Selection, select_parameters
from shardrun.step.agreement import MissingGradientPolicy
from shardrun.step.data_parallel import SelectedDataParallel

_VAL_MICRO_BATCHES = 8  # of each rank in a window of the validation


@dataclass
class Built:
    """Everything that one worker trains with."""

    config: Config
    comm: Communicator
    world: World
    recipe: Recipe
    model: nn.Module
    selection: Selection
    sharded: Sharded
    """The optimizer over the selected trainable parameters, which steps them."""
    loader: MicroBatchLoader
    val_loader: MicroBatchLoader | None
    """Goes over the val split in order; None where no validation is asked for."""
    schedule: Schedule
    missing: MissingGradientPolicy
    autocast: bool
    notes: list[str]
    buffer_forms: dict[str, str]
    """Shape and dtype of every buffer as the recipe built it: what a restore can put back."""

    @property
    def stop_position(self) -> int | None:
        """The data position at which the run ends, if its length is given in epochs."""
        return None if self.config.train.epochs is None else self.config.train.epochs * self.loader.samples


def open_communicator(config: Config) -> Communicator:
    """Join the world that the environment describes, as the config's topology says. Every rank calls it."""
    torch.set_num_threads(config.topology.threads_per_rank)
    topology = config.topology
    backend = topology.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"
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
    )
    if joined.world_size != topology.world_size:
        raise ConfigError(
            f"topology.world_size is {topology.world_size}, but {joined.world_size} ranks were started; make them equal"
        )
    return Communicator.open(joined)


def build(config: Config, comm: Communicator, saved: Placement | None = None) -> Built:
    """Recipe, model, selection, session, optimizer and data of this rank. Collective; differences are refused.

    `saved` is the placement of parameters in the checkpoint to go on from: a model that defines its parameters in
    another order than the one that was saved is the same model.
    """
    recipe = load_recipe(config.recipe, config.recipe_args)
    world = World(comm.rank, comm.world_size)
    seed_all(derive_seed(Purpose.MODEL, config.run.seed))
    model = recipe.build_model(world)
    models.refuse_unfit(model)
    # Before the cast, which would part tensors that share memory without a word.
    selection = select_parameters(model, config.select.include, config.select.exclude, comm=comm)
    dtype = models.PARAMETER_DTYPES[config.precision.parameters]
    models.place_model(model, dtype, comm.device)
    notes = _model_notes(model, dtype)
    if config.init_from is not None:
        models.init_from(model, config.init_from)
    models.freeze_unselected(selection)
    notes += _selection_notes(selection)
    differed = models.compare_unselected(comm, model, selection, config.topology.sync_unselected)
    if differed:
        notes.append(f"{differed} unselected tensors differed between ranks and were overwritten by rank 0's")
    checkpointed = models.checkpoint_activations(model, config.train.activation_checkpointing)
    if checkpointed:
        notes.append(f"activations of {checkpointed} modules are computed again in backward")
    session = SelectedDataParallel(comm, model, selection, None if saved is None else saved.order)
    notes += _factory_notes(config)
    loader = _loader(config, recipe, comm)
    return Built(
        config=config,
        comm=comm,
        world=world,
        recipe=recipe,
        model=model,
        selection=selection,
        sharded=shard_optimizer(config, session, recipe, saved),
        loader=loader,
        val_loader=_val_loader(config, recipe, comm),
        schedule=_schedule(config, loader),
        missing=MissingGradientPolicy(config.train.missing_gradients),
        autocast=config.precision.autocast == "bf16",
        notes=notes,
        buffer_forms=models.buffer_forms(model),
    )


def _model_notes(model: nn.Module, dtype: torch.dtype) -> list[str]:
    notes = []
    kept = [module for module in model.modules() if models.keeps_format(module)] if dtype != torch.float32 else []
    if kept:
        notes.append(f"parameters of {len(kept)} norms with running statistics keep their format, as the buffers do")
    if not model.training:
        notes.append("build_model left the model in eval mode, and so it is trained: without dropout, for example")
    return notes


def _selection_notes(selection: Selection) -> list[str]:
    trainable = [path for path, parameter in selection.parameters.items() if parameter.requires_grad]
    if not trainable:
        raise SelectionError("select: nothing that is selected is trainable; the recipe froze all of it")
    notes = [f"{path} is selected as another name of a selected tensor" for path in selection.added]
    frozen = len(selection.parameters) - len(trainable)
    if frozen:
        notes.append(f"{frozen} selected parameters are frozen by the recipe: kept as they are, not sharded")
    return notes


def _factory_notes(config: Config) -> list[str]:
    asked = config.optimizer
    if not isinstance(asked, Factory):
        return []
    told = f"optimizer: {asked.factory} of the recipe is declared {asked.kind}"
    return [f"{told}; a few small tensors were stepped to check that, which finds the usual mistakes and is no proof"]


def _loader(config: Config, recipe: Recipe, comm: Communicator) -> MicroBatchLoader:
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
        )
    except UsageError as error:
        raise UsageError(f"val split (eval.every, eval.at_end): {error}") from error


def _schedule(config: Config, loader: MicroBatchLoader) -> Schedule:
    asked, train = config.schedule, config.train
    total = asked.total_steps or train.steps
    if total is None and train.epochs is not None:
        total = train.epochs * windows_per_epoch(loader.samples, train.global_batch_size, config.data.drop_last)
    if total is None and asked.name != "constant":
        raise ConfigError(
            f"schedule.total_steps: null, but a {asked.name} schedule over train.tokens needs the number of updates"
        )
    return Schedule(asked.name, asked.warmup_steps, asked.min_lr_ratio, total or 1)
