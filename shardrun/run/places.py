"""The model of a plan: built on the meta device, once for each place at which ranks have a part of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardrun.checkpoint.snapshot import model_specs
from shardrun.config.groups import places, replica_sets
from shardrun.config.schema import Config
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import ConfigError, ShardrunError
from shardrun.records.header import TensorBytes
from shardrun.records.tensors import form_bytes
from shardrun.run.build import make_model, selection_notes
from shardrun.run.failure import frames_of
from shardrun.run.groups import find_groups
from shardrun.run.model import (
    PARAMETER_DTYPES,
    cast_parameters,
    distinct_parameters,
    freeze_unselected,
    named_buffers,
    named_tensors,
    refuse_unsound,
    tied_names,
)
from shardrun.run.recipe import Recipe, World
from shardrun.run.state import rank_state
from shardrun.shard.selection import Selection

META = torch.device("meta")


@dataclass(frozen=True)
class Place:
    """Ranks that have the same part of the model, and what it is."""

    ranks: tuple[int, ...]
    selections: Mapping[str, Selection]
    """By group."""
    stored: Mapping[str, list[Any]]
    """Name -> [dtype, shape] of what a model file holds of it, tied tensors once."""
    aliases: Mapping[str, str]
    weights: int
    """Bytes of its parameters, tied ones once."""
    frozen: int
    """Bytes of those that nobody trains."""
    buffers: int
    state: Mapping[str, TensorBytes]
    """What each of its ranks keeps in a file of its own."""
    notes: list[str]


def build_places(config: Config, recipe: Recipe) -> list[Place]:
    """Every place of the world, by its first rank. ConfigError and SelectionError as in a run."""
    return [_build_place(config, recipe, ranks) for ranks in _distinct(config)]


def _distinct(config: Config) -> list[tuple[int, ...]]:
    """Ranks that are in the same replica set of every group have the same parameters."""
    topology = config.topology
    sets = [replica_sets(one.replicas, topology.axes, topology.world_size) for one in config.parts.values()]
    part_of = [{rank: part for part, ranks in enumerate(one) for rank in ranks} for one in sets]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        found.setdefault(tuple(part[rank] for part in part_of), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _build_place(config: Config, recipe: Recipe, ranks: tuple[int, ...]) -> Place:
    axes = config.topology.axes
    coordinates = places(axes)[ranks[0]] if axes else {}
    seed_all(derive_seed(Purpose.MODEL, config.run.seed))  # as a run does; and the same plan at every call
    model = _build_model(recipe, World(ranks[0], config.topology.world_size, dict(axes), coordinates))
    refuse_unsound(model)
    selections = find_groups(model, config.parts, shapes_only=True)
    cast_parameters(model, PARAMETER_DTYPES[config.precision.parameters])
    freeze_unselected(model, {path for one in selections.values() for path in one.parameters})
    notes = [note for name, one in selections.items() for note in selection_notes(name, one, config)]
    parameters = distinct_parameters(model)
    aliases = tied_names(model)
    return Place(
        ranks,
        selections,
        model_specs({name: tensor for name, tensor in named_tensors(model).items() if name not in aliases}),
        aliases,
        weights=sum(one.nbytes for one in parameters.values()),
        frozen=sum(one.nbytes for one in parameters.values() if not one.requires_grad),
        buffers=sum(buffer.nbytes for buffer in named_buffers(model).values()),
        state={name: form_bytes(name, one.dtype, tuple(one.shape)) for name, one in rank_state(model).items()},
        notes=notes,
    )


def _build_model(recipe: Recipe, world: World) -> nn.Module:
    try:
        with META:
            return make_model(recipe, world)
    except ShardrunError:
        raise
    except Exception as error:
        raise ConfigError(
            f"recipe: build_model of {recipe.source} cannot run on the meta device, where a plan builds the model so "
            f"that it takes no memory: {described(error)}; tensors have no values there: leave out what reads them, "
            "such as .item() or torch.load, where a parameter is_meta"
        ) from error


def described(error: Exception) -> str:
    """An error of a recipe's own code, with the place in it."""
    file, line, _ = frames_of(error)[-1]
    return f"{type(error).__name__}: {error} (at {file}:{line})"
