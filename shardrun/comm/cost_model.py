"""What collectives cost on the ranks of one host: latency + bytes / bandwidth, at each world size that was measured.

[Note: ranks that share cores] Over gloo the wire is paid in CPU time: every rank copies, sends and adds by itself. As
long as each has a core they do so side by side; N ranks on C cores take N / C times as long (a copy by 2, 4 and 8 ranks
on 2 cores does, to 10 %). So lines are of ranks that have a core each, and are stretched by `crowd`; what else the
world size changes is little, and interpolated. A GPU belongs to one rank: no crowd there.

`shardrun bench --collectives --save FILE` measures and writes, `shardrun plan --links FILE` reads. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardrun.errors import UsageError

COPY, AGREEMENT, ALL_REDUCE = "copy", "agreement", "all_reduce"
AGREEMENT_SENT = "agreement over sockets"
"""Beside `AGREEMENT` where ranks agree in shared memory: how they would without."""
SHARED = "shared memory"
"""The way of ranks of one host that read each other's buckets in place; the others have the names of their seams."""
_FORMAT, _VERSION = "shardrun links", 1


def reduce_by(way: str) -> str:
    """Name of the line of buckets that are reduced in this way."""
    return f"reduce by {way}"


def gather_by(way: str) -> str:
    """Name of the line of slices that are gathered in this way."""
    return f"gather by {way}"


def travels(name: str, nbytes: int, ranks: int) -> int:
    """The bytes that the line `name` counts for a bucket of `nbytes`: of slices those that a rank sends."""
    return nbytes // ranks * (ranks - 1) if name.startswith(("reduce by", "gather by")) else nbytes


def read_bytes(splits: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """By rank: bytes of all others' memory that it reads to reduce a bucket of these slices in FP32, and to gather it.

    As ranks of one host do, who send nothing of it. `itemsize`: bytes of a gathered element.
    """
    total, others = sum(splits), len(splits) - 1
    return [(4 * others * numel, (total - numel) * itemsize) for numel in splits]


@dataclass(frozen=True)
class Line:
    """What one collective costs in one world, for ranks that have a core each."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, nbytes: float, calls: int = 1) -> float:
        """Of `calls` calls with `nbytes` in all."""
        return calls * self.latency_s + nbytes * self.seconds_per_byte


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds) with the least squares of relative errors; neither part is below 0.

    At least one point, no seconds of 0. Points of one size alone: no latency, unless they have no bytes.
    """
    ones = sum(1 / seconds**2 for _, seconds in points)
    sums = sum(nbytes / seconds**2 for nbytes, seconds in points)
    squares = sum((nbytes / seconds) ** 2 for nbytes, seconds in points)
    flat = sum(1 / seconds for _, seconds in points)
    rising = sum(nbytes / seconds for nbytes, seconds in points)
    if squares == 0:
        return Line(flat / ones, 0.0)
    determinant = ones * squares - sums**2
    latency = (flat * squares - rising * sums) / determinant if determinant > 1e-9 * ones * squares else 0.0
    slope = (rising - latency * sums) / squares
    if latency <= 0:
        return Line(0.0, rising / squares)
    return Line(latency, slope) if slope >= 0 else Line(flat / ones, 0.0)


@dataclass(frozen=True)
class Links:
    """The lines of one host and backend, by name and world size."""

    backend: str
    cores: int | None
    """Cores that the ranks share; None: each has a device of its own."""
    threads_per_rank: int
    lines: Mapping[str, Mapping[int, Line]]
    torch: str = ""
    """Version that was measured with."""

    @property
    def worlds(self) -> list[int]:
        """World sizes that were measured, in rising order."""
        return sorted({ranks for one in self.lines.values() for ranks in one})

    @property
    def ways(self) -> list[str]:
        """Names of the seams that were measured, as far as they both reduce and gather."""
        prefix = reduce_by("")
        named = [name.removeprefix(prefix) for name in self.lines if name.startswith(prefix)]
        return [way for way in named if gather_by(way) in self.lines]

    def crowd(self, ranks: int) -> float:
        """How many times longer everything takes because `ranks` share the cores; 1 while each has its own."""
        return 1.0 if self.cores is None else max(1.0, ranks * self.threads_per_rank / self.cores)

    def line(self, name: str, ranks: int) -> Line:
        """Between two measured worlds in proportion; below and above them see `seconds`."""
        known = sorted(self.lines[name].items())
        for (low, first), (high, second) in pairwise(known):
            if low <= ranks <= high:
                return _between(first, second, (ranks - low) / (high - low))
        if ranks < known[0][0] or len(known) == 1:
            return known[0][1] if ranks < known[0][0] else known[-1][1]
        (low, first), (high, second) = known[-2:]
        growth = max(0.0, second.latency_s - first.latency_s) / (high - low)
        return Line(second.latency_s + growth * (ranks - high), second.seconds_per_byte)

    def seconds(self, name: str, nbytes: float, ranks: int, *, calls: int = 1, sharing: int | None = None) -> float:
        """Of `calls` calls of `name` among `ranks`, with `nbytes` in all (see `travels`).

        `sharing`: how many ranks share the cores meanwhile, if not those. In a world larger than any that was measured
        latency grows on as between the last two, and bandwidth stays; in a smaller one both stay.
        """
        return self.crowd(sharing or ranks) * self.line(name, ranks).seconds(nbytes, calls)

    def to_json(self) -> dict[str, Any]:
        """As `read_links` takes it."""
        lines = {name: {str(n): asdict(line) for n, line in one.items()} for name, one in self.lines.items()}
        return {"format": _FORMAT, "version": _VERSION, **asdict(self), "lines": lines}


def _between(first: Line, second: Line, part: float) -> Line:
    return Line(
        first.latency_s + part * (second.latency_s - first.latency_s),
        first.seconds_per_byte + part * (second.seconds_per_byte - first.seconds_per_byte),
    )


def fit_links(
    measured: Iterable[tuple[str, int, int, float]], backend: str, cores: int | None, threads_per_rank: int, torch: str
) -> Links:
    """The links through (name, world size, bytes of a bucket, seconds).

    Of copies the largest alone counts: those that fit into a cache are on no line with the others.
    """
    bare = Links(backend, cores, threads_per_rank, {}, torch)
    points: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for name, ranks, nbytes, seconds in measured:
        point = (travels(name, nbytes, ranks), seconds / bare.crowd(ranks))
        points.setdefault(name, {}).setdefault(ranks, []).append(point)
    points[COPY] = {ranks: [max(one)] for ranks, one in points.get(COPY, {}).items()}
    lines = {name: {n: fit(one) for n, one in worlds.items()} for name, worlds in points.items() if worlds}
    return Links(backend, cores, threads_per_rank, lines, torch)


# ---- the file --------------------------------------------------------------------------------------------------------


def save_links(links: Links, path: Path) -> None:
    """Write the file that `read_links` reads; OSError where that cannot be."""
    path.write_text(json.dumps(links.to_json(), indent=2) + "\n")


def read_links(path: Path) -> Links:
    """What `save_links` wrote; UsageError for anything else, OSError where there is nothing."""
    try:
        document = json.loads(path.read_bytes())
        if (found := (document["format"], document["version"])) != (_FORMAT, _VERSION):
            raise ValueError(f"format {found[0]!r}, version {found[1]!r}; expected {_FORMAT!r}, {_VERSION}")
        return _from_json(document)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: no links that `shardrun bench --collectives --save FILE` wrote: {type(error).__name__}: {error}; "
            "measure again"
        ) from None


def _from_json(document: Mapping[str, Any]) -> Links:
    lines = {
        str(name): {
            int(ranks): Line(_number(one["latency_s"]), _number(one["seconds_per_byte"])) for ranks, one in w.items()
        }
        for name, w in document["lines"].items()
    }
    if not all(lines.values()):
        raise ValueError("a line without a world")
    cores, threads = document["cores"], int(_number(document["threads_per_rank"], least=1))
    cores = None if cores is None else int(_number(cores, least=1))
    return Links(str(document["backend"]), cores, threads, lines, str(document["torch"]))


def _number(value: Any, least: float = 0) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= least):
        raise ValueError(f"{value!r} where a number of at least {least} is expected")
    return number
