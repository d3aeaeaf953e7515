"""Two checkpoints of one step compared bit for bit, and the metrics on the way to them, kind by kind. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardrun.checkpoint.contents import Contents, Meter
from shardrun.checkpoint.difference import MODEL, STATE, compare
from shardrun.errors import CheckpointError
from shardrun.run.comparison import METRICS, Comparison, leaves
from shardrun.run.metrics import NAME, read_rows
from shardrun.run.proof import Compared

_SECTIONS = {
    "topology": "topology",
    "counters": "counters",
    "schedule": "schedule",
    "data position": "data",
    "ties": "aliases",
    "digest of parameters": "param_sha256",
    "config": "meaning",
}
_OF_A_GROUP = ("contract", "layout", "optimizer", "step_count")


def compared(run: Contents, replay: Contents, meter: Meter) -> list[Compared]:
    """All that two checkpoints of one step hold: what the manifests say of the state, and every tensor by name.

    Both have been found sound. CheckpointError if one of them cannot be read any more: that is no difference.
    """
    assert run.manifest is not None
    assert replay.manifest is not None
    kinds: dict[str, list[tuple[int, str | None]]] = {}
    for kind, one, other in _values(run.manifest, replay.manifest):
        kinds.setdefault(kind, []).append(_apart(one, other))
    parameters = {spec["path"] for group in run.manifest["groups"].values() for spec in group["contract"]}
    for row in compare(run, replay, meter)[0]:
        if row["what"] == "unreadable":
            raise CheckpointError(
                f"{row.get('why', row['name'])}; it was sound when the replay began, nothing is proven"
            )
        kind = _kind(row["section"], row["name"], parameters)
        kinds.setdefault(kind, []).append((row["elements"], _told(row)))
    step, rows = run.manifest["step"], []
    for kind, found in kinds.items():
        first = next((text for _, text in found if text is not None), None)
        rows.append(Compared(kind, sum(count for count, _ in found), first and f"step {step}, {kind}: {first}"))
    return rows


def compared_metrics(run_dir: Path, replay_dir: Path, steps: range) -> Compared:
    """The metrics of these windows; validations where both have one (a stop in a hurry leaves it out)."""
    sides = [[row for row in read_rows(folder / NAME) if row.get("step") in steps] for folder in (run_dir, replay_dir)]
    validated = [{row["step"] for row in rows if "loss" not in row} for rows in sides]
    sides = [[row for row in rows if "loss" in row or row["step"] in validated[0] & validated[1]] for rows in sides]
    if not sides[0]:
        return Compared(METRICS, 0)
    comparison = Comparison(1)
    comparison.compare_metrics("", *sides)
    values, first = sum(row.values for row in comparison.rows), comparison.first
    if first is None:
        return Compared(METRICS, values)
    told = f"step {first.step}, {METRICS}: {first.name}: run {first.straight}, replay {first.interrupted}"
    return Compared(METRICS, values, told)


def _values(run: Mapping[str, Any], replay: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(kind, run, replay) of what the manifests hold of the state."""
    for kind, key in _SECTIONS.items():
        yield kind, run.get(key), replay.get(key)
    for name in sorted(run["groups"].keys() | replay["groups"].keys()):
        one, other = (manifest["groups"].get(name, {}) for manifest in (run, replay))
        for key in _OF_A_GROUP:
            yield f"{key.replace('_', ' ')} of groups", {name: one.get(key)}, {name: other.get(key)}


def _apart(one: Any, other: Any) -> tuple[int, str | None]:
    """How many plain values there are, and the first that differs."""
    left, right = dict(leaves(one)), dict(leaves(other))
    for name in [*left, *(name for name in right if name not in left)]:
        sides = [json.dumps(side[name]) if name in side else "absent" for side in (left, right)]
        if sides[0] != sides[1]:
            return len(left), f"{name}: run {sides[0]}, replay {sides[1]}"
    return len(left), None


def _kind(section: str, name: str, parameters: set[str]) -> str:
    """What a tensor of a checkpoint is, in the words of a Comparison."""
    if section == MODEL:
        return "parameters" if name in parameters else "buffers"
    if section.startswith("rank "):
        return "rng " + name.removeprefix("rng/") if name.startswith("rng/") else "buffers"
    key = name.rpartition("/")[2]
    return "fp32 masters" if key == "master" else f"optimizer {key}"


def _told(row: Mapping[str, Any]) -> str | None:
    if row["what"] == "same":
        return None
    where = row["name"] if row["section"] in (MODEL, STATE) else f"{row['section']}: {row['name']}"
    if row["what"] != "values":
        return f"{where}: {row['what']}"
    first = row["first"]
    return (
        f"{where}, element {first['element']}: run {first['one']}, replay {first['other']} "
        f"({row['differing']:,} of {row['elements']:,} elements differ)"
    )
