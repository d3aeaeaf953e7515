"""ZeRO-2 over a selection: gradients and elementwise optimizer state in equal slices, parameters whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardrun.optim.elementwise import SliceOptimizer, SliceTensors
from shardrun.optim.kinds import Elementwise, OptionGroup
from shardrun.records.record import Zero2Record
from shardrun.shard.flat_gradients import Pending
from shardrun.step.agreement import MEAN, SUM, MissingGradientPolicy, Window
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.draft import BUCKET_BYTES, CutDraft, Optimizer, draft_zero2
from shardrun.step.joint_step import StepResult, as_flag
from shardrun.step.sharded import ShardedOptimizer, agree_draft, agree_layout, options_text


class SelectedZero2(ShardedOptimizer):
    """An elementwise optimizer over the session's selected trainable parameters, in equal slices.

    Collective to make: every rank of the session's group, with the same optimizer and options. `optimizer` is an
    elementwise class of torch.optim or its name, or `Declared`, and `options` are its own; `option_groups` give
    parameters other options (first match wins). `masters`: FP32 master weights for 16-bit parameters; without them a
    slice is updated in its own dtype. Selected parameters' memory moves into flat buffers (values unchanged); state
    exists for this rank's slices only.
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
        bucket_bytes: int = BUCKET_BYTES,
        chunk_numel: int | None = None,
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
                **options,
            )

        draft = agree_draft(session, name, draw)
        (share,) = draft.shares
        assert isinstance(share.kind, Elementwise)
        self.kind = share.kind
        asked = f"{share.kind.name} {options_text(options, share.option_groups)} {masters} {bucket_bytes}"
        super().__init__(session, name, masters, agree_layout(session, name, asked, draft))
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

    # ---- the phases, in the order of joint_step.run_step ---------------------------------------------------------

    def collect(self) -> Pending:
        """This rank's gradients of the window, accumulated in FP32 in the flat buffers."""
        return self._problems(self.flat.collect())

    # agree: step/agreement.py, the same for every strategy

    def reduce(self, window: Window, pending: Pending) -> None:
        """Sum over ranks in FP32: this rank receives its slice of each bucket. Pending gradients are not written."""
        self.flat.gradients.zero_absent(pending.present)
        with self.comm.meeting():
            for s in reversed(self.slices):  # the order in which backward finishes them
                self.comm.reduce_slice(s.bucket.grad, s.reduced, contributes=window.contributes, agreed=True)

    def normalise(self, divisor: int | None) -> None:
        """Divide the slices once by the exact weight, in FP32, and cast once to the optimizer's gradient dtype."""
        for s in self.slices:
            s.normalise(divisor)

    def gradients(self) -> list[Tensor]:
        """What is judged and clipped: (n,) per slice, in the optimizer's gradient dtype."""
        return [s.grad for s in self.slices]

    def propose(self, window: Window, rates: Sequence[float]) -> None:
        """The optimizer's step beside the live slices: all that can go wrong, does so here."""
        self.stepper.propose(window.present, rates)

    def gather(self, window: Window) -> None:
        """All ranks' new slices into staging, on the memory of the pending gradients. A world of one skips it."""
        self.stage(window)
        with self.comm.meeting():
            for s in self.slices:
                if s.proposed is not None:
                    self.comm.gather_slices(s.bucket.staging, s.proposed, agreed=True)

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
