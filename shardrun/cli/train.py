"""`shardrun train`: run a config, or go on with the run that it began."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.checkpoint.lock import RunLock
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import candidates, newest, scan
from shardrun.config.load import differences, load, resolved_yaml
from shardrun.config.schema import Config, meaning
from shardrun.errors import CheckpointError, LaunchError, UsageError
from shardrun.report import TrainScreen
from shardrun.run.launch import launch, write_exit
from shardrun.run.outcome import Outcome, RankEnd, judge
from shardrun.run.streams import RankLog
from shardrun.run.tether import Tether
from shardrun.run.worker_process import Job

RESOLVED = "config.resolved.yaml"


def run(
    config: Path,
    overrides: list[str],
    fresh: bool = False,
    accept_changes: bool = False,
    allow_fallback: bool = False,
    resume_from: Path | None = None,
    stop_at: int | None = None,
    json: bool = False,
) -> int:
    """Run the config to its end and return the exit code.

    Raises what forbids a start, before anything is written: ConfigError, UsageError, CheckpointError (nothing to resume
    from), LaunchError (the folder is in use). Started by torchrun or SLURM, this process is one rank of the run.
    """
    settings = load(config, overrides)
    by_environment = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if by_environment:
        _check_environment(settings, fresh)
    _check_start(settings, fresh, resume_from)
    if fresh:
        settings = _in_new_folder(settings)
    notes = _check_changes(settings, accept_changes)
    options = {
        "fresh": fresh,
        "accept_changes": accept_changes,
        "allow_fallback": allow_fallback,
        "resume_from": resume_from and os.path.abspath(resume_from),
        "stop_at": stop_at,
    }
    again = _command(config, overrides, settings if fresh else None)
    with TrainScreen(json=json, steps=settings.log.stdout) as screen, _owned(settings, by_environment) as fence:
        document = {
            "config": settings.model_dump(mode="json"),
            "run_dir": str(settings.run.dir),
            "options": {**options, "fence": fence},
        }
        if by_environment:
            return _run_as_rank(settings, document, screen, again, notes, json)
        for note in notes:
            screen.event(0, {"event": "note", "text": note})
        outcome = launch(_job(settings, document), screen)
        screen.close()
        _show(outcome, settings.run.dir, again, json)
        return outcome.exit_code


def _job(settings: Config, document: Mapping[str, Any]) -> Job:
    topology = settings.topology
    return Job(
        document,
        settings.run.dir,
        topology.world_size,
        threads_per_rank=topology.threads_per_rank,
        allow_non_loopback=topology.allow_non_loopback,
    )


def _show(outcome: Outcome, run_dir: Path, again: str, json: bool) -> None:
    last = next((found.path for found in scan(run_dir) if found.complete), None)
    report.outcome(outcome, run_dir, again, last, json=json)


# ---- before the start ----------------------------------------------------------------------------------------------


def _check_start(settings: Config, fresh: bool, resume_from: Path | None) -> None:
    """Refuse a run that must go on from something where there is nothing."""
    if resume_from is not None:
        candidates(resume_from, required=True)
    elif settings.checkpoint.resume == "required":
        if fresh:
            raise UsageError("--fresh starts anew, but checkpoint.resume is required; leave one of them out")
        candidates(settings.run.dir, required=True)


def _in_new_folder(settings: Config) -> Config:
    """The settings with a folder that nobody else has: run.dir, or the same name with -2, -3, ..."""
    base = settings.run.dir
    for folder in itertools.chain([base], (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(f"{folder}: cannot be made: {error.strerror}; choose another with run.dir=...") from error
    return settings.model_copy(update={"run": settings.run.model_copy(update={"dir": folder})})


def _check_changes(settings: Config, accept: bool) -> list[str]:
    """Refuse settings that mean something else than those which the run in this folder was trained with.

    Returns what the user should know of changes that are let through.
    """
    found = newest(settings.run.dir)
    if found is None:
        return []
    try:
        # What the checkpoint was trained with, not config.resolved.yaml: that one belongs to the last start, which may
        # have been refused.
        changed = differences(read_manifest(found.path)[0]["meaning"], meaning(settings))
    except (CheckpointError, OSError, KeyError):
        return []  # the worker says what is wrong with the checkpoint
    if not changed:
        return []
    if accept:
        return ["going on with a changed config:", *changed]
    raise UsageError(
        "\n  ".join(
            [
                f"{settings.run.dir}: this run was trained with another config",
                *changed,
                "go on with the change: --accept-changes; start anew in another folder: --fresh",
            ]
        )
    )


def _command(config: Path, overrides: list[str], moved: Config | None) -> str:
    """The command that goes on with this run."""
    program = ["python", "-m", "shardrun"] if Path(sys.argv[0]).name == "__main__.py" else ["shardrun"]
    words = list(overrides)
    if moved is not None:
        words = [word for word in words if not word.startswith("run.dir=")] + [f"run.dir={moved.run.dir}"]
    return shlex.join([*program, "train", str(config), *words])


@contextlib.contextmanager
def _owned(settings: Config, by_environment: bool) -> Iterator[int]:
    """Own the run's folder, with the config that now counts in it; of the ranks of a torchrun the first does it."""
    if by_environment and os.environ["RANK"] != "0":
        yield 0
        return
    with RunLock(settings.run.dir) as lock:
        path, text = settings.run.dir / RESOLVED, resolved_yaml(settings)
        try:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                part = path.with_suffix(".part")
                part.write_text(text, encoding="utf-8")
                part.replace(path)
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from error
        yield lock.token


# ---- one rank of a torchrun ----------------------------------------------------------------------------------------


def _check_environment(settings: Config, fresh: bool) -> None:
    given, asked = os.environ["WORLD_SIZE"], settings.topology.world_size
    if given != str(asked):
        raise UsageError(
            f"the environment has WORLD_SIZE={given}, topology.world_size is {asked}; start as many ranks, "
            f"or give topology.world_size={given}"
        )
    if fresh:
        raise UsageError("--fresh cannot choose a folder for ranks that are started apart; give run.dir=... yourself")


def _run_as_rank(
    settings: Config, document: dict[str, Any], screen: TrainScreen, again: str, notes: list[str], json: bool
) -> int:
    """Be one rank. The first one shows the run; the others only warnings, and their own error if they are its cause."""
    began, run_dir, total_steps = time.time(), settings.run.dir, None
    log = RankLog(run_dir / "logs" / f"rank-{os.environ['RANK']}.log")
    log.release()

    def sink(rank: int, event: Mapping[str, Any]) -> None:
        nonlocal total_steps
        total_steps = event.get("total_steps", total_steps)
        log.write(screen.event(rank, event))

    tether = Tether.from_env(sink)
    for note in notes if tether.rank == 0 else []:
        tether.send("note", text=note)
    from shardrun.run.worker import run_worker

    code = tether.run(lambda ties: run_worker(document, ties))
    screen.close()
    end = RankEnd(tether.rank, code, tether.status.status, tether.failure, ended_by_us=False, time=time.time())
    if end.failure is not None:
        log.write(end.failure.traceback.splitlines())
    log.close()
    outcome = judge([end], total_steps, stopping=tether.stop_requested, interrupted=False)
    leads = tether.rank == 0 if outcome.culprit is None else not end.follows
    if leads or not _is_newer(run_dir / "exit.json", began):
        write_exit(run_dir, outcome)
    if leads:
        _show(outcome, run_dir, f"the same command again ({again})", json)
    return code


def _is_newer(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime >= than
    except OSError:
        return False
