"""The loop: windows of micro-batches, one step each, and what is logged, validated and saved between them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from shardrun.data.order import Window, windows_per_epoch
from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import EmptyWindowError, NonFiniteError, ShardrunError, StoppedAfterSave
from shardrun.run.build import Built
from shardrun.run.evaluate import evaluate, training_aside
from shardrun.run.forward import Tally, empty_loss, loss_of, sum_over_ranks
from shardrun.run.groups import step_groups
from shardrun.run.journal import Journal
from shardrun.run.progress import Progress
from shardrun.run.replicas import compare_replicas
from shardrun.run.saving import Saving
from shardrun.run.state import Lineage
from shardrun.run.tether import Tether
from shardrun.run.witness import Onlooker

_KEEPING = nullcontext()
"""Around a backward whose gradients are kept for the step."""
MOST_SKIPPED_IN_A_ROW = 50
"""Windows that `train.nonfinite: skip` passes over without one update between them; a run that diverged ends then."""


@dataclass(frozen=True)
class Plan:
    """What the command line asked of this start of the run."""

    run_dir: Path
    stop_at: int | None = None
    end_at: int | None = None
    """The run counts as finished after this window, however long it is."""
    saves: bool = True


@dataclass
class Trainer:
    """Trains from `progress` to the end of the run. Every rank makes one and calls `run`, unless it is finished."""

    built: Built
    tether: Tether
    plan: Plan
    progress: Progress
    lineage: Lineage
    journal: Journal
    current_step: int = 0
    """The window under way or just done, for the status."""
    witness: Onlooker | None = None
    """Looks on in a proof."""
    _stopping: bool = False
    """Whether any rank was asked to stop: all know it from the same moment on."""
    _hurried: bool = False
    """Whether it was asked from outside, by somebody who waits for the save."""
    _skipped_in_a_row: int = 0
    _all_waiting: bool = False
    """Whether every rank has written its part of the save that is under way."""
    _saving: Saving = field(init=False)

    def run(self) -> None:
        """Train to the end, or until somebody asks to stop: then save and raise StoppedAfterSave.

        Modules train in the modes in which the recipe left them.
        """
        step = self.current_step = self.progress.step
        self._saving = Saving(self.built, self.plan.run_dir, self.lineage, self.journal, self.total_steps, step)
        try:
            self._train()
        except Exception as error:
            self._settle_after(error)
            raise

    def _train(self) -> None:
        built, progress = self.built, self.progress
        self._make_up_for_validation()
        self._enter_data()
        for window, share in built.loader.windows(progress.position, built.stop_position):
            began = time.monotonic()
            tally = self._accumulate(window, share)
            self._check_replicas()
            row = self._update(window, tally)
            self.journal.window(
                row,
                time.monotonic() - began,
                built.comm.device,
                shown=self._due(built.config.log.every) or row["step"] == 1 or self.finished,
                total_steps=self.total_steps,
            )
            self._after_window()
            if self.finished:
                break
            self._enter_data()
        if progress.skipped_empty and not progress.updates:
            raise ShardrunError(
                f"no update was made in {progress.step} windows: the loss has a gradient for none of the trained "
                "parameters, or no weight; look for detach() and no_grad() in the recipe, and at select"
            )

    # ---- one window --------------------------------------------------------------------------------------------

    def _enter_data(self) -> None:
        """From here on an error is one of the next window, and of its data."""
        self.current_step = self.progress.step + 1
        self.built.comm.enter("data")

    def _accumulate(self, window: Window, share: Iterable[tuple[int, Any]]) -> Tally:
        """Forward and backward of this rank's micro-batches; gradients of the loss SUM add up in FP32."""
        tally, built, own = Tally(), self.built, 0
        for number, batch in share:
            own += 1
            if self.witness is not None:
                self.witness.saw(self.progress, window, number, batch)
            # Every micro-batch has streams of its own, so that dropout depends neither on placement nor on a resume.
            seed_all(derive_seed(Purpose.MICRO_BATCH, built.config.run.seed, self.progress.step, number))
            built.comm.enter("forward")
            loss_sum, weight = loss_of(built, batch)
            tally.add(loss_sum, weight)
            self._backward(loss_sum, self._reducing(window, own, weight, tally.weight))
            built.comm.enter("data")
        self._join_in(window, own)
        if (nothing := empty_loss(built, built.loader, window, own)) is not None:
            self._backward(nothing)
        if window.dropped:
            self.journal.note(
                f"{window.dropped} samples dropped at the end of epoch {window.epoch + 1} (data.drop_last)"
            )
        return tally

    def _backward(self, loss_sum: Tensor, reducing: AbstractContextManager[None] = _KEEPING) -> None:
        self.built.comm.enter("backward")
        with reducing:
            if loss_sum.requires_grad:  # else nothing trainable took part, which is for the policy of missing gradients
                loss_sum.backward()  # type: ignore[no-untyped-call]

    def _reducing(
        self, window: Window, own: int, weight: int | Tensor, weight_so_far: int | Tensor
    ) -> AbstractContextManager[None]:
        """In what the backward of this rank's micro-batch number `own` (from 1) runs: gradients that are not kept are
        reduced in the last one of the window, or in each (train.accumulate: sharded)."""
        if (streaming := self.built.streaming) is None:
            return _KEEPING
        if self.built.accumulates_sharded:
            return streaming.window(local_weight=weight)
        last = own == self.built.loader.own_micro_batches(window)
        return streaming.window(local_weight=weight_so_far, last=last)

    def _join_in(self, window: Window, own: int) -> None:
        """Reduce with the ranks that have more micro-batches than the `own` of this one; they wait for it."""
        if (streaming := self.built.streaming) is None:
            return
        sharded, most = self.built.accumulates_sharded, self.built.loader.most_micro_batches(window)
        missed = max(1, most) - own if sharded else int(own == 0)
        for _ in range(missed):
            self.built.comm.enter("backward")
            with streaming.window(local_weight=0):
                pass

    def _check_replicas(self) -> None:
        """Compare the parameters before this window's update spreads them, where it is due."""
        built, window = self.built, self.progress.step + 1
        every = built.config.train.check_replicas_every
        if every is not None and window % every == 0:
            prevented = f"step {window} is not made"
            built.comm.enter("replicas")
            compare_replicas(built.comm, built.model, built.spread, prevented, in_parts=built.in_parts)

    def _update(self, window: Window, tally: Tally) -> dict[str, Any]:
        """One step, or an agreed skip; then the counters and the row for the log (epochs counted from 1)."""
        built, progress = self.built, self.progress
        max_grad_norm = built.config.train.max_grad_norm
        if max_grad_norm is None and built.config.log.grad_norm:
            max_grad_norm = math.inf
        lr = built.groups[0].lr(progress.updates)
        grad_norm, skipped, moved = None, None, False
        self._saving.hold()
        try:
            result = step_groups(
                built.groups,
                tally.weight,
                progress.updates,
                built.missing,
                max_grad_norm,
            )
            grad_norm, moved = result.grad_norm, result.moved
            for path in result.absent:
                self.journal.note(f"{path} has no gradient on any rank: left alone as long as that is so")
        except EmptyWindowError:
            skipped = "empty"
            progress.skipped_empty += 1
            self._discard_gradients()
        except NonFiniteError as error:
            self._skipped_in_a_row += 1
            if built.config.train.nonfinite == "stop" or self._skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
                raise
            skipped = "nonfinite"
            progress.skipped_nonfinite += 1
            self._discard_gradients()
            self.journal.note(f"window {progress.step + 1} is skipped: {error}", once=False)
        else:
            self._skipped_in_a_row = 0
        progress.step += 1
        loss, tokens, moved = self._sum(tally, moved)
        if skipped is None and not moved:
            skipped = "no gradient"
            progress.skipped_empty += 1
        progress.updates += moved
        progress.position = window.next_position
        progress.epoch = window.epoch + 1
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

    def _sum(self, tally: Tally, moved: bool) -> tuple[float, int, bool]:
        """Loss and weight of the window over all ranks, whether any of them `moved` a parameter; and what each has
        seen, known by all from here on."""
        step, comm = self.progress.step, self.built.comm
        requested = self.tether.stop_requested  # ranks hear of it at different moments: it takes effect in a sum
        seen = (requested, step == self.plan.stop_at, self._saving.is_waiting, moved)
        counts = [int(tally.weight), *map(int, seen)]
        loss, (tokens, asked, planned, waiting, movers) = sum_over_ranks(
            comm, f"step {step}", float(tally.loss), counts
        )
        self._hurried = asked > 0
        self._stopping = self._hurried or planned > 0
        self._all_waiting = waiting == comm.world_size
        return loss, tokens, movers > 0

    def _discard_gradients(self) -> None:
        for group in self.built.groups:
            group.sharded.discard_gradients()

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

    def _after_window(self) -> None:
        """Validate and save where it is due; raises StoppedAfterSave where somebody asked to stop."""
        config, progress, last = self.built.config, self.progress, self.finished
        if self._all_waiting:
            self._saving.advance()
        # The last one before the save, whoever waits: once there is a checkpoint of it the run counts as finished.
        if (last and config.eval.at_end) or (self._due(config.eval.every) and (last or not self._hurried)):
            self._evaluate(may_leave=not last)
        ending = self._stopping or last
        if self.plan.saves and (ending or not self._saving.has_begun or self._due(config.checkpoint.every)):
            self._saving.save(progress, wait=ending)
            self._stopping |= self._asked_to_stop()
        leaving = self._stopping and not last
        if self.witness is not None:
            self.witness.after_window(progress, leaving=leaving or last)
        if leaving:
            self._leave()

    def _asked_to_stop(self) -> bool:
        """Whether any rank was, while all were saving: nobody should wait for another window then; collective."""
        asked = int(self.tether.stop_requested)
        return self.built.comm.compare("stop after the save", "", sums=[asked]).sums[0] > 0

    def _leave(self) -> NoReturn:
        self._saving.settle()
        self.tether.send("stopped", step=self.progress.step, path=str(self.lineage.parent))
        raise StoppedAfterSave(f"stopped after step {self.progress.step}")

    def _make_up_for_validation(self) -> None:
        """Do the validation that a hurried stop left out after the window that the run goes on from; collective."""
        if not self._due(self.built.config.eval.every) or self.progress.step == 0:
            return
        if self.built.comm.agree("owed validation", self.journal.lacks_validation)[0]:
            self._evaluate(may_leave=True)
            if self._stopping:
                self._leave()

    def _evaluate(self, *, may_leave: bool) -> None:
        self.built.comm.enter("validation")
        found = evaluate(self.built, lambda: self.tether.stop_requested, may_leave=may_leave)
        self.built.comm.enter("between steps")
        self._stopping |= found.stopping
        if not found.whole:  # made up for by the next start
            return
        row: dict[str, Any] = {"step": self.progress.step, "val_loss": found.loss, "val_tokens": found.tokens}
        if found.bits_per_byte is not None:
            row["bits_per_byte"] = found.bits_per_byte
        if self.built.recipe.metrics is not None:
            with training_aside(self.built.model):
                row |= self.built.recipe.metrics(found.loss, found.tokens)
        self.journal.validation(row, {"loss": found.loss, "tokens": found.tokens, "bits_per_byte": found.bits_per_byte})

    def _settle_after(self, error: Exception) -> None:
        """Publish what is under way, as long as all ranks have come to the same end and can still talk."""
        comm, phase = self.built.comm, self.built.comm.phase
        together = comm.world_size == 1 or (isinstance(error, ShardrunError) and error.agreed)
        if not together or comm.is_poisoned:
            return
        try:
            self._saving.settle()
        except ShardrunError as lost:
            error.add_note(f"besides, the checkpoint that was being written is lost: {lost}")
        comm.enter(phase)  # the one that failed

    @property
    def total_steps(self) -> int | None:
        """The run's length in windows, where it is known beforehand."""
        train, data = self.built.config.train, self.built.config.data
        if train.epochs is None:
            return train.steps
        return train.epochs * windows_per_epoch(self.built.loader.samples, train.global_batch_size, data.drop_last)
