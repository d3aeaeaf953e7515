"""What a save and a load cost: 60 million parameters with Adam state on two ranks, beside torch.save and DCP.

    python -m tests.checkpoints.cost [--rounds 5] [--dir FOLDER]

All of them fsync what they write. A round saves and loads in every way, one after the other, and each save begins with
a disk that has nothing left to write; the loads come once with the files in the page cache and once without. Times are
those of the slower rank, medians over the rounds; memory is by how much the resident set of a rank grew at its peak. In
the background the training goes on with small windows meanwhile, and what counts is for how long the loop stood still.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from shardrun.config.load import from_mapping
from shardrun.run.build import Built, build, open_communicator
from shardrun.run.forward import loss_of
from shardrun.run.groups import step_groups
from shardrun.run.journal import Journal
from shardrun.run.progress import Progress
from shardrun.run.resharding import Source
from shardrun.run.saving import Saving
from shardrun.run.state import Lineage, resume
from tests.checkpoints.rivals import dcp_load, dcp_save, torch_load, torch_save, whole_state
from tests.faults.verdict import table
from tests.support.launching import ROOT
from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks
from tests.support.training import document

WORLD_SIZE = 2
_MODEL = {"context": 128, "layers": 10, "width": 704, "heads": 11}
Figures = dict[str, list[float]]


def _config(run_dir: Path) -> dict[str, Any]:
    sections = {
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1000, "micro_batch_size": 1, "global_batch_size": WORLD_SIZE},
        "checkpoint": {"every": 1, "keep": 1, "async": True},
    }
    return document(run_dir, WORLD_SIZE, sections, str(ROOT / "recipes" / "gpt.py"), **_MODEL)


class _Run:
    """One rank's live run, and stopwatches that all ranks start together."""

    def __init__(self, built: Built, folder: Path) -> None:
        self.built, self.comm, self.folder = built, built.comm, folder
        self.figures: Figures = defaultdict(list)
        self.progress = Progress()
        self._windows = iter(built.loader.windows(0, None))

    def train(self, before_update: Callable[[], object] = lambda: None) -> None:
        """One window."""
        _, share = next(self._windows)
        weight: Any = 0
        for _, batch in share:
            loss_sum, tokens = loss_of(self.built, batch)
            torch.autograd.backward(loss_sum)
            weight += tokens
        before_update()
        step_groups(self.built.groups, weight, self.progress.updates, self.built.missing, math.inf)
        self.progress.step += 1
        self.progress.updates += 1

    def timed(self, name: str, work: Callable[[], object]) -> float:
        """Seconds and bytes of memory of `work` on this rank."""
        self.comm.vote()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began, cpu = _status("VmRSS"), time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - began
        self.figures[f"{name}: s"].append(seconds)
        self.figures[f"{name}: CPU s"].append(time.process_time() - cpu)
        self.figures[f"{name}: MB"].append((_status("VmHWM") - before) / 1e6)
        self.comm.vote()
        return seconds

    def clean_disk(self) -> None:
        """Nothing left to write, on any rank."""
        if self.comm.rank == 0:
            os.sync()
        self.comm.vote()

    def forget(self, folder: Path) -> None:
        """Take the files below `folder` out of the page cache."""
        self.clean_disk()
        for path in folder.rglob("*"):
            if self.comm.rank == 0 and path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self.comm.vote()


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _measure(seat: Seat, folder: Path, rounds: int) -> Figures:
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "SHARDRUN_INIT_FILE": seat.init_file}
    config = from_mapping(_config(folder / "run"))
    run = _Run(build(config, open_communicator(config)), folder)
    run.train()
    state = whole_state(run.built.model)
    split = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"split_model": True})})
    whole, shared = run.built, replace(run.built, config=split)
    for _ in range(rounds):
        _foreground(run, whole, "shardrun")
        _foreground(run, shared, "shardrun, model split")
        for name, save, load in (("torch.save", torch_save, torch_load), ("DCP", dcp_save, dcp_load)):
            place = folder / "rival"
            run.clean_disk()
            run.timed(f"{name} save", lambda save=save, place=place: save(state, place))  # type: ignore[misc]
            _loads(run, name, place, lambda load=load, place=place: load(state, place))  # type: ignore[misc]
        _background(run, whole, "in the background")
        _background(run, shared, "in the background, model split")
    run.comm.close()
    return dict(run.figures)


def _foreground(run: _Run, built: Built, name: str) -> None:
    run.train()
    run.clean_disk()
    saving, run_dir = _saving(run, built), run.folder / "run"
    run.timed(f"{name} save", lambda: saving.save(run.progress, wait=True))
    job = {"run_dir": str(run_dir), "options": {}}
    _loads(run, name, run_dir / "checkpoints", lambda: resume(built, job, Source(run_dir)))


def _saving(run: _Run, built: Built) -> Saving:
    journal = Journal(cast(Any, None))  # without a file it tells nothing
    return Saving(built, run.folder / "run", Lineage("cost", "1", None, None), journal, None, -1)


def _loads(run: _Run, name: str, place: Path, load: Callable[[], object]) -> None:
    run.figures[f"{name} save: bytes"].append(sum(one.stat().st_size for one in place.rglob("*") if one.is_file()))
    run.timed(f"{name} load", load)
    run.forget(place)
    run.timed(f"{name} load, not cached", load)
    if run.comm.rank == 0:
        shutil.rmtree(place)
    run.comm.vote()


def _background(run: _Run, built: Built, name: str) -> None:
    """The pause is what the loop stood still for in all; the rest of the time it trained."""
    run.train()
    run.clean_disk()
    saving, pause = _saving(run, built), 0.0
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _status("VmRSS"), time.perf_counter()

    def stands_still(work: Callable[[], object]) -> None:
        nonlocal pause
        at = time.perf_counter()
        work()
        pause += time.perf_counter() - at

    stands_still(lambda: saving.save(run.progress, wait=False))
    while saving.under_way:
        run.train(before_update=lambda: stands_still(saving.hold))
        if run.comm.compare("window", "", sums=[int(saving.is_waiting)]).sums[0] == WORLD_SIZE:
            stands_still(saving.advance)
    run.figures[f"{name}: published after s"].append(time.perf_counter() - began)
    run.figures[f"{name}: s"].append(pause)
    run.figures[f"{name}: MB"].append((_status("VmHWM") - before) / 1e6)
    if run.comm.rank == 0:
        shutil.rmtree(run.folder / "run" / "checkpoints")
    run.comm.vote()


def told(ranks: list[Figures]) -> str:
    """Two tables."""
    worst = {name: median(map(max, zip(*(figures[name] for figures in ranks), strict=True))) for name in ranks[0]}
    rows = []
    for name in ("shardrun", "shardrun, model split", "torch.save", "DCP"):
        row = [name]
        for work in ("save", "load", "load, not cached"):
            row.append(f"{worst[f'{name} {work}: s']:.2f} ({worst[f'{name} {work}: CPU s']:.2f})")
        row.append(f"{worst[f'{name} save: bytes']:,.0f}")
        rows.append([*row, f"{worst[f'{name} save: MB']:.0f}", f"{worst[f'{name} load: MB']:.0f}"])
    header = ["", "save s (CPU s)", "load s (CPU s)", "load not cached s (CPU s)", "bytes on disk"]
    asides = []
    for name, whole in (("", "shardrun"), (", model split", "shardrun, model split")):
        found = {what: worst[f"in the background{name}: {what}"] for what in ("s", "MB", "published after s")}
        share = 100 * found["s"] / worst[f"{whole} save: s"]
        row = [f"in the background{name}", f"{found['s']:.3f}", f"{share:.1f} %", f"{found['published after s']:.1f}"]
        asides.append([*row, f"{found['MB']:.0f}"])
    return "\n".join(
        [
            table([*header, "save memory MB", "load memory MB"], rows),
            table(["", "training stands still s", "of a save", "published after s of training", "memory MB"], asides),
        ]
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write; the folder of temporary files if not given"
    )
    asked = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the launcher does
    with tempfile.TemporaryDirectory(prefix="cost-", dir=asked.dir) as folder:
        measured = (Path(folder), asked.rounds)
        print(told(run_ranks(WORLD_SIZE, _measure, *measured, timeout_s=3600, open_comm=False, debug="OFF")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
