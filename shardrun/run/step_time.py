"""The time of a step before it is taken: from what a plan says is moved, and what a host was measured to move.

[Note: the terms] A step is the compute of a rank's micro-batches, then reduce, optimizer, gather and agreements, one
after the other: nothing overlaps, as on one host the wire is paid by the cores that compute. Left out are what the
recipe sends and loads, validation, saves, and the time for which ranks wait for the slowest one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardrun.comm.cost_model import AGREEMENT, AGREEMENT_SENT, COPY, SHARED, Links, gather_by, reduce_by
from shardrun.errors import UsageError
from shardrun.optim.table import Elementwise
from shardrun.run.compute_time import Compute
from shardrun.run.groups import micro_batches_of
from shardrun.run.plan import Planned, PlannedGroup
from shardrun.run.traffic import memory_traffic


@dataclass(frozen=True)
class Term:
    """A part of the step."""

    name: str
    seconds: float
    of: str
    """What it is made of, in words."""


@dataclass(frozen=True)
class StepTime:
    """The predicted step of the rank that has most to do."""

    terms: tuple[Term, ...]
    way: str
    """How slices travel."""
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of all terms."""
        return sum(term.seconds for term in self.terms)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "seconds": self.seconds}


def predict(planned: Planned, links: Links, compute: Compute | None) -> StepTime:
    """The step of a planned run, all ranks on one host such as `links` were measured on.

    Without `compute`: what comes beside it. UsageError where the links lack what the step is made of.
    """
    way = _way(planned, links)
    parts: list[list[tuple[PlannedGroup, int]]] = [[] for _ in range(planned.world_size)]
    for group in planned.groups:
        for number, rank in enumerate(group.ranks):
            parts[rank].append((group, number))
    slowest = max(
        (list(_terms_of(planned, links, way, one)) for one in parts),
        key=lambda terms: sum(term.seconds for term in terms),
    )
    terms = [] if compute is None else [_compute(planned, links, compute)]
    return StepTime((*terms, *slowest), way, tuple(_notes(planned, links, compute)))


def _way(planned: Planned, links: Links) -> str:
    """How slices would travel on this backend: the first of its ways that was measured."""
    needed = [COPY] if planned.world_size == 1 else [COPY, AGREEMENT]
    if lacking := [name for name in needed if name not in links.lines]:
        raise UsageError(f"links: no line of {' and '.join(lacking)} was measured; measure again")
    if planned.world_size == 1:
        return "none"
    over_gloo = [SHARED, "exchange"] if planned.transport == SHARED else ["exchange"]
    wanted = ["native"] if links.backend == "nccl" else over_gloo
    way = next((one for one in wanted if one in links.ways), None)
    if way is None:
        raise UsageError(
            f"links: found ways {', '.join(links.ways)}, expected one of {', '.join(wanted)}; measure again"
        )
    return way


def _compute(planned: Planned, links: Links, compute: Compute) -> Term:
    ranks, count = planned.world_size, micro_batches_of(planned.config)
    crowd = links.crowd(ranks)
    shared = f" x {crowd:g} ({ranks} ranks on {links.cores} cores)" if crowd > 1 else ""
    words = f"{count} micro-batch{'es' * (count != 1)} x {1000 * compute.seconds:,.4g} ms{shared}, {compute.source}"
    return Term("compute", count * compute.seconds * crowd, words)


def _terms_of(planned: Planned, links: Links, way: str, parts: Sequence[tuple[PlannedGroup, int]]) -> Iterator[Term]:
    """Of the rank that has these numbers in these groups; without compute."""
    ranks = planned.world_size
    moved = sum(memory_traffic(group, number) for group, number in parts)
    talking = [(group, group.held[number]) for group, number in parts if len(group.ranks) > 1]

    def travelling(name: str, moved: Sequence[int], calls: Sequence[int]) -> Term:
        seconds = sum(
            links.seconds(name, nbytes, len(group.ranks), calls=times, sharing=ranks)
            for (group, _), nbytes, times in zip(talking, moved, calls, strict=True)
        )
        told = "sent by each rank" if planned.transport != SHARED else "read by each rank of the others"
        buckets = f"{sum(calls)} bucket{'s' * (sum(calls) != 1)}"
        return Term(name.partition(" ")[0], seconds, f"{buckets}, {_mb(sum(moved))} {told}, by {way}")

    if talking:
        reduced = [held.reduce_sent + held.reduce_read for _, held in talking]
        yield travelling(reduce_by(way), reduced, [group.buckets * group.reductions for group, _ in talking])
    copied = links.seconds(COPY, moved / 2, ranks)  # a copy reads and writes
    yield Term("optimizer", copied, f"{_mb(moved)} read and written, at the speed of a copy")
    if talking:
        gathered = [held.gather_sent + held.gather_read for _, held in talking]
        yield travelling(gather_by(way), gathered, [group.buckets for group, _ in talking])
    if ranks > 1:
        sent = planned.transport != SHARED and AGREEMENT_SENT in links.lines
        agreement = AGREEMENT_SENT if sent else AGREEMENT
        seconds = links.seconds(agreement, 0, ranks, calls=planned.rounds) + links.seconds(gather_by(way), 0, ranks)
        yield Term("agreements", seconds, f"{planned.rounds} rounds over all ranks, and the losses for the log")


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _notes(planned: Planned, links: Links, compute: Compute | None) -> Iterator[str]:
    ranks, worlds = planned.world_size, links.worlds
    if compute is None:
        yield "compute is not known and not in the sum: give --compute-s or --bench"
    if ranks > 1 and not worlds[0] <= ranks <= worlds[-1]:
        told = ", ".join(map(str, worlds))
        yield f"links were measured on {told} ranks: {ranks} are beyond them, on one host that is like it"
    if planned.config.topology.threads_per_rank != links.threads_per_rank:
        yield (
            f"links were measured with {links.threads_per_rank} threads per rank, the config has "
            f"{planned.config.topology.threads_per_rank}"
        )
    shares = (share for group in planned.groups for share in group.footprint.draft.shares if share.paths)
    if whole := sorted({share.kind.name for share in shares if not isinstance(share.kind, Elementwise)}):
        yield f"the arithmetic of {', '.join(whole)} on whole matrices is not in it, only the memory that it touches"
