"""Data parallel over a selection: whole reduced gradients on every rank, for an optimizer of the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardrun.comm.communicator import Communicator
from shardrun.errors import UsageError
from shardrun.shard.flat_buffer import DTYPES
from shardrun.shard.flat_gradients import FlatGradients, Pending, deliver, like_parameter
from shardrun.shard.layout import Entry, plan_layout
from shardrun.shard.selection import select_parameters
from shardrun.step.agreement import MEAN, SUM, MissingGradientPolicy, Request, Window
from shardrun.step.joint_step import Part, as_flag, run_step
from shardrun.step.session import Session

_BUCKET_NUMEL = 4 << 20


@dataclass(frozen=True)
class ReduceResult:
    """What a reduction returns; the same on every rank but for the remaining gradients."""

    global_weight: int
    """Exact denominator of the mean, or the number of active ranks of a sum."""
    gradients: dict[str, Tensor]
    """Path -> reduced gradient, the parameter's `.grad` from now on."""
    remaining_gradients: dict[str, Tensor]
    """Gradients of unselected parameters, the very same tensor objects."""
    absent: tuple[str, ...]
    """Selected trainable parameters without a gradient on any contributing rank: their `.grad` is None."""


class SelectedDataParallel(Session):
    """Selected parameters, the same on all ranks of `comm`.

    Collective: every rank of the group makes it, with a selection of the same contract (paths, shapes, dtypes,
    trainable flags, ties; definition order may differ). A difference is raised on every rank as ContractError naming
    the first differing path and all sides. Then the selected parameters are broadcast from rank 0, and with
    `broadcast_buffers` all of the model's buffers, of any dtype. Unselected parameters are not touched. `order` (the
    root's counts) is the order of the trainable paths in the flat buffers, if it is not to be the root's definition
    order; it is ignored unless it names exactly these.

    Give it to SelectedZero2 or SelectedZero1, or reduce gradients here and step an optimizer of your own. Every rank
    calls a reduction after its last backward; gradients are derivatives of its loss SUM over the window, added in FP32.
    `.grad` of the selected trainable parameters become the reduced gradients. They are not judged or clipped. Raises
    StepRefused kin on all ranks, or StepFailed; either way the pending gradients are still there.
    """

    taken_by: str | None = None
    _reduction: _Reduction | None = None

    def reduce(
        self,
        *,
        local_weight: int | Tensor,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
    ) -> ReduceResult:
        """The exact mean over all ranks' weights (samples or tokens, 0 allowed), in each parameter's own dtype.

        Divided once in FP32, by the sum of the weights, then cast once.
        """
        return self._reduce(MEAN, local_weight, missing, fp32=False)

    def reduce_fp32(
        self,
        *,
        local_weight: int | Tensor,
        missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
    ) -> ReduceResult:
        """The exact mean, float32 for 16-bit parameters too."""
        return self._reduce(MEAN, local_weight, missing, fp32=True)

    def sum(
        self, *, local_active: bool, missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR
    ) -> ReduceResult:
        """The sum over active ranks, divided by nothing, in each parameter's own dtype."""
        return self._reduce(SUM, as_flag(local_active), missing, fp32=False)

    def sum_fp32(
        self, *, local_active: bool, missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR
    ) -> ReduceResult:
        """The sum over active ranks, float32 for 16-bit parameters too."""
        return self._reduce(SUM, as_flag(local_active), missing, fp32=True)

    def _reduce(self, mode: str, weight: object, missing: object, *, fp32: bool) -> ReduceResult:
        if self.taken_by is not None:
            raise UsageError(
                f"these gradients are {self.taken_by}'s to reduce; make another session to reduce them here"
            )
        if self._reduction is None:
            self._reduction = _Reduction(self)
        reduction = self._reduction
        reduction.fp32 = fp32
        part = Part(reduction, Request(mode, weight, missing, (), f"fp32 {fp32}"))
        run_step(self.comm, f"reduction {reduction.step_count + 1} of the session", [part], judge=False)
        absent = tuple(path for path, here in part.window.present.items() if not here)
        return ReduceResult(part.window.global_weight, reduction.handed, self.remaining_gradients(), absent)


class DataParallel(SelectedDataParallel):
    """SelectedDataParallel over all parameters of the model."""

    def __init__(self, comm: Communicator, model: nn.Module, *, broadcast_buffers: bool = False) -> None:
        super().__init__(comm, model, select_parameters(model, comm=comm), broadcast_buffers=broadcast_buffers)


class WholeGradients:
    """The phases up to the vote, in the order of joint_step.run_step: every rank gets whole reduced gradients.

    `adopt`: whether pending gradients are accumulated in the flat ranges, or copied there at the step.
    """

    stages_on_gradients = False
    streams = False

    def __init__(
        self,
        name: str,
        number: str,
        comm: Communicator,
        parameters: Mapping[str, nn.Parameter],
        order: Sequence[str],
        *,
        adopt: bool,
    ) -> None:
        self.name = name
        self.comm = comm
        self.step_count = 0
        self.torn = False
        self.fp32 = False
        """Whether 16-bit parameters get float32 gradients."""
        dtypes = {path: str(parameters[path].dtype).removeprefix("torch.") for path in order}
        entries = [Entry(path, parameters[path].numel(), dtypes[path], 0) for path in order]
        layout = plan_layout(entries, _BUCKET_NUMEL)
        self.identity = f"session {number}, layout {layout.digest[:16]}"
        rank, world_size = comm.rank, comm.world_size
        self.flat = FlatGradients(layout, parameters, rank, world_size, adopt=adopt, zeros=comm.flat_zeros)
        self.paths = self.flat.paths
        self._reduced: list[Tensor] = []
        self._whole: dict[str, Tensor] = {}

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """This rank's gradients of the window, in FP32 in the flat buffers."""
        return self.flat.collect()

    # agree: step/agreement.py, the same for every strategy

    def reduce(self, window: Window, pending: Pending) -> None:
        """Sum over ranks in FP32: this rank receives its slice of each bucket. Pending gradients are not written."""
        self.flat.zero_absent(pending.present)
        self._reduced = [torch.empty_like(bucket.grad[bucket.own]) for bucket in self.flat.buckets]
        with self.comm.exchanges() as exchanges:
            for bucket, reduced in reversed(list(zip(self.flat.buckets, self._reduced, strict=True))):
                exchanges.reduce(bucket.grad, reduced, contributes=window.contributes)

    def normalise(self, divisor: int | None) -> None:
        """Divide the slices once by the exact weight, in FP32."""
        if divisor is not None:
            for reduced in self._reduced:
                reduced.div_(divisor)

    def gradients(self) -> list[Tensor]:
        """What would be judged and clipped; these strategies do neither."""
        return self._reduced

    def propose(self, window: Window, rates: Sequence[float]) -> None:
        """The slices in the dtype that the caller gets, cast once."""
        for number, bucket in enumerate(self.flat.buckets if not self.fp32 else ()):
            self._reduced[number] = self._reduced[number].to(DTYPES[bucket.space.dtype])

    def gather(self, window: Window) -> None:
        """All ranks' slices into new memory: whole reduced gradients, each in the memory order of its parameter."""
        results = [r.new_empty(b.grad.numel()) for b, r in zip(self.flat.buckets, self._reduced, strict=True)]
        with self.comm.exchanges() as exchanges:
            for result, reduced in zip(results, self._reduced, strict=True):
                exchanges.gather(result, reduced)
        self._whole = {
            held.path: like_parameter(held, result[at : at + held.grad.numel()].view(held.grad.shape))
            for bucket, result in zip(self.flat.buckets, results, strict=True)
            for held, at in bucket.members
        }

    def hand_out(self, window: Window) -> dict[str, Tensor]:
        """In the commit: make the results the parameters' `.grad`; path -> gradient."""
        handed = {}
        for held in self.flat.held:
            held.parameter.grad = None
            if window.present[held.path]:
                handed[held.path] = deliver(held, self._whole[held.path], adopted=self.flat.adopts)
        self._reduced, self._whole = [], {}
        return handed

    def non_finite(self, pending: Pending) -> str | None:
        """Path of the first pending gradient that is not finite."""
        return self.flat.non_finite(pending.present)

    def clear(self) -> None:
        """Drop the pending gradients."""
        self.flat.clear()


class _Reduction(WholeGradients):
    """The phases of a session's reduction."""

    def __init__(self, session: SelectedDataParallel) -> None:
        super().__init__("the session", session.number, session.comm, session.parameters, session.order, adopt=True)
        self._session = session
        self.handed: dict[str, Tensor] = {}

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """This rank's gradients of the window, accumulated in FP32 in the flat buffers."""
        self.handed = {}
        pending = super().collect(request, contributes)
        return Pending(pending.present, (*pending.problems, *self._session.replaced()))

    def commit(self, window: Window, rates: Sequence[float]) -> None:
        """Hand out the results as `.grad`."""
        self.handed = self.hand_out(window)
        self.step_count += 1
