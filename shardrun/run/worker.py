"""One rank of a job: join, build, take up the newest checkpoint, train, leave."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun.checkpoint.store import CHECKPOINTS, step_of
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.errors import ShardrunError, StoppedAfterSave
from shardrun.run.build import Built, build, open_communicator
from shardrun.run.curve import PICTURE, write_curve
from shardrun.run.failure import Seen, follows
from shardrun.run.fault_plan import install_faults
from shardrun.run.journal import Journal
from shardrun.run.metrics import MetricsFile
from shardrun.run.model import distinct_parameters
from shardrun.run.report_tables import start_tables
from shardrun.run.resharding import Source, find_source
from shardrun.run.state import resume, saved_order
from shardrun.run.tether import Tether
from shardrun.run.trainer import Plan, Trainer
from shardrun.run.witness import onlooker


def run_worker(job: Mapping[str, Any], tether: Tether) -> int:
    """Do this rank's part of `job` and return its exit code; raises what went wrong. Every rank calls it."""
    config = from_mapping(job["config"])
    _forward_warnings(tether)
    comm = open_communicator(config)
    trainer: Trainer | None = None

    def step() -> int:
        return 0 if trainer is None else trainer.current_step

    try:
        comm.observer = lambda phase, collective: tether.status.set(step(), phase, collective)
        install_faults(job["options"].get("fault"), comm, step)
        with comm.timeout(config.topology.save_timeout_s):
            source = find_source(comm, job)
            placement = saved_order(comm, source)
        built = build(config, comm, placement)
        install_faults(job["options"].get("fault"), comm, step, distinct_parameters(built.model))
        trainer = _trainer(built, job, source, tether)
        _start_event(trainer)
        already = trainer.finished
        if not already:
            trainer.run()
        comm.agree("end of the run")
        if comm.rank == 0:
            if not already or not (trainer.plan.run_dir / PICTURE).exists():  # killed between the last save and here
                _draw_curve(trainer.plan.run_dir, tether)
            tether.send("finished", step=trainer.progress.step, already=already)
    except BaseException as error:
        if not isinstance(error, StoppedAfterSave):
            _leave_word(error, comm, step())
            tether.seen = _seen(comm)
        raise
    finally:
        comm.close()  # frees peers that wait for this rank
        if trainer is not None:
            trainer.journal.close()
    return 0


def _leave_word(error: BaseException, comm: Communicator, step: int) -> None:
    """Tell the peers, who wait for this rank, whose fault it was; and the log of this rank what came before."""
    if not (isinstance(error, ShardrunError) and error.agreed) and not follows(error, comm.rank):
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        comm.poison(f"rank {comm.rank} failed at step {step}, phase {comm.phase}: {told}")
    if table := comm.history_text():  # a note is part of the traceback, and that is for the log alone
        error.add_note(f"the last collectives of rank {comm.rank}:\n{table}")


def _seen(comm: Communicator) -> Seen | None:
    seen = comm.failure
    return None if seen is None else Seen(seen.kind, seen.collective, seen.seconds, seen.missing, seen.culprit)


def _trainer(built: Built, job: Mapping[str, Any], source: Source, tether: Tether) -> Trainer:
    options, run_dir = job["options"], Path(job["run_dir"])
    witness = onlooker(built, options)
    if witness is not None:
        witness.before_restore()
    with built.comm.timeout(built.config.topology.save_timeout_s):
        progress, lineage = resume(built, job, source)
    if built.comm.rank == 0:
        source.discard()
    if witness is not None:
        witness.after_restore(progress)
    if built.comm.rank == 0 and lineage.parent is not None:
        tether.send("resumed", step=progress.step, path=str(lineage.parent))
    plan = Plan(
        run_dir,
        stop_at=options.get("stop_at"),
        end_at=None if witness is None else witness.end,
        saves=options.get("saves", True),
    )
    trainer = Trainer(built, tether, plan, progress, lineage, Journal(tether), witness=witness)
    if built.comm.rank == 0 and not trainer.finished:  # a finished run is left exactly as it is
        metrics = MetricsFile(run_dir, progress.step, later=_later_checkpoint(run_dir, progress.step))
        trainer.journal = Journal(tether, metrics)
    return trainer


def _later_checkpoint(run_dir: Path, step: int) -> bool:
    """Whether the run's folder holds a checkpoint of a later step than it goes on from."""
    folder = run_dir / CHECKPOINTS
    return any((step_of(one.name) or 0) > step for one in folder.iterdir()) if folder.is_dir() else False


def _draw_curve(run_dir: Path, tether: Tether) -> None:
    """Draw the loss; a run that is done and saved does not fail because a picture cannot be written."""
    try:
        write_curve(run_dir)
    except OSError as error:
        tether.send("warning", text=f"{error.filename}: {error.strerror}; the loss curve is not drawn")


def _start_event(trainer: Trainer) -> None:
    built, comm = trainer.built, trainer.built.comm
    tables = start_tables(built)
    if comm.rank != 0:
        return
    trainer.tether.send(
        "start",
        world_size=comm.world_size,
        device=str(comm.device),
        backend=comm.backend,
        transport=_transport(built),
        tables=tables,
        first_step=trainer.progress.step,
        total_steps=trainer.total_steps,
    )
    for note in built.notes:
        trainer.tether.send("note", text=note)


def _transport(built: Built) -> str:
    """How gradients and slices of this rank's groups travel, see `Communicator.transport`."""
    talking = [group.comm for group in built.groups if group.comm.world_size > 1]
    return "; ".join(dict.fromkeys(comm.transport for comm in talking or [built.comm]))


def _forward_warnings(tether: Tether) -> None:
    """A warning on any rank reaches the screen once, marked with its rank, and this rank's log."""

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        tether.send("warning", text=f"{category.__name__}: {message} ({filename}:{lineno})")

    warnings.showwarning = show  # type: ignore[assignment]
