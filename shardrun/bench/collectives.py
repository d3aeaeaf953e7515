"""`bench --collectives`: what ranks measured at several world sizes, and the cost model fitted to it. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

from shardrun.bench.ranks import COMMAND, run_job
from shardrun.comm.cost_model import AGREEMENT, AGREEMENT_SENT, Links, fit_links, gather_by, reduce_by, travels
from shardrun.errors import UsageError
from shardrun.run.worker_process import Job

_BODY = "shardrun.bench.collectives_rank:run"
_BUCKETS = 5
"""Memory of a rank in buckets: what is sent, shared, gathered and received, and what the backend takes for itself."""


@dataclass(frozen=True)
class Asked:
    """What is measured: buckets of each of `sizes` (bytes) in each of `worlds`, in `repeats` rounds."""

    worlds: Sequence[int]
    sizes: Sequence[int]
    backend: str = "gloo"
    repeats: int = 5
    threads_per_rank: int = 1
    limit_s: float = 600.0
    """Of one world."""


@dataclass(frozen=True)
class Row:
    """One collective on one bucket size in one world."""

    name: str
    world_size: int
    bytes: int
    """Of the whole bucket; 0 of an agreement."""
    seconds: float
    """Median over the rounds; see `_lap_s`."""
    least: float
    most: float

    @property
    def gb_per_s(self) -> float:
        """Of the whole bucket, in 1e9 bytes."""
        return self.bytes / self.seconds / 1e9


def rows_of(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """What the ranks of one world measured (collectives_rank.measure), a row for each case."""
    found = []
    for cases in zip(*ranks, strict=True):
        first = cases[0]
        rounds = zip(*(case["rounds"] for case in cases), strict=True)
        seconds = [median(map(_lap_s, repeat(first["name"]), zip(*laps, strict=True))) for laps in rounds]
        seconds = [one / first["times"] for one in seconds]
        found.append(Row(first["name"], len(ranks), first["bytes"], median(seconds), min(seconds), max(seconds)))
    return found


def _lap_s(name: str, spans: Sequence[tuple[float, float]]) -> float:
    """From the first rank that began to the last that was done; of an agreement, from the last that came to it."""
    begins, ends = zip(*spans, strict=True)
    began = max(begins) if name in (AGREEMENT, AGREEMENT_SENT) else min(begins)
    return float(max(ends) - began)


def measure_links(asked: Asked, scratch: Path, say: Callable[[str], None]) -> tuple[list[Row], Links]:
    """Measure one world after the other on fresh ranks of this host, and fit the cost model to all of them.

    `scratch` has to be empty; `say` gets a line before each world. Raises UsageError where memory would not do,
    RanksFailed, or Interrupted if somebody asked to stop.
    """
    _require_memory(asked)
    rows: list[Row] = []
    version = ""
    for world_size in asked.worlds:
        say(f"{world_size} ranks over {asked.backend}")
        folder = scratch / f"world-{world_size}"
        folder.mkdir()
        ranks = run_job(_job(asked, world_size, folder), f"bench --collectives on {world_size} ranks")
        rows += rows_of([rank["cases"] for rank in ranks])
        version = ranks[0]["torch"]
    cores = None if asked.backend == "nccl" else len(os.sched_getaffinity(0))
    points = ((row.name, row.world_size, row.bytes, row.seconds) for row in rows)
    return rows, fit_links(points, asked.backend, cores, asked.threads_per_rank, version)


def _job(asked: Asked, world_size: int, folder: Path) -> Job:
    options = {key: getattr(asked, key) for key in ("backend", "sizes", "repeats", "threads_per_rank")}
    document = {"body": _BODY, "limit_s": asked.limit_s, "run_dir": str(folder), "options": options}
    return Job(document, folder, world_size, threads_per_rank=asked.threads_per_rank, command=COMMAND)


def _require_memory(asked: Asked) -> None:
    """Ranks that are killed for want of memory take others with them."""
    if asked.backend == "nccl" or (free := _available_bytes()) is None:
        return
    bucket, ranks = max(asked.sizes), max(asked.worlds)
    if (needed := _BUCKETS * bucket * ranks) > free:
        raise UsageError(
            f"--mib: {ranks} ranks need about {needed >> 20:,} MiB for buckets of {bucket >> 20:,} MiB, and "
            f"{free >> 20:,} MiB are free; give smaller buckets or fewer ranks"
        )


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, as the kernel sees it; None where it does not say."""
    with suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    return None


def misses(links: Links, row: Row) -> float:
    """How far the model is from a row, as a part of what was measured."""
    nbytes = travels(row.name, row.bytes, row.world_size)
    return links.seconds(row.name, nbytes, row.world_size) / row.seconds - 1


@dataclass(frozen=True)
class Faster:
    """The fastest way to reduce and to gather buckets of one size in one world."""

    world_size: int
    bytes: int
    way: str
    seconds: float
    """To reduce a bucket and to gather it."""
    times: dict[str, float]
    """Way -> how many times as long it takes."""


def faster(rows: Sequence[Row]) -> list[Faster]:
    """Of every world and size, the fastest way."""
    by_case = {(row.name, row.world_size, row.bytes): row.seconds for row in rows}
    ways = [row.name.removeprefix(reduce_by("")) for row in rows if row.name.startswith(reduce_by(""))]
    found = []
    for world_size, nbytes in dict.fromkeys((row.world_size, row.bytes) for row in rows if row.bytes):
        both = {
            way: by_case[reduce_by(way), world_size, nbytes] + by_case[gather_by(way), world_size, nbytes]
            for way in dict.fromkeys(ways)
            if (reduce_by(way), world_size, nbytes) in by_case
        }
        best = min(both, key=lambda way: both[way])
        times = {way: seconds / both[best] for way, seconds in both.items() if way != best}
        found.append(Faster(world_size, nbytes, best, both[best], times))
    return found


def to_json(rows: Sequence[Row], links: Links) -> dict[str, Any]:
    """All of it as plain JSON."""
    return {
        "backend": links.backend,
        "cores": links.cores,
        "threads_per_rank": links.threads_per_rank,
        "torch": links.torch,
        "rows": [{**asdict(row), "model_misses": misses(links, row)} for row in rows],
        "faster": [asdict(one) for one in faster(rows)],
        "links": links.to_json(),
    }
