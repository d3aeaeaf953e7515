"""Two runs compared bit for bit, from what their ranks wrote down. No torch, and nothing that loads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardrun.records.elements import first_difference, value_text
from shardrun.records.header import Entry, read_header, read_tensor
from shardrun.records.header_parser import DTYPE_BYTES

DATA_SEEN = "data seen"
METRICS = "metrics"
_TIMES = frozenset({"seconds", "tokens_per_s"})
_ALWAYS = ("counters", "schedule", "data position", DATA_SEEN, "parameters", "buffers", "fp32 masters")
_LAST = ("rng python", "rng numpy", "rng torch", METRICS)
_ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """The first value that differs: what it is, when and where it was seen, and both values."""

    what: str
    when: str
    step: int
    rank: int
    name: str
    element: int | None
    straight: str
    interrupted: str

    def __str__(self) -> str:
        element = "" if self.element is None else f", element {self.element}"
        return (
            f"step {self.step} ({self.when}), rank {self.rank}: {self.what}: {self.name}{element}: "
            f"straight {self.straight}, interrupted {self.interrupted}"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass
class Row:
    """How many values of one kind were compared, and the first that differed."""

    what: str
    values: int = 0
    first: Difference | None = None


@dataclass(frozen=True)
class Moment:
    """What is compared with what: the probes of the straight and of the interrupted run, without rank and ending.

    The interrupted leg has itself seen the data of the windows after `since` and up to `step`.
    """

    when: str
    since: int
    step: int
    straight: Path
    interrupted: Path


class Comparison:
    """Compares moments one after another and keeps count. `first` is the first difference of the earliest moment."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.first: Difference | None = None
        self.unsteady: str | None = None
        """Where the data set gave something else when it was asked again for the same samples."""
        self._hints: dict[str, str] = {}
        self._rows = {what: Row(what) for what in (*_ALWAYS, *_LAST)}

    @property
    def rows(self) -> list[Row]:
        """One row for each kind of value, in the order in which a difference is reported."""
        between = sorted(self._rows.keys() - {*_ALWAYS, *_LAST})
        return [self._rows[what] for what in (*_ALWAYS, *between, *_LAST)]

    @property
    def hints(self) -> list[str]:
        """What could not be compared, and what no checkpoint holds: a line each."""
        return list(self._hints.values())

    def compare(self, moment: Moment) -> None:
        """Compare all ranks of one moment. OSError or CheckpointError if a probe cannot be read."""
        found: dict[str, Difference] = {}
        for rank in range(self.world_size):
            for difference in self._of_rank(moment, rank):
                found.setdefault(difference.what, difference)
        self._note(found)

    def compare_metrics(
        self, when: str, straight: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
    ) -> None:
        """Compare the rows of two metrics.jsonl, all keys but those that hold times."""
        found: dict[str, Difference] = {}
        for number in range(max(len(straight), len(other))):
            row_a = straight[number] if number < len(straight) else {}
            row_b = other[number] if number < len(other) else {}
            step = int((row_a or row_b).get("step", 0))
            for key in sorted((row_a.keys() | row_b.keys()) - _TIMES):
                self._row(METRICS).values += 1
                a, b = (json.dumps(row[key]) if key in row else _ABSENT for row in (row_a, row_b))
                if a != b:
                    found.setdefault(METRICS, Difference(METRICS, when, step, 0, key, None, a, b))
        self._note(found)

    def _row(self, what: str) -> Row:
        return self._rows.setdefault(what, Row(what))

    def _note(self, found: Mapping[str, Difference]) -> None:
        for what, difference in found.items():
            row = self._row(what)
            row.first = row.first or difference
        if self.first is None and found:
            self.first = next(found[row.what] for row in self.rows if row.what in found)

    # ---- one rank --------------------------------------------------------------------------------------------------

    def _of_rank(self, moment: Moment, rank: int) -> Iterator[Difference]:
        a, b = (_document(base, rank) for base in (moment.straight, moment.interrupted))
        yield from self._values(moment, rank, a["sections"], b["sections"])
        yield from self._seen(moment, rank, a["seen"], b["seen"])
        yield from self._tensors(moment, rank)
        for name in sorted(a["attributes"].keys() | b["attributes"].keys()):
            x, y = (side["attributes"].get(name, _ABSENT) for side in (a, b))
            if x != y:
                self._hints.setdefault(
                    name,
                    f"{name}, a plain attribute of the model, is {x} in the straight run at step {moment.step} and {y} "
                    f"{moment.when}; checkpoints hold parameters and buffers: use register_buffer if it matters",
                )
        for entry in b.get("unsteady", ())[:1]:
            self.unsteady = self.unsteady or unsteady_text(rank, entry)
        for kind in sorted({*a["unread"], *b["unread"]}):
            self._hints.setdefault(kind, f"batches hold objects of {kind}, whose content was not compared")

    def _values(self, moment: Moment, rank: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
        for what in a.keys() | b.keys():
            left, right = dict(leaves(a.get(what))), dict(leaves(b.get(what)))
            for name in [*left, *(name for name in right if name not in left)]:
                self._row(what).values += 1
                x, y = (json.dumps(side[name]) if name in side else _ABSENT for side in (left, right))
                if x != y:
                    yield Difference(what, moment.when, moment.step, rank, name, None, x, y)

    def _seen(self, moment: Moment, rank: int, a: Sequence[Any], b: Sequence[Any]) -> Iterator[Difference]:
        """The micro-batches of the windows that the interrupted leg has made itself."""
        expected = [entry for entry in a if moment.since < entry["step"] <= moment.step]
        for number in range(max(len(expected), len(b))):
            self._row(DATA_SEEN).values += 1
            x, y = (dict(leaves(side[number])) if number < len(side) else {} for side in (expected, b))
            for name in [*x, *(name for name in y if name not in x)]:
                if x.get(name, _ABSENT) != y.get(name, _ABSENT):
                    entry = x or y
                    where = f"micro-batch {entry['micro_batch']}: {name}"
                    values = (str(side.get(name, _ABSENT)) for side in (x, y))
                    yield Difference(DATA_SEEN, moment.when, entry["step"], rank, where, None, *values)

    def _tensors(self, moment: Moment, rank: int) -> Iterator[Difference]:
        paths = [
            base.with_name(f"{base.name}.rank-{rank}.safetensors") for base in (moment.straight, moment.interrupted)
        ]
        left, right = (read_header(path).tensors for path in paths)
        with paths[0].open("rb", buffering=0) as file_a, paths[1].open("rb", buffering=0) as file_b:
            for full in [*left, *(name for name in right if name not in left)]:
                what, _, name = full.partition("/")
                start = 0
                if "@" in name:
                    name, _, begin = name.rpartition("@")
                    start = int(begin)
                a, b = left.get(full), right.get(full)
                self._row(what).values += int(np.prod((a or b or Entry("", (), 0, 0)).shape))
                if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
                    yield Difference(what, moment.when, moment.step, rank, name, None, _shape(a), _shape(b))
                    continue
                x, y = bytes(read_tensor(file_a, a)), bytes(read_tensor(file_b, b))
                if x != y:
                    element, one, other = _first(x, y, a)
                    at = start + element if a.shape else None
                    yield Difference(what, moment.when, moment.step, rank, name, at, one, other)


def unsteady_text(rank: int, entry: Mapping[str, Any]) -> str:
    """What an onlooker has noted of data that do not come out the same twice."""
    return (
        f"step {entry['step']}, rank {rank}, micro-batch {entry['micro_batch']}: asked again for the same samples, the "
        "data set gives something else, so it keeps a position or draws from outside"
    )


def _document(base: Path, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(base.with_name(f"{base.name}.rank-{rank}.json").read_text())
    return document


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, plain value) of everything in a JSON value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif value is not None or name:
        yield name, value


# ---- values --------------------------------------------------------------------------------------------------------


def _shape(entry: Entry | None) -> str:
    return _ABSENT if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _first(x: bytes, y: bytes, entry: Entry) -> tuple[int, str, str]:
    """Index and both values of the first element whose bits differ."""
    size = DTYPE_BYTES[entry.dtype]
    at = first_difference(x, y, entry.dtype)[1]
    part = slice(at * size, (at + 1) * size)
    return at, value_text(entry.dtype, x[part]), value_text(entry.dtype, y[part])
