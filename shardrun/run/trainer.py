"""The loop: windows of micro-batches, one step each, and what is logged, validated and saved between them."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardrun.checkpoint.commit import Saved
from shardrun.data.order import Window
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import EmptyWindowError, NonFiniteError, StoppedAfterSave
from shardrun.run.build import Built
from shardrun.run.evaluate import Evaluation, Evaluator
from shardrun.run.forward import loss_of, sum_over_ranks
from shardrun.run.metrics import MetricsFile
from shardrun.run.progress import Progress
from shardrun.run.state import Lineage, save_checkpoint
from shardrun.run.tether import Tether
from shardrun.run.witness import Witness


@dataclass(frozen=True)
class Plan:
    """What the command line asked of this start of the run."""

    run_dir: Path
    stop_at: int | None = None
    end_at: int | None = None
    """The run counts as finished after this window, however long it is."""
    saves: bool = True


@dataclass
class _Local:
    """What this rank's share of a window came to."""

    loss: torch.Tensor | float = 0.0
    weight: int | torch.Tensor = 0


@dataclass
class Trainer:
    """Trains from `progress` to the end of the run. Every rank makes one and calls `run`."""

    built: Built
    tether: Tether
    plan: Plan
    progress: Progress
    lineage: Lineage
    metrics: MetricsFile | None = None
    """Rank 0's, once there is something to write."""
    current_step: int = 0
    """The window under way or just done, for the status."""
    witness: Witness | None = None
    """Looks on in a verification."""
    _evaluator: Evaluator | None = None
    _saved_step: int = -1
    _warned: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Train to the end, or until somebody asks to stop: then save and raise StoppedAfterSave."""
        built, progress = self.built, self.progress
        self._saved_step = progress.step
        built.model.train()
        for window, share in built.loader.windows(progress.position, built.stop_position):
            if self.finished:
                break
            began, self.current_step = time.monotonic(), progress.step + 1
            local = self._accumulate(window, share)
            row = self._update(window, local)
            self._log(row, time.monotonic() - began)
            if self._due(built.config.eval.every):
                self._evaluate()
            stopping = self._wants_to_stop()
            if stopping or progress.step == 1 or self._due(built.config.checkpoint.every):
                self._save()
            leaving = stopping and not self.finished
            if self.witness is not None:
                self.witness.after_window(progress, leaving=leaving)
            if leaving:
                self.tether.send("stopped", step=progress.step, path=str(self.lineage.parent))
                raise StoppedAfterSave(f"stopped after step {progress.step}")
        if built.config.eval.at_end and not self._due(built.config.eval.every):
            self._evaluate()
        self._save()
        if self.witness is not None:
            self.witness.after_window(progress, leaving=True)

    # ---- one window --------------------------------------------------------------------------------------------

    def _accumulate(self, window: Window, share: Iterable[tuple[int, Any]]) -> _Local:
        """Forward and backward of this rank's micro-batches; gradients of the loss SUM add up in FP32."""
        local, built = _Local(), self.built
        for number, batch in share:
            if self.witness is not None:
                self.witness.saw(self.progress, window, number, batch)
            # Every micro-batch has streams of its own, so that dropout depends neither on placement nor on a resume.
            seed_all(derive_seed(Purpose.MICRO_BATCH, built.config.run.seed, self.progress.step, number))
            built.comm.enter("forward")
            loss_sum, weight = loss_of(built, batch)
            built.comm.enter("backward")
            loss_sum.backward()  # type: ignore[no-untyped-call]
            local.loss = local.loss + loss_sum.detach().double()
            local.weight = local.weight + weight
        if window.dropped:
            self._note(f"{window.dropped} samples dropped at the end of epoch {window.epoch + 1} (data.drop_last)")
        return local

    def _update(self, window: Window, local: _Local) -> dict[str, Any]:
        """One step, or an agreed skip; then the counters and the row for the log (epochs counted from 1)."""
        built, progress = self.built, self.progress
        max_grad_norm = built.config.train.max_grad_norm
        lr = built.config.optimizer.lr * built.schedule.factor(progress.updates)
        grad_norm, skipped = None, None
        try:
            result = built.zero2.step(
                local_weight=local.weight,
                lr=lr,
                missing=built.missing,
                max_grad_norm=math.inf if max_grad_norm is None else max_grad_norm,
            )
            grad_norm = result.grad_norm
            progress.updates += 1
            for path in result.absent:
                self._note(f"{path} has no gradient on any rank: left alone as long as that is so")
        except EmptyWindowError:
            skipped = "empty"
            progress.skipped_empty += 1
            built.zero2.discard_gradients()
        except NonFiniteError as error:
            if built.config.train.nonfinite == "stop":
                raise
            skipped = "nonfinite"
            progress.skipped_nonfinite += 1
            built.zero2.discard_gradients()
            self._note(str(error), once=False)
        loss, tokens = sum_over_ranks(built.comm, f"step {progress.step + 1}", float(local.loss), int(local.weight))
        progress.step += 1
        progress.position = window.next_position
        progress.epoch = window.epoch
        progress.samples += window.samples
        progress.tokens += tokens
        return {
            "step": progress.step,
            "updates": progress.updates,
            "epoch": window.epoch + 1,
            "loss": loss / tokens if tokens else None,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "total_tokens": progress.tokens,
            "skipped": skipped,
        }

    @property
    def finished(self) -> bool:
        """Whether the run has its length."""
        train, progress = self.built.config.train, self.progress
        return (
            (train.steps is not None and progress.step >= train.steps)
            or (train.tokens is not None and progress.tokens >= train.tokens)
            or (self.plan.end_at is not None and progress.step >= self.plan.end_at)
            or (self.built.stop_position is not None and progress.position >= self.built.stop_position)
        )

    # ---- between windows ---------------------------------------------------------------------------------------

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _wants_to_stop(self) -> bool:
        """Whether any rank was asked to stop; ranks hear of it at different moments and decide here together."""
        asked = self.tether.stop_requested or self.progress.step == self.plan.stop_at
        return self.built.comm.compare("stop", str(self.progress.step), sums=[int(asked)]).sums[0] > 0

    def _evaluate(self) -> None:
        self.built.comm.enter("validation")
        if self._evaluator is None:
            self._evaluator = Evaluator(self.built)
        found: Evaluation = self._evaluator.run()
        row: dict[str, Any] = {"step": self.progress.step, "val_loss": found.loss, "val_tokens": found.tokens}
        if found.bits_per_byte is not None:
            row["bits_per_byte"] = found.bits_per_byte
        if self.built.recipe.metrics is not None:
            row |= self.built.recipe.metrics(found.loss, found.tokens)
        self._write(row)
        if self.metrics is not None:
            self.tether.send(
                "eval", step=self.progress.step, loss=found.loss, tokens=found.tokens, bits_per_byte=found.bits_per_byte
            )

    def _save(self) -> None:
        if not self.plan.saves or self._saved_step == self.progress.step:
            return
        self.built.comm.enter("save")
        saved: Saved = save_checkpoint(self.built, self.plan.run_dir, self.progress, self.lineage)
        self._saved_step = self.progress.step
        self.built.comm.enter("between steps")
        for note in saved.notes:
            self._note(note, once=False)
        if self.metrics is not None:
            self.tether.send(
                "checkpoint", step=saved.step, path=str(saved.path), bytes=saved.bytes, seconds=saved.seconds
            )

    def _log(self, row: dict[str, Any], seconds: float) -> None:
        if self.metrics is None:
            return
        tokens_per_s = row["tokens"] / seconds
        self._write({**row, "seconds": round(seconds, 4), "tokens_per_s": round(tokens_per_s, 1)})
        if self._due(self.built.config.log.every) or row["step"] == 1 or self.finished:
            self.tether.send(
                "step",
                **row,
                total_steps=self.total_steps,
                tokens_per_s=tokens_per_s,
                memory_mb=_peak_memory_mb(self.built.comm.device),
            )

    @property
    def total_steps(self) -> int | None:
        """The run's length in windows, where it is known beforehand."""
        train = self.built.config.train
        return train.steps or (self.built.schedule.total_steps if train.epochs is not None else None)

    def _write(self, row: dict[str, Any]) -> None:
        if self.metrics is not None and (warning := self.metrics.write(row)):
            self.tether.send("warning", text=warning)

    def _note(self, text: str, *, once: bool = True) -> None:
        if self.metrics is not None and not (once and text in self._warned):
            self._warned.add(text)
            self.tether.send("note", text=text)


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
