"""Prove a real run: replay it in scratch from one of its checkpoints to a later one, and compare all that both hold.

[Note: what a replay proves] The later checkpoint was written by processes that had been going on; the replay is a fresh
set of processes that knows only the earlier one, and in which everything was spoiled before the restore. Where the run
did not stop between the two, equal bits say that a resume is the same as going on. Where it was stopped or killed and
resumed between them, the replay passes that place without a stop, and equal bits say that the interrupted run is the
one that never stopped. What a save forgets is not compared, but the windows after it depend on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import hash_file
from shardrun.checkpoint.contents import Contents, Meter, checkpoint_contents
from shardrun.checkpoint.difference import compare
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import newest
from shardrun.config.load import differences
from shardrun.config.schema import Checkpoint
from shardrun.errors import CheckpointError, StoppedAfterSave, UsageError
from shardrun.run.changes import recipe_changes
from shardrun.run.comparison import leaves, unsteady_text
from shardrun.run.launch import Screen, launch
from shardrun.run.legs import Legs, Start
from shardrun.run.lineage import Pair
from shardrun.run.proof import Compared, Proof, facts_of, limits
from shardrun.run.saved_state import compared, compared_metrics
from shardrun.run.verify import SCRAMBLE

_SEEN = "seen"


@dataclass(frozen=True)
class Replayed:
    """What one replay left."""

    contents: Contents
    run_dir: Path

    @property
    def manifest(self) -> Mapping[str, Any]:
        """That of its checkpoint."""
        assert self.contents.manifest is not None
        return self.contents.manifest

    def seen(self) -> list[dict[str, Any]]:
        """What the ranks noted of the data."""
        paths = sorted(self.run_dir.glob(f"{_SEEN}.rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
        return [json.loads(path.read_text()) for path in paths]


class Replay:
    """The replay of `pair` in the folder `scratch`, which has to be empty. Arguments as in Verification."""

    def __init__(
        self,
        pair: Pair,
        scratch: Path,
        screen: Screen,
        *,
        say: Callable[[str], None] = lambda text: None,
        start: Start = launch,
        meter: Meter | None = None,
    ) -> None:
        self._pair = pair
        self._scratch = scratch
        self._legs = Legs(screen, start)
        self._say = say
        self._meter = meter or Meter()
        self._settings = pair.settings
        self._require_recipe()

    def run(self) -> Proof:
        """Replay, compare, and after a difference look for its kind. Raises LegFailed, CheckpointError, Interrupted."""
        began, pair = time.monotonic(), self._pair
        saved = [_sound(one.path, one.manifest, self._meter) for one in (pair.start, pair.end)][1]
        ranks = self._settings.topology.world_size
        self._say(f"replaying windows {pair.start.step + 1} to {pair.end.step} on {ranks} rank{'s' * (ranks > 1)}")
        replayed = self.replay("replay")
        self._say(f"replayed windows {pair.start.step + 1} to {pair.end.step} ({time.monotonic() - began:.1f} s)")
        rows = compared(saved, replayed.contents, self._meter)
        rows.insert(0, compared_metrics(pair.run_dir, replayed.run_dir, range(pair.start.step + 1, pair.end.step + 1)))
        first = next((row.first for row in rows if row.first), None)
        hints, unsteady = [*pair.notes], None
        if first is not None:
            again = self.replay("replay-again", asks_again=True)
            hint, unsteady = self._kind_of_difference(replayed, again)
            hints.append(hint)
        not_claimed = [*self._changed_since(replayed), *limits(replayed.manifest, unsteady=unsteady)]
        return self._proof(rows, first, hints, not_claimed, replayed, began)

    def replay(self, name: str, *, asks_again: bool = False) -> Replayed:
        """Go from the earlier checkpoint to the step of the later one in fresh processes, in a folder of its own."""
        run_dir, end = self._scratch / name, self._pair.end
        run_dir.mkdir()
        asked = {"folder": str(run_dir), "scramble": SCRAMBLE, "asks_again": asks_again}
        options = {
            "resume_from": str(self._pair.start.path.resolve()),
            "accept_changes": True,  # of recipe and versions: what they are now is told, not refused
            "stop_at": end.step,
            "replay": asked,
        }
        settings = self._settings.model_copy(update={"checkpoint": Checkpoint()})  # saved at the end and only there
        self._legs.run(name, settings, run_dir, options, {0, StoppedAfterSave.exit_code})
        found = newest(run_dir)
        if found is None or found.step != end.step:
            raise CheckpointError(f"{run_dir}: the replay ended without a checkpoint of step {end.step}")
        return Replayed(_sound(found.path, read_manifest(found.path)[0], Meter()), run_dir)

    def _kind_of_difference(self, one: Replayed, other: Replayed) -> tuple[str, str | None]:
        """What a second replay says of a difference; and where data changed, if they did."""
        for rank, noted in enumerate(other.seen()):
            if noted["unsteady"]:
                text = unsteady_text(rank, noted["unsteady"][0])
                return f"the data of this recipe cannot be resumed: {text}", text
        seen = [[noted["seen"] for noted in replayed.seen()] for replayed in (one, other)]
        if seen[0] != seen[1]:
            text = "two replays from the same checkpoint were given different data"
            return f"the data of this recipe cannot be resumed: {text}", text
        if any(row["what"] != "same" for row in compare(one.contents, other.contents, Meter())[0]):
            return "two replays from the same checkpoint differ from each other: the run does not repeat itself", None
        return (
            "two replays are equal to each other: what the run had and the replays had not is held by no checkpoint (a "
            "plain attribute, a generator or a position of the recipe's own), or code, data or versions have changed"
        ), None

    # ---- telling ---------------------------------------------------------------------------------------------------

    def _proof(
        self,
        rows: list[Compared],
        first: str | None,
        hints: list[str],
        not_claimed: list[str],
        replayed: Replayed,
        began: float,
    ) -> Proof:
        pair = self._pair
        same = _same_files(pair.end.path, pair.end.manifest, replayed.manifest)
        facts = {
            "run": {"id": pair.end.manifest["run"], "folder": str(pair.run_dir.resolve())},
            "from": {"checkpoint": pair.start.path.name, "manifest sha256": pair.start.manifest_sha256},
            "to": {"checkpoint": pair.end.path.name, "manifest sha256": pair.end.manifest_sha256},
            "files": f"{same[0]} of {same[1]} byte-identical",
            **facts_of(replayed.manifest),
        }
        beyond = f"the windows up to {pair.start.step} and after {pair.end.step}"
        return Proof(
            f"run {pair.run_dir}, replayed from step {pair.start.step} to step {pair.end.step}",
            pair.claim,
            rows,
            first,
            facts,
            [*pair.not_claimed, beyond, *not_claimed],
            time.monotonic() - began,
            hints,
            {"mode": "run", "run_dir": str(pair.run_dir), "from": pair.start.path.name, "to": pair.end.path.name},
        )

    def _changed_since(self, replayed: Replayed) -> Iterator[str]:
        """What is no longer as it was when the run was trained; what was replayed is then not quite that run."""
        for one in (self._pair.start, self._pair.end):
            before, now = one.manifest, replayed.manifest
            lines = recipe_changes(before, str(now["recipe"]["source"]), now["recipe"]["sha256"])
            lines += differences(_flat_numerics(before), _flat_numerics(now))
            for line in lines:
                yield f"that the run as it was at {one.path.name} is what was replayed: {line}"

    def _require_recipe(self) -> None:
        recipe = self._settings.recipe
        if recipe.endswith(".py") and not Path(recipe).is_file():
            raise UsageError(f"{recipe}: the recipe of the run is not there any more; put it back to replay the run")


def _flat_numerics(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return dict(leaves(manifest["numerics"], "numerics"))


def _sound(path: Path, manifest: Mapping[str, Any], meter: Meter) -> Contents:
    """The contents of a checkpoint, every hash of it checked."""
    found = checkpoint_contents(path, manifest, verify=True, meter=meter)
    if found.problems:
        raise CheckpointError("\n  ".join([f"checkpoint {path} is damaged:", *found.problems]))
    return found


def _same_files(path: Path, saved: Mapping[str, Any], replayed: Mapping[str, Any]) -> tuple[int, int]:
    """How many files of the checkpoint `path` have the same bytes, of how many."""
    found = {entry["path"]: entry["hash"] for entry in replayed["files"]}
    both = [(entry, found[entry["path"]]) for entry in saved["files"] if entry["path"] in found]
    return sum(_hash_like(path, entry, other) == other for entry, other in both), len(saved["files"])


def _hash_like(path: Path, entry: Mapping[str, Any], other: str) -> str:
    """The hash of a saved file by the algorithm of `other`; the file is read where its format had another one."""
    if entry["hash"].partition(":")[0] == other.partition(":")[0]:
        return str(entry["hash"])
    return hash_file(path, entry["path"], like=other)
