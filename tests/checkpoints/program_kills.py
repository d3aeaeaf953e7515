"""The real program on two ranks, saving after every window, killed with all its processes at random moments.

    python -m tests.checkpoints.program_kills [--kills 20 --seed 5]

After each kill the newest checkpoint is read and hashed, and it is never an older one than before; the next start goes
on from it, saving in the foreground and in the background in turn. In the end the run is brought to its length and
held against one that nothing happened to, tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.store import newest
from tests.support.launching import Program, final_tensors, shardrun, started, until, write_config
from tests.support.training import trained

_ENDLESS = 10**6
_LATEST_S = 0.25  # so long after a checkpoint, at most, the next kill comes
_MORE = 5  # windows that the last start makes


def killed_at_random(folder: Path, kills: int, seed: int) -> list[int]:
    """The step of the newest checkpoint after each kill. AssertionError if anything is lost or damaged."""
    folder.mkdir(exist_ok=True)
    recipe_args = {"samples": 10_000}
    config = write_config(
        folder, recipe="run_plain", recipe_args=recipe_args, optimizer={"name": "adamw"}, checkpoint={"every": 1}
    )
    chance, steps = random.Random(seed), [0]
    for number in range(kills):
        words = [f"train.steps={_ENDLESS}", f"checkpoint.async={'true' if number % 2 == 0 else 'false'}"]
        with started(shardrun("train", config, *words), folder) as program:
            until(lambda: _last(folder / "run") > steps[-1], 120, f"no checkpoint: {program.stdout}{program.stderr}")
            time.sleep(chance.uniform(0, _LATEST_S))
            _kill_all(program)
        found = newest(folder / "run")
        assert found is not None
        assert found.complete, found.why
        assert inspect(found.path, verify=True)["problems"] == []
        assert found.step > steps[-1]
        steps.append(found.step)
    document = json.loads(config.read_text())
    document["train"]["steps"] = steps[-1] + _MORE
    for run in ("run", "twin"):
        trained({**document, "run": {"dir": str(folder / run)}})
    one, other = final_tensors(folder / "run"), final_tensors(folder / "twin")
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []
    return steps[1:]


def _last(run_dir: Path) -> int:
    found = newest(run_dir)
    return 0 if found is None else found.step


def _kill_all(program: Program) -> None:
    for pid in [*program.family(), program.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description="Kill the real program while it saves.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="program-kills-") as folder:
        steps = killed_at_random(Path(folder), asked.kills, asked.seed)
    print(f"killed {len(steps)} times, each time gone on from a whole checkpoint, of steps {steps}")
    print(f"the same tensors at the end as without a kill; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
