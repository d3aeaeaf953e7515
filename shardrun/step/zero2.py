"""ZeRO-2 over a selection: gradients and elementwise optimizer state are cut into equal padded slices, parameters stay whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import ContractError, NonFiniteError, SelectionError, UsageError
from shardrun.optim.elementwise import CHUNK_NUMEL, SliceOptimizer, SliceTensors
from shardrun.optim.kinds import OptionGroup, elementwise, group_of
from shardrun.records.fit import violations
from shardrun.records.record import RECORD_VERSION, Zero2Record
from shardrun.shard.flat_buffer import FlatBucket, FlatBuffers
from shardrun.shard.layout import Entry, FlatLayout, plan_layout
from shardrun.step.agreement import MissingGradientPolicy, Request, Window, agree_window
from shardrun.step.data_parallel import SelectedDataParallel
from shardrun.step.norm import block_squares, clip_coefficient, norm_of
from shardrun.step.transaction import transaction

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


@dataclass(frozen=True)
class _Slice:
    """One bucket's buffers on this rank; n = bucket.own.numel()."""

    bucket: FlatBucket
    reduced: Tensor  # (n,) float32: the sum over ranks, then the mean
    grad: Tensor  # (n,) in the leaf's dtype: what the optimizer sees; `reduced` itself where that is float32
    leaf: Tensor  # (n,) FP32 master, or the live parameter slice itself
    proposed: Tensor  # (n,) in the parameter's dtype


class SelectedZero2:
    """An elementwise optimizer over the session's selected trainable parameters, in equal slices.

    Collective to make: every rank of the session's group, with the same optimizer and options. `optimizer` is a class of
    torch.optim (SGD, Adam, AdamW) and `options` are its own; `option_groups` give parameters other options (first match
    wins). `masters`: FP32 master weights for 16-bit parameters; without them a slice is updated in its own dtype.
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
        chunk_numel: int = CHUNK_NUMEL,
        **options: Any,
    ) -> None:
        self.session = session
        self.comm = session.comm
        self.name = name
        self.masters = masters
        self.step_count = 0
        self.kind = elementwise(optimizer)
        self._option_groups = tuple(option_groups)
        self.layout = self._agree_layout(options, bucket_bytes)
        self.flat = FlatBuffers(self.layout, session.parameters, self.comm.rank, self.comm.world_size)
        self._slices = [self._make_slice(bucket) for bucket in self.flat.buckets]
        alone = self.comm.world_size == 1
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

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Path -> selected Parameter, frozen ones and aliases included."""
        return self.session.parameters

    @property
    def trainable_parameters(self) -> list[str]:
        """Paths of the distinct selected trainable parameters, in the root's definition order."""
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
        masters = sum(s.leaf.nbytes for s in self._slices if s.leaf is not s.bucket.own)
        return masters + self.slice_optimizer.state_nbytes

    @property
    def gradient_nbytes(self) -> dict[str, int]:
        """Bytes of gradient memory on this rank: pending FP32 gradients (whole), the reduced slice, the proposed slice."""
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
        allowed). They are added in FP32 and divided once by the sum of all weights. `max_grad_norm=math.inf` measures
        the norm without clipping. Raises StepRefused kin on all ranks with nothing changed, or StepFailed.
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
        return self._step("sum", int(bool(local_active)), lr, missing, max_grad_norm)

    def _step(
        self, mode: str, weight: int | Tensor, lr: float | None, missing: str, max_grad_norm: float | None
    ) -> StepResult:
        comm, flat, optimizer = self.comm, self.flat, self.slice_optimizer
        base_lr = optimizer.base_lr if lr is None else lr
        request = Request(mode, weight, MissingGradientPolicy(missing), base_lr, max_grad_norm)
        call = f"step {self.step_count + 1} of {self.name}"
        with transaction(comm, self.step_count + 1):
            comm.enter("collect")
            pending = flat.collect()

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
                grad_norm = self._decide(call, max_grad_norm)

                comm.enter("propose")
                optimizer.set_lr(base_lr)
                self._propose(window)

                comm.enter("gather")
                self._gather()

                comm.enter("vote")
                comm.vote()

                comm.enter("commit")
                self._commit(window)
            self.step_count += 1
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

    def _decide(self, call: str, max_grad_norm: float | None) -> float | None:
        """Refuse non-finite gradients and clip by the global norm; every rank takes the same branch."""
        if max_grad_norm is None:
            bad = sum(int(not torch.isfinite(s.grad).all()) for s in self._slices)
            if self.comm.sum_integers([bad])[0]:
                self._refuse_non_finite(call)
            return None
        own = torch.cat([block_squares(s.grad) for s in self._slices])
        blocks = own.new_empty(own.numel() * self.world_size)
        self.comm.gather_slices(blocks, own)
        norm = norm_of(blocks.tolist())
        if norm != norm:
            self._refuse_non_finite(call)
        coefficient = clip_coefficient(norm, max_grad_norm)
        if coefficient < 1.0:
            for s in self._slices:
                s.grad.mul_(coefficient)
        return norm

    def _refuse_non_finite(self, call: str) -> None:
        found = self.comm.texts(f"non-finite gradient of {call}", self.flat.non_finite() or "")
        where = [f"rank {rank} has a non-finite gradient for {path}" for rank, path in enumerate(found) if path]
        told = "; ".join(where) or "every local gradient is finite, their FP32 sum overflowed"
        raise NonFiniteError(f"{call} refused before the update: {told}")

    def _propose(self, window: Window) -> None:
        """The optimizer's new slices into `proposed`; live parameters and state are only read. A world of one skips it."""
        if self.world_size > 1:
            self.slice_optimizer.propose(window.present)

    def _gather(self) -> None:
        """All ranks' new slices into staging, which is the memory of the pending gradients. A world of one skips it."""
        for s in self._slices if self.world_size > 1 else ():
            self.comm.gather_slices(s.bucket.staging, s.proposed)

    def _commit(self, window: Window) -> None:
        """Switch over, by local work alone: state and masters in place, then staging into the parameters' storage."""
        self.slice_optimizer.commit(window.present)
        for s in self._slices:
            if self.world_size > 1:
                s.bucket.param.copy_(s.bucket.staging)
            elif s.leaf is not s.bucket.own:
                s.bucket.own.copy_(s.leaf)
        self.flat.clear_staged()

    def discard_gradients(self) -> None:
        """Drop the window's pending gradients without a step; local, every rank decides alike."""
        self.flat.clear()

    # ---- records -----------------------------------------------------------------------------------------------

    def to_record(self) -> Zero2Record:
        """This rank's slices of optimizer state and masters, copied; local. Save it with the whole model."""
        tensors = self.slice_optimizer.state_tensors()
        for s in self._slices:
            if s.leaf is not s.bucket.own:
                for f in s.bucket.fragments:
                    tensors[f"{f.path}/master"] = s.leaf[f.offset : f.offset + f.stop - f.start].clone()
        return Zero2Record(self._meta(), tensors)

    def load_record(self, record: Zero2Record) -> None:
        """Replace optimizer state and masters; collective. Any misfit on any rank is raised by all, before any change."""
        found = violations(record.meta, self._meta())
        found += self._tensor_misfits(record.tensors) if not found else []
        error = ContractError(f"record of {self.name} does not fit: " + "; ".join(found)) if found else None
        self.comm.agree(f"load_record of {self.name}", error=error)
        self.slice_optimizer.load_state_tensors(record.tensors)
        for s in self._slices:
            if s.leaf is not s.bucket.own:
                for f in s.bucket.fragments:
                    s.leaf[f.offset : f.offset + f.stop - f.start].copy_(record.tensors[f"{f.path}/master"])
        self.step_count = int(record.meta["step_count"])

    def _meta(self) -> dict[str, Any]:
        fragments = self.layout.fragments(self.rank, self.world_size)
        return {
            "version": RECORD_VERSION,
            "group": self.name,
            "rank": self.rank,
            "world_size": self.world_size,
            "step_count": self.step_count,
            "contract": self.session.contract.to_json(),
            "layout": self.layout.to_json(),
            "optimizer": self.optimizer_description(),
            "numerics": {"seam": self.comm.seam, "threads": torch.get_num_threads()},
            "fragments": {path: list(extent) for path, extent in fragments.items()},
        }

    def optimizer_description(self) -> dict[str, Any]:
        """Kind, options per option group (registry names, never import paths) and masters, as plain JSON."""
        groups = [
            {**{k: v for k, v in options.items() if k != "lr"}, "lr_scale": scale}
            for options, scale in zip(self.slice_optimizer.options, self.slice_optimizer.lr_scales, strict=True)
        ]
        described: dict[str, Any] = json.loads(json.dumps({"name": self.kind.name, "masters": self.masters, "groups": groups}))
        return described

    def _tensor_misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        expected = self.slice_optimizer.expected_tensors(tensors)
        for s in self._slices:
            if s.leaf is not s.bucket.own:
                expected |= {f"{f.path}/master": ((f.stop - f.start,), torch.float32) for f in s.bucket.fragments}
        found = [f"{name}: in the record, not expected" for name in sorted(tensors.keys() - expected.keys())]
        for name, (shape, dtype) in sorted(expected.items()):
            if name not in tensors:
                found.append(f"{name}: expected, not in the record")
            elif tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
                found.append(f"{name}: saved {tuple(tensors[name].shape)} {tensors[name].dtype}, expected {shape} {dtype}")
        return found

    # ---- set-up ------------------------------------------------------------------------------------------------

    def _agree_layout(self, options: Mapping[str, Any], bucket_bytes: int) -> FlatLayout:
        """The root's layout; refuses on all ranks what cannot be cut and options that differ."""
        entries, problem = [], None
        by_path = {spec.path: spec for spec in self.session.contract.specs}
        for path in self.session.order:
            spec = by_path[path]
            if spec.dtype == "float16":
                problem = SelectionError(f"{path} is float16, which needs a dynamic loss scale; use bfloat16 or float32, or freeze it")
            entries.append(Entry(path, spec.numel, spec.dtype, group_of(path, self._option_groups)))
        asked = repr((self.kind.name, sorted(options.items()), self.masters, [
            (sorted(g.paths), sorted(g.options.items()), g.lr_scale) for g in self._option_groups
        ], bucket_bytes))
        digest = hashlib.sha256(asked.encode()).hexdigest()
        layout = plan_layout(entries, max(1, bucket_bytes // 4))
        answers = self.comm.agree(f"layout of {self.name}", {"options": digest, "layout": layout.to_json()}, problem)
        if any(answer["options"] != digest for answer in answers):
            raise UsageError(f"the ranks give {self.name} different optimizer options; this rank: {asked}")
        return FlatLayout.from_json(answers[0]["layout"])

    def _make_slice(self, bucket: FlatBucket) -> _Slice:
        own = bucket.own
        reduced = torch.zeros(own.numel(), dtype=torch.float32, device=own.device)
        sixteen_bit = own.dtype != torch.float32
        leaf = own.float() if sixteen_bit and self.masters else own
        grad = reduced if leaf.dtype == torch.float32 else torch.zeros_like(own)
        return _Slice(bucket, reduced, grad, leaf, torch.zeros_like(own))
