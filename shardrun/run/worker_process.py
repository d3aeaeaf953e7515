"""One worker process as its launcher sees it: environment, pipes, files, end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardrun.run import failure, status
from shardrun.run.kernel import RecentKills
from shardrun.run.outcome import RankEnd
from shardrun.run.streams import LineSplitter, RankLog
from shardrun.run.tether import STOP_SIGNALS


@dataclass(frozen=True)
class Job:
    """What to run: `document` is the JSON that every worker reads (config, run_dir, options).

    After a failure that may pass, up to `max_restarts` new worlds go on from the newest checkpoint. Once this start
    has saved one they read `later`, which asks for nothing that holds for the first world only.
    """

    document: Mapping[str, Any]
    run_dir: Path
    world_size: int
    threads_per_rank: int = 1
    allow_non_loopback: bool = False
    max_restarts: int = 0
    later: Mapping[str, Any] | None = None
    command: tuple[str, ...] = field(default=(sys.executable, "-m", "shardrun.run.worker_main"))


@dataclass(frozen=True)
class Place:
    """Which ranks of the world run here, by which name they know their world, and where its store is."""

    ranks: range
    run_id: str
    address: tuple[str, int] | None = None
    """Of the store; None for a world of one."""
    store: socket.socket | None = None
    """Listens there already; for rank 0, if it runs here."""
    host: str = ""
    """Name of this host where there are several."""


class WorkerProcess:
    """One worker process, its pipes and its files."""

    def __init__(
        self, rank: int, host: str, process: subprocess.Popen[bytes], event_fd: int, control: Path, log: RankLog
    ) -> None:
        assert process.stdout is not None
        self.rank = rank
        self.host = host
        self.process = process
        self.event_fd = event_fd
        self.out_fd = process.stdout.fileno()
        self.log = log
        self.status_path = _status_path(control, rank)
        self.error_path = _error_path(control, rank)
        self.events = LineSplitter(sys.maxsize)
        self.output = LineSplitter()
        self.ended_by_us = False
        self._kernel_kills = RecentKills()
        for fd in (self.out_fd, event_fd):
            os.set_blocking(fd, False)
        self.end: RankEnd | None = None

    def has_left(self) -> bool:
        """Whether the process is over. It stays a zombie, so that its number still means its session."""
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        self._kernel_kills.look()
        return False

    def kill(self) -> None:
        """Kill the whole session group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> RankEnd:
        """Take the end of a process that is over, and kill what it may have left behind."""
        self.kill()
        code = self.process.wait()
        self.end = RankEnd(
            rank=self.rank,
            code=code,
            status=status.read(self.status_path),
            failure=failure.read(self.error_path),
            ended_by_us=self.ended_by_us and code == -signal.SIGKILL,
            time=time.time(),
            host=self.host,
            by_kernel=code == -signal.SIGKILL and self._kernel_kills.any(),
        )
        return self.end

    def close(self) -> None:
        """End what still runs and close what is open, however the run came here."""
        if self.end is None:
            self.kill()
            self.process.wait()
        self.log.close()
        os.close(self.event_fd)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def is_done(self) -> bool:
        """Whether it has left its mark of being done, its process over or not."""
        return status.read(self.status_path).done

    @property
    def is_failing(self) -> bool:
        """Whether it failed, even if its process still struggles to leave."""
        return not self.end.done if self.end is not None else self.error_path.exists()


def start_worker(job: Job, rank: int, control: Path, life_fd: int, place: Place) -> WorkerProcess:
    """Start the worker of `rank` in a session of its own; OSError if there is no such program."""
    event_read, event_write = os.pipe()
    env = _environment(job, control, rank, place)
    env |= {"SHARDRUN_EVENT_FD": str(event_write), "SHARDRUN_LIFE_FD": str(life_fd)}
    passed = [event_write, life_fd]
    if place.store is not None and rank == 0:
        env["SHARDRUN_STORE_FD"] = str(place.store.fileno())
        passed.append(place.store.fileno())
    # Inherited as blocked; the tether of the worker lets them in once there is a handler for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        process = subprocess.Popen(
            job.command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=passed,
            start_new_session=True,
        )
    except OSError:
        os.close(event_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(event_write)
    log = RankLog(job.run_dir / "logs" / f"rank-{rank}.log")
    return WorkerProcess(rank, place.host, process, event_read, control, log)


def _environment(job: Job, control: Path, rank: int, place: Place) -> dict[str, str]:
    # Nothing of another launcher, under which this one may run, may reach the workers.
    foreign = ("SHARDRUN_", "TORCHELASTIC_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - place.ranks.start),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(len(place.ranks)),
        "OMP_NUM_THREADS": str(job.threads_per_rank),
        "MKL_NUM_THREADS": str(job.threads_per_rank),
        "PYTHONUNBUFFERED": "1",
        "SHARDRUN_RUN_ID": place.run_id,
        "SHARDRUN_JOB": str(control / "job.json"),
        "SHARDRUN_STATUS": str(_status_path(control, rank)),
        "SHARDRUN_ERROR": str(_error_path(control, rank)),
    }
    # torch asks for the user's name when it makes its first optimizer; without one in the environment that is a call to
    # the name service, through a socket.
    env.setdefault("USER", env.get("LOGNAME", str(os.getuid())))
    # Fresh memory of the size of a tensor comes in huge pages, without which a copy of the state takes up to four times
    # as long.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # The flight recorder of NCCL belongs beside the rank's log, unless the user has another place for it.
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in env:
        env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(job.run_dir.absolute() / "logs" / "nccl-trace-rank-"))
    if place.address is not None:
        address, port = place.address
        env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if not job.allow_non_loopback:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return env


def store_socket() -> socket.socket:
    """Bound here and handed to rank 0, so that no port is ever free for somebody else between choice and use."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    return listening


def _status_path(control: Path, rank: int) -> Path:
    return control / f"rank-{rank}.status"


def _error_path(control: Path, rank: int) -> Path:
    return control / f"rank-{rank}.error.json"
