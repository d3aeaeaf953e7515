"""Collectives that are done later than they return, on a device (NCCL): waited for in bounded time, ended by abort.

[Note: NCCL fails late] A collective on NCCL returns when it is queued. A dead peer, a broken link or a rank that never
comes shows only in a later query; until then a plain synchronize waits, perhaps for ever, and what an aborted
collective leaves in its buffers is part of a sum. Destroying a group waits for its collectives too. So: before anything
on the host depends on such a buffer, `settle` polls an event on the device and asks for errors, against the clock; and
a failed world is aborted, never destroyed, by a thread that may get stuck without keeping anybody.

torch's watchdog thread stays on as the second line, for a rank whose host code is stuck in a driver call behind a
collective that never ends: it aborts at the timeout and ends no process (TORCH_NCCL_ASYNC_ERROR_HANDLING=2). It sets
the error before it aborts, so a buffer that an abort has let through is never taken for a good one.

The rules are plain Python around `DeviceBackend`; tests run them on a backend with these manners. Not run on NCCL with
more than one rank: NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Protocol

ABORT_S = 10.0  # how long an abort is waited for; it goes on by itself after that
DUMP_S = 5.0
_SPIN_S = 0.0005  # most waits are shorter: polled without sleeping
_NAP_S = 0.0005


class DeviceBackend(Protocol):
    """What is asked of a backend; none of it but `abort` and `dump` may wait for the device."""

    def mark(self) -> object:
        """A place behind all that has been queued so far."""

    def reached(self, mark: object) -> bool:
        """Whether the device has come to `mark`."""

    def error(self) -> str:
        """What has gone wrong in any group so far, empty if nothing."""

    def take_over(self) -> None:
        """Keep what `abort` needs, and for ever: torch is about to be told to forget its groups."""

    def abort(self) -> None:
        """End all collectives of all groups; may never return."""

    def dump(self) -> None:
        """Write the flight recorder to its file; may never return."""


class DeviceWatch:
    """The rules, see [Note: NCCL fails late]."""

    def __init__(
        self,
        backend: DeviceBackend,
        trace_file: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.trace_file = trace_file
        """Where the flight recorder of this rank is written."""
        self._backend = backend
        self._clock = clock
        self._sleep = sleep

    def settle(self, timeout_s: float) -> None:
        """Return once the device has done all collectives so far without an error.

        Raises TimeoutError after `timeout_s`, RuntimeError for an error of the backend; both end the world.
        """
        began = self._clock()
        mark = self._backend.mark()
        while not self._backend.reached(mark):
            self._raise_error()
            waited = self._clock() - began
            if waited > timeout_s:
                raise TimeoutError(f"the device was not done after {waited:.1f} s")
            if waited > _SPIN_S:
                self._sleep(_NAP_S)
        self._raise_error()  # also an abort lets the device come through

    def _raise_error(self) -> None:
        if told := self._backend.error():
            raise RuntimeError(told)

    def take_over(self) -> None:
        """Prepare for torch to forget its groups."""
        self._backend.take_over()

    def abort(self, *, dump: bool) -> str:
        """End all collectives, and before that write the flight recorder if `dump`; returns what was not in time."""
        problems = []
        if dump and not _in_time(self._backend.dump, DUMP_S):
            problems.append(f"the flight recorder was not written within {DUMP_S:.0f} s")
        if not _in_time(self._backend.abort, ABORT_S):
            problems.append(f"the device's groups were not aborted within {ABORT_S:.0f} s")
        return "; ".join(problems)


def _in_time(call: Callable[[], None], seconds: float) -> bool:
    """Whether `call` ended in `seconds`; it runs in a thread of its own, and what it raises ends it too."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    running = threading.Thread(target=run, name="device abort", daemon=True)
    running.start()
    running.join(seconds)
    return not running.is_alive()


def trace_file(environ: Mapping[str, str], rank: int) -> str:
    """Where torch writes the flight recorder of `rank`, by its environment."""
    prefix = next((environ[name] for name in _TRACE_NAMES if name in environ), "")
    return f"{prefix}{rank}" if prefix else ""


_TRACE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Each with its older name, which counts as well where it is set already.
_DEFAULTS = (
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "2"),  # abort, and end no process
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),  # the flight recorder is on
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    (("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",), "2000"),  # the watchdog sleeps four times as long before it aborts
)


def prepare_environment(environ: MutableMapping[str, str], folder: Path, name: str) -> None:
    """Set what torch reads when NCCL is opened and nobody has set; what is set already stays.

    The flight recorder is written to "`folder`/shardrun-`name`-nccl-rank-N" unless another place is set.
    """
    for names, value in (*_DEFAULTS, (_TRACE_NAMES, str(folder / f"shardrun-{name}-nccl-rank-"))):
        if not any(known in environ for known in names):
            environ[names[0]] = value
