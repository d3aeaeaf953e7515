"""What rank 0 tells of a training: the rows of metrics.jsonl, and events for its screen and log."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from shardrun.checkpoint.commit import Saved
from shardrun.run.metrics import MetricsFile, plain
from shardrun.run.tether import Tether


class Journal:
    """Without a file, as on all other ranks and in a finished run, it tells nothing; its methods are local."""

    def __init__(self, tether: Tether, metrics: MetricsFile | None = None) -> None:
        self._tether = tether
        self._metrics = metrics
        self._told: set[str] = set()

    @property
    def lacks_validation(self) -> bool:
        """Whether the window that the run goes on from has no validation yet."""
        return self._metrics is not None and self._metrics.lacks_validation

    def window(
        self, row: Mapping[str, Any], seconds: float, device: torch.device, *, shown: bool, total_steps: int | None
    ) -> None:
        """A window is done; it is `shown` or only written down."""
        if self._metrics is None:
            return
        tokens_per_s = row["tokens"] / seconds
        self._write({**row, "seconds": round(seconds, 4), "tokens_per_s": round(tokens_per_s, 1)})
        if shown:
            figures = {"tokens_per_s": tokens_per_s, "memory_mb": _peak_memory_mb(device)}
            self._tether.send("step", **plain(row), total_steps=total_steps, **figures)

    def validation(self, row: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """A validation is done: its row, and what is shown of it."""
        if self._metrics is not None:
            self._write(row)
            self._tether.send("eval", step=row["step"], **plain(figures))

    def saved(self, saved: Saved, *, most: int | None = None) -> None:
        """A checkpoint is published: the rows so far are those of the run.

        `most`: how many may stand at one time, to be told with how many more there is room for.
        """
        if self._metrics is None:
            return
        self._metrics.saved()
        for text in saved.notes:
            self.note(text, once=False)
        room = {} if most is None else {"most": most, "fits": saved.free // saved.bytes}
        shown = {"step": saved.step, "path": str(saved.path), "bytes": saved.bytes, "seconds": saved.seconds}
        self._tether.send("checkpoint", **shown, **room)

    def note(self, text: str, *, once: bool = True) -> None:
        """Something that the user should know, by default the first time only."""
        if self._metrics is not None and not (once and text in self._told):
            self._told.add(text)
            self._tether.send("note", text=text)

    def close(self) -> None:
        """Close the file; no row can follow."""
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        if warning := self._metrics.write(row):
            self._tether.send("warning", text=warning)


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
