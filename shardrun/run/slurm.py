"""A rank that srun started, as torchrun would have put it into the environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from shardrun.errors import LaunchError, UsageError
from shardrun.run.hosts import split_address

_PORTS = (20_000, 10_000)  # first and number: below those that systems give away by themselves
_LIST = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")


def rank_of_srun(environ: Mapping[str, str], rendezvous: str | None = None) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and a run id; None if this is no task among several.

    A step of one task is no rank: what runs in it starts its ranks itself. Neither is a batch script, which has some
    of the variables of a task. The ranks meet at `rendezvous` (HOST:PORT), else at MASTER_ADDR and MASTER_PORT if these
    are set, else on the first host of the step at a port that its number gives.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if "RANK" in environ or "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ or tasks == "1":
        return None
    hosts = expand(environ["SLURM_STEP_NODELIST"])
    step = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    if rendezvous is not None:
        address, port = split_address(rendezvous)
    else:
        address = environ.get("MASTER_ADDR") or _first_address(hosts)
        port = int(environ.get("MASTER_PORT") or _PORTS[0] + _number(step) % _PORTS[1])
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "SHARDRUN_RUN_ID": f"slurm-{step}",
    }
    if len(hosts) == 1:
        found["LOCAL_WORLD_SIZE"] = tasks
    return found


def _number(step: str) -> int:
    job, _, number = step.partition(".")
    return int(job) * 7 + int(number)  # steps of a job, and jobs in a row, are apart


def _first_address(hosts: list[str]) -> str:
    if len(hosts) == 1:
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(hosts[0])
    except OSError as error:
        raise LaunchError(
            f"the first host of this SLURM step, {hosts[0]}, has no address here ({error.strerror}); set MASTER_ADDR, "
            "or give --rendezvous HOST:PORT"
        ) from error
    if address.startswith("127."):
        raise LaunchError(
            f"the first host of this SLURM step, {hosts[0]}, is {address} on this machine, where the other hosts "
            "cannot reach it; set MASTER_ADDR, or give --rendezvous HOST:PORT"
        )
    return address


def expand(hosts: str) -> list[str]:
    """The names in a host list of SLURM: "a[01-03,7],b" is a01, a02, a03, a7, b."""
    return [name for part in _LIST.findall(hosts) if part for name in _names(part)]


def _names(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    names = []
    for piece in inside.split(","):
        first, _, last = piece.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise UsageError(f"SLURM_STEP_NODELIST has {part!r}, which is no list of hosts; set MASTER_ADDR instead")
        names += [f"{head}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [name + end for name in names for end in (_names(tail) if tail else [""])]
