"""Two checkpoints, or files of tensors, compared by name and by bit, whatever slices hold the elements. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrun.checkpoint.assemble import Whole, chunks
from shardrun.checkpoint.contents import Contents, Held, Meter, checkpoint_contents, loose_contents
from shardrun.checkpoint.inspect import plain_files
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.statistics import CHUNK
from shardrun.checkpoint.store import candidates, is_checkpoint
from shardrun.errors import CheckpointError
from shardrun.records.elements import decode, first_difference, value_text
from shardrun.records.header_parser import DTYPE_BYTES, DTYPE_NAMES

_COMPARED = ("step", "counters", "topology", "schedule", "data", "recipe", "numerics", "meaning", "aliases")
_NOT_OF_THE_MODEL = ("zero1/", "zero2/", "state/")
_ABSENT = "absent"
MODEL, STATE = "model", "state"
"""Sections whose tensors are known by their names alone; others are named before the tensor."""


@dataclass(frozen=True)
class Named:
    """A tensor with all its elements, and the folder that its files are in."""

    root: Path
    held: Held
    whole: Whole


def diff(one: Path, other: Path, *, verify: bool = False, meter: Meter | None = None) -> dict[str, Any]:
    """What differs between two checkpoints, run folders (their newest one counts) or safetensors files, as plain JSON.

    `same` tells whether every tensor is equal in dtype, shape and all bits; `settings` lists what the manifests say
    differently. Files without a manifest are compared with the model of a checkpoint. At different world sizes the
    state that belongs to a rank is left out, and `notes` says so. CheckpointError if there is nothing to compare.
    """
    meter = meter or Meter()
    sides = [_open(path, verify, meter) for path in (one, other)]
    rows, notes = compare(sides[0], sides[1], meter)
    manifests = [side.manifest for side in sides if side.manifest is not None]
    settings = setting_differences(*manifests) if len(manifests) == 2 else []
    problems = [line for side in sides for line in side.problems]
    differing = [row for row in rows if row["what"] != "same"]
    return {
        "kind": "diff",
        "one": str(sides[0].root if sides[0].manifest else one),
        "other": str(sides[1].root if sides[1].manifest else other),
        "same": not differing,
        "good": not problems,
        "problems": problems,
        "notes": notes,
        "compared": dict(Counter(row["section"] for row in rows)),
        "elements": sum(row["elements"] for row in rows),
        "counts": dict(Counter(row["what"] for row in rows)),
        "differences": differing,
        "settings": settings,
    }


def _open(path: Path, verify: bool, meter: Meter) -> Contents:
    if not is_checkpoint(path):
        if (plain := plain_files(path)) is not None:
            return plain
        path = next((one.path for one in candidates(path, wanted="compare") if one.sequence is not None), path)
    try:
        manifest = read_manifest(path)[0]
    except CheckpointError as error:
        found = loose_contents(path)
        found.problems.insert(0, str(error))
        return found
    return checkpoint_contents(path, manifest, verify=verify, meter=meter)


# ---- which tensors belong together -----------------------------------------------------------------------------------


def compare(one: Contents, other: Contents, meter: Meter) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each tensor of either side, in order; and what was left out."""
    left, right = _named(one), _named(other)
    notes = []
    loose = one.manifest is None or other.manifest is None
    sizes = [side.manifest["topology"]["world_size"] if side.manifest else None for side in (one, other)]
    if loose and (one.manifest or other.manifest):
        notes.append("a file without a manifest is compared with the model; optimizer state and ranks are left out")
        left, right = ({key: tensor for key, tensor in side.items() if key[0] == MODEL} for side in (left, right))
    elif sizes[0] != sizes[1]:
        notes.append(
            f"the state of each rank (random streams, buffers) is left out: world sizes {sizes[0]} and {sizes[1]}"
        )
        left, right = (
            {key: tensor for key, tensor in side.items() if not key[0].startswith("rank ")} for side in (left, right)
        )
    keys = [*left, *(key for key in right if key not in left)]
    both = [left[key].whole.nbytes + right[key].whole.nbytes for key in keys if key in left and key in right]
    meter.expect(sum(both))
    return [_row(key, left.get(key), right.get(key), meter) for key in keys], notes


def _named(contents: Contents) -> dict[tuple[str, str], Named]:
    """Every tensor by (section, name); of ties that both sides may have only the tensor itself.

    Which group a parameter is in may depend on the ranks, so state goes by its name alone.
    """
    counts = Counter((kind, held.whole.name) for (kind, _), held in contents.all())
    found: dict[tuple[str, str], Named] = {}
    for (kind, name), held in contents.all():
        if held.alias_of is None:
            label = _label(kind, name, unique=counts[kind, held.whole.name] == 1)
            found[label, held.whole.name] = Named(contents.root, held, held.whole)
    return found


def _label(kind: str, name: str, *, unique: bool) -> str:
    if kind == "group" and unique:
        return STATE
    if kind == "file":
        return MODEL if unique and not name.startswith(_NOT_OF_THE_MODEL) else name
    return f"{kind} {name}".strip()


# ---- one pair --------------------------------------------------------------------------------------------------------


def _row(key: tuple[str, str], one: Named | None, other: Named | None, meter: Meter) -> dict[str, Any]:
    """What became of one name: "same", "values", "dtype", "shape", "only in one", "only in other", "unreadable"."""
    there = one or other
    assert there is not None
    row: dict[str, Any] = {"section": key[0], "name": key[1], "what": "same", "elements": there.whole.numel}
    if one is None or other is None:
        return {**row, "what": "only in other" if one is None else "only in one"}
    shapes = [list(side.whole.shape) for side in (one, other)]
    dtypes = [DTYPE_NAMES.get(side.whole.dtype, side.whole.dtype) for side in (one, other)]
    if dtypes[0] != dtypes[1]:
        row |= {"what": "dtype", "dtypes": dtypes}
    if shapes[0] != shapes[1]:
        return {**row, "what": "shape", "shapes": shapes}
    if not (one.held.is_readable and other.held.is_readable):
        return {**row, "what": "unreadable", "left": [one.held.left.value, other.held.left.value]}
    try:
        found = _values(one, other, meter)
    except (CheckpointError, OSError) as error:
        return {**row, "what": "unreadable", "why": str(error)}
    if found["differing"] and row["what"] == "same":
        row["what"] = "values"
    return {**row, **found} if row["what"] != "same" else row


def _values(one: Named, other: Named, meter: Meter) -> dict[str, Any]:
    """How many elements differ, by how much, and the first of them; of two dtypes the values count, else the bits."""
    count = CHUNK // 8
    sizes = [DTYPE_BYTES[side.whole.dtype] for side in (one, other)]
    runs = zip(
        *(chunks(side.root, side.whole.pieces, count * size) for side, size in zip((one, other), sizes, strict=True)),
        strict=True,
    )
    found = _Distance()
    first: dict[str, Any] | None = None
    at = 0
    for left, right in runs:
        if left != right or sizes[0] != sizes[1]:
            place = found.add(one.whole.dtype, left, other.whole.dtype, right)
            if place is not None and first is None:
                texts = [
                    value_text(side.whole.dtype, raw[place * size : (place + 1) * size])
                    for side, raw, size in zip((one, other), (left, right), sizes, strict=True)
                ]
                first = {
                    "element": at + place,
                    "index": list(index_of(at + place, one.whole.shape)),
                    "one": texts[0],
                    "other": texts[1],
                }
        else:
            found.add_same(one.whole.dtype, left)
        at += len(left) // sizes[0]
        meter.read(len(left) + len(right))
    return {**found.to_json(), "first": first}


def index_of(element: int, shape: tuple[int, ...]) -> Iterator[int]:
    """The index along each axis of an element of a flattened tensor."""
    for axis in range(len(shape)):
        inner = prod(shape[axis + 1 :])
        yield element // inner % shape[axis]


class _Distance:
    """How far two tensors are apart: elements that differ, the greatest difference, and the norm of the difference in
    parts of the norm of the first."""

    def __init__(self) -> None:
        self.differing = 0
        self.most: float | None = 0.0
        self.squares = self.norm_squares = 0.0

    def add(self, dtype: str, raw: bytearray, other_dtype: str, other_raw: bytearray) -> int | None:
        """The next elements of both; the place of the first that differs, if one does."""
        one, other = decode(dtype, raw), decode(other_dtype, other_raw)
        if dtype == other_dtype:
            count, place = first_difference(raw, other_raw, dtype)
        elif one is None or other is None:
            count, place = max(len(raw) // DTYPE_BYTES[dtype], 1), 0
        else:
            differs = one.astype(np.complex128) != other.astype(np.complex128)
            count, place = int(np.count_nonzero(differs)), int(np.argmax(differs))
        self.differing += count
        if one is None or other is None:
            self.most = None
        else:
            self._measure(_wide(one), _wide(other))
        return place if count else None

    def add_same(self, dtype: str, raw: bytearray) -> None:
        """The next elements, equal on both sides."""
        if (values := decode(dtype, raw)) is not None:
            self._measure(_wide(values), None)

    def _measure(self, one: Any, other: Any) -> None:
        finite = one[np.isfinite(one)]
        self.norm_squares += float(np.vdot(finite, finite).real)
        if other is None or self.most is None:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(other - one)
        apart = apart[~((one == other) | (np.isnan(one) & np.isnan(other)))]
        if apart.size:
            apart = np.where(np.isnan(apart), math.inf, apart)  # a number against NaN is as far as can be
            self.most = max(self.most, float(apart.max()))
            self.squares += float(np.dot(apart, apart))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `max_abs` and `relative` are None where the dtype cannot be decoded."""
        known = self.most is not None and self.norm_squares > 0
        relative = math.sqrt(self.squares / self.norm_squares) if known else None
        return {"differing": self.differing, "max_abs": self.most, "relative": relative}


def _wide(values: Any) -> Any:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


# ---- what the manifests say ------------------------------------------------------------------------------------------


def setting_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"key", "one", "other"} for each value of the manifests that differs, of those that say what a run is and where
    it stands."""
    found = [line for key in _COMPARED for line in _apart(one.get(key), other.get(key), key)]
    for name in sorted(one["groups"].keys() & other["groups"].keys()):
        sides = [_without_owners(side["groups"][name].get("optimizer")) for side in (one, other)]
        found += _apart(sides[0], sides[1], f"group {name}.optimizer")
    return found


def _without_owners(optimizer: Any) -> Any:
    """Who holds what is told beside each tensor."""
    return {k: v for k, v in optimizer.items() if k != "owners"} if isinstance(optimizer, Mapping) else optimizer


def _apart(one: Any, other: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(one.keys() | other.keys()):
            yield from _apart(one.get(name, _ABSENT), other.get(name, _ABSENT), f"{key}.{name}")
    elif one != other:
        yield {"key": key, "one": one, "other": other}
