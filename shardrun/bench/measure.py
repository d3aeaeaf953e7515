"""What is measured in the process of a contender: times, bytes of tensors, peak memory."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Marks of a clock on this rank: one at the beginning, then one at the end of each window."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []
        self._aside: list[float] = []
        self.first_window_s: float | None = None
        """From the start of this process to the end of the first window."""

    def mark(self, aside: float = 0.0) -> None:
        """Now, once the device has done what was asked of it so far; `aside`: seconds up to now that do not count."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.append(time.perf_counter())
        self._aside.append(aside)
        if len(self._marks) == 2:
            self.first_window_s = process_age_s()

    def windows_s(self) -> list[float]:
        """Seconds of each window: from the end of the one before, so that nothing between them is left out."""
        counted = [mark - aside for mark, aside in zip(self._marks, self._aside, strict=True)]
        return [end - begin for begin, end in itertools.pairwise(counted)]


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: of the device where there is one, else what was resident of this process (Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory in which the tensors of this rank live, each piece of it counted once."""
    pieces = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the part of a DTensor on this rank
            storage = local.untyped_storage()
            pieces[storage.data_ptr()] = storage.nbytes()
    return sum(pieces.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples, such as the state of an optimizer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
