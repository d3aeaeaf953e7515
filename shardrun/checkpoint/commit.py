"""Saving: every rank writes, all of them agree, and one rename publishes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from shardrun.checkpoint.plan import agree_on_plan
from shardrun.checkpoint.publish import Order, publish
from shardrun.checkpoint.snapshot import Snapshot
from shardrun.checkpoint.staging import abandoned_on_error, open_staging, write_files
from shardrun.checkpoint.store import CHECKPOINTS, step_name
from shardrun.checkpoint.together import by_root
from shardrun.comm.communicator import Communicator
from shardrun.errors import UsageError

__all__ = ["Saved", "Snapshot", "save"]


@dataclass(frozen=True)
class Saved:
    """A published, durable checkpoint. `bytes` counts all ranks' files; `notes` are for the user's eyes."""

    step: int
    path: Path
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()


def save(
    run_dir: Path, comm: Communicator, snapshot: Snapshot, *, keep: int | None = None, fence: int | None = None
) -> Saved:
    """Publish `snapshot` as RUN_DIR/checkpoints/step-...; every rank of the world calls it, at the same step.

    When it returns, the checkpoint is durable. When it raises, all ranks raise, and the folder holds exactly what it
    held before, or the new checkpoint too (rank 0 was lost after the commit); what is there is whole in any case. A
    checkpoint of the same step is replaced in one go, and the new one is the newest whatever its step.

    `keep`: how many complete checkpoints stay (at least 1; None: all); older ones go once the new one is published.
    `fence`: the token of the RunLock that this run holds, see [Note: fencing]. Extra memory: one tensor at a time.
    CheckpointError: full or broken disk (folder, bytes needed and free), folder not shared, ranks that differ.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"keep {keep}: at least 1 checkpoint has to stay")
    started = time.monotonic()
    plan = agree_on_plan(comm, snapshot)
    staging = open_staging(run_dir, comm, snapshot, plan.needed, fence)
    with abandoned_on_error(staging, comm):
        entries = write_files(staging, comm, plan, snapshot)
        order = Order(run_dir, staging, plan.sections, entries, plan.needed, keep, fence)
        published = by_root(comm, "checkpoint published", lambda: publish(order))
    path = run_dir / CHECKPOINTS / step_name(snapshot.step)
    return Saved(snapshot.step, path, published["bytes"], time.monotonic() - started, tuple(published["notes"]))
