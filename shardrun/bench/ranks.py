"""Starts fresh processes, one for each rank, has them do one thing, and brings what each has found. No torch here."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardrun.config.schema import Config
from shardrun.errors import Interrupted, LaunchError, ShardrunError
from shardrun.run.launch import launch
from shardrun.run.outcome import Outcome
from shardrun.run.worker_process import Job

COMMAND = (sys.executable, "-m", "shardrun.bench.rank_main")
_LAST_LINES = 12


class RanksFailed(ShardrunError):
    """A rank failed, and what was to be measured is not."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def scratch_folder(inside: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards, `inside` another one or where temporary files go; LaunchError if there is no
    room for one."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardrun-bench-", dir=inside))
    except OSError as error:
        way = "point TMPDIR to a folder with room" if inside is None else f"make room in {inside}"
        raise LaunchError(f"no scratch folder: {error.strerror}; {way}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def job_of(config: Config, body: str, options: Mapping[str, Any], folder: Path, times: int = 1) -> Job:
    """The job to run `body`, "module:function" of (job, tether), on the ranks of the config, without validation.

    `times`: for as many things on end as may each take the time of `topology.timeout_s`. Makes `folder`.
    """
    folder.mkdir()
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": None, "at_end": False})})
    topology = config.topology
    document = {
        "config": config.model_dump(mode="json"),
        "run_dir": str(folder),
        "body": body,
        "limit_s": topology.timeout_s * times,
        "options": dict(options),
    }
    return Job(
        document,
        folder,
        topology.world_size,
        threads_per_rank=topology.threads_per_rank,
        allow_non_loopback=topology.allow_non_loopback,
        command=COMMAND,
    )


def run_job(job: Job, where: str) -> list[Any]:
    """Run the job on fresh ranks to its end; what the body has returned on each of them, by rank.

    Raises RanksFailed with the error and the last lines of the rank that failed, or Interrupted if somebody asked to
    stop. No process of it is left then.
    """
    screen = _LastLines()
    outcome = launch(job, screen)
    if outcome.exit_code == Interrupted.exit_code or screen.stopping:
        raise Interrupted(f"stopped in {where}; nothing is compared")
    if outcome.exit_code != 0:
        raise RanksFailed(f"{where}: {_told(outcome, screen)}", outcome.exit_code)
    return [json.loads((job.run_dir / f"rank-{rank}.json").read_text()) for rank in range(job.world_size)]


class _LastLines:
    """A screen that shows nothing and keeps the last lines that each rank printed."""

    def __init__(self) -> None:
        self.stopping = False
        self.lines: dict[int, deque[str]] = {}

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        self.stopping |= event["event"] == "stopping"
        return []

    def output(self, rank: int, text: str) -> None:
        self.lines.setdefault(rank, deque(maxlen=_LAST_LINES)).append(text)


def _told(outcome: Outcome, screen: _LastLines) -> str:
    """What went wrong: the reason, the error with its place, and the last lines of that rank."""
    lines, culprit = [outcome.reason], outcome.culprit
    if culprit is not None and (cause := culprit.failure) is not None:
        place = f"\n    at {cause.file}:{cause.line}" if cause.file is not None else ""
        lines.append(f"  {cause.type}: {cause.message}{place}")
    if culprit is not None and (last := screen.lines.get(culprit.rank)):
        lines += [f"  the last lines of rank {culprit.rank}:", *(f"    {text}" for text in last)]
    return "\n".join(lines)
