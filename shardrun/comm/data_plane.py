"""The data plane of a communicator: buckets of gradients and parameters, by the fast way of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.agreement import Agreement
from shardrun.comm.group import Group
from shardrun.comm.slices import ExchangeSeam, NativeSeam, SliceSeam, slice_sizes
from shardrun.comm.world_state import WorldState
from shardrun.errors import UsageError, by_all


class DataPlane(Agreement):
    """Slices of flat buckets travel between the ranks of a group; every rank of it calls, in the same order.

    [Note: control plane] Agreements, texts, norms and votes are CPU tensors over gloo on every machine: it raises what
    went wrong, in time. Only gradients and parameters take the fast way of the device, and `settle` waits for it.
    """

    def __init__(self, group: Group, state: WorldState, backend: str, device: torch.device) -> None:
        super().__init__(group, state)
        self.backend = backend
        self.device = device
        self._control = ExchangeSeam(group, state)
        self._seam: SliceSeam = NativeSeam(group.size, group) if backend == "nccl" else self._control

    @property
    def seam(self) -> str:
        """Name of the way slices travel; part of a record's numerics."""
        return self._seam.name if self.world_size > 1 else "none"

    def settle(self) -> None:
        """Wait until this rank's device has done all collectives so far, and raise what went wrong there.

        Before anything on the host depends on what a collective left on the device. Nothing to do without a device.
        """
        if self._state.device is not None:
            with self._guard("settle"):
                self._state.device.settle(self._state.timeout_s)

    def broadcast_(self, tensor: Tensor, tag: str, root: int = 0, *, agreed: bool = False) -> None:
        """Overwrite `tensor` (any shape, any dtype, contiguous) with the root's.

        `agreed`: the ranks have already compared tag, dtype and size of this and every other broadcast that follows.
        """
        if self.world_size == 1:
            self.require_open()
            return
        if not agreed:
            self.compare("broadcast", f"{tag} {tensor.dtype} {tensor.numel()} from {root}")
        if tensor.numel() == 0:
            return
        raw = tensor.view(-1).view(torch.uint8)
        wire = raw.to(self.device)
        with self._guard(f"broadcast of {tag}", wire):
            dist.broadcast(wire, group=self._group.handle, group_src=root)
            if self._state.device is not None and wire is not raw:
                self._state.device.settle(self._state.timeout_s)
        if wire is not raw:
            raw.copy_(wire)

    def reduce_slice(
        self,
        bucket: Tensor,
        out: Tensor,
        *,
        splits: Sequence[int] | None = None,
        contributes: bool = True,
        agreed: bool = False,
    ) -> None:
        """Sum `bucket` (sum(splits),) float32 over ranks, this rank's slice to `out` (splits[rank],).

        `splits` has the elements of each rank's slice, 0 allowed; None stands for equal ones. `bucket` is not written.
        A rank that does not contribute counts as zeros. `agreed`: the ranks have already compared sizes, dtypes and
        order of this and every other exchange of slices that follows.
        """
        if self.world_size == 1:
            self.require_open()
            slice_sizes(bucket, out, splits, self._group)
            out.copy_(bucket)
            return
        if not agreed:
            self._compare_slices("reduce", bucket, out, splits)
        with self._guard("reduce", bucket, out, self._seam):
            sizes = slice_sizes(bucket, out, splits, self._group)
            self._seam.reduce(bucket, out, sizes, contributes=contributes)

    def gather_slices(
        self, bucket: Tensor, own: Tensor, *, splits: Sequence[int] | None = None, agreed: bool = False
    ) -> None:
        """Write every rank's `own` (splits[rank],) into its slice of `bucket` (sum(splits),).

        `splits` has the elements of each rank's slice, 0 allowed; None stands for equal ones. `agreed` as in
        reduce_slice.
        """
        if self.world_size == 1:
            self.require_open()
            slice_sizes(bucket, own, splits, self._group)
            bucket.copy_(own)
            return
        if not agreed:
            self._compare_slices("gather", bucket, own, splits)
        seam = self._control if bucket.device.type == "cpu" else self._seam
        with self._guard("gather", bucket, own, seam):
            seam.gather(bucket, own, slice_sizes(bucket, own, splits, self._group))

    def _compare_slices(self, operation: str, bucket: Tensor, own: Tensor, splits: Sequence[int] | None) -> None:
        """Refuse on all ranks what differs between them, or cannot be meant on any."""
        problem = None
        detail = f"{bucket.numel()} of {bucket.dtype} in slices that do not fit"
        try:
            sizes = slice_sizes(bucket, own, splits, self._group)
            detail = f"{bucket.numel()} of {bucket.dtype} in slices of {','.join(map(str, sizes))}"
        except UsageError as error:
            problem = error
        self.compare(operation, detail)
        if problem is not None:
            raise by_all(problem)
