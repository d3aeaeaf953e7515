"""Who writes what of a model of which ranks have different parts; and whether what was read is what was saved."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardrun.checkpoint.load import Loaded
from shardrun.checkpoint.manifest import joined_digest
from shardrun.checkpoint.snapshot import ModelParts, model_specs
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, by_all
from shardrun.records.tensors import tensors_sha256
from shardrun.run.build import Built
from shardrun.run.model import distinct_parameters, named_tensors
from shardrun.run.replicas import FORMER_CHUNK, digests_of, joint_digest


def model_parts(comm: Communicator, model: Mapping[str, Tensor], aliases: Mapping[str, str]) -> ModelParts:
    """The whole model, of which this rank has `model` (tied tensors once): each tensor's first holder writes it.

    Collective over the world. CheckpointError on all ranks where two of them have different tensors of one name.
    """
    parts, problem = join_parts(dict(enumerate(comm.agree("model parts", (model_specs(model), dict(aliases))))))
    if problem:
        raise by_all(CheckpointError(problem))
    own = {name for name, rank in parts.holder.items() if rank == comm.rank}
    return ModelParts(parts.specs, parts.aliases, sorted({*parts.holder.values()}), own)


@dataclass(frozen=True)
class JoinedParts:
    """A model out of the parts that ranks have."""

    specs: Mapping[str, list[Any]]
    aliases: Mapping[str, str]
    holder: Mapping[str, int]
    """Name -> the first rank that has it, which writes it."""


def join_parts(held: Mapping[int, tuple[Mapping[str, list[Any]], Mapping[str, str]]]) -> tuple[JoinedParts, str]:
    """The whole of what each rank has (specs and aliases, by rank), and what is wrong with it, if anything is."""
    specs: dict[str, list[Any]] = {}
    ties: dict[str, str] = {}
    holder: dict[str, int] = {}
    problem = ""
    for rank, (own, tied) in held.items():
        for name, spec in own.items():
            first = specs.setdefault(name, spec)
            if first != spec:
                told = f"rank {holder[name]} has {first}, rank {rank} has {spec}"
                problem = problem or f"{name} is the name of different tensors: {told}; name them apart"
            holder.setdefault(name, rank)
        for name, to in tied.items():
            if ties.setdefault(name, to) != to:
                problem = (
                    problem or f"{name} is tied to {ties[name]} and on rank {rank} to {to}; tie it alike on all ranks"
                )
    for name in sorted(ties.keys() & specs.keys()):
        told = f"{name} is tied to {ties[name]}, but a tensor of its own on rank {holder[name]}"
        problem = problem or f"{told}; tie it on all ranks that have it, or name them apart"
    return JoinedParts(specs, ties, holder), problem


def shared_parts(
    comm: Communicator, model: Mapping[str, Tensor], aliases: Mapping[str, str], replicated: Container[str]
) -> ModelParts:
    """A model that all ranks have, of which each writes about as many bytes; local, and the same on all ranks.

    What is not `replicated` (a buffer has its own value on every rank) is written by rank 0.
    """
    written = [0] * comm.world_size
    holder: dict[str, int] = {}
    for name in sorted(model, key=lambda name: (name in replicated, -model[name].nbytes, name)):
        holder[name] = written.index(min(written)) if name in replicated else 0
        written[holder[name]] += model[name].nbytes
    own = {name for name, rank in holder.items() if rank == comm.rank}
    return ModelParts(model_specs(model), aliases, sorted({*holder.values()}), own, replicated=True)


def parameter_misfits(built: Built, loaded: Loaded) -> list[str]:
    """What changed in the memory of a rank between the agreement of a save and its writing is in a file that is sound.

    Collective over the world. All ranks have read the same bytes, so one looks at each file: where ranks have different
    parts of the model, the first that has all of what is in it; else they take turns.
    """
    saved, found = loaded.manifest["param_sha256"], ""
    for way in _WAYS:
        found = _parameters_digest(built, loaded, way) or saved
        if found == saved:
            return []
    return [
        f"its parameters (digest {found[:16]}) are not those that the ranks agreed on when it was saved "
        f"({saved[:16]}); go on from an older one with --resume-from, and look for faulty memory"
    ]


def _as_read(loaded: Loaded, path: str, names: Sequence[str]) -> str:
    digests = loaded.digests.get(path) or digests_of({name: loaded.model[name] for name in names})
    return joint_digest({name: digests[name] for name in names})


def _of_former_chunks(loaded: Loaded, _: str, names: Sequence[str]) -> str:
    return joint_digest(digests_of({name: loaded.model[name] for name in names}, FORMER_CHUNK))


def _of_all_bytes(loaded: Loaded, _: str, names: Sequence[str]) -> str:
    return tensors_sha256({name: loaded.model[name] for name in names})


_Way = Callable[[Loaded, str, Sequence[str]], str]
"""Of a file of the model, by its path, and the parameters in it."""
# Of format 2, which a reshard makes of format 1; of format 1; and of its first saves, which hashed every byte.
_WAYS: Sequence[_Way] = (_as_read, _of_former_chunks, _of_all_bytes)


def _parameters_digest(built: Built, loaded: Loaded, of: _Way) -> str | None:
    """One digest of what was read of all files of the model; None where nobody can look at one of them."""
    parameters, mine = distinct_parameters(built.model), named_tensors(built.model).keys()
    files = sorted(entry["path"] for entry in loaded.manifest["files"] if entry["role"] == "model")
    turns = files if built.in_parts else files[built.comm.rank :: built.comm.world_size]
    digests = {
        path: of(loaded, path, [name for name in parameters if name in held])
        for path, held in loaded.model_files.items()
        if path in turns and mine >= {*held}
    }
    every = built.comm.agree("parameter digests", digests)
    found = [next((one[path] for one in every if path in one), "") for path in files]
    return joined_digest(found) if all(found) else None
