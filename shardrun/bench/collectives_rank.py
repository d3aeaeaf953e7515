"""What one rank does for `bench --collectives`: every way in which slices can travel, timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.agreement import ROUND_BYTES
from shardrun.comm.communicator import Communicator
from shardrun.comm.config import CommunicatorConfig
from shardrun.comm.cost_model import AGREEMENT, AGREEMENT_SENT, ALL_REDUCE, COPY, SHARED, gather_by, reduce_by
from shardrun.comm.slices import ExchangeSeam, NativeSeam, SliceSeam
from shardrun.run.tether import Tether
from shardrun.shard.layout import align

_AT_ONCE, _MOST = 16 << 20, 25
"""Bytes that are sent in a row and timed as one, of small buckets so many at most."""
_WORK = 4 << 20
"""Bytes that a rank copies before it comes to an agreement."""
Lap = tuple[float, float]
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Something that all ranks do at once; `times` times in a row are timed as one."""

    name: str
    """Of its line in the cost model."""
    nbytes: int
    """Of the whole bucket."""
    times: int
    run: Run


def run(job: Mapping[str, Any], tether: Tether) -> dict[str, Any]:
    """Join the world, measure as the options of the job say, leave; the result as plain JSON. Every rank calls it."""
    asked = job["options"]
    torch.set_num_threads(asked["threads_per_rank"])
    comm = Communicator.open(CommunicatorConfig.from_env(backend=asked["backend"]))
    try:
        cases = measure(comm, asked["sizes"], asked["repeats"])
        comm.agree("end of the measurement")
    finally:
        comm.close()
    return {"cases": cases, "torch": str(torch.__version__)}


def measure(comm: Communicator, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time every case in each of `repeats` rounds, after one round to warm up; collective.

    `sizes`: bytes of the buckets, rounded up to whole slices. Returns what each case is, and of every round its laps:
    [begin, end] on this rank, by a clock that all processes of a host share.
    """
    cases = list(_cases(comm, sizes))
    laps: list[list[list[Lap]]] = [[] for _ in cases]
    sums = torch.zeros(ROUND_BYTES // 8, dtype=torch.int64)
    agreed: dict[str, Run] = {AGREEMENT: comm.vote}
    if comm.transport == SHARED:
        agreed[AGREEMENT_SENT] = partial(dist.all_reduce, sums)
    agreements: dict[str, list[list[Lap]]] = {name: [] for name in agreed}
    for number in range(1 + repeats):
        for case, found in zip(cases, laps, strict=True):
            comm.vote()  # all begin together
            begin = time.perf_counter()
            for _ in range(case.times if number else 1):
                case.run()
            comm.settle()
            found.append([(begin, time.perf_counter())])
        for name, agree in agreed.items():
            agreements[name].append(_agreements(agree))
    cases += [Case(name, 0, 1, agree) for name, agree in agreed.items()]
    laps += agreements.values()
    return [
        {"name": case.name, "bytes": case.nbytes, "times": case.times, "rounds": found[1:]}
        for case, found in zip(cases, laps, strict=True)
    ]


def _agreements(agree: Run) -> list[Lap]:
    """Agreements as they come in a step: after other work, when ranks and their threads have to be woken for them."""
    held = torch.zeros(_WORK // 4)
    copy = torch.empty_like(held)
    laps = []
    for _ in range(_MOST):
        copy.copy_(held)
        begin = time.perf_counter()
        agree()
        laps.append((begin, time.perf_counter()))
    return laps


def _cases(comm: Communicator, sizes: Sequence[int]) -> Iterator[Case]:
    """All cases of all sizes, on the same memory."""
    slices = [align(-(-nbytes // (4 * comm.world_size))) for nbytes in sizes]
    full = comm.world_size * max(slices)
    shared = comm.flat_zeros(full, comm.device)  # where the ranks can read it in place
    # Zeros stay zeros, however often they are added up; written, because memory that nobody wrote is not there yet.
    source, target, own = (torch.empty(n, device=comm.device).fill_(0.0) for n in (full, full, max(slices)))
    for numel in slices:
        total = comm.world_size * numel
        whole, received, piece = source[:total], target[:total], own[:numel]
        ways = {name: _of_seam(seam, whole, received, piece) for name, seam in _seams(comm).items()}
        if comm.transport == SHARED:
            ways[SHARED] = _in_place(comm, shared[:total].fill_(0.0), received, piece)
        case = partial(Case, nbytes=4 * total, times=min(_MOST, max(1, _AT_ONCE // (4 * total))))
        for name, (reduce, gather) in ways.items():
            yield case(reduce_by(name), run=reduce)
            yield case(gather_by(name), run=gather)
        yield case(ALL_REDUCE, run=partial(_all_reduce, received))
        yield case(COPY, run=partial(received.copy_, whole))


def _seams(comm: Communicator) -> dict[str, SliceSeam]:
    """Those that this backend can have; over NCCL messages between two ranks would wait for each other."""
    seams: dict[str, SliceSeam] = {"native": NativeSeam(comm.world_size, comm._group)}
    return seams if comm.backend == "nccl" else {**seams, "exchange": ExchangeSeam(comm._group, comm._state)}


def _of_seam(seam: SliceSeam, bucket: Tensor, received: Tensor, own: Tensor) -> tuple[Run, Run]:
    """Reduce and gather of whole buckets, over the wire."""
    return lambda: seam.reduce(bucket, own, contributes=True)(), lambda: seam.gather(received, own)()


def _in_place(comm: Communicator, bucket: Tensor, received: Tensor, own: Tensor) -> tuple[Run, Run]:
    """The same of buckets that all ranks read in place, up to where they may be written again."""

    def gather() -> None:
        with comm.exchanges() as exchanges:
            exchanges.gather(received, own, source=bucket)

    return partial(comm.reduce_slice, bucket, own, agreed=True), gather


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
