"""ZeRO-2 over a selection: gradients and elementwise optimizer state in equal slices, parameters whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import ContractError, NonFiniteError, StepFailed, by_all
from shardrun.optim.elementwise import SliceOptimizer, SliceTensors
from shardrun.optim.kinds import OptionGroup, elementwise
from shardrun.records.record import RECORD_VERSION, Zero2Record
from shardrun.shard.flat_buffer import FlatBuffers
from shardrun.step.agreement import MissingGradientPolicy, Request, Window, agree_window, is_real
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.masters import Masters
from shardrun.step.norm import block_squares, clip_coefficient, norm_of
from shardrun.step.record_fit import Expected, joint_misfits, judge
from shardrun.step.slices import agree_layout, make_slice, on_first_paths
from shardrun.step.transaction import signals_deferred, transaction

__all__ = ["MissingGradientPolicy", "SelectedZero2", "StepResult"]

BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class StepResult:
    """What a committed step returns."""

    global_weight: int
    """Exact denominator of the mean, or the number of active ranks of a sum."""
    grad_norm: float | None
    """L2 norm of the reduced gradient before clipping; None unless `max_grad_norm` was given."""
    remaining_gradients: dict[str, Tensor]
    """Gradients of unselected parameters, the very same tensor objects."""
    absent: tuple[str, ...]
    """Selected trainable parameters without a gradient on any contributing rank: left alone."""


class SelectedZero2:
    """An elementwise optimizer over the session's selected trainable parameters, in equal slices.

    Collective to make: every rank of the session's group, with the same optimizer and options. `optimizer` is a class
    of torch.optim (SGD, Adam, AdamW) and `options` are its own; `option_groups` give parameters other options (first
    match wins). `masters`: FP32 master weights for 16-bit parameters; without them a slice is updated in its own dtype.
    Selected parameters' memory moves into flat buffers (values unchanged); state exists for this rank's slices only.
    """

    def __init__(
        self,
        session: SelectedDataParallel,
        optimizer: type[torch.optim.Optimizer] | str,
        *,
        option_groups: Sequence[OptionGroup] = (),
        masters: bool = True,
        name: str = "default",
        bucket_bytes: int = BUCKET_BYTES,
        chunk_numel: int | None = None,
        **options: Any,
    ) -> None:
        self.session = session
        self.comm = session.comm
        self.name = name
        self.masters = masters
        self.step_count = 0
        self.kind = elementwise(optimizer)
        option_groups = on_first_paths(session, option_groups)
        self.layout = agree_layout(session, name, self.kind, options, option_groups, masters, bucket_bytes)
        self.flat = FlatBuffers(self.layout, session.parameters, self.comm.rank, self.comm.world_size)
        alone = self.comm.world_size == 1
        self._slices = [make_slice(bucket, masters, proposes=not alone) for bucket in self.flat.buckets]
        self.slice_optimizer = SliceOptimizer(
            self.kind,
            {"lr": options.pop("lr", 1e-3), **options},
            option_groups,
            [
                SliceTensors(s.bucket.option_group, s.leaf, s.grad, None if alone else s.proposed, s.bucket.fragments)
                for s in self._slices
            ],
            chunk_numel,
        )
        self._layout_digest = self.layout.digest[:16]
        self._masters = Masters(self._slices, self.flat)
        self._torn = False

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Path -> selected Parameter, frozen ones and aliases included."""
        return self.session.parameters

    @property
    def trainable_parameters(self) -> list[str]:
        """Paths of the distinct selected trainable parameters, in the order of the flat buffers."""
        return list(self.session.order)

    @property
    def rank(self) -> int:
        """The rank that owns this group's slice number `rank`."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of equal slices, and of ranks in the group."""
        return self.comm.world_size

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch.optim object over this rank's slices; its leaves are views into them."""
        return self.slice_optimizer.optimizer

    @property
    def state_parameter_count(self) -> int:
        """Number of parameters of which this rank holds optimizer state."""
        return len({fragment.path for s in self._slices for fragment in s.bucket.fragments})

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank: state slices and FP32 masters, padding included."""
        return self._masters.nbytes + self.slice_optimizer.state_nbytes

    @property
    def gradient_nbytes(self) -> dict[str, int]:
        """Bytes of gradient memory on this rank: pending FP32 gradients (whole), reduced slices, proposed slices."""
        return {
            "pending": sum(s.bucket.grad.nbytes for s in self._slices),
            "reduced": sum(s.reduced.nbytes for s in self._slices),
            "proposed": sum(s.proposed.nbytes for s in self._slices),
        }

    # ---- the step ----------------------------------------------------------------------------------------------

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
        return self._step("mean", local_weight, lr, missing, max_grad_norm)

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
        active = int(local_active) if isinstance(local_active, bool) else local_active
        return self._step("sum", active, lr, missing, max_grad_norm)

    def _step(
        self, mode: str, weight: object, lr: float | None, missing: object, max_grad_norm: float | None
    ) -> StepResult:
        comm, flat, optimizer = self.comm, self.flat, self.slice_optimizer
        self._require_whole()
        rates = optimizer.rates(lr) if lr is None or is_real(lr) else [lr]
        request = Request(mode, weight, missing, rates, optimizer.terms(), max_grad_norm)
        call = f"step {self.step_count + 1} of {self.name}"
        with transaction(comm, self.step_count + 1, flat.clear):
            comm.enter("collect")
            pending = flat.collect()
            pending = replace(
                pending, problems=(*pending.problems, *self._masters.overwritten(), *self.session.replaced())
            )

            comm.enter("agree")
            window = agree_window(comm, call, self._layout_digest, request, flat.paths, pending)
            grad_norm = None if max_grad_norm is None else 0.0
            if any(window.present.values()):
                comm.enter("reduce")
                flat.zero_absent(pending.present)
                self._reduce(window)

                comm.enter("normalise")
                self._normalise(window.global_weight if mode == "mean" else None)

                comm.enter("decide")
                grad_norm = self._decide(call, max_grad_norm, window)

                comm.enter("propose")
                optimizer.propose(window.present, rates)

                comm.enter("gather")
                self._gather()

                with signals_deferred():
                    comm.enter("vote")
                    comm.vote()

                    comm.enter("commit", cannot_fail=True)
                    self._commit(window, rates)
                    comm.enter("idle", cannot_fail=True)
            flat.clear()
        absent = tuple(path for path, here in window.present.items() if not here)
        return StepResult(window.global_weight, grad_norm, self.session.remaining_gradients(), absent)

    def _reduce(self, window: Window) -> None:
        """Sum over ranks in FP32; this rank receives its slices only. Pending gradients are not written."""
        for s in reversed(self._slices):  # the order in which backward finishes them
            self.comm.reduce_slice(s.bucket.grad, s.reduced, contributes=window.contributes)

    def _normalise(self, divisor: int | None) -> None:
        """Divide once by the exact weight, in FP32, on the slice; then cast once to the optimizer's gradient dtype."""
        for s in self._slices:
            if divisor is not None:
                s.reduced.div_(divisor)
            if s.grad is not s.reduced:
                s.grad.copy_(s.reduced)

    def _decide(self, call: str, max_grad_norm: float | None, window: Window) -> float | None:
        """Refuse non-finite gradients and clip by the global norm; every rank takes the same branch."""
        if max_grad_norm is None:
            bad = sum(int(not torch.isfinite(s.grad).all()) for s in self._slices)
            if self.comm.sum_integers([bad])[0]:
                self._refuse_non_finite(call, window)
            return None
        own = torch.cat([block_squares(s.grad) for s in self._slices])
        blocks = own.new_empty(own.numel() * self.world_size)
        self.comm.gather_slices(blocks, own)
        norm = norm_of(blocks.tolist())
        if norm != norm:
            self._refuse_non_finite(call, window)
        coefficient = clip_coefficient(norm, max_grad_norm)
        if coefficient < 1.0:
            for s in self._slices:
                s.grad.mul_(coefficient)
        return norm

    def _refuse_non_finite(self, call: str, window: Window) -> None:
        own = self.flat.non_finite() if window.contributes else None
        found = self.comm.texts(f"non-finite gradient of {call}", own or "")
        where = [f"rank {rank} has a non-finite gradient for {path}" for rank, path in enumerate(found) if path]
        told = "; ".join(where) or "every local gradient is finite, their FP32 sum overflowed"
        raise by_all(NonFiniteError(f"{call} refused before the update: {told}"))

    def _gather(self) -> None:
        """All ranks' new slices into staging, which is the memory of the pending gradients. A world of one skips it."""
        for s in self._slices if self.world_size > 1 else ():
            self.comm.gather_slices(s.bucket.staging, s.proposed)
        self.comm.settle()

    def _commit(self, window: Window, rates: Sequence[float]) -> None:
        """Switch over, by local work alone: state and masters in place, then staging into the parameters' storage."""
        self._torn = True
        self.slice_optimizer.commit(window.present, rates)
        for s in self._slices:
            if self.world_size > 1:
                s.bucket.param.copy_(s.bucket.staging)
            elif s.has_master:
                s.bucket.own.copy_(s.leaf)
        self.step_count += 1
        self.flat.clear_staged()
        self._torn = False

    def _require_whole(self) -> None:
        if self._torn:
            raise StepFailed(
                f"a failure inside the commit of step {self.step_count + 1} left the state of {self.name} half way; "
                "start again from the last checkpoint",
                step=self.step_count + 1,
                phase="commit",
                gradients_kept=False,
                in_doubt=True,
            )

    def refresh_masters(self) -> None:
        """Take the parameters' present values into the FP32 masters, after they were changed; local, every rank."""
        self._masters.refresh()

    def discard_gradients(self) -> None:
        """Drop the window's pending gradients without a step; local, every rank decides alike."""
        self.flat.clear()

    # ---- records -----------------------------------------------------------------------------------------------

    def to_record(self) -> Zero2Record:
        """This rank's slices of optimizer state and masters, copied; local. Save it with the whole model."""
        self._require_whole()
        tensors = self.slice_optimizer.state_tensors()
        tensors |= {name: view.clone() for name, view in self._masters.views.items()}
        return Zero2Record(self.record_meta(), tensors)

    def load_record(self, record: Zero2Record) -> None:
        """Replace optimizer state and masters; collective. Any misfit on any rank is raised by all before a change."""
        masters = self._masters.views
        mastered: Expected = {name: ((view.numel(),), view.dtype) for name, view in masters.items()}
        found, shared = judge(
            record, self.record_meta(), lambda held: {**self.slice_optimizer.expected_tensors(held), **mastered}
        )
        told = f"record of {self.name} does not fit: "
        error = ContractError(told + "; ".join(found)) if found else None
        if joint := joint_misfits(self.comm.agree(f"load_record of {self.name}", shared, error)):
            raise by_all(ContractError(told + "; ".join(joint)))
        self.slice_optimizer.load_state_tensors(record.tensors)
        self._masters.load(record.tensors)
        self.step_count = int(record.meta["step_count"])

    def record_meta(self) -> dict[str, Any]:
        """What a record says of itself, as plain JSON: contract, layout, optimizer, topology, fragments."""
        fragments = self.layout.fragments(self.rank, self.world_size)
        return {
            "version": RECORD_VERSION,
            "group": self.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "step_count": self.step_count,
            "contract": self.session.contract.to_json(),
            "layout": self.layout.to_json(),
            "optimizer": {"name": self.kind.name, "masters": self.masters, "groups": self.slice_optimizer.described()},
            "numerics": {"seam": self.comm.seam},
            "fragments": {path: list(extent) for path, extent in fragments.items()},
        }
