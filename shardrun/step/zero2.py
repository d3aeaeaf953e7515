"""ZeRO-2 over a selection: gradients and elementwise optimizer state in equal slices, parameters whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardrun.optim.elementwise import SliceOptimizer, SliceTensors
from shardrun.optim.kinds import Elementwise, OptionGroup
from shardrun.records.record import Zero2Record
from shardrun.shard.flat_gradients import Pending
from shardrun.shard.streamed_gradients import StreamedGradients
from shardrun.step.agreement import MEAN, SUM, MissingGradientPolicy, Request, Window
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.draft import CutDraft, Optimizer, draft_zero2
from shardrun.step.joint_step import StepResult, as_flag, require_whole
from shardrun.step.sharded import ShardedOptimizer, agree_draft, agree_layout, options_text
from shardrun.step.streaming import Streaming


class SelectedZero2(ShardedOptimizer):
    """An elementwise optimizer over the session's selected trainable parameters, in equal slices.

    Collective to make: every rank of the session's group, with the same optimizer and options. `optimizer` is an
    elementwise class of torch.optim or its name, or `Declared`, and `options` are its own; `option_groups` give
    parameters other options (first match wins). `masters`: FP32 master weights for 16-bit parameters; without them a
    slice is updated in its own dtype. Selected parameters' memory moves into flat buffers (values unchanged); state
    exists for this rank's slices only.

    `stream_gradients`: reduce inside the last backward, bucket by bucket, and keep nothing, for the least memory. Every
    rank runs that backward in `window`; a step that fails, or is refused after the agreement, needs a new one.
    """

    strategy = "zero2"

    def __init__(
        self,
        session: SelectedDataParallel,
        optimizer: Optimizer,
        *,
        option_groups: Sequence[OptionGroup] = (),
        masters: bool = True,
        name: str = "default",
        bucket_bytes: int | None = None,
        chunk_numel: int | None = None,
        stream_gradients: bool = False,
        **options: Any,
    ) -> None:
        def draw() -> CutDraft:
            return draft_zero2(
                session.contract,
                session.order,
                optimizer,
                option_groups=option_groups,
                masters=masters,
                bucket_bytes=bucket_bytes,
                stream_gradients=stream_gradients,
                **options,
            )

        draft = agree_draft(session, name, draw)
        (share,) = draft.shares
        assert isinstance(share.kind, Elementwise)
        self.kind = share.kind
        asked = f"{share.kind.name} {options_text(options, share.option_groups)} {masters} {bucket_bytes}"
        layout = agree_layout(session, name, f"{asked} {stream_gradients}", draft)
        super().__init__(session, name, masters, layout, streams=stream_gradients)
        gradients, self._streaming = self.flat.gradients, None
        self._order: Sequence[int] = range(len(self.slices))
        if isinstance(gradients, StreamedGradients):
            self._order = gradients.sequence
            self._streaming = Streaming(session.comm, f"{name}, {self.identity}", gradients, self.slices)
        self.stepper = self.slice_optimizer = SliceOptimizer(
            share.kind,
            options,
            share.option_groups,
            [SliceTensors(s.bucket.option_group, s.leaf, s.grad, s.proposed, s.bucket.fragments) for s in self.slices],
            chunk_numel,
        )

    def step(
        self,
        *,
        local_weight: int | Tensor,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """Update by the exact weighted mean; every rank of the group calls it after its last backward.

        Gradients are derivatives of this rank's loss SUM over the window, `local_weight` the samples or tokens in it (0
        allowed). They are added in FP32 and divided once by the sum of all weights. `lr`: this step's base rate, times
        each group's `lr_scale`; None: what `optimizer.param_groups` say. `max_grad_norm=math.inf` measures the norm
        without clipping. Raises StepRefused kin on all ranks with nothing changed, or StepFailed.
        """
        return self._step(MEAN, local_weight, lr, missing, max_grad_norm)

    def step_sum(
        self,
        *,
        local_active: bool,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """Update by the sum alone, for contributions that already carry a global denominator; collective.

        `local_active` says whether this rank contributes; it scales nothing. With no active rank nothing changes.
        """
        return self._step(SUM, as_flag(local_active), lr, missing, max_grad_norm)

    @contextmanager
    def window(self, *, local_weight: int | Tensor, last: bool = True) -> Iterator[None]:
        """Run the last backward before a step in this block; collective if the session streams its gradients.

        Every rank of the group enters it, one without samples with an empty block, and all equally often: once before a
        step, or once for each micro-batch, whose sums then add up in the slices (the sums over ranks come first, so the
        last bits may be others). `local_weight`: samples or tokens in what this block reduces; the step's is the sum of
        these. `last` False: nothing is reduced yet, gradients accumulate as usual. A session that keeps its gradients
        reduces them in the step, and the block does nothing.
        Raises StepRefused kin on all ranks, or StepFailed; an exception in the block closes the communicator.
        """
        if self._streaming is None or not last:
            yield
            return
        require_whole(self)
        with self._streaming.window(self.step_count + 1, local_weight):
            yield

    # ---- the phases, in the order of joint_step.run_step ---------------------------------------------------------

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """This rank's gradients of the window, accumulated in FP32 in the flat buffers."""
        pending = self._problems(self.flat.collect())
        unfit = self._streaming.problems(request, contributes) if self._streaming is not None else []
        return replace(pending, problems=(*pending.problems, *unfit))

    # agree: step/agreement.py, the same for every strategy

    def reduce(self, window: Window, pending: Pending) -> None:
        """Sum over ranks in FP32: this rank receives its slice of each bucket. Pending gradients are not written."""
        if self._streaming is not None:
            return  # done, in `window`
        self.flat.gradients.zero_absent(pending.present)
        with self.comm.exchanges() as exchanges:
            for s in reversed(self.slices):
                exchanges.reduce(s.bucket.grad, s.reduced, contributes=window.contributes)

    def normalise(self, divisor: int | None) -> None:
        """Divide the slices once by the exact weight, in FP32, and cast once to the optimizer's gradient dtype."""
        if self._streaming is not None:
            self._streaming.gradients.spend()
        for s in self.slices:
            s.normalise(divisor)

    def gradients(self) -> list[Tensor]:
        """What is judged and clipped: (n,) per slice, in the optimizer's gradient dtype."""
        return [s.grad for s in self.slices]

    def propose(self, window: Window, rates: Sequence[float]) -> None:
        """The optimizer's step beside the live slices: all that can go wrong, does so here."""
        self.stepper.propose(window.present, rates)

    def gather(self, window: Window) -> None:
        """All ranks' new slices to this one, on the memory of the pending gradients if they are kept. A world of one
        skips it."""
        with self.comm.exchanges() as exchanges:
            for number in self._order:
                s = self.slices[number]
                if s.proposed is None:
                    continue
                s.clear_gaps()
                self.slice_optimizer.stage_slice(number, window.present)
                s.await_others()
                exchanges.gather(s.arriving, s.proposed, source=s.bucket.staging)

    # vote: one for all sessions of the step

    def commit(self, window: Window, rates: Sequence[float]) -> None:
        """Switch over, by local work alone: state and masters in place, then staging into the parameters' storage."""
        self.stepper.commit(window.present, rates)
        for s in self.slices:
            s.commit()
        self.step_count += 1
        self.flat.clear_staged()

    # ---- records -----------------------------------------------------------------------------------------------

    def to_record(self) -> Zero2Record:
        """This rank's slices of optimizer state and masters, copied; local. Save it with the whole model.

        The options in its meta are those of set-up: what a scheduler or the user wrote to `param_groups` since is not
        recorded and not compared; set it again after `load_record`.
        """
        return Zero2Record(self.record_meta(), self._record_tensors())

    def _described(self) -> dict[str, Any]:
        return {"name": self.kind.name, "masters": self.masters, "groups": self.stepper.described()}
