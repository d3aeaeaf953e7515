"""Step 1 of a save: all ranks are about to save the same step of the same run, or nothing is touched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardrun.checkpoint.manifest import canonical_json, sha256
from shardrun.checkpoint.snapshot import PlannedFile, Snapshot, group_sections, model_specs, planned_files
from shardrun.checkpoint.together import together
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError

_SHORT = 300


@dataclass(frozen=True)
class Plan:
    """`files`: what this rank writes. `sections`: the manifest, but for what only the writing can tell. `needed`: bytes
    of all ranks' files together."""

    files: list[PlannedFile]
    sections: dict[str, Any]
    needed: int


def agree_on_plan(comm: Communicator, snapshot: Snapshot) -> Plan:
    """The plan, once all ranks have shown the same step, sections, model, groups and parameter digest; collective."""
    made: list[Plan] = []

    def describe() -> dict[str, Any]:
        made.append(_make_plan(comm, snapshot))
        return {"needed": made[0].needed, "sections": _brief_sections(made[0].sections)}

    answers = together(comm, "checkpoint plan", describe)
    found = [
        f"{key}: rank 0 has {answers[0]['sections'].get(key, 'nothing')}, rank {rank} has {value}"
        for rank, answer in enumerate(answers)
        for key, value in _differing(answers[0]["sections"], answer["sections"]).items()
    ]
    if found:
        raise CheckpointError(f"step {snapshot.step} is not saved because the ranks differ: " + "; ".join(found))
    return Plan(made[0].files, made[0].sections, sum(answer["needed"] for answer in answers))


def _make_plan(comm: Communicator, snapshot: Snapshot) -> Plan:
    if "param_sha256" not in snapshot.manifest:
        raise CheckpointError("param_sha256 is missing: every rank has to bring the digest of its parameters")
    sections = {
        **snapshot.manifest,
        "step": snapshot.step,
        "topology": {**snapshot.manifest.get("topology", {}), "world_size": comm.world_size},
        "groups": group_sections(snapshot),
        "model": model_specs(snapshot),
        "aliases": dict(snapshot.aliases),
    }
    files = planned_files(snapshot, comm.rank, comm.world_size)
    return Plan(files, sections, sum(file.nbytes for file in files))


def _brief_sections(sections: dict[str, Any]) -> dict[str, str]:
    """Section -> its value as text, or its hash where it is long; one line per group."""
    flat = {**sections, **{f"groups.{name}": group for name, group in sections["groups"].items()}}
    del flat["groups"]
    brief = {}
    for key, value in flat.items():
        try:
            text = canonical_json(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{key} of the manifest is not plain JSON: {error}") from error
        if canonical_json(json.loads(text)) != text:
            raise CheckpointError(f"{key} of the manifest has keys that are not text, and would not be read back alike")
        brief[key] = text.decode("ascii") if len(text) <= _SHORT else f"{len(text)} characters, sha256 {sha256(text)}"
    return brief


def _differing(first: dict[str, str], other: dict[str, str]) -> dict[str, str]:
    """What `other` has in the place of what `first` has. A group may be known to its members alone."""
    return {
        key: other.get(key, "nothing")
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key) and not (key.startswith("groups.") and not (key in first and key in other))
    }
