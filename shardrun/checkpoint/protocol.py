"""The way of a save from a plan to a published checkpoint, as work between meetings; needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrun.checkpoint.plan import Plan, agreed, shown
from shardrun.checkpoint.publish import Order, publish
from shardrun.checkpoint.retention import Retention
from shardrun.checkpoint.staging import (
    abandoned_on_error,
    joined_entries,
    joined_sections,
    open_staging,
    read_nonce,
    staging_folder,
    write_files,
)
from shardrun.checkpoint.store import CHECKPOINTS, step_name
from shardrun.checkpoint.together import together

if TYPE_CHECKING:
    from shardrun.comm.communicator import Communicator


@dataclass(frozen=True)
class Saved:
    """A published, durable checkpoint. `bytes` counts all ranks' files; `notes` are for the user's eyes.

    `free`: bytes that were free in the folder once the files were written.
    """

    step: int
    path: Path
    bytes: int
    free: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """What a rank does on its own (`do`: plain JSON) before all ranks meet under `tag` and show what came of it."""

    tag: str
    do: Callable[[], Any]


Stages = Generator[Work, list[Any], Saved]
"""[Note: stages of a save] Yields each work, takes what it gave on every rank, and returns the checkpoint.

Whoever drives it calls `together` with the work, at once (`run_stages`) or in the background (`PendingSave`), and
throws into it what that raises. So both ways of saving are one protocol, and only the driver communicates.
"""


def stages_of_save(
    run_dir: Path, comm: Communicator, make: Callable[[], Plan], retention: Retention, fence: int | None
) -> Stages:
    """A save from its plan, which is the first work, to the published checkpoint."""
    started, made = time.monotonic(), list[Plan]()

    def propose() -> dict[str, Any]:
        made.append(make())
        return shown(made[0])

    answers = yield Work("checkpoint plan", propose)
    made[0] = agreed(made[0], answers)
    plan = replace(made[0], files=[], param_sha256=None)  # the tensors are let go by whoever writes them
    opened, *_ = yield Work("checkpoint staging", lambda: open_staging(run_dir, plan, fence) if comm.rank == 0 else {})
    staging = staging_folder(run_dir, opened)
    with abandoned_on_error(staging, comm):
        yield Work("checkpoint nonce", lambda: read_nonce(staging, opened))
        written = yield Work("checkpoint files", lambda: write_files(staging, made.pop()))

        def order() -> Order:
            entries, sections = joined_entries(plan, written), joined_sections(plan, written)
            return Order(run_dir, staging, sections, entries, plan.needed, retention, fence)

        published, *_ = yield Work("checkpoint published", lambda: publish(order()) if comm.rank == 0 else None)
    path = run_dir / CHECKPOINTS / step_name(plan.step)
    seconds = time.monotonic() - started
    return Saved(plan.step, path, published["bytes"], published["free"], seconds, tuple(published["notes"]))


def run_stages(comm: Communicator, stages: Stages) -> Saved:
    """Do all the work at once; collective."""
    try:
        work = next(stages)
        while True:
            try:
                answers = together(comm, work.tag, work.do)
            except BaseException as error:
                stages.throw(error)
                raise
            work = stages.send(answers)
    except StopIteration as done:
        saved: Saved = done.value
        return saved
