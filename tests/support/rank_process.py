"""What happens inside one rank that tests/support/ranks.py started."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing.connection
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrun.comm.communicator import Communicator

# torch._dynamo: the first step of any torch optimizer imports it, which costs a second per rank.
# pytest: a rank imports the parent's main module again, which under pytest is pytest.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",
    "numpy",
    "pytest",
    "tests.support.rank_process",
    "shardrun.run.worker",
    "safetensors.torch",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """One rank's part: `call` is the pickled (body, args)."""

    rank: int
    world_size: int
    folder: Path
    call: bytes
    open_comm: bool
    comm_timeout_s: float
    debug: str
    shared_memory: bool = True
    coverage: tuple[str, str] | None = None
    """Where the test process measures coverage: its config file and its data file."""


@dataclass(frozen=True)
class Seat:
    """What a body gets that asked for no Communicator."""

    rank: int
    world_size: int
    init_file: str


@dataclass(frozen=True)
class Report:
    """What a rank sends back: a value, or an error as text. `time` is CLOCK_MONOTONIC, the same in all processes."""

    value: Any
    error: str | None
    error_type: str | None
    time: float


_current: Job | None = None


def mark(name: str) -> None:
    """Tell the parent that the body has come this far (`RunningRanks.wait_for_mark`)."""
    assert _current is not None, "mark() is for the body of a rank"
    (_current.folder / f"mark-{_current.rank}-{name}").touch()


def await_mark(rank: int, name: str, timeout_s: float = 60.0) -> None:
    """Wait until the body of `rank` has come to its mark."""
    assert _current is not None, "await_mark() is for the body of a rank"
    path, end = _current.folder / f"mark-{rank}-{name}", time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"rank {rank} has not come to {name}"
        time.sleep(0.01)


def main(pickled: bytes, pipe: multiprocessing.connection.Connection) -> None:
    """Entry of the child process: run the body, send one report, leave without waiting for anybody."""
    global _current
    # The forkserver ends when the test process does, and takes the ranks along, however the test process ended.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = _current = pickle.loads(pickled)
    with open(job.folder / f"stack-{job.rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=True)
        stop_measuring = _measure(job.coverage)
        report = _run(job)
        try:
            message = pickle.dumps(report)
        except Exception:
            message = pickle.dumps(Report(None, traceback.format_exc(), "PicklingError", time.monotonic()))
        pipe.send_bytes(message)
        stop_measuring()
        # Not sys.exit: destructors of process groups may wait for peers, and a test must not end by their grace.
        os._exit(0)


def _measure(coverage: tuple[str, str] | None) -> Callable[[], None]:
    """Measure this rank's coverage into a data file of its own; the test process combines them at its end."""
    if coverage is None:
        return lambda: None
    from coverage import Coverage

    config_file, data_file = coverage
    measured = Coverage(config_file=config_file, data_file=data_file, data_suffix=True)
    measured.start()

    def stop() -> None:
        warnings.simplefilter("ignore")
        measured.stop()
        measured.save()

    return stop


def _run(job: Job) -> Report:
    try:
        _settle_torch(job)
        body, args = pickle.loads(job.call)
        seat = Seat(job.rank, job.world_size, str(job.folder / "rendezvous"))
        warnings.simplefilter("error")
        value = body(
            open_communicator(seat, job.comm_timeout_s, shared_memory=job.shared_memory) if job.open_comm else seat,
            *args,
        )
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a body are results too
        return Report(None, traceback.format_exc(), type(error).__name__, time.monotonic())
    return Report(value, None, None, time.monotonic())


def _settle_torch(job: Job) -> None:
    """One thread, deterministic algorithms, loopback only."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = job.debug
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch._C._distributed_c10d import set_debug_level_from_env

    set_debug_level_from_env()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def open_communicator(seat: Seat, timeout_s: float, *, shared_memory: bool = True) -> Communicator:
    """The Communicator of a seat over gloo; a world of one needs no process group."""
    from shardrun.comm.communicator import Communicator
    from shardrun.comm.config import CommunicatorConfig

    if seat.world_size == 1:
        return Communicator.single()
    config = CommunicatorConfig(
        rank=seat.rank,
        world_size=seat.world_size,
        backend="gloo",
        init_file=Path(seat.init_file),
        timeout_s=timeout_s,
        shared_memory=shared_memory,
    )
    return Communicator.open(config)
