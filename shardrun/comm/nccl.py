"""torch's NCCL groups as a DeviceBackend. Written after torch's sources; not run on NCCL with more than one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# The destructor of an aborted group joins threads of torch that may sleep for minutes: it must never run.
_never_freed: list[Any] = []


class NcclBackend:
    """All NCCL groups that torch knows in this process."""

    def __init__(self, device: torch.device, trace_file: str) -> None:
        self._device = device
        self._trace_file = trace_file
        self._taken: list[Any] | None = None

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: object) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def error(self) -> str:
        for backend in self._backends():
            told = backend.get_error()
            if told.name != "SUCCESS":
                return f"NCCL reports {told.name} (its flight recorder: {self._trace_file or 'off'})"
        return ""

    def take_over(self) -> None:
        if self._taken is None:
            self._taken = [*self._backends()]
            _never_freed.extend(self._taken)

    def abort(self) -> None:
        self.take_over()
        backends = self._taken or []
        if not backends:
            return
        # One NCCL group of calls around all: aborts one after the other can wait for each other (NVIDIA/nccl 1013).
        backends[0]._group_start()
        for backend in backends:
            with contextlib.suppress(RuntimeError):
                backend.abort()
        backends[0]._group_end()

    def dump(self) -> None:
        take = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if take is not None and self._trace_file:
            Path(self._trace_file).write_bytes(take())

    def _backends(self) -> Iterator[Any]:
        """Newest group first, as torch aborts them."""
        if self._taken is not None:
            yield from self._taken
            return
        if not dist.is_initialized():
            return
        groups = sorted(c10d._world.pg_names.items(), key=lambda item: item[1], reverse=True)
        for group, _ in groups:
            if torch.device("cuda") in group._device_types:
                backend = group._get_backend(torch.device("cuda"))
                yield getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
