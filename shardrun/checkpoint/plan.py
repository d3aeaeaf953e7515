"""Step 1 of a save: all ranks are about to save the same step of the same run, or nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardrun.checkpoint.manifest import canonical_json, sha256
from shardrun.errors import CheckpointError
from shardrun.records.header import TensorBytes, planned_bytes

PARAM_SHA256 = "param_sha256"
_SHORT = 300


@dataclass(frozen=True)
class PlannedFile:
    """A file that this rank will write; `entry` is its line in the manifest, but for bytes and hash."""

    path: str
    tensors: dict[str, TensorBytes]
    metadata: dict[str, str]
    entry: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Size the file will have."""
        return planned_bytes(self.tensors, self.metadata)


@dataclass(frozen=True)
class Plan:
    """What one rank will do in a save.

    `files`: what this rank writes. `sections`: the manifest, but for what only the writing can tell. `needed`: bytes of
    this rank's files, and of all ranks' together once they have agreed. `split`: what the holders of a cut parameter
    must hold alike: group -> path -> key -> dtype, and value if it is a scalar. `param_sha256` computes, while this
    rank writes, the digest of the parameters that it writes; None if it writes none or `sections` has it already.
    `groups`: sections of the groups that rank 0 is no member of and this rank the first.
    """

    step: int
    files: list[PlannedFile]
    sections: dict[str, Any]
    needed: int
    split: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    param_sha256: Callable[[], str] | None = None
    groups: Mapping[str, Any] = field(default_factory=dict)


def shown(plan: Plan) -> dict[str, Any]:
    """What a rank shows the others of its plan, as plain JSON; CheckpointError if it could not stand in a manifest."""
    return {"needed": plan.needed, "sections": _brief_sections(plan.sections), "groups": plan.groups}


def agreed(plan: Plan, answers: list[dict[str, Any]]) -> Plan:
    """The plan of this rank with what those of all ranks add to it. `answers`: what `shown` gave, by rank;
    CheckpointError on all of them unless all have the same step, sections, model and groups."""
    found = [
        f"{key}: rank 0 has {answers[0]['sections'].get(key, 'nothing')}, rank {rank} has {value}"
        for rank, answer in enumerate(answers)
        for key, value in _differing(answers[0]["sections"], answer["sections"]).items()
    ]
    if found:
        raise CheckpointError(f"step {plan.step} is not saved because the ranks differ: " + "; ".join(found))
    groups = {name: group for answer in answers for name, group in answer["groups"].items()}
    sections = {**plan.sections, "groups": {**plan.sections["groups"], **groups}}
    return replace(plan, needed=sum(answer["needed"] for answer in answers), sections=sections)


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
