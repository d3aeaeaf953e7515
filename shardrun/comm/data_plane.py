"""The data plane of a communicator: buckets of gradients and parameters, by the fast way of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardrun.comm.agreement import Agreement
from shardrun.comm.board import BOARD_BYTES, Board, knows_order
from shardrun.comm.group import Group
from shardrun.comm.history import Call
from shardrun.comm.shared_memory import Offer, SharedMemory
from shardrun.comm.slices import Finish, NativeSeam, SharedSeam, Slices, SliceSeam, pieces_of, slice_sizes
from shardrun.comm.world_state import WorldState
from shardrun.errors import UsageError, by_all

T = TypeVar("T")


class DataPlane(Agreement):
    """Slices of flat buckets travel between the ranks of a group; every rank of it calls, in the same order.

    [Note: control plane] Agreements, texts, norms and votes travel on pages of the host where there are any, and over
    gloo elsewhere, on every machine: they raise what went wrong, in time. Only gradients and parameters take the fast
    way of the device, and `settle` waits for it.
    """

    def __init__(
        self, group: Group, state: WorldState, backend: str, device: torch.device, shares_memory: bool
    ) -> None:
        super().__init__(group, state)
        self.backend = backend
        self.device = device
        self._not_shared = "" if shares_memory else "switched off"
        """Why buffers are not in shared memory; of all ranks, as soon as they have tried to make one."""
        self._gave_up_sharing = self._asked_for_board = False
        self._memory = SharedMemory()
        self._control = SharedSeam(group, state, self._memory)
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
        if self.world_size > 1 and device.type == "cpu" and numel > 0 and not self._gave_up_sharing:
            if not self._asked_for_board:
                self._asked_for_board = True
                if self._group.board is None and all(self.agree("signals", knows_order())):
                    self._group.board = self._share(BOARD_BYTES, self._board)
            made = None if self._gave_up_sharing else self._share(4 * numel, self._memory.add)
            if made is not None:
                return made.view(torch.float32)
        return torch.zeros(numel, dtype=torch.float32, device=device)

    def _board(self, offer: Offer, mapped: Sequence[mmap | None], pids: Sequence[int]) -> Board:
        return Board(offer.memory, mapped, pids, self._group.named)

    def _share(self, nbytes: int, make: Callable[[Offer, Sequence[mmap | None], Sequence[int]], T]) -> T | None:
        """What `make` makes of memory that all ranks of the group have mapped; None on all of them if one cannot."""
        offer, made, problem = None, None, self._not_shared
        try:
            offer = None if problem else Offer(nbytes)
        except OSError as error:
            problem = str(error)
        answers = self.agree("shared memory", None if offer is None else offer.address())
        try:
            if offer is not None and None not in answers:
                made = make(offer, offer.attach(answers, self.rank), [answer["pid"] for answer in answers])
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = self.agree("shared memory is mapped", problem)
        if offer is not None:
            offer.settle()
        if not any(problems):
            return made
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
        if not agreed:
            self._compare_slices("reduce", bucket, out, splits)
        with self.exchanges() as exchanges:
            exchanges.reduce(bucket, out, splits=splits, contributes=contributes)

    def gather_slices(
        self, bucket: Tensor, own: Tensor, *, splits: Sequence[int] | None = None, agreed: bool = False
    ) -> None:
        """Write every rank's `own` (splits[rank],) into its slice of `bucket` (sum(splits),).

        `splits` has the elements of each rank's slice, 0 allowed; None stands for equal ones. `agreed` as in
        reduce_slice.
        """
        if not agreed:
            self._compare_slices("gather", bucket, own, splits)
        with self.exchanges() as exchanges:
            exchanges.gather(bucket, own, splits=splits)

    @contextmanager
    def exchanges(self) -> Iterator[Exchanges]:
        """Several exchanges of slices that the ranks have agreed on, in the same order on all of them.

        All are done at the end of the block, and this rank may write to any of the buckets again. An exception in the
        block after the first has begun closes the communicator. No others may begin in it, by any communicator of this
        world: their order would be that in which each rank happens to come to them.
        """
        if self._state.exchanging and self.world_size > 1:
            raise UsageError(
                "exchanges are under way already, and others inside of them would meet in another order on each rank; "
                "end the first window or block before the next: what the backward in `with one.window(...)` leaves for "
                "another session is sent by `with other.window(...): pass` after it"
            )
        exchanges = Exchanges(self)
        before, self._state.exchanging = self._state.exchanging, self._state.exchanging or self.world_size > 1
        try:
            yield exchanges
            exchanges.finish()
        except BaseException as error:
            if exchanges.is_half_way:
                told = f"{type(error).__name__}: {error}"
                self._state.poison(
                    f"{self._group.named(self.rank)} failed in phase {self._state.phase}, in exchanges: {told}",
                    keep_alive=exchanges,
                )
            raise
        finally:
            self._state.exchanging = before

    def begin_reduce(self, bucket: Tensor, out: Tensor, splits: Sequence[int] | None, contributes: bool) -> Finish:
        """Of `Exchanges`."""
        sizes = slice_sizes(bucket, out, splits, self._group)
        if self.world_size == 1:
            self.require_open()
            out.copy_(bucket)
            return _done
        with self._guard("reduce", bucket, out, self._seam, ends=False) as call:
            return self._ending(call, self._seam.reduce(bucket, out, sizes, contributes=contributes))

    def begin_gather(self, bucket: Slices, own: Tensor, splits: Sequence[int] | None, source: Tensor | None) -> Finish:
        """Of `Exchanges`."""
        sizes = slice_sizes(bucket, own, splits, self._group)
        if self.world_size == 1:
            self.require_open()
            mine = bucket if isinstance(bucket, Tensor) else bucket[0]
            assert isinstance(mine, Tensor)
            mine.copy_(own)
            return _done
        seam = self._control if own.device.type == "cpu" else self._seam
        with self._guard("gather", _tensors(bucket), own, seam, ends=False) as call:
            return self._ending(call, seam.gather(bucket, own, sizes, source))

    @staticmethod
    def _ending(call: Call, finish: Finish) -> Finish:
        def end() -> None:
            finish()
            call.end()

        return end

    def end(self, finish: Finish, *buffers: object) -> None:
        """Of `Exchanges`: wait for what was begun, as part of the same collective."""
        if finish is not _done:
            with self._state.guard("reduce or gather", self._group, *buffers, goes_on=True):
                finish()

    def all_read(self) -> None:
        """Of `Exchanges`: wait until all ranks have read this one's buckets."""
        if self.world_size > 1:
            with self._state.guard("end of the exchanges", self._group, goes_on=True):
                self._control.all_read()

    def _compare_slices(self, operation: str, bucket: Tensor, own: Tensor, splits: Sequence[int] | None) -> None:
        """Refuse on all ranks what differs between them, or cannot be meant on any."""
        problem = None
        detail = f"{bucket.numel()} of {own.dtype} in slices that do not fit"
        try:
            sizes = slice_sizes(bucket, own, splits, self._group)
            detail = f"{bucket.numel()} of {own.dtype} in slices of {','.join(map(str, sizes))}"
        except UsageError as error:
            problem = error
        self.compare(operation, detail)
        if problem is not None:
            raise by_all(problem)


def _tensors(bucket: Slices) -> list[Tensor]:
    return [bucket] if isinstance(bucket, Tensor) else [piece for part in bucket for piece in pieces_of(part)]


def _done() -> None:
    """What a rank alone has to wait for."""


class Exchanges:
    """Reductions and gathers that are begun one after another, each of them finished when the next is to begin.

    So a rank that is a little ahead does not wait for the others. Every rank of the group does the same in the same
    order. A bucket may be written again, on this rank, when the one after the next has begun, or after `finish`.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._finish: Finish = _done
        self._then: Finish = _done
        self._buffers: tuple[object, ...] = ()
        self._begun_any = False

    def reduce(
        self,
        bucket: Tensor,
        out: Tensor,
        *,
        splits: Sequence[int] | None = None,
        contributes: bool = True,
        then: Finish = _done,
    ) -> None:
        """As reduce_slice; `out` is there when the next one has begun, and `then` was called before."""
        self._end()
        self._begun(self._plane.begin_reduce(bucket, out, splits, contributes), then, bucket, out)

    def gather(
        self, bucket: Slices, own: Tensor, *, splits: Sequence[int] | None = None, source: Tensor | None = None
    ) -> None:
        """As gather_slices; `bucket` may be the slices one by one.

        `source`: a bucket of the same splits, made by `flat_zeros`, that may be overwritten: where the others read
        `own`, should it not stand there already; `bucket` itself if not given.
        """
        self._end()
        finish = self._plane.begin_gather(bucket, own, splits, source)
        self._begun(finish, _done, _tensors(bucket), own, source)

    @property
    def is_half_way(self) -> bool:
        """Whether other ranks wait, or will, for what this one has begun."""
        return self._begun_any and self._plane.world_size > 1

    def finish(self) -> None:
        """Wait for the last of them, and until all ranks have read this one's buckets."""
        self._end()
        self._plane.all_read()

    def _begun(self, finish: Finish, then: Finish, *buffers: object) -> None:
        self._finish, self._then, self._buffers = finish, then, buffers
        self._begun_any = True

    def _end(self) -> None:
        finish, self._finish = self._finish, _done
        self._plane.end(finish, *self._buffers)
        self._then()
        self._then = _done
