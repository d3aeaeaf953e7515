"""shardrun's trainer and a plain torch loop in one process, step by step in turn, at world size 1.

[Note: pairs] Each has a model, an optimizer and a loader of its own and trains the same windows. A pair is one window
of each. Who goes first changes from pair to pair, so that a run reads S P P S S P P S and so on. What slows the machine
for longer than a step slows both windows of a pair alike, and their ratio does not see it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardrun.bench.peer import Plain
from shardrun.bench.sameness import same_bits
from shardrun.bench.trained import Trained
from shardrun.bench.work import make_work
from shardrun.config.load import from_mapping
from shardrun.run.build import open_communicator
from shardrun.run.tether import Tether

Times = tuple[float, float]
"""Seconds of wall and of CPU time."""


class Pairs:
    """Does the plain windows between those of the trainer, and keeps the times of both."""

    def __init__(self, plain: Plain) -> None:
        self._plain = plain
        self._windows = plain.work.windows()
        self.ours: list[Times] = []
        self.plain: list[Times] = []
        self._began = self._now()

    def ended(self, row: Mapping[str, Any]) -> None:
        """A window of the trainer is over, which began when this was left the last time; see [Note: pairs]."""
        self.ours.append(self._since(self._began))
        if len(self.ours) % 2:
            for _ in range(2):
                began, seeded, step = self._now(), self._plain.work.seeding_s, len(self.plain)
                self._plain.update(step, self._plain.accumulate(step, next(self._windows)))
                wall, cpu = self._since(began)
                aside = self._plain.work.seeding_s - seeded  # on one thread: as much CPU time as wall time
                self.plain.append((wall - aside, cpu - aside))
        self._began = self._now()

    def _now(self) -> Times:
        device = self._plain.work.comm.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter(), time.process_time()

    def _since(self, began: Times) -> Times:
        wall, cpu = self._now()
        return wall - began[0], cpu - began[1]


def run_pairs(job: Mapping[str, Any], tether: Tether) -> dict[str, Any]:
    """Train as many pairs as the job says (an even number); the times of each, and whether both ended alike."""
    config, count = from_mapping(job["config"]), int(job["options"]["pairs"])
    comm = open_communicator(config)
    trained = Trained(config, comm, tether, Path(job["run_dir"]))
    plain = Plain(make_work(config, comm))
    pairs = Pairs(plain)
    trained.train(count, pairs.ended)
    ours = dict(trained.parameters())
    return {
        "ours": pairs.ours,
        "plain": pairs.plain,
        "device": str(comm.device),
        "differing": [path for path, other in plain.parameters() if not same_bits(ours[path], other)],
    }
