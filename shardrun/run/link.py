"""What the launchers of several hosts say to each other while their ranks run.

[Note: hosts] Node 0 leads: every other launcher is connected with it and with nobody else. It passes on what all have
to know, gathers how the ranks of all hosts ended, and gives the one verdict that every launcher shows. A launcher says
"beat" every second. One whose connection ends, or that has not been heard of for longer than any rank waits for
another, is lost, and its ranks with it. The ranks of the others find out by themselves and tell what they waited for;
then their launcher gives up a silent host within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from shardrun.run.wire import Message, Wire

# After its own ranks have failed nobody waits longer than this for a host that is silent.
HURRIED_SILENCE_S = 5.0
# So much later than a rank that waits for another: that one knows more.
LATER_S = 5.0
_FOR_ALL = frozenset({"failing", "stopping", "interrupted", "lost"})


class Link:
    """This launcher's connections with the others, and what is known of them."""

    def __init__(self, node: int, names: Mapping[int, str], wires: Mapping[int, Wire], patience_s: float) -> None:
        """`names` has every host as messages name it. Node 0 has a wire to every other, they have one to node 0."""
        self.node = node
        self.names = dict(names)
        self.lost: dict[int, str] = {}
        """Hosts that are gone, and how that was noticed."""
        self._wires = dict(wires)
        self._patience_s = patience_s + LATER_S
        self._silence_s = self._patience_s
        self._kept: list[Message] = []

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.node == 0

    @property
    def others(self) -> list[int]:
        """All nodes but this one."""
        return [node for node in self.names if node != self.node]

    def say(self, say: str, **fields: Any) -> None:
        """Tell all others; what node 0 alone has to know goes to it, and from it to nobody."""
        for wire in self._wires.values():
            wire.send(say, node=self.node, **fields)

    def hurry(self) -> None:
        """Something has failed: from now on a silent host is given up sooner."""
        self._silence_s = min(self._patience_s, HURRIED_SILENCE_S)

    def calm_down(self) -> None:
        """A new world begins: a silent host is waited for as before."""
        self._silence_s = self._patience_s

    def keep(self, message: Message) -> None:
        """Put back what was heard too early; it is heard again first."""
        self._kept.append(message)

    def heard(self) -> list[Message]:
        """What the others have said since the last call; to be called several times a second.

        A host that was lost meanwhile is in it as {"say": "lost", "node": ..., "how": ...}.
        """
        found, self._kept = self._kept, []
        for node, wire in list(self._wires.items()):
            messages = wire.receive()
            for message in messages:
                if self.leads:
                    message["node"] = node
                    self._pass_on(message)
            found += messages
            silent_s = time.monotonic() - wire.heard_at
            if wire.ended is not None or silent_s > self._silence_s:
                message = {
                    "say": "lost",
                    "node": node,
                    "how": wire.ended or f"nothing was heard for {silent_s:.0f} s",
                }
                del self._wires[node]
                wire.drop()
                self._pass_on(message)
                found.append(message)
            else:
                wire.beat()
        for message in found:
            if message["say"] == "lost":
                self.lost.setdefault(message["node"], message["how"])
        return found

    def close(self) -> None:
        """Part from all others, once they have what was said."""
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    def _pass_on(self, message: Message) -> None:
        if self.leads and message["say"] in _FOR_ALL:
            for node, wire in self._wires.items():
                if node != message["node"]:
                    wire.send(**message)
