"""Prove a reshard: a run stopped on so many ranks goes on with another number of them, against the run that never was.

[Note: what a reshard keeps] At the moment of the reshard the live objects of the new ranks are held against those of
the old ones, by name and in the order of the elements of whole tensors: parameters on every rank, masters, optimizer
state, buffers, counters and positions, all to the bit. Random streams begin anew and are not compared. Afterwards
another number of ranks adds in another order: each parameter has to stay within a tolerance of the straight run, while
the data stay the same to the bit, because what a micro-batch holds does not depend on the rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import Piece, Whole, chunks, open_header
from shardrun.checkpoint.contents import Contents, Held, Left, Meter
from shardrun.checkpoint.difference import STATE, compare
from shardrun.config.schema import Config
from shardrun.errors import StoppedAfterSave, UsageError
from shardrun.run.comparison import DATA_SEEN, leaves
from shardrun.run.metrics import NAME, read_rows
from shardrun.run.proof import Compared
from shardrun.run.stops import Stops
from shardrun.run.verify import SCRAMBLE, Verification

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}
"""How far a parameter may be from the straight run's: the norm of the difference in parts of its own norm."""

_EXACT_SECTIONS = ("counters", "schedule", "optimizer options")
_MOST_WORLDS = 3
_PARAMETERS, _MASTERS = "parameters", "fp32 masters"


@dataclass
class Found:
    """What the comparisons have come to: `exact` at the moments of a reshard, `near` after them."""

    exact: list[Compared] = field(default_factory=list)
    near: list[Compared] = field(default_factory=list)

    @property
    def rows(self) -> list[Compared]:
        """All of them."""
        return [*self.exact, *self.near]

    @property
    def first(self) -> str | None:
        """The first difference."""
        return next((row.first for row in self.rows if row.first), None)

    @property
    def hint(self) -> str | None:
        """What it means if only what came after a reshard is apart."""
        if self.first is None or any(row.first for row in self.exact):
            return None
        told = "at the reshard all was the same to the bit, so the results of this recipe depend on the number of ranks"
        buffers = any(row.what.startswith("buffers") and row.values for row in self.exact)
        return told + ("; its buffers are each rank's own, as running statistics are" if buffers else "")


class WorldsVerification(Verification):
    """A verification whose legs have `worlds` ranks, one after another; the last of them goes on to the end.

    Other arguments as in Verification. UsageError unless there are two or three worlds, of ranks without axes.
    """

    def __init__(self, settings: Config, worlds: Sequence[int], *args: Any, **options: Any) -> None:
        if not 2 <= len(worlds) <= _MOST_WORLDS or min(worlds) < 1:
            raise UsageError(f"--world {','.join(map(str, worlds))}: two or three numbers of ranks, such as 2,1")
        if settings.topology.axes:
            axes = ", ".join(settings.topology.axes)
            raise UsageError(f"--world counts ranks; this config lays them out by topology.axes ({axes})")
        super().__init__(at_world(settings, worlds[0]), *args, **options)
        self.worlds = [*worlds, worlds[-1]][:_MOST_WORLDS]
        self.found = Found()
        precise = settings.precision.parameters == "fp32" and settings.precision.autocast == "none"
        self.tolerance = TOLERANCES["fp32" if precise else "bf16"]

    @property
    def differs(self) -> bool:
        """Whether a difference was found."""
        return self.comparison.first is not None or self.found.first is not None

    def leg(self, plan: Stops, number: int) -> None:
        """Leg `number`; the first one is held against the straight run to the bit, as in any verification."""
        if number == 1:
            super().leg(plan, number)
            return
        begins, ends = plan.stops[number - 2], (*plan.stops, plan.end)[number - 1]
        before, now = self.worlds[number - 2], self.worlds[number - 1]
        last, began, probes = number > len(plan.stops), time.monotonic(), self._interrupted / f"probes-{number}"
        asked = {"leg": number, "plan": plan.to_json(), "tamper": self._tamper, "scramble": SCRAMBLE + number}
        options = {"reshard": True, **({} if last else {"stop_at": ends})}
        code = 0 if last else StoppedAfterSave.exit_code
        self._launch(f"leg {number}", self._interrupted, options, asked, code, at_world(self._settings, now))
        # The first leg was the straight run's equal, and what a leg left is the next one's measure.
        left = self._straight_at(begins) if number == 2 else self._interrupted / f"probes-{number - 1}" / "left"
        self.found.exact += exact_rows(left, before, probes / "restored", now, f"restored at {begins}")
        straight = self._straight_at(ends)
        self.found.near += seen_rows(straight, self.worlds[0], probes / "left", now, begins, ends)
        self.found.near += near_rows(straight, self.worlds[0], probes / "left", now, ends, self.tolerance)
        self.found.near += self._loss_rows(begins, ends)
        told = "resharded" if before != now else "restored"
        seconds = time.monotonic() - began
        self._say(
            f"leg {number}: {told} at {begins}, {before} -> {now} ranks; ended after window {ends} ({seconds:.1f} s)"
        )

    def _loss_rows(self, begins: int, ends: int) -> Iterator[Compared]:
        sides = [
            {row["step"]: row for row in read_rows(folder / NAME) if "loss" in row and begins < row["step"] <= ends}
            for folder in (self._straight, self._interrupted)
        ]
        farthest, first = 0.0, None
        for step in range(begins + 1, ends + 1):
            one, other = (side.get(step, {}).get("loss") for side in sides)
            apart = 0.0 if one == other else abs(one - other) / abs(one) if one and other is not None else float("inf")
            farthest = max(farthest, apart)
            if apart > self.tolerance and first is None:
                first = f"step {step}, loss: straight {one}, resharded {other}"
        how = f"within {farthest:.1e} (tolerance {self.tolerance:g})"
        yield Compared(f"loss, {begins + 1} to {ends}", ends - begins, first, how)


def at_world(settings: Config, world_size: int) -> Config:
    """The settings with another number of ranks."""
    topology = settings.topology.model_copy(update={"world_size": world_size})
    return settings.model_copy(update={"topology": topology})


# ---- two worlds, by name ---------------------------------------------------------------------------------------------


def live_contents(base: Path, world_size: int, as_ranks: int) -> Contents:
    """The tensors of the probes `base` of a world: optimizer state put together from all ranks, and of rank r of
    `as_ranks` the parameters and buffers of rank r modulo the world size. Random streams are left out.

    `problems` names scalars that are not equal on all holders of a parameter.
    """
    found = Contents(base.parent, None, [])
    wholes: dict[str, Whole] = {}
    replicas: list[list[Held]] = []
    for rank in range(world_size):
        own: list[Held] = []
        file = f"{base.name}.rank-{rank}.safetensors"
        for full, entry in open_header(found.root, file).tensors.items():
            kind, _, rest = full.partition("/")
            name, cut, begin = rest.rpartition("@")
            start, numel = int(begin) if cut else 0, prod(entry.shape)
            piece = Piece(start, start + numel, rank, file, entry)
            if cut and entry.shape:
                wholes.setdefault(f"{kind}/{name}", Whole(f"{kind}/{name}", entry.dtype, ())).pieces.append(piece)
            elif cut:
                scalar = Piece(0, 1, rank, file, entry)
                whole = wholes.setdefault(f"{kind}/{name}", Whole(f"{kind}/{name}", entry.dtype, (), [scalar]))
                if _bytes(found.root, whole.pieces[0]) != _bytes(found.root, scalar):
                    found.problems.append(f"{kind}: {name} on rank {rank} is not that of rank {whole.pieces[0].rank}")
            elif not kind.startswith("rng"):
                own.append(Held(Whole(full, entry.dtype, entry.shape, [piece]), Left.WHOLE))
        replicas.append(own)
    for whole in wholes.values():
        whole.pieces.sort(key=lambda piece: piece.start)
        whole.shape = (whole.pieces[-1].stop,)
    state = [Held(whole, Left.PARTLY if whole.gaps() else Left.WHOLE) for whole in wholes.values()]
    found.sections["group", ""] = state
    found.sections |= {("rank", str(rank)): replicas[rank % world_size] for rank in range(as_ranks)}
    return found


def _bytes(root: Path, piece: Piece) -> bytes:
    return b"".join(chunks(root, [piece], 1 << 10))


def exact_rows(one: Path, before: int, other: Path, now: int, when: str) -> Iterator[Compared]:
    """What `now` ranks hold against what `before` ranks held, to the bit."""
    left, right = live_contents(one, before, now), live_contents(other, now, now)
    kinds: dict[str, Compared] = {}
    for row in compare(left, right, Meter())[0]:
        kind = row["name"].partition("/")[0]
        known = kinds.get(kind, Compared(kind, 0))
        first = known.first or (None if row["what"] == "same" else f"{when}, {_where(row)}{_told(row)}")
        kinds[kind] = Compared(kind, known.values + row["elements"], first)
    for text in right.problems:
        kind = text.partition(":")[0]
        kinds[kind] = Compared(kind, kinds[kind].values, kinds[kind].first or f"{when}, {text}")
    for kind, values, first in _positions(_documents(one, before), _documents(other, now)):
        kinds[kind] = Compared(kind, values, first and f"{when}, {first}")
    for kind, found in sorted(kinds.items()):
        yield Compared(f"{kind}, {when}", found.values, found.first)


def _where(row: Mapping[str, Any]) -> str:
    return "" if row["section"] == STATE else f"{row['section']}: "


def _told(row: Mapping[str, Any]) -> str:
    first = row.get("first")
    if first is None:
        return f"{row['name']}: {row['what']}"
    return f"{row['name']}, element {first['element']}: before {first['one']}, after {first['other']}"


def _documents(base: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads(base.with_name(f"{base.name}.rank-{rank}.json").read_text()) for rank in range(world_size)]


def _positions(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int, str | None]]:
    """(kind, values, first difference) of counters and positions; of the samples to come the ranks' shares together."""
    for kind in (*_EXACT_SECTIONS, "data position"):
        sides = [_together(kind, side) for side in (before, now)]
        values = [dict(leaves(side)) for side in sides]
        names = [*values[0], *(name for name in values[1] if name not in values[0])]
        apart = [name for name in names if values[0].get(name) != values[1].get(name)]
        first = (
            f"{kind}: {apart[0]}: before {values[0].get(apart[0])}, after {values[1].get(apart[0])}" if apart else None
        )
        yield kind, len(values[0]), first


def _together(kind: str, ranks: Sequence[Mapping[str, Any]]) -> Any:
    section = ranks[0]["sections"].get(kind, {})
    if kind != "data position":
        return section
    coming = [
        {**windows[0], "samples": [index for window in windows for index in window["samples"]]}
        for windows in zip(*(rank["sections"][kind]["next_windows"] for rank in ranks), strict=True)
    ]
    return {**section, "next_windows": coming}


def seen_rows(one: Path, before: int, other: Path, now: int, begins: int, ends: int) -> Iterator[Compared]:
    """The content of every micro-batch of the windows after `begins` and up to `ends`, whichever rank had it."""
    sides = [
        {
            (entry["step"], entry["micro_batch"]): (entry["samples"], entry["sha256"])
            for document in _documents(base, world_size)
            for entry in document["seen"]
            if begins < entry["step"] <= ends
        }
        for base, world_size in ((one, before), (other, now))
    ]
    apart = sorted(key for key in sides[0].keys() | sides[1].keys() if sides[0].get(key) != sides[1].get(key))
    first = f"step {apart[0][0]}, {DATA_SEEN}: micro-batch {apart[0][1]} has another content" if apart else None
    yield Compared(f"{DATA_SEEN}, {begins + 1} to {ends}", len(sides[0]), first)


def near_rows(one: Path, before: int, other: Path, now: int, step: int, tolerance: float) -> Iterator[Compared]:
    """Parameters and masters against those of the straight run, to a tolerance."""
    left, right = live_contents(one, before, 1), live_contents(other, now, 1)
    kinds: dict[str, list[Mapping[str, Any]]] = {_PARAMETERS: [], _MASTERS: []}
    for compared in compare(left, right, Meter())[0]:
        kinds.get(compared["name"].partition("/")[0], []).append(compared)
    for kind, rows in kinds.items():
        farthest, first = 0.0, None
        for row in rows:
            apart = 0.0 if row["what"] == "same" else row.get("relative")
            if apart is None:
                apart = row.get("max_abs") or float("inf")  # the straight one is all zeros
            farthest = max(farthest, apart)
            if apart > tolerance and first is None:
                first = f"step {step}, {_told(row)} ({apart:.1e} of its norm apart, tolerance {tolerance:g})"
        if rows:
            how = f"within {farthest:.1e} (tolerance {tolerance:g})"
            yield Compared(f"{kind}, at {step}", sum(row["elements"] for row in rows), first, how)
