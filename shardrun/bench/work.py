"""The work that every peer does: model, data, loss, seeds, rates and optimizer, as the trainer has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.config.matrices import Factory
from shardrun.config.schema import Config
from shardrun.data.loader import MicroBatchLoader
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.optim.kinds import OptionGroup, any_kind, group_of, resolve_fused
from shardrun.run import model as models
from shardrun.run.build import make_model, schedule_of, training_loader
from shardrun.run.compiling import require_compiler
from shardrun.run.forward import on_device
from shardrun.run.groups import find_groups, open_world
from shardrun.run.recipe import Recipe, World, load_recipe
from shardrun.run.schedule import Schedule


@dataclass
class Work:
    """What a peer trains on this rank. The model is there for the peer to wrap; its paths stay as they are."""

    config: Config
    comm: Communicator
    world: World
    recipe: Recipe
    model: nn.Module
    loader: MicroBatchLoader
    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Of the optimizer, as its class takes them; `lr` is the base rate."""
    option_groups: list[OptionGroup]
    schedule: Schedule
    seeding_s: float = 0.0
    """Seconds that went into random seeds so far, for the dropout of the trainer: no peer is charged with them."""

    def windows(self) -> Iterator[Iterator[tuple[int, Any]]]:
        """This rank's micro-batches (number, batch) of one window after the other."""
        for _, share in self.loader.windows():
            yield share

    def loss(self, module: nn.Module, step: int, number: int, batch: Any) -> tuple[Tensor, int | Tensor]:
        """The loss sum and weight of micro-batch `number`, under the trainer's seed and autocast.

        `module`: the model, or what the peer has wrapped around it.
        """
        began = time.perf_counter()
        seed_all(derive_seed(Purpose.MICRO_BATCH, self.config.run.seed, step, number))
        self.seeding_s += time.perf_counter() - began
        device = self.comm.device
        asked = self.config.precision.autocast == "bf16"
        with torch.autocast(device.type, dtype=torch.bfloat16) if asked else nullcontext():
            return self.recipe.loss(module, on_device(batch, device), self.world)

    def trained(self) -> dict[str, nn.Parameter]:
        """Path -> parameter of what is trained, tied ones once, as the model has them now."""
        return {path: p for path, p in models.distinct_parameters(self.model).items() if p.requires_grad}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The trained parameters in groups as torch.optim takes them, each with `lr_scale`."""
        every = [OptionGroup(frozenset()), *self.option_groups]
        held: list[list[nn.Parameter]] = [[] for _ in every]
        for path, parameter in self.trained().items():
            held[group_of(path, self.option_groups)].append(parameter)
        return [
            {"params": parameters, **group.options, "lr_scale": group.lr_scale}
            for group, parameters in zip(every, held, strict=True)
            if parameters
        ]

    def set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The rates of the update after `step` others."""
        rate = self.options["lr"] * self.schedule.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]


def make_work(config: Config, comm: Communicator) -> Work:
    """The work of this rank; collective."""
    recipe = load_recipe(config.recipe, config.recipe_args)
    world = open_world(comm, config)
    model = starting_model(config, recipe, world)
    models.place_model(model, torch.float32, comm.device)
    (selection,) = find_groups(model, config.parts).values()
    models.freeze_unselected(model, selection.parameters)
    models.checkpoint_activations(model, config.train.activation_checkpointing)
    if config.train.compile:
        require_compiler(comm)
        recipe.compile(deterministic=config.run.deterministic)
    asked = config.optimizer
    assert asked is not None
    assert not isinstance(asked, Factory)  # what cannot be compared is refused before
    options = asked.model_dump(exclude={"name", "strategy", "options"})
    kind = any_kind(asked.name)
    loader = training_loader(config, recipe, comm)
    fused = resolve_fused(options.pop("fused", None), options, comm.device, kind)
    return Work(
        config=config,
        comm=comm,
        world=world,
        recipe=recipe,
        model=model,
        loader=loader,
        optimizer_class=cast(type[torch.optim.Optimizer], kind.cls),  # of torch's own a class, no function
        options={**options, "fused": True} if fused else options,
        option_groups=models.option_groups(
            [
                (one.match, one.model_dump(exclude={"match", "lr_scale"}, exclude_none=True), one.lr_scale)
                for one in asked.options
            ],
            selection.contract(),
        ),
        schedule=schedule_of(config, config.schedule, loader),
    )


def starting_model(config: Config, recipe: Recipe, world: World) -> nn.Module:
    """The model with the parameters from which the training starts, on the CPU."""
    seed_all(derive_seed(Purpose.MODEL, config.run.seed))
    model = make_model(recipe, world)
    models.refuse_unfit(model)
    if config.init_from is not None:
        models.init_from(model, config.init_from)
    return model
