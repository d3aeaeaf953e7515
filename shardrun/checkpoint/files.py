"""The files of a checkpoint as they follow from what is saved: what goes into them, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from shardrun.records.record import record_key

MODEL_METADATA = {"format": "pt"}
"""Of a file of the model: transformers asks for it."""
_T = TypeVar("_T")


def file_metadata(step: int, run: object, metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file of the checkpoint of `step`; `run` is the id of the run, if it has one."""
    return {**metadata, "step": str(step), **({"run": run} if isinstance(run, str) else {})}


def kept_on_disk(
    tensors: Mapping[str, _T], dims: Mapping[str, int], fragments: Mapping[str, Sequence[int]]
) -> dict[str, _T]:
    """What of a record a file holds: a scalar is stored once, by the rank whose fragment starts at 0."""
    return {name: tensor for name, tensor in tensors.items() if dims[name] or fragments[record_key(name)[0]][0] == 0}
