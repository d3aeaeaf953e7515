"""ZeRO-1 over a selection: every tensor has one owner, who alone holds its optimizer state and steps it whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.kinds import OptionGroup
from shardrun.records.record import Zero1Record
from shardrun.shard.flat_gradients import Pending
from shardrun.step.agreement import MEAN, SUM, MissingGradientPolicy, Request, Window
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.draft import Optimizer, OwnedDraft, draft_zero1
from shardrun.step.joint_step import StepResult, as_flag
from shardrun.step.owned import OwnedOptimizer
from shardrun.step.sharded import ShardedOptimizer, agree_draft, agree_layout, options_text


class SelectedZero1(ShardedOptimizer):
    """Any optimizer over the session's selected trainable parameters, each stepped whole by its owner.

    Collective to make: every rank of the session's group, with the same arguments. `optimizer` is a class of
    torch.optim (Muon and other matrix optimizers too), its name, or `Declared`; `options` are its own. What it does not
    take (Muon: everything that is not 2-D), and what `rest_paths` name (embeddings and heads, for example), goes to
    `rest` with `rest_options`; `split` tells which went where.
    `owners`: path -> rank; without it parameters are dealt out so that the ranks' updates cost about the same
    (Newton-Schulz of a matrix counts as what it multiplies). `masters`: FP32 master weights for 16-bit parameters, on
    the owner.
    """

    strategy = "zero1"

    def __init__(
        self,
        session: SelectedDataParallel,
        optimizer: Optimizer,
        *,
        option_groups: Sequence[OptionGroup] = (),
        owners: Mapping[str, int] | None = None,
        rest: Optimizer = torch.optim.AdamW,
        rest_options: Mapping[str, Any] | None = None,
        rest_paths: Collection[str] = (),
        masters: bool = True,
        name: str = "default",
        bucket_bytes: int | None = None,
        **options: Any,
    ) -> None:
        def draw() -> OwnedDraft:
            return draft_zero1(
                session.contract,
                session.order,
                optimizer,
                option_groups=option_groups,
                owners=owners,
                rest=rest,
                rest_options=rest_options,
                rest_paths=rest_paths,
                masters=masters,
                bucket_bytes=bucket_bytes,
                **options,
            )

        draft = agree_draft(session, name, draw)
        shares = draft.shares
        self.kind = shares[0].kind
        self.split: dict[str, list[str]] = {}
        """Name of an optimizer -> the paths that it steps."""
        for share in shares:
            self.split.setdefault(share.kind.name, []).extend(path for path in session.order if path in share.paths)
        self._costs = draft.costs
        asked = "; ".join(f"{share.kind.name} {options_text(share.options, share.groups)}" for share in shares)
        asked += f" {masters} {bucket_bytes} {None if owners is None else sorted(owners.items())}"
        asked += f" {sorted(draft.left_out)}"
        super().__init__(session, name, masters, agree_layout(session, name, asked, draft))
        self.owners = {
            path: rank for rank in range(self.world_size) for path in self.layout.fragments(rank, self.world_size)
        }
        """Path -> the rank of the group that owns it."""
        shapes = {path: spec.shape for path, spec in draft.specs.items()}
        self.stepper = self._owned = OwnedOptimizer(shares, self.slices, shapes)
        self._all_fp32 = False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch.optim objects of `optimizer` and of `rest`, or the one that has parameters; for schedulers."""
        return self._owned.optimizers

    @property
    def gradient_nbytes(self) -> dict[str, int]:
        """As SelectedZero2.gradient_nbytes, and the copies of leaves and state that a matrix optimizer proposes in."""
        return {**super().gradient_nbytes, "proposed": self._owned.shadow_nbytes}

    def step(
        self,
        *,
        local_weight: int | Tensor,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """Update by the exact weighted mean; every rank of the group calls it after its last backward.

        The arguments are those of SelectedZero2.step. The optimizer sees float32 gradients where it steps float32
        leaves, FP32 masters among them, and else gradients rounded once to the parameter's own dtype.
        """
        return self._step(MEAN, local_weight, lr, missing, max_grad_norm)

    def step_fp32(
        self,
        *,
        local_weight: int | Tensor,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """The same, refused where gradients would not stay float32: 16-bit parameters need FP32 masters for it."""
        return self._step_fp32(MEAN, local_weight, lr, missing, max_grad_norm)

    def step_sum(
        self,
        *,
        local_active: bool,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """Update by the sum over active ranks, divided by nothing; dtypes as in `step`."""
        return self._step(SUM, as_flag(local_active), lr, missing, max_grad_norm)

    def step_sum_fp32(
        self,
        *,
        local_active: bool,
        lr: float | None = None,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """The same, refused where gradients would not stay float32: 16-bit parameters need FP32 masters for it."""
        return self._step_fp32(SUM, as_flag(local_active), lr, missing, max_grad_norm)

    def request(
        self, mode: str, weight: object, lr: float | None, missing: object, max_grad_norm: float | None
    ) -> Request:
        """What is asked of this session in one step."""
        asked = super().request(mode, weight, lr, missing, max_grad_norm)
        return replace(asked, options=f"{asked.options} all in float32: {self._all_fp32}")

    def _step_fp32(self, mode: str, weight: object, *rest: Any) -> StepResult:
        self._all_fp32 = True
        try:
            return self._step(mode, weight, *rest)
        finally:
            self._all_fp32 = False

    # ---- the phases, in the order of joint_step.run_step ---------------------------------------------------------

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """This rank's gradients of the window, accumulated in FP32 in the flat buffers."""
        pending = self._problems(self.flat.collect())
        unfit = self._all_fp32 and any(s.leaf.dtype != torch.float32 for s in self.slices)
        told = "FP32 gradients of 16-bit parameters go to FP32 masters, and this session has none: use step, or masters"
        return replace(pending, problems=(*pending.problems, told)) if unfit else pending

    # agree: step/agreement.py, the same for every strategy

    def reduce(self, window: Window, pending: Pending) -> None:
        """Sum over ranks in FP32: this rank receives the tensors that it owns. Pending gradients are not written."""
        self.flat.gradients.zero_absent(pending.present)
        with self.comm.exchanges() as exchanges:
            for s in reversed(self.slices):  # the order in which backward finishes them
                exchanges.reduce(s.bucket.grad, s.reduced, splits=s.bucket.splits, contributes=window.contributes)

    def normalise(self, divisor: int | None) -> None:
        """Divide once by the exact weight, in FP32, and cast once to the optimizer's gradient dtype."""
        for s in self.slices:
            s.normalise(divisor)

    def gradients(self) -> list[Tensor]:
        """What is judged and clipped: (n,) per slice of owned tensors, in the optimizer's gradient dtype."""
        return [s.grad for s in self.slices]

    def propose(self, window: Window, rates: Sequence[float]) -> None:
        """The optimizer's step beside the live tensors: all that can go wrong, does so here."""
        self.stepper.propose(window.present, rates)

    def gather(self, window: Window) -> None:
        """All owners' new tensors into staging, on the memory of the pending gradients. A world of one skips it."""
        self.stage(window)
        with self.comm.exchanges() as exchanges:
            for s in self.slices:
                if s.proposed is not None:
                    exchanges.gather(s.bucket.staging, s.proposed, splits=s.bucket.splits)

    # vote: one for all sessions of the step

    def commit(self, window: Window, rates: Sequence[float]) -> None:
        """Switch over, by local work alone: state and masters in place, then staging into the parameters' storage."""
        self.stepper.commit(window.present, rates)
        for s in self.slices:
            s.commit()
        self.step_count += 1
        self.flat.clear_staged()

    # ---- records -----------------------------------------------------------------------------------------------

    def to_record(self) -> Zero1Record:
        """Optimizer state and masters of the tensors that this rank owns, copied; local. Save it with the model.

        The options in its meta are those of set-up: what a scheduler or the user wrote to `param_groups` since is not
        recorded and not compared; set it again after `load_record`.
        """
        return Zero1Record(self.record_meta(), self._record_tensors())

    def record_meta(self) -> dict[str, Any]:
        """As ShardedOptimizer.record_meta, with what an update of each owned tensor costs: owners follow from it."""
        meta = super().record_meta()
        return {**meta, "costs": {path: self._costs[path] for path in meta["fragments"]}}

    def _described(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "masters": self.masters, "owners": self.owners, **self._owned.summary()}
