"""`shardrun train`: run a config, or go on with the run that it began."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.checkpoint.lock import RunLock
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import Found, candidates, newest, scan
from shardrun.cli.hosts import party_of
from shardrun.comm.faults import plan
from shardrun.config.load import load, resolved_yaml
from shardrun.config.schema import Config
from shardrun.errors import CheckpointError, LaunchError, UsageError
from shardrun.report import TrainScreen
from shardrun.run.changes import changes, of_world_size, refusal
from shardrun.run.exit_file import forget_exit, write_exit
from shardrun.run.hosts import Hosts, hosts_of
from shardrun.run.launch import launch
from shardrun.run.outcome import Outcome, RankEnd, cut_short, judge, tells
from shardrun.run.slurm import rank_of_srun
from shardrun.run.streams import RankLog
from shardrun.run.tether import Tether
from shardrun.run.worker_main import work
from shardrun.run.worker_process import Job

RESOLVED = "config.resolved.yaml"


def run(
    config: Path,
    overrides: list[str],
    fresh: bool = False,
    accept_changes: bool = False,
    allow_fallback: bool = False,
    reshard: bool = False,
    resume_from: Path | None = None,
    stop_at: int | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    json: bool = False,
    fault: str | None = None,
) -> int:
    """Run the config to its end and return the exit code.

    Raises what forbids a start, before anything is written: ConfigError, UsageError, CheckpointError (nothing to resume
    from), LaunchError (the folder is in use). Started by torchrun or srun, this process is one rank of the run; with
    `nnodes` it is one of so many launchers, which meet at `rendezvous`. `fault` is a plan of comm.faults.
    """
    settings = load(config, overrides)
    if fault is not None:
        plan(fault, settings.topology.world_size)
    hosts = _hosts(settings, nnodes, node_rank, rendezvous, fresh)
    by_environment = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if by_environment:
        _check_environment(settings, fresh)
    _check_start(settings, fresh, resume_from)
    notes = []
    if resume_from is not None or not fresh:
        source = settings.run.dir if resume_from is None else resume_from
        if saved := _to_go_on_from(source, allow_fallback):
            notes = _check_changes(settings, source, saved, accept_changes, reshard)
            _check_stop(settings, source, saved, stop_at)
    if fresh:
        settings = _in_new_folder(settings)
    options = {
        "fresh": fresh,
        "accept_changes": accept_changes,
        "allow_fallback": allow_fallback,
        "reshard": reshard,
        "resume_from": resume_from and os.path.abspath(resume_from),
        "stop_at": stop_at,
        "fault": fault,
    }
    again = partial(_command, config, overrides, settings, options, newest(settings.run.dir), hosts)
    first = os.environ["RANK"] == "0" if by_environment else hosts is None or hosts.leads
    with (
        TrainScreen(json=json, steps=settings.log.stdout) as screen,
        _owned(settings, first, by_environment) as fence,
    ):
        document = {
            "config": settings.model_dump(mode="json"),
            "run_dir": str(settings.run.dir),
            "options": {**options, "fence": fence},
        }
        if by_environment:
            return _run_as_rank(settings, document, screen, again, [*notes, *_unused(settings)], json)
        for note in notes:
            screen.event(0, {"event": "note", "text": note})
        party = None if hosts is None else party_of(settings, hosts, options)
        outcome = launch(_job(settings, document), screen, party)
        screen.close()
        _show(outcome, settings.run.dir, again(), json)
        return outcome.exit_code


def _job(settings: Config, document: Mapping[str, Any]) -> Job:
    topology = settings.topology
    # Once there is a checkpoint of this start, it is gone on from as it stands.
    asked_once = ("accept_changes", "allow_fallback", "reshard")
    of_this_start = {"resume_from": None, "fault": None, **dict.fromkeys(asked_once, False)}
    return Job(
        document,
        settings.run.dir,
        topology.world_size,
        threads_per_rank=topology.threads_per_rank,
        allow_non_loopback=topology.allow_non_loopback,
        max_restarts=topology.max_restarts,
        later={**document, "options": {**document["options"], **of_this_start}},
    )


def _show(outcome: Outcome, run_dir: Path, again: str, json: bool) -> None:
    last = next((found.path for found in scan(run_dir) if found.complete), None)
    report.outcome(outcome, run_dir, again, last, json=json)


# ---- before the start ----------------------------------------------------------------------------------------------


def _hosts(
    settings: Config, nnodes: int | None, node_rank: int | None, rendezvous: str | None, fresh: bool
) -> Hosts | None:
    """The hosts of the run if there are several. A task of srun becomes a rank as torchrun would have made it."""
    topology = settings.topology
    if nnodes is None:
        rank = rank_of_srun(os.environ, rendezvous)
        os.environ.update(rank or {})
        if rendezvous is not None and rank is None:
            raise UsageError(f"--rendezvous {rendezvous} is for several hosts; give --nnodes too, or leave it out")
    hosts = hosts_of(
        nnodes,
        node_rank,
        rendezvous,
        world_size=topology.world_size,
        allow_non_loopback=topology.allow_non_loopback,
        environ=os.environ,
    )
    if hosts is not None and fresh:
        raise UsageError("--fresh cannot choose a folder for hosts that are started apart; give run.dir=... yourself")
    return hosts


def _check_start(settings: Config, fresh: bool, resume_from: Path | None) -> None:
    """Refuse a run that must go on from something where there is nothing."""
    if resume_from is not None:
        candidates(resume_from, wanted="resume from")
    elif settings.checkpoint.resume == "required":
        if fresh:
            raise UsageError("--fresh starts anew, but checkpoint.resume is required; leave one of them out")
        candidates(settings.run.dir, wanted="resume from")


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


def _to_go_on_from(source: Path, allow_fallback: bool) -> dict[str, Any] | None:
    """The manifest of the checkpoint that the workers will take up; None where it is for them to say what is wrong."""
    found = next((one for one in candidates(source) if one.complete or not allow_fallback), None)
    try:
        saved = {} if found is None else read_manifest(found.path)[0]
    except (CheckpointError, OSError):
        return None
    sections = (saved.get(name) for name in ("meaning", "counters", "data"))
    return saved if all(isinstance(section, dict) for section in sections) else None


def _check_changes(settings: Config, source: Path, saved: Mapping[str, Any], accept: bool, reshard: bool) -> list[str]:
    """Refuse settings that mean something else than those which the checkpoint was trained with.

    That is what counts, not config.resolved.yaml: that one belongs to the last start, which may have been refused.
    Returns what the user should know of changes that are let through. The workers look again, at what they did load.
    Another world size is let through by `reshard` alone.
    """
    changed = [line for line in changes(saved, settings) if not (reshard and of_world_size(line))]
    if changed and (not accept or any(map(of_world_size, changed))):
        raise refusal(source, changed)
    return ["going on with a changed config:", *changed] if changed else []


def _check_stop(settings: Config, source: Path, saved: Mapping[str, Any], stop_at: int | None) -> None:
    """Refuse a stop that lies behind; a finished run has nothing left to stop and is left as it is."""
    step = saved["step"]
    if stop_at is not None and stop_at <= step and not _finished(settings, saved):
        raise UsageError(
            f"--stop-at {stop_at} lies behind: the checkpoint in {source} is of step {step}; "
            f"give a step after {step}, or leave --stop-at out"
        )


def _finished(settings: Config, saved: Mapping[str, Any]) -> bool:
    train, counters = settings.train, saved["counters"]
    if train.epochs is not None:
        return bool(counters.get("position", 0) >= train.epochs * saved["data"].get("samples", 0))
    return bool(saved["step"] >= train.steps if train.steps else counters.get("tokens", 0) >= (train.tokens or 0))


def _command(
    config: Path,
    overrides: list[str],
    settings: Config,
    options: Mapping[str, Any],
    before: Found | None,
    hosts: Hosts | None,
) -> str:
    """The command that goes on with this run. `before`: the newest checkpoint that its folder held at the start.

    What was asked for at the start has to be asked for again until a checkpoint of this start is there.
    """
    program = ["python", "-m", "shardrun"] if Path(sys.argv[0]).name == "__main__.py" else ["shardrun"]
    words = list(overrides)
    if options["fresh"]:
        words = [word for word in words if not word.startswith("run.dir=")] + [f"run.dir={settings.run.dir}"]
    if newest(settings.run.dir) == before:
        if options["resume_from"] is not None:
            words += ["--resume-from", str(options["resume_from"])]
        words += [
            f"--{name.replace('_', '-')}" for name in ("accept_changes", "allow_fallback", "reshard") if options[name]
        ]
    if hosts is None:
        return shlex.join([*program, "train", str(config), *words])
    words += ["--nnodes", str(hosts.nnodes), "--node-rank", str(hosts.node_rank), "--rendezvous", hosts.place]
    return f"the same command again on every host ({shlex.join([*program, 'train', str(config), *words])})"


@contextlib.contextmanager
def _owned(settings: Config, first: bool, by_environment: bool) -> Iterator[int]:
    """Own the run's folder, with the config that now counts in it; of several ranks or hosts the `first` does it."""
    if not first:
        yield 0
        return
    with RunLock(settings.run.dir) as lock:
        if by_environment:  # else the launcher does it
            forget_exit(settings.run.dir)
        path, text = settings.run.dir / RESOLVED, resolved_yaml(settings)
        try:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                part = path.with_suffix(".part")
                part.write_text(text, encoding="utf-8")
                part.replace(path)
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from error
        yield lock.token


# ---- one rank of a torchrun or srun --------------------------------------------------------------------------------


def _check_environment(settings: Config, fresh: bool) -> None:
    given, asked = os.environ["WORLD_SIZE"], settings.topology.world_size
    if given != str(asked):
        raise UsageError(
            f"the environment has WORLD_SIZE={given}, topology.world_size is {asked}; start as many ranks, "
            f"or give topology.world_size={given}"
        )
    if fresh:
        raise UsageError("--fresh cannot choose a folder for ranks that are started apart; give run.dir=... yourself")


def _unused(settings: Config) -> list[str]:
    restarts = settings.topology.max_restarts
    told = "is for ranks that shardrun starts itself; here torchrun's --max-restarts counts"
    return [f"topology.max_restarts {restarts} {told}"] if restarts else []


def _run_as_rank(
    settings: Config,
    document: dict[str, Any],
    screen: TrainScreen,
    again: Callable[[], str],
    notes: list[str],
    json: bool,
) -> int:
    """Be one rank. The first one shows the run; the others only warnings, and their own error if they are its cause,
    or the absence of others if they are the first of those who are left."""
    began, run_dir, total_steps = time.time(), settings.run.dir, None
    log = RankLog(run_dir / "logs" / f"rank-{os.environ['RANK']}.log")
    log.release()

    def sink(rank: int, event: Mapping[str, Any]) -> None:
        nonlocal total_steps
        total_steps = event.get("total_steps", total_steps)
        log.write(screen.event(rank, event))

    tether = Tether.from_env(sink)
    tether.before_interrupt = lambda: write_exit(run_dir, cut_short())
    for note in notes if tether.rank == 0 else []:
        tether.send("note", text=note)
    code = tether.run(lambda ties: work(document, ties))
    screen.close()
    end = RankEnd(tether.rank, code, tether.status.status, tether.failure, ended_by_us=False, time=time.time())
    if end.failure is not None:
        log.write(end.failure.traceback.splitlines())
    log.close()
    outcome = judge([end], total_steps, stopping=tether.stop_requested, interrupted=False)
    leads = tether.rank == 0 if outcome.culprit is None else tells(end)
    if leads or not _is_newer(run_dir / "exit.json", began):
        write_exit(run_dir, outcome)
    if leads:
        _show(outcome, run_dir, f"the same command again ({again()})", json)
    return code


def _is_newer(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime >= than
    except OSError:
        return False
