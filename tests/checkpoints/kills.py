"""A save that is killed at every system call that changes something: always the previous checkpoint or the new one.

    python -m tests.checkpoints.kills [--sample N --seed S]

The saver needs no torch and its slices are small. For each scene the calls of one save are counted by tracing it; then
it is killed right before each of them, on a fresh copy of the folder, and what is left is read to the last byte. After
some kills the next save is made, as the next start of the run would.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardrun.checkpoint.store import CHECKPOINTS, STAGING, TRASH, scan
from tests.checkpoints.saver import held, put
from tests.checkpoints.syscalls import run_traced, unavailable
from tests.faults.verdict import table

HEADER = ["save", "calls that change something", "kills", "left the previous", "left the new one", "next save made"]
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory: a killed process loses nothing that it wrote, and most of a save's time is its fsyncs."""

_NEXT = 9
_GO_ON_EVERY = 5


@dataclass(frozen=True)
class Scene:
    """A folder as `prepare` leaves it, and the save that is killed there."""

    prepare: Callable[[Path], object]
    save: Callable[[Path], object]
    step: int


def _nothing(run_dir: Path) -> None:
    """No run was here yet."""


def _two(run_dir: Path) -> None:
    put(run_dir, 2)
    put(run_dir, 3)


def _four(run_dir: Path) -> None:
    for step in (2, 3, 4, 5):
        put(run_dir, step)


def _left_overs(run_dir: Path) -> None:
    _two(run_dir)
    folder = run_dir / CHECKPOINTS
    shutil.copytree(folder / "step-0000000002", folder / STAGING / "step-0000000004.1.abc")
    shutil.copytree(folder / "step-0000000002", folder / TRASH / "step-0000000001.abc")


SCENES = {
    "the first of all": Scene(_nothing, lambda run_dir: put(run_dir, 1), 1),
    "a later one; older ones go": Scene(_two, lambda run_dir: put(run_dir, 4, keep=1), 4),
    "keep and keep_every": Scene(_four, lambda run_dir: put(run_dir, 6, keep=1, keep_every=2), 6),
    "of the same step again": Scene(_two, lambda run_dir: put(run_dir, 3, keep=2), 3),
    "after one that was killed": Scene(_left_overs, lambda run_dir: put(run_dir, 4, keep=2), 4),
}


@dataclass
class Swept:
    """What came of the kills of one scene."""

    calls: list[str]
    kept: int = 0
    published: int = 0
    gone_on: int = 0

    def row(self, name: str) -> list[str]:
        """Of the table, see HEADER."""
        kinds = ", ".join(f"{call} {count}" for call, count in sorted(Counter(self.calls).items()))
        numbers = (self.kept + self.published, self.kept, self.published, self.gone_on)
        return [name, f"{len(self.calls)}: {kinds}", *map(str, numbers)]


def sweep(scene: Scene, folder: Path, sample: int | None = None, seed: int = 0) -> Swept:
    """Kill the save of `scene` before each of its calls, or a sample of them. AssertionError if it does any harm."""
    start = folder / "start"
    start.mkdir(parents=True)
    scene.prepare(start)
    before, saves = held(start), _saves(start)
    whole = shutil.copytree(start, folder / "whole")
    traced = run_traced(lambda: scene.save(whole))
    assert (traced.killed, traced.code) == (False, 0)
    after = held(whole)
    swept = Swept(traced.calls)
    places = range(1, len(traced.calls) + 1)
    chosen = sorted(random.Random(seed).sample(places, min(sample, len(places)))) if sample else places
    for number in chosen:
        run_dir = shutil.copytree(start, folder / "killed")
        ended = run_traced(lambda run_dir=run_dir: scene.save(run_dir), kill_before=number)  # type: ignore[misc]
        assert ended.killed, number
        assert ended.calls == traced.calls[:number], "a save makes the same calls every time"
        left, published = held(run_dir), _saves(run_dir) > saves
        if published:
            assert left[0] == scene.step
            assert set(after) <= set(left) <= {*before, scene.step}
        else:
            assert left == before
        assert published or not swept.published, "once it is published it stays"
        swept.published += published
        swept.kept += not published
        if number % _GO_ON_EVERY == 0:
            _go_on(run_dir)
            swept.gone_on += 1
        shutil.rmtree(run_dir)
    return swept


def _saves(run_dir: Path) -> int:
    """How many saves the folder has seen, as its newest checkpoint knows."""
    return max((found.sequence or 0 for found in scan(run_dir)), default=0)


def _go_on(run_dir: Path) -> None:
    put(run_dir, _NEXT, keep=1)
    assert held(run_dir) == [_NEXT]
    left = [path for name in (STAGING, TRASH) for path in (run_dir / CHECKPOINTS / name).glob("*")]
    assert left == []


def main() -> int:
    """Sweep all scenes and print the table."""
    parser = argparse.ArgumentParser(description="Kill a save at every system call.")
    parser.add_argument("--sample", type=int, default=None, help="so many calls of each save; all by default")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if why := unavailable():
        print(why)
        return 1
    began, rows = time.monotonic(), []
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory(prefix="kills-", dir=FAST) as folder:
            rows.append(sweep(scene, Path(folder) / "scene", asked.sample, asked.seed).row(name))
    print(table(HEADER, rows))
    print(f"{sum(int(row[2]) for row in rows)} kills in {time.monotonic() - began:.0f} s: no harm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
