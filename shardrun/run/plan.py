"""What a run would hold, send and save on every rank of a world, without starting it: one process, no memory for it.

Layouts, owners, forms of state and sizes of files come from the functions that the run itself uses. What they need of
the model are shapes, so it is built on the meta device (see run/places.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardrun.checkpoint.files import MODEL_METADATA, file_metadata, kept_on_disk
from shardrun.checkpoint.manifest import MAX_BYTES, canonical_json
from shardrun.checkpoint.store import model_file, record_file, state_file
from shardrun.comm.agreement import ROUND_BYTES
from shardrun.comm.cost_model import SHARED, read_bytes
from shardrun.config.groups import replica_sets
from shardrun.config.schema import Config
from shardrun.errors import ConfigError, ShardrunError
from shardrun.records.header import TensorBytes, planned_bytes
from shardrun.records.header_parser import DTYPE_NAMES
from shardrun.records.tensors import form_bytes
from shardrun.run.build import backend_of
from shardrun.run.groups import (
    micro_batches_of,
    record_name,
    reductions_per_step,
    refuse_shared_paths,
    rounds_per_step,
)
from shardrun.run.model_files import join_parts
from shardrun.run.optimizer import draft_optimizer
from shardrun.run.places import Place, build_places, described
from shardrun.run.recipe import Recipe, load_recipe
from shardrun.run.state import new_run_id
from shardrun.shard.flat_buffer import DTYPES
from shardrun.step.draft import CutDraft
from shardrun.step.footprint import Footprint
from shardrun.step.session import trainable_order

Piece = tuple[str, int, bool]
"""A fragment as far as the size of a file depends on it: path, elements, and whether it begins the parameter."""
_CODES = {name: code for code, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class PlannedFile:
    """A file of a checkpoint."""

    path: str
    role: str
    rank: int
    """Who writes it."""
    bytes: int


@dataclass(frozen=True)
class Held:
    """What one rank holds of a group, and moves in a step, in bytes; the first three as in `RankBytes`."""

    pending: int
    in_step: int
    state: int
    reduce_sent: int
    """Sent to the other ranks, in all reductions of a step, see `sent_bytes`; 0 where they read in place."""
    gather_sent: int
    reduce_read: int
    """Read in the memory of the other ranks, see `read_bytes`; 0 where it is sent."""
    gather_read: int


@dataclass
class PlannedGroup:
    """One replica set of a group of the config."""

    name: str
    record: str
    """As checkpoints name what this replica set holds."""
    strategy: str
    ranks: tuple[int, ...]
    footprint: Footprint
    reductions: int
    """How often its gradients are reduced in a step."""
    in_place: bool
    """Whether its ranks read each other's memory; else all is sent."""
    _sizes: dict[tuple[Piece, ...], int] = field(default_factory=dict)
    """Bytes of the files of records that hold the same."""
    _pieces: dict[Piece, dict[str, TensorBytes]] = field(default_factory=dict)

    @cached_property
    def elements(self) -> int:
        """Trained elements."""
        return sum(spec.numel for spec in self.footprint.draft.specs.values())

    @property
    def streams(self) -> bool:
        """Whether its gradients are reduced inside backward, and not kept."""
        draft = self.footprint.draft
        return isinstance(draft, CutDraft) and draft.streams

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return sum(len(space.buckets) for space in self.footprint.layout.spaces)

    @cached_property
    def held(self) -> list[Held]:
        """What each of its ranks holds and moves."""
        held = self.footprint.held
        if self.in_place:
            moved = [(0, 0, self.reductions * reduced, gathered) for reduced, gathered in self._read()]
        else:
            moved = [(self.reductions * one.reduce_sent, one.gather_sent, 0, 0) for one in held]
        return [Held(one.pending, one.in_step, one.state, *of) for one, of in zip(held, moved, strict=True)]

    def _read(self) -> list[tuple[int, int]]:
        """By rank: what it reads of the others in one reduction and in the gather."""
        read = np.zeros((len(self.ranks), 2), dtype=np.int64)
        for space in self.footprint.layout.spaces:
            splits = np.array([bucket.splits(len(self.ranks)) for bucket in space.buckets]).sum(axis=0)
            read += np.array(read_bytes(splits.tolist(), DTYPES[space.dtype].itemsize), dtype=np.int64)
        return [(reduced, gathered) for reduced, gathered in read.tolist()]

    @cached_property
    def digest(self) -> str:
        """Of its contract."""
        return self.footprint.draft.contract.digest

    def to_json(self) -> dict[str, Any]:
        """What it is, as plain JSON."""
        draft = self.footprint.draft
        return {
            "name": self.name,
            "record": self.record,
            "strategy": self.strategy,
            "optimizers": {share.kind.name: len(share.paths) for share in draft.shares if share.paths},
            "gradients": "streamed" if self.streams else "kept",
            "ranks": list(self.ranks),
            "tensors": len(draft.specs),
            "elements": self.elements,
        }

    def record_bytes(self, number: int, step: int, run: str) -> int:
        """Size of the file of the record of its rank `number`."""
        fragments = self.footprint.fragments(number)
        same = tuple((path, stop - start, start == 0) for path, (start, stop) in fragments.items())
        if same not in self._sizes:
            tensors = {name: one for piece in same for name, one in self._kept(piece).items()}
            self._sizes[same] = planned_bytes(tensors, file_metadata(step, run, {"contract": self.digest}))
        return self._sizes[same]

    def _kept(self, piece: Piece) -> dict[str, TensorBytes]:
        """What a file holds of a fragment."""
        if piece not in self._pieces:
            path, numel, begins = piece
            forms = self.footprint.recorded(path, numel)
            tensors = {name: form_bytes(name, dtype, shape) for name, (shape, dtype) in forms.items()}
            dims = {name: len(shape) for name, (shape, _) in forms.items()}
            self._pieces[piece] = kept_on_disk(tensors, dims, {path: [0 if begins else 1]})
        return self._pieces[piece]


@dataclass(frozen=True)
class Planned:
    """A run on `world_size` ranks."""

    config: Config
    places: list[Place]
    groups: list[PlannedGroup]
    files: list[PlannedFile]
    """Of a checkpoint of the last step, but for its manifest."""
    rounds: int
    """Rounds of a few integers in each step."""
    transport: str
    """How gradients and slices travel, see `transport`."""
    notes: list[str]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.config.topology.world_size

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return sum(file.bytes for file in self.files)

    def ranks(self) -> Iterator[tuple[int, Place, dict[str, Held]]]:
        """Every rank, its place, and by group what it holds and moves."""
        place_of = {rank: place for place in self.places for rank in place.ranks}
        held: dict[int, dict[str, Held]] = {rank: {} for rank in range(self.world_size)}
        for group in self.groups:
            for rank, one in zip(group.ranks, group.held, strict=True):
                held[rank][group.name] = one
        for rank, groups in held.items():
            yield rank, place_of[rank], groups

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON; sizes in bytes."""
        axes = self.config.topology.axes
        return {
            "world_size": self.world_size,
            "axes": dict(axes),
            "groups": [group.to_json() for group in self.groups],
            "ranks": [
                {
                    "rank": rank,
                    "weights": place.weights,
                    "frozen": place.frozen,
                    "buffers": place.buffers,
                    "groups": {name: asdict(one) for name, one in groups.items()},
                }
                for rank, place, groups in self.ranks()
            ],
            "transport": self.transport,
            "rounds_per_step": self.rounds,
            "bytes_per_round": ROUND_BYTES,
            "files": [asdict(file) for file in self.files],
            "checkpoint_bytes": self.checkpoint_bytes,
            "notes": self.notes,
        }


def plan(config: Config) -> Planned:
    """Plan the run of `config`; local. ConfigError, SelectionError and UsageError for what a run would refuse."""
    recipe = _load_recipe(config)
    found = build_places(config, recipe)
    groups = list(_groups(config, recipe, found))
    spread = [group for group in groups if len(group.ranks) < config.topology.world_size]
    refuse_shared_paths({one.record: [spec.path for spec in one.footprint.draft.contract.specs]} for one in spread)
    notes = list(dict.fromkeys(note for place in found for note in place.notes))
    notes += [
        f"the state of {name} is not known before its first update, and not counted"
        for name in sorted({name for group in groups for name in group.footprint.unknown})
    ]
    files = [*_model_files(config, found), *_records(config, groups), *_states(config, found)]
    notes += [*_waiting_notes(config, groups), *_manifest_notes(groups)]
    return Planned(config, found, groups, files, rounds_per_step(config), transport(config), notes)


def transport(config: Config) -> str:
    """What `Communicator.transport` would say of a run that is started on this machine, and cannot leave it."""
    topology = config.topology
    if topology.world_size == 1:
        return "nothing is sent"
    if backend_of(config) == "nccl":
        return "NCCL"
    if not topology.shared_memory:
        return "sockets (switched off)"
    if topology.allow_non_loopback:
        return "sockets (hosts may be several; groups on one of them read in place)"
    return SHARED if hasattr(os, "memfd_create") else "sockets (this system has no memory without a name)"


def _load_recipe(config: Config) -> Recipe:
    try:
        return load_recipe(config.recipe, config.recipe_args)
    except ShardrunError:
        raise
    except Exception as error:
        raise ConfigError(f"recipe: {config.recipe} cannot be loaded: {described(error)}") from error


def _groups(config: Config, recipe: Recipe, found: Sequence[Place]) -> Iterator[PlannedGroup]:
    place_of = {rank: place for place in found for rank in place.ranks}
    for name, asked in config.parts.items():
        sets = replica_sets(asked.replicas, config.topology.axes, config.topology.world_size)
        for part, ranks in enumerate(sets):
            selection = place_of[ranks[0]].selections[name]
            contract = selection.contract()
            order = trainable_order(selection.parameters, contract)
            draft = draft_optimizer(asked.optimizer, config, contract, order, recipe)
            yield PlannedGroup(
                name,
                record_name(name, part, len(sets)),
                asked.optimizer.strategy,
                ranks,
                Footprint(draft, len(ranks)),
                reductions=reductions_per_step(config),
                in_place=transport(config) == SHARED,
            )


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def _told(config: Config, metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file that the last step writes; its length is all that counts."""
    return file_metadata(config.train.steps or 1, new_run_id(), metadata)


def _model_files(config: Config, found: Sequence[Place]) -> Iterator[PlannedFile]:
    parts, problem = join_parts({place.ranks[0]: (place.stored, place.aliases) for place in found})
    if problem:
        raise ConfigError(f"recipe: {problem}")
    written: dict[int, dict[str, TensorBytes]] = {}
    for name, rank in parts.holder.items():
        code, shape = parts.specs[name]
        written.setdefault(rank, {})[name] = TensorBytes(_CODES[code], tuple(shape), bytes)
    for number, (rank, tensors) in enumerate(sorted(written.items())):
        size = planned_bytes(tensors, _told(config, MODEL_METADATA))
        yield PlannedFile(model_file(number, len(written)), "model", rank, size)


def _records(config: Config, groups: Sequence[PlannedGroup]) -> Iterator[PlannedFile]:
    step, run = config.train.steps or 1, new_run_id()
    for group in groups:
        for number, rank in enumerate(group.ranks):
            path = record_file(group.record, number, len(group.ranks), group.strategy)
            yield PlannedFile(path, "record", rank, group.record_bytes(number, step, run))


def _waiting_notes(config: Config, groups: Sequence[PlannedGroup]) -> Iterator[str]:
    """Gradients that add up over micro-batches are whole until the last of them, whatever they go through then."""
    most, reductions = micro_batches_of(config), reductions_per_step(config)
    for group in groups:
        if group.streams and most > reductions:
            sharded = "" if len(group.ranks) == 1 else "; with train.accumulate: sharded none of it"
            yield (
                f"gradients of {group.name} wait whole, {4 * group.elements:,} bytes more, from one of {most} "
                f"micro-batches to the next{sharded}"
            )


def _manifest_notes(groups: Sequence[PlannedGroup]) -> Iterator[str]:
    """A manifest lists what every rank has state of; many tensors on very many ranks make it too long to be saved."""
    listed = sum(
        len(canonical_json(group.footprint.fragments(number))) for group in groups for number in range(len(group.ranks))
    )
    if listed > MAX_BYTES:
        yield (
            f"no checkpoint of this run could be saved: its manifest would list what every rank has state of in "
            f"{listed:,} bytes, and manifests have up to {MAX_BYTES:,}; train on fewer ranks"
        )


def _states(config: Config, found: Sequence[Place]) -> Iterator[PlannedFile]:
    sizes = [(place.ranks, planned_bytes(place.state, _told(config, {}))) for place in found]
    for rank, size in sorted((rank, size) for ranks, size in sizes for rank in ranks):
        yield PlannedFile(state_file(rank, config.topology.world_size), "state", rank, size)
