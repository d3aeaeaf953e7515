"""How the launchers of one world come to one verdict about its end; one launcher alone comes to it by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardrun.run.link import Link
from shardrun.run.outcome import UNKNOWN, RankEnd, end_from_json, lost_end
from shardrun.run.wire import Message

_NAP_S = 0.02


@dataclass(frozen=True)
class Verdict:
    """What every launcher of a world judges it by. `again`: a new world follows."""

    ends: tuple[RankEnd, ...]
    total_steps: int | None
    stopping: bool
    interrupted: bool
    nothing_to_do: bool
    again: bool

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, without tracebacks: they are in the logs."""
        return {**asdict(self), "ends": [_told(end) for end in self.ends]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_json`."""
        found = {field.name: document[field.name] for field in fields(cls)}
        return cls(**{**found, "ends": tuple(end_from_json(end) for end in document["ends"])})


class Council:
    """One launcher among several, for one world. Node 0 gathers the ends of all ranks; the others wait for its word."""

    def __init__(self, link: Link, ranks: Mapping[int, range]) -> None:
        """`ranks` are those of every node."""
        link.calm_down()
        self._link = link
        self._ranks = ranks
        self._ends: dict[int, list[RankEnd]] = {}
        self._has_told: set[str] = set()
        self.failing = False
        """Whether a rank of another host fails, or a host is lost."""
        self.verdict: Verdict | None = None

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self._link.leads

    @property
    def has_lost_node_0(self) -> bool:
        """Whether nobody is left who could speak for all."""
        return 0 in self._link.lost

    def hear(self) -> list[Message]:
        """Listen to the others; returns their requests to stop, for this launcher to act on."""
        requests = []
        for message in self._link.heard():
            match message["say"]:
                case "failing" | "lost":
                    self.failing = True
                    self._link.hurry()
                case "ends":
                    self._ends[message["node"]] = [end_from_json(end) for end in message["ends"]]
                case "verdict":
                    self.verdict = Verdict.from_json(message)
                case "go":  # right behind the verdict about this world
                    self._link.keep(message)
                case "stopping" | "interrupted":
                    requests.append(message)
        self.failing |= bool(self._link.lost)
        return requests

    def tell_failing(self) -> None:
        """A rank of this host fails: those of the others will follow."""
        if "failing" not in self._has_told:
            self._has_told.add("failing")
            self._link.say("failing")
            self._link.hurry()

    def tell(self, say: str, **fields: Any) -> None:
        """Tell all other launchers."""
        self._link.say(say, **fields)

    def conclude(self, own: Sequence[RankEnd], judge: Callable[[tuple[RankEnd, ...]], Verdict]) -> None:
        """To be called again and again once all ranks of this host are over; sets `verdict` as soon as there is one.

        Node 0 makes it by `judge` from the ends of all ranks, and so does a launcher that has lost node 0.
        """
        if self.verdict is not None:
            return
        if not self._link.leads and "ends" not in self._has_told:
            self._has_told.add("ends")
            self._link.say("ends", ends=[_told(end) for end in own])
        if self._link.leads and all(node in self._ends or node in self._link.lost for node in self._link.others):
            self.verdict = judge(self._all_ends(own))
            self._link.say("verdict", **self.verdict.to_json())
        elif not self._link.leads and 0 in self._link.lost:
            self.verdict = judge(self._all_ends(own))

    def _all_ends(self, own: Sequence[RankEnd]) -> tuple[RankEnd, ...]:
        ends = list(own)
        for node in self._link.others:
            how = self._link.lost.get(node, UNKNOWN)
            lost = [lost_end(rank, self._link.names[node], how) for rank in self._ranks[node]]
            ends += self._ends.get(node, lost)
        return tuple(ends)


def _told(end: RankEnd) -> dict[str, Any]:
    document = asdict(end)
    if document["failure"] is not None:
        document["failure"]["traceback"] = ""
    return document


def wait_for_go(link: Link, on_stop: Callable[[str], object]) -> Message | None:
    """Until node 0 starts the next world; None if it is gone. Requests to stop that come first go to `on_stop`."""
    go: Message | None = None
    while go is None and 0 not in link.lost:
        for message in link.heard():
            if message["say"] == "go":
                go = message
            elif message["say"] == "stopping":
                on_stop(message["signal"])
        time.sleep(_NAP_S)
    return go
