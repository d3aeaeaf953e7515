"""Saving: every rank writes, all of them agree, and one rename publishes."""

from __future__ import annotations

from pathlib import Path

from shardrun.checkpoint.background import PendingSave
from shardrun.checkpoint.plan import agree_on_plan
from shardrun.checkpoint.protocol import Saved, run_stages, stages_of_save
from shardrun.checkpoint.retention import Retention
from shardrun.checkpoint.snapshot import Snapshot, plan_of
from shardrun.comm.communicator import Communicator

__all__ = ["PendingSave", "Saved", "Snapshot", "begin_save", "save"]


def save(
    run_dir: Path,
    comm: Communicator,
    snapshot: Snapshot,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    fence: int | None = None,
) -> Saved:
    """Publish `snapshot` as RUN_DIR/checkpoints/step-...; every rank of the world calls it, at the same step.

    When it returns, the checkpoint is durable. When it raises, all ranks raise, and the folder holds exactly what it
    held before, or the new checkpoint too (rank 0 was lost after the commit); what is there is whole in any case. A
    checkpoint of the same step is replaced in one go, and the new one is the newest whatever its step.

    `keep`, `keep_every`: which complete checkpoints stay, see Retention; others go once the new one is published.
    `fence`: the token of the RunLock that this run holds, see [Note: fencing]. Extra memory: one tensor at a time.
    CheckpointError: full or broken disk (folder, bytes needed and free), folder not shared, ranks that differ.
    """
    retention = Retention(keep, keep_every)
    plan = agree_on_plan(comm, lambda: plan_of(snapshot, comm.rank, comm.world_size))
    return run_stages(comm, stages_of_save(run_dir, comm, plan, retention, fence))


def begin_save(
    run_dir: Path,
    comm: Communicator,
    snapshot: Snapshot,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    fence: int | None = None,
) -> PendingSave:
    """Begin a save that goes on in the background; collective, otherwise as `save`.

    When it returns, nothing is durable yet, but `snapshot` has been copied and the live tensors may change. Extra
    memory until the save is over: this rank's record, and on rank 0 the model.
    """
    retention = Retention(keep, keep_every)
    aside = snapshot.set_aside(comm.rank)
    plan = agree_on_plan(comm, lambda: plan_of(aside, comm.rank, comm.world_size))
    return PendingSave(comm, stages_of_save(run_dir, comm, plan, retention, fence))
