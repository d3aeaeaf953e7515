"""Write the golden checkpoint of the format that this shardrun writes: python -m tests.golden.make

Run once per format version. A checkpoint that is committed is never written again: tests hold that it loads for ever.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import VERSION
from shardrun.comm.communicator import Communicator
from tests.golden import state
from tests.support.ranks import run_ranks

STEP = 3
WORLD_SIZE = 2
FOLDER = Path(__file__).parent / f"format-{VERSION}"


def save_golden(comm: Communicator, run_dir: Path) -> None:
    """One rank's part."""
    save(run_dir, comm, state.snapshot(comm.rank, comm.world_size, STEP))


def table(checkpoint: Path) -> dict[str, list[object]]:
    """Tensor name -> dtype, shape, sha256, of the model and of the whole optimizer state."""
    found = inspect(checkpoint, verify=True)
    rows = [*found["model"], *(row for group in found["groups"].values() for row in group["state"])]
    return {row["name"]: [row["dtype"], row["shape"], row.get("sha256")] for row in rows}


def main() -> int:
    """0 when it was written; 1 when it is there already."""
    if FOLDER.exists():
        return 1
    run_ranks(WORLD_SIZE, save_golden, FOLDER)
    tensors = table(FOLDER / "checkpoints" / f"step-{STEP:010d}")
    (FOLDER / "tensors.json").write_text(json.dumps(tensors, indent=0, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
