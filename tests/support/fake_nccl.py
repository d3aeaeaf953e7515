"""A backend with NCCL's manners, without a GPU: collectives return at once, fail late, and may never end.

What is imitated (after torch's ProcessGroupNCCL and NCCL's documentation; not run on NCCL): a collective is only queued
by its call. An error of a peer or a link shows at a later query, and the device never comes through by itself. An
abort, our own or that of torch's watchdog, lets the device through with rubbish in the buffers; the watchdog sets the
error before it aborts. Destroying a group waits for the device. An abort and a dump can hang, too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

FINE = "fine"
NEVER = "never ends"
LATE_ERROR = "an error that shows later"
WATCHDOG = "an error, and the watchdog aborts"


@dataclass
class FakeNccl:
    """A DeviceBackend. `manner` is how collectives end from now on; `queries` how often one is asked for in vain."""

    manner: str = FINE
    queries: int = 3
    abort_hangs: bool = False
    dump_hangs: bool = False
    called: list[str] = field(default_factory=list)
    """What was called besides queries, in order."""
    _asked: int = 0
    _aborted: bool = False

    def mark(self) -> object:
        self._asked = 0
        return object()

    def reached(self, mark: object) -> bool:
        self._asked += 1
        if self._aborted:
            return True
        return self._asked > self.queries and self.manner in (FINE, WATCHDOG)

    def error(self) -> str:
        late = self.manner in (LATE_ERROR, WATCHDOG) and self._asked >= self.queries
        return "NCCL reports COMM_ERROR" if late else ""

    def take_over(self) -> None:
        self.called.append("take over")

    def abort(self) -> None:
        self.called.append("abort")
        if self.abort_hangs:
            threading.Event().wait()
        self._aborted = True

    def dump(self) -> None:
        self.called.append("dump")
        if self.dump_hangs:
            threading.Event().wait()
