"""The data plane of a communicator: buckets of gradients and parameters, by the fast way of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.agreement import Agreement
from shardrun.comm.group import Group
from shardrun.comm.shared_memory import Offer, SharedMemory
from shardrun.comm.slices import ExchangeSeam, NativeSeam, SharedSeam, Slices, SliceSeam, slice_sizes
from shardrun.comm.world_state import WorldState
from shardrun.errors import UsageError, by_all


class DataPlane(Agreement):
    """Slices of flat buckets travel between the ranks of a group; every rank of it calls, in the same order.

    [Note: control plane] Agreements, texts, norms and votes are CPU tensors over gloo on every machine: it raises what
    went wrong, in time. Only gradients and parameters take the fast way of the device, and `settle` waits for it.
    """

    def __init__(
        self, group: Group, state: WorldState, backend: str, device: torch.device, shares_memory: bool
    ) -> None:
        super().__init__(group, state)
        self.backend = backend
        self.device = device
        self._not_shared = "" if shares_memory else "switched off"
        """Why buffers are not in shared memory; of all ranks, as soon as they have tried to make one."""
        self._gave_up_sharing = False
        self._memory = SharedMemory()
        self._control = SharedSeam(group, ExchangeSeam(group, state), self._memory)
        self._seam: SliceSeam = NativeSeam(group.size, group) if backend == "nccl" else self._control

    @property
    def seam(self) -> str:
        """Name of the way slices travel; part of a record's numerics."""
        return self._seam.name if self.world_size > 1 else "none"

    @property
    def transport(self) -> str:
        """How slices travel, for people to read; the bits do not depend on it where `seam` is the same."""
        if self.world_size == 1:
            return "nothing is sent"
        if self.backend == "nccl":
            return "NCCL"
        return f"sockets ({self._not_shared})" if self._not_shared else "shared memory"

    def flat_zeros(self, numel: int, device: torch.device) -> Tensor:
        """(numel,) float32 zeros on `device`, for buckets; collective, with the same numel on all ranks.

        The ranks of the group read each other's in place where all of them are on one host, see
        [Note: reading in place].
        """
        talks = self.world_size > 1 and device.type == "cpu" and numel > 0
        own = self._share(4 * numel) if talks and not self._gave_up_sharing else None
        return torch.zeros(numel, dtype=torch.float32, device=device) if own is None else own.view(torch.float32)

    def _share(self, nbytes: int) -> Tensor | None:
        """A buffer that all ranks of the group have mapped; None on all of them if one cannot."""
        offer, mapped, problem = None, [], self._not_shared
        try:
            offer = None if problem else Offer(nbytes)
        except OSError as error:
            problem = str(error)
        answers = self.agree("shared memory", None if offer is None else offer.address())
        try:
            if offer is not None and None not in answers:
                mapped = offer.attach(answers, self.rank)
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = self.agree("shared memory is mapped", problem)
        if offer is not None:
            offer.settle()
        if not any(problems):
            assert offer is not None
            return self._memory.add(offer, mapped)
        self._gave_up_sharing = True
        self._not_shared = "; ".join(dict.fromkeys(filter(None, problems)))
        return None

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
        self,
        bucket: Slices,
        own: Tensor,
        *,
        splits: Sequence[int] | None = None,
        source: Tensor | None = None,
        agreed: bool = False,
    ) -> None:
        """Write every rank's `own` (splits[rank],) into its slice of `bucket` (sum(splits),).

        `bucket` may be the slices one by one. `splits` has the elements of each rank's slice, 0 allowed; None stands
        for equal ones. `source`: a bucket of the same splits, made by `flat_zeros`, that may be overwritten: where
        others read `own`, should it not stand there already; `bucket` itself if not given. `agreed` as in reduce_slice.
        """
        if self.world_size == 1:
            self.require_open()
            slice_sizes(bucket, own, splits, self._group)
            (bucket if isinstance(bucket, Tensor) else bucket[0]).copy_(own)
            return
        if not agreed:
            self._compare_slices("gather", bucket, own, splits)
        seam = self._control if own.device.type == "cpu" else self._seam
        with self._guard("gather", bucket, own, seam):
            seam.gather(bucket, own, slice_sizes(bucket, own, splits, self._group), source)

    @contextmanager
    def meeting(self, *, more: bool = False) -> Iterator[None]:
        """Reduce or gather several buckets that are all written by now, or are written in the block before the first.

        Every rank does the same in the block. It spares what says, for each bucket in shared memory, that all ranks
        have written it and all have read it: after the block this rank may write to any of them. `more`: it says so
        only after the next meeting has begun, if that is about other buckets.
        """
        self._control.begin()
        try:
            yield
        except BaseException:
            self._control.end()
            raise
        if self._control.end() and not more:
            with self._guard("end of the meeting"):
                self._control.finish()

    def _compare_slices(self, operation: str, bucket: Slices, own: Tensor, splits: Sequence[int] | None) -> None:
        """Refuse on all ranks what differs between them, or cannot be meant on any."""
        problem = None
        numel = bucket.numel() if isinstance(bucket, Tensor) else sum(piece.numel() for piece in bucket)
        detail = f"{numel} of {own.dtype} in slices that do not fit"
        try:
            sizes = slice_sizes(bucket, own, splits, self._group)
            detail = f"{numel} of {own.dtype} in slices of {','.join(map(str, sizes))}"
        except UsageError as error:
            problem = error
        self.compare(operation, detail)
        if problem is not None:
            raise by_all(problem)
