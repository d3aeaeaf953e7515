"""Saving: every rank writes, all of them agree, and one rename publishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardrun.checkpoint.background import PendingSave
from shardrun.checkpoint.protocol import Saved, Stages, run_stages, stages_of_save
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
    return run_stages(comm, _stages(run_dir, comm, lambda: snapshot, Retention(keep, keep_every), fence))


def begin_save(
    run_dir: Path,
    comm: Communicator,
    take: Callable[[], Snapshot],
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    fence: int | None = None,
) -> PendingSave:
    """Begin a save that goes on in the background; every rank of the world calls it, otherwise as `save`.

    `take` is called in the background and gives a snapshot of memory of its own: the live tensors that it copies must
    not change before `PendingSave.hold` has returned. Extra memory until its files are written: what this rank writes.
    """
    return PendingSave(comm, _stages(run_dir, comm, take, Retention(keep, keep_every), fence))


def _stages(
    run_dir: Path, comm: Communicator, take: Callable[[], Snapshot], retention: Retention, fence: int | None
) -> Stages:
    return stages_of_save(run_dir, comm, lambda: plan_of(take(), comm.rank, comm.world_size), retention, fence)
