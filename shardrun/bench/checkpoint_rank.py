"""What one rank does for `bench --checkpoint`: its run saved and loaded by shardrun, torch.save and DCP in turn.

All of them fsync what they write. Each save begins with a disk that has nothing left to write; the files are then
loaded once out of the page cache and once from the disk. Every work begins with free memory at hand: a virtual machine
may have given it back to its host, and the first to touch it would pay for that.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardrun.bench.checkpoint_rivals import dcp_load, dcp_save, nbytes, torch_load, torch_save, whole_state
from shardrun.config.load import from_mapping
from shardrun.run.build import Built, build, open_communicator
from shardrun.run.forward import loss_of
from shardrun.run.groups import step_groups
from shardrun.run.journal import Journal
from shardrun.run.progress import Progress
from shardrun.run.resharding import Source
from shardrun.run.saving import Saving
from shardrun.run.state import Lineage, resume
from shardrun.run.tether import Tether

Figures = dict[str, dict[str, list[float]]]
"""Contender -> figure -> its value in each round."""

_MIB = 1 << 20
_RIVALS = {"torch.save": (torch_save, torch_load), "DCP": (dcp_save, dcp_load)}


def run(job: Mapping[str, Any], tether: Tether) -> dict[str, Any]:
    """Build the run of the job, measure as its options say, leave; the result as plain JSON. Every rank calls it."""
    config = from_mapping(job["config"])
    built = build(config, open_communicator(config))
    try:
        figures = Measurement(built, Journal(tether), Path(job["run_dir"])).rounds(job["options"]["rounds"])
        built.comm.agree("end of the measurement")
    finally:
        built.comm.close()
    return {"figures": figures, "device": str(built.comm.device), "torch": str(torch.__version__)}


class Measurement:
    """One rank's live run, and stopwatches that all ranks start together; collective, but for what is local."""

    def __init__(self, built: Built, journal: Journal, folder: Path) -> None:
        """`folder` is written to, by all ranks."""
        self.built, self.comm, self.folder = built, built.comm, folder
        self.figures: Figures = defaultdict(lambda: defaultdict(list))
        self._journal, self._progress = journal, Progress()
        self._windows = built.loader.windows()

    def rounds(self, count: int) -> Figures:
        """The figures of so many rounds; in each everybody has a turn, in another order every time."""
        self._train()
        state = whole_state(self.built)
        self._at_hand = nbytes(state)
        turns: list[Callable[[], object]] = [self._foreground, self._background]
        turns += [lambda name=name: self._rival(name, state) for name in _RIVALS]  # type: ignore[misc]
        for number in range(count):
            for place in range(len(turns)):
                turns[(number + place) % len(turns)]()
        return {name: dict(figures) for name, figures in self.figures.items()}

    def _rival(self, name: str, state: Mapping[str, Any]) -> None:
        place = self.folder / "rival"
        save, load = _RIVALS[name]
        self._clean_disk()
        self._timed(name, "save", lambda: save(dict(state), place))
        self._loads(name, place, lambda: load(dict(state), place))

    def _foreground(self) -> None:
        self._train()
        self._clean_disk()
        saving, run_dir = self._saving(), self.folder / "run"
        self._timed("shardrun", "save", lambda: saving.save(self._progress, wait=True))
        job = {"run_dir": str(run_dir), "options": {}}
        self._loads("shardrun", run_dir / "checkpoints", lambda: resume(self.built, job, Source(run_dir)))

    def _background(self) -> None:
        """The pause is what the loop stood still for in all; the rest of the time it trained."""
        self._train()
        self._clean_disk()
        self._take_memory()
        self.comm.vote()
        saving, pause = self._saving(), 0.0
        before, began = _watched(), time.perf_counter()

        def stands_still(work: Callable[[], object]) -> None:
            nonlocal pause
            at = time.perf_counter()
            work()
            pause += time.perf_counter() - at

        stands_still(lambda: saving.save(self._progress, wait=False))
        while saving.under_way:
            self._train(before_update=lambda: stands_still(saving.hold))
            if self.comm.compare("window", "", sums=[int(saving.is_waiting)]).sums[0] == self.comm.world_size:
                stands_still(saving.advance)
        found = self.figures["in the background"]
        found["pause_s"].append(pause)
        found["published_after_s"].append(time.perf_counter() - began)
        found["save_memory_bytes"].append(_resident("VmHWM") - before)
        self._remove(self.folder / "run" / "checkpoints")

    def _loads(self, name: str, place: Path, load: Callable[[], object]) -> None:
        self.figures[name]["bytes"].append(sum(one.stat().st_size for one in place.rglob("*") if one.is_file()))
        self._timed(name, "cached_load", load)
        self._forget(place)
        self._timed(name, "load", load)
        self._remove(place)

    def _timed(self, name: str, what: str, work: Callable[[], object]) -> None:
        """Seconds and memory of `work` on this rank."""
        self._take_memory()
        self.comm.vote()
        before, began, cpu = _watched(), time.perf_counter(), time.process_time()
        work()
        figures = self.figures[name]
        figures[f"{what}_s"].append(time.perf_counter() - began)
        figures[f"{what}_cpu_s"].append(time.process_time() - cpu)
        figures[f"{what}_memory_bytes"].append(_resident("VmHWM") - before)
        self.comm.vote()

    def _train(self, before_update: Callable[[], object] = lambda: None) -> None:
        """One window."""
        _, share = next(self._windows)
        built, most = self.built, self.built.config.train.max_grad_norm
        count: int | Tensor = 0
        for _, batch in share:
            loss_sum, tokens = loss_of(built, batch)
            torch.autograd.backward(loss_sum)
            count = count + tokens
        if built.streaming is not None:
            with built.streaming.window(local_weight=count):
                pass  # what the backwards have left is sent when it ends
        before_update()
        norm = math.inf if most is None else most
        step_groups(built.groups, count, self._progress.updates, built.missing, norm)
        self._progress.step += 1
        self._progress.updates += 1

    def _saving(self) -> Saving:
        return Saving(self.built, self.folder / "run", Lineage("bench", "1", None, None), self._journal, None, -1)

    def _clean_disk(self) -> None:
        """Nothing left to write, on any rank."""
        if self.comm.rank == 0:
            os.sync()
        self.comm.vote()

    def _forget(self, place: Path) -> None:
        """Take the files below `place` out of the page cache."""
        self._clean_disk()
        for path in place.rglob("*"):
            if self.comm.rank == 0 and path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self.comm.vote()

    def _remove(self, place: Path) -> None:
        self.comm.vote()
        if self.comm.rank == 0:
            shutil.rmtree(place)
        self.comm.vote()

    def _take_memory(self) -> None:
        """Touch as much memory as the state has, in huge pages where the system has them, and free it; local."""
        with mmap.mmap(-1, max(self._at_hand, _MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            for _ in range(self._at_hand // _MIB):
                memory.write(bytes(_MIB))


def _watched() -> int:
    """Bytes that are resident now; the peak begins anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
