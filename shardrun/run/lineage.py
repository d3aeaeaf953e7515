"""Two checkpoints of a run that a replay can lie between, and what such a replay can claim. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import Found, candidates, checkpoints_folder, is_checkpoint, scan, step_name, step_of
from shardrun.config.load import differences, from_mapping, load
from shardrun.config.schema import Config, meaning
from shardrun.errors import CheckpointError, ConfigError, UsageError

_RESOLVED = "config.resolved.yaml"
_OF_A_RUN: Mapping[str, type] = {
    **dict.fromkeys(("run", "attempt"), str),
    **dict.fromkeys(("config", "meaning", "counters", "numerics", "recipe", "data"), dict),
}
"""What the manifest of a run has besides that of any checkpoint."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint with its manifest."""

    path: Path
    step: int
    manifest: Mapping[str, Any]
    manifest_sha256: str


@dataclass(frozen=True)
class Pair:
    """Replay `settings` from `start` to `end`. `claim` is what follows from equal bits, `not_claimed` what does not."""

    run_dir: Path
    start: Saved
    end: Saved
    claim: str
    not_claimed: tuple[str, ...]
    settings: Config
    notes: tuple[str, ...]


def choose(run_dir: Path, start: str | None = None, end: str | None = None) -> Pair:
    """The two checkpoints of a run to replay between: by default the newest, and the newest that it came after.

    `start` and `end` name others: a step, or the folder's name. CheckpointError where they are missing or damaged;
    UsageError where no replay can lie between them: another run, another config, another number of ranks.
    """
    if is_checkpoint(run_dir):
        raise UsageError(f"{run_dir} is one checkpoint; give the folder of its run, and --to {run_dir.name}")
    candidates(run_dir, wanted="replay")
    run_dir = checkpoints_folder(run_dir).parent
    found = scan(run_dir)
    last = _saved(_named(found, run_dir, end) if end is not None else found[0])
    first = _saved(_named(found, run_dir, start)) if start is not None else _before(found, last, run_dir)
    _require_one_history(first, last)
    return Pair(run_dir, first, last, *_claims(run_dir, first, last), *_settings(run_dir, last))


def _named(found: list[Found], run_dir: Path, name: str) -> Found:
    wanted = step_name(int(name)) if name.isdecimal() else Path(name).name
    for one in found:
        if one.path.name == wanted:
            return one
    there = ", ".join(one.path.name for one in found)
    raise CheckpointError(f"{run_dir}: holds no checkpoint {wanted}; there are {there}")


def _saved(found: Found) -> Saved:
    if not found.complete:
        raise CheckpointError(f"checkpoint {found.path} is damaged: {found.why}; name another one")
    manifest, digest = read_manifest(found.path)
    if wanting := [key for key, kind in _OF_A_RUN.items() if not isinstance(manifest.get(key), kind)]:
        raise CheckpointError(f"{found.path}: its manifest has no {', '.join(wanting)}; it is no run's")
    return Saved(found.path, found.step, manifest, digest)


def _before(found: list[Found], last: Saved, run_dir: Path) -> Saved:
    """The newest sound checkpoint that the last one may have come after."""
    sequence = last.manifest["sequence"]
    earlier = [one for one in found if one.complete and (one.sequence or sequence) < sequence and one.step < last.step]
    came_from = {name for name, manifest in _ancestry(run_dir, last) if manifest is not None}
    for one in sorted(earlier, key=lambda one: one.path.name not in came_from):  # else the newest first
        return _saved(one)
    raise UsageError(
        f"{run_dir}: holds no checkpoint before {last.path.name}; a replay lies between two of them "
        "(checkpoint.every, and checkpoint.keep of 2 or more)"
    )


def _require_one_history(first: Saved, last: Saved) -> None:
    names = f"{first.path.name} and {last.path.name}"
    one, other = first.manifest, last.manifest
    if first.step >= last.step or one["sequence"] >= other["sequence"]:
        raise UsageError(f"{names}: the first was not saved before the second, at a lower step; name two that were")
    if one["run"] != other["run"]:
        raise UsageError(f"{names} are of two runs: {one['run']} and {other['run']}")
    sizes = [manifest["topology"]["world_size"] for manifest in (one, other)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{names}: saved by {sizes[0]} and {sizes[1]} ranks; a replay goes on with as many as it begins with"
        )
    changed = differences(one["meaning"], other["meaning"])
    if changed:
        told = "the config was changed between them; choose two on the same side of the change"
        raise UsageError("\n  ".join([f"{names}: {told}", *changed]))


# ---- what can be claimed ---------------------------------------------------------------------------------------------


def _claims(run_dir: Path, first: Saved, last: Saved) -> tuple[str, tuple[str, ...]]:
    """The claim, and what is not claimed, by where the run was stopped and resumed between the two."""
    if first.manifest["attempt"] == last.manifest["attempt"]:
        return (
            f"a resume at step {first.step} is the same as going on: the run did not stop between the two checkpoints, "
            "the replay is of fresh processes",
            (),
        )
    stops, whole = _resumed_at(run_dir, first, last)
    not_claimed = []
    if first.step in stops:
        not_claimed.append(
            f"that the run is the one that did not stop at step {first.step}: it was itself resumed there; choose an "
            "earlier start (--from) for that"
        )
    if not whole:
        not_claimed.append(
            "that the run went on from nothing else in between: some of its checkpoints between the two are gone"
        )
    passed = [str(step) for step in stops if step > first.step]
    if whole and not passed:
        return f"the resume at step {first.step} gives the same again", tuple(not_claimed)
    where = f"at step {passed[0]}" if passed else "somewhere between the two"
    if len(passed) > 1:
        where = f"at steps {', '.join(passed[:-1])} and {passed[-1]}"
    claim = (
        f"the run, which was stopped and resumed {where}, is the one that never stopped: the replay went from step "
        f"{first.step} to step {last.step} at one go"
    )
    return claim, tuple(not_claimed)


def _resumed_at(run_dir: Path, first: Saved, last: Saved) -> tuple[list[int], bool]:
    """The steps from `first` on at which a start of the run began that `last` came from; and whether all of the way
    back to `first` can be seen.

    UsageError if the way back does not lead to `first`.
    """
    attempt, stops = last.manifest["attempt"], list[int]()
    for name, manifest in _ancestry(run_dir, last):
        if (step_of(name) or 0) < first.step:
            raise UsageError(f"{last.path.name} did not come after {first.path.name}: the run went on from {name}")
        if manifest is None:
            return stops, False
        if manifest["attempt"] != attempt:
            stops.insert(0, manifest["step"])
        if name == first.path.name:
            return stops, True
        attempt = manifest["attempt"]
    raise UsageError(f"{last.path.name} did not come after {first.path.name}: the run began anew between them")


def _ancestry(run_dir: Path, last: Saved) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Name and manifest of each checkpoint that `last` came from, newest first; None, and no more, for one that is
    gone. One of that name that was saved later is another one: the run went on from an earlier step meanwhile.
    """
    later = last.manifest
    while isinstance(name := later.get("parent"), str):
        try:
            manifest = read_manifest(checkpoints_folder(run_dir) / name)[0]
        except CheckpointError:
            yield name, None
            return
        if manifest["sequence"] >= later["sequence"] or "attempt" not in manifest:
            yield name, None
            return
        yield name, manifest
        later = manifest


def _settings(run_dir: Path, last: Saved) -> tuple[Config, tuple[str, ...]]:
    """The config that `last` was trained with, and where config.resolved.yaml, which belongs to the last start of the
    run, says something else.

    Where that file means the same it is taken, because the order in which it lists the axes of the ranks counts, and a
    manifest has its keys sorted.
    """
    saved = from_mapping(last.manifest["config"])
    try:
        resolved = load(run_dir / _RESOLVED)
    except ConfigError as error:
        return saved, (f"{_RESOLVED} cannot be read, the config in the checkpoint is replayed: {error.problems[0]}",)
    changed = differences(last.manifest["meaning"], meaning(resolved))
    if not changed:
        return resolved.model_copy(update={"train": saved.train, "eval": saved.eval}), ()
    told = f"{_RESOLVED} differs from the config in the checkpoint, which is replayed"
    return saved, tuple(f"{told}: {line}" for line in changed)
