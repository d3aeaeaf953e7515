"""Loading: rank 0's scan decides, every rank checks and reads into fresh memory, one vote, then it is handed out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardrun.checkpoint.manifest import MANIFEST, read_manifest
from shardrun.checkpoint.read import Digests, RankFiles, read_rank_files, shared_scalars, spread_scalars
from shardrun.checkpoint.store import candidates, checkpoints_folder, is_checkpoint
from shardrun.checkpoint.together import by_root, together
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError
from shardrun.records.fit import checkpoint_violations
from shardrun.records.record import ShardRecord

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint in fresh CPU tensors; nothing of it has been applied.

    `model` has every name, aliases included; tied names give the very same tensor. `records` and `rank_state` are this
    rank's. The scalars of a cut parameter are in the record of every holder. `notes` are for the user's eyes.
    """

    step: int
    path: Path
    manifest: dict[str, Any]
    model: dict[str, Tensor]
    records: dict[str, ShardRecord]
    rank_state: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    model_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Path -> names in it, of the files of the model that this rank has read."""
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Path -> name -> digest, of the same files, if `load` was given a way to make them."""


@dataclass(frozen=True)
class _Offer:
    """A checkpoint as rank 0 sees it; `name` is None where the caller named the one checkpoint itself."""

    name: str | None
    why: str
    manifest_sha256: str

    def at(self, path: Path) -> Path:
        """Where this rank finds it."""
        return path if self.name is None else checkpoints_folder(path) / self.name


def load(
    run_dir_or_checkpoint: Path,
    comm: Communicator,
    expected: Mapping[str, Any],
    *,
    allow_fallback: bool = False,
    required: bool = False,
    names: Collection[str] | None = None,
    digests: Digests | None = None,
) -> Loaded | None:
    """The newest checkpoint of a run folder, or the one named; every rank of the world calls it. Changes nothing.

    `expected` says what this run is, in the manifest's structure: topology, groups, model ({name: [dtype, shape]}),
    aliases ({alias: name}), numerics, and whatever else has to be equal; a section left out is not compared, the world
    size always is. `names`: what this rank has of the model, if not all of it. `digests`: makes those of the result,
    beside the reading of other files. None where there is nothing to load, unless `required`. CheckpointError on all
    ranks, with all that was found: the newest is damaged (`allow_fallback` takes the next older good one, and `notes`
    says so), or misfits.
    """
    path = run_dir_or_checkpoint
    offers = [_Offer(**offer) for offer in by_root(comm, "checkpoint scan", lambda: _scan(path, required))]
    damaged: list[str] = []
    for place, offer in enumerate(offers):
        loaded, problems = (
            (None, [offer.why]) if offer.why else _load_one(path, offer, comm, expected, damaged, names, digests)
        )
        if loaded is not None:
            return loaded
        damaged.append(_sentence(f"checkpoint {offer.at(path)} is damaged", problems))
        if not allow_fallback:
            older = any(not other.why for other in offers[place + 1 :])
            raise CheckpointError(damaged[0] + ("\nan older one is there: --allow-fallback takes it" if older else ""))
    if damaged:
        raise CheckpointError("\n".join(damaged))
    return None


def _scan(path: Path, required: bool) -> list[dict[str, Any]]:
    single = is_checkpoint(path)
    return [
        {"name": None if single else found.path.name, "why": found.why, "manifest_sha256": found.manifest_sha256}
        for found in candidates(path, wanted="resume from" if required else None)
    ]


def _load_one(
    path: Path,
    offer: _Offer,
    comm: Communicator,
    expected: Mapping[str, Any],
    damaged: list[str],
    names: Collection[str] | None,
    digests: Digests | None,
) -> tuple[Loaded | None, list[str]]:
    """The checkpoint, or what is damaged about it on any rank; CheckpointError if it does not fit on any."""
    here = offer.at(path)
    manifest: dict[str, Any] = {}
    files = RankFiles()

    def look() -> dict[str, Any]:
        nonlocal files
        try:
            manifest.update(_same_manifest(here, offer))
        except CheckpointError as error:
            return {"damage": [str(error)], "misfits": [], "scalars": {}}
        topology = {**expected.get("topology", {}), "world_size": comm.world_size}
        misfits = checkpoint_violations(manifest, {**expected, "topology": topology})
        if not misfits:
            files = read_rank_files(here, manifest, comm.rank, names, digests)
        return {"damage": files.problems, "misfits": misfits, "scalars": shared_scalars(files.records)}

    votes = together(comm, "checkpoint vote", look)
    problems = _merged([vote["damage"] for vote in votes])
    if problems:
        return None, problems
    misfits = _merged([vote["misfits"] for vote in votes])
    if misfits:
        raise CheckpointError(_sentence(f"checkpoint {here} does not fit this run", misfits))
    spread_scalars(files.records, [vote["scalars"] for vote in votes])
    notes = (*damaged, f"went back to {here}") if damaged else ()
    held = files.model, files.records, files.state
    loaded = Loaded(manifest["step"], here, manifest, *held, notes, files.model_files, files.digests)
    return loaded, []


def _same_manifest(here: Path, offer: _Offer) -> dict[str, Any]:
    manifest, found = read_manifest(here)
    if found != offer.manifest_sha256:
        raise CheckpointError(
            f"{here / MANIFEST}: is another one than rank 0 reads (sha256 {found}, there {offer.manifest_sha256}); "
            "the run folder has to be one folder that all ranks share"
        )
    return manifest


def _merged(lines: list[list[str]]) -> list[str]:
    """Each line once, with the ranks that say it where not all do."""
    ranks: dict[str, list[int]] = {}
    for rank, told in enumerate(lines):
        for line in told:
            ranks.setdefault(line, []).append(rank)
    return [
        line if len(who) == len(lines) else f"rank {', '.join(map(str, who))}: {line}" for line, who in ranks.items()
    ]


def _sentence(head: str, lines: list[str]) -> str:
    return f"{head}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{head}:", *lines])
