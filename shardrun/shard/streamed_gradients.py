"""Gradients that leave bucket by bucket while backward goes on, through memory for a few buckets.

[Note: streaming] Buckets are sent in one order on all ranks: the one in which backward is expected to finish them. They
take turns in a few slots of memory. A gradient whose bucket has a slot is copied there as soon as it is done, and its
own memory is free again; one that comes earlier stays where torch has put it until its bucket has a slot. A bucket is
sent as soon as all its gradients are there and all buckets before it are sent. What never comes is sent as zeros when
the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from shardrun.errors import UsageError
from shardrun.shard.flat_gradients import (
    FlatGradients,
    Held,
    Pending,
    Zeros,
    accumulate_in_fp32,
    form_problem,
    hook_up,
    structure_problem,
)
from shardrun.shard.layout import FlatLayout

SLOTS = 3


class Send(Protocol):
    """Begin to reduce a bucket whose gradients are all in place; on all ranks in the same order.

    Its memory is written again when the one after the next has begun, or after the round.
    """

    def __call__(self, number: int) -> None: ...


def sequence(layout: FlatLayout, defined: Sequence[str]) -> list[int]:
    """Numbers of the buckets in the order in which they are sent; `defined`: paths as the root's model defines them.

    Backward goes through a model from its end: a bucket is finished by the parameter in it that is defined first.
    """
    places = {path: place for place, path in enumerate(defined)}
    first = [
        min(places[one.path] for one in space.parameters if bucket.start <= one.offset < bucket.stop)
        for space in layout.spaces
        for bucket in space.buckets
    ]
    return sorted(range(len(first)), key=lambda number: -first[number])


def slot_numel(sizes: Collection[int], world_size: int) -> int:
    """Elements of all slots for buckets of these sizes; of all buckets where they take turns in none.

    A rank alone reduces nothing and keeps each bucket.
    """
    return SLOTS * max(sizes) if take_turns(sizes, world_size) else sum(sizes)


def take_turns(sizes: Collection[int], world_size: int) -> bool:
    """Whether buckets of these sizes share slots: where that saves memory."""
    return world_size > 1 and SLOTS * max(sizes, default=0) < sum(sizes)


class StreamedGradients(FlatGradients):
    """As FlatGradients, but nothing is kept: see [Note: streaming]. `defined`: paths as the root's model defines them.

    `.grad` is left as torch makes it outside of `receiving`, float32 for 16-bit parameters too, and is None afterwards.
    """

    streams = True

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        *,
        defined: Sequence[str],
        zeros: Zeros,
    ) -> None:
        self.sequence = sequence(layout, defined)
        self._places = {number: place for place, number in enumerate(self.sequence)}
        self._world_size = world_size
        self._alone = world_size == 1
        self._take_turns = False
        super().__init__(layout, parameters, rank, world_size, zeros=zeros)
        self._numbers = {held.path: k for k, held in enumerate(self.held)}
        self._bucket_of = {held.path: n for n, bucket in enumerate(self.buckets) for held, _ in bucket.members}
        self._gaps = [bucket.gaps() for bucket in self.buckets]
        self._sums = torch.zeros(len(self.held), device=self.memory[0].device if self.memory else None)
        """The sum of each gradient of the last round: finite only if all elements are. A rank alone takes none."""
        self._finite = torch.isfinite(self._sums)
        """Whether each gradient was finite in every round since the last step that counts."""
        self._send: Send | None = None
        self._counts = True
        self._sent = 0
        self._here: list[set[str]] = [set() for _ in self.buckets]
        self._present = [False] * len(self.held)
        self.rounds = 0
        """How often gradients were sent since the last step."""
        self._is_spent = False
        """Whether they were divided for a step that has not been made."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots on this rank."""
        return 4 * slot_numel([grad.numel() for grad in self.memory], self._world_size)

    def _memory(self, layout: FlatLayout, sizes: Sequence[int], zeros: Callable[[int], Tensor]) -> list[Tensor]:
        self._take_turns = take_turns(sizes, self._world_size)
        if not self._take_turns:
            return super()._memory(layout, sizes, zeros)
        slots = zeros(SLOTS * max(sizes)).view(SLOTS, -1)
        return [slots[self._places[number] % SLOTS, :size] for number, size in enumerate(sizes)]

    def _take_over(self, held: Held) -> None:
        if not held.parameter.requires_grad:
            return  # frozen after the contract was made: the next step refuses that
        accumulate_in_fp32(held.parameter)
        hook_up(held.parameter, lambda _: self._arrived(held))

    # ---- a round -----------------------------------------------------------------------------------------------

    @contextmanager
    def receiving(self, send: Send, *, counts: bool) -> Iterator[None]:
        """One backward in the block, or none: every gradient that is pending at its end is sent, by `send`.

        `counts`: whether what is sent from this rank counts as a gradient that is present.
        """
        if self._send is not None:
            raise UsageError("this session is in a window(...) already; end it before the next one begins")
        if self.rounds == 0:
            self._present = [False] * len(self.held)
            self._finite.fill_(True)
        self._counts = counts
        self._send, self._sent, self._here = send, 0, [set() for _ in self.buckets]
        try:
            yield
            with torch.no_grad():
                while self._sent < len(self.sequence):
                    self._send_next()
        finally:
            self._send = None
        self.rounds, self._is_spent = self.rounds + 1, False
        if counts:
            self._finite &= torch.isfinite(self._sums)
            for here in self._here:
                for path in here:
                    self._present[self._numbers[path]] = True

    @torch.no_grad()
    def _arrived(self, held: Held) -> None:
        grad, number = held.parameter.grad, self._bucket_of[held.path]
        if self._send is None or grad is None or form_problem(held, grad):
            return  # the step tells of it
        if held.path in self._here[number]:
            raise UsageError(
                f"{held.path} got a gradient twice in one window(...) of a session that streams its gradients, and the "
                "first is on its way already; run one backward in each, or keep the gradients, to the same bits: with "
                "train.stream_gradients: false in the config of a run, without stream_gradients=True elsewhere"
            )
        self._here[number].add(held.path)
        if self._has_slot(number):
            self._move_in(held)
        while self._sent < len(self.sequence) and self._is_whole(self.sequence[self._sent]):
            self._send_next()

    def _is_whole(self, number: int) -> bool:
        return len(self._here[number]) == len(self.buckets[number].members)

    def _has_slot(self, number: int) -> bool:
        """Whether all ranks have read what was in its slot before."""
        return not self._take_turns or self._places[number] < max(SLOTS, self._sent + SLOTS - 2)

    def _move_in(self, held: Held) -> None:
        """Copy a gradient to its slot; its own memory is free."""
        grad = held.parameter.grad
        assert grad is not None
        k = self._numbers[held.path]
        if self._holds_sum(k):
            if self._counts:
                held.grad.add_(grad)
        elif self._alone and not self._counts:
            held.grad.zero_()  # of other ranks the exchange counts them as zeros
        else:
            held.grad.copy_(grad)
        if not self._alone:
            torch.sum(held.grad.view(-1), 0, out=self._sums[k])
        held.parameter.grad = None

    def _holds_sum(self, k: int) -> bool:
        """Whether the sum of earlier windows stands in the memory of a gradient, as nobody else reduces it."""
        return self._alone and self.rounds > 0 and self._present[k]

    def _send_next(self) -> None:
        """Send the bucket whose turn it is; the slot that is free by that goes to a later one."""
        assert self._send is not None
        number = self.sequence[self._sent]
        bucket = self.buckets[number]
        self._fetch(number, everything=True)
        for held, _ in bucket.members:
            k = self._numbers[held.path]
            if held.path not in self._here[number] and not self._holds_sum(k):
                held.grad.zero_()
                self._sums[k] = 0.0
        for gap in self._gaps[number]:
            gap.zero_()
        self._send(number)
        self._sent += 1
        if not self._take_turns:
            return  # nothing has waited
        for later in self.sequence[self._sent :]:
            if not self._has_slot(later):
                break
            self._fetch(later, everything=False)

    def _fetch(self, number: int, *, everything: bool) -> None:
        """Move in what waits for the bucket's slot; or `everything`, also what earlier backwards have left."""
        for held, _ in self.buckets[number].members:
            grad = held.parameter.grad
            if grad is None or form_problem(held, grad):
                continue
            if everything or held.path in self._here[number]:
                self._here[number].add(held.path)
                self._move_in(held)

    # ---- what the step asks ------------------------------------------------------------------------------------

    def collect(self, grads: Mapping[str, Tensor | None] | None = None) -> Pending:
        """Which gradients were sent since the last step; what was not is refused. Local."""
        assert grads is None
        problems = self._of_frozen()
        pending = any(held.parameter.grad is not None for held in self.held)
        if self._send is not None:
            problems.append("a window(...) of this session has not ended; step after its block")
        elif self._alone and self._is_spent and not pending:
            problems.append(
                "the gradients of the step that was refused are gone, as this session streams them, and there are no "
                "new ones; run a backward again, or call discard_gradients"
            )
        elif self._alone and (not self.rounds or pending):
            with self.receiving(lambda number: None, counts=True):
                pass  # a rank alone may do without: nobody waits for its gradients
        if not self.rounds and self.held and not self._alone:
            problems.append(
                "no gradient was sent since the last step: this session streams its gradients, so every rank runs its "
                "last backward, if it has one, in `with session.window(local_weight=...)`"
            )
        for held in self.held:
            grad = held.parameter.grad
            if problem := structure_problem(held) or (grad is not None and form_problem(held, grad)):
                problems.append(problem)
            elif grad is not None:
                problems.append(
                    f"{held.path}: has a gradient that was not sent; run the last backward before a step in "
                    "`with session.window(local_weight=...)`"
                )
        return Pending(tuple(self._present), tuple(problems))

    def zero_absent(self, present: tuple[bool, ...]) -> None:
        """They were sent as zeros."""

    def non_finite(self, present: tuple[bool, ...]) -> str | None:
        """Path of the first gradient that this rank has sent since the last step and that was not finite."""
        if self._alone:
            return super().non_finite(present)
        finite = self._finite.tolist()
        return next((held.path for held, fine in zip(self.held, finite, strict=True) if not fine), None)

    def spend(self) -> None:
        """What was sent cannot be taken for a step again."""
        self.rounds, self._is_spent = 0, True

    def clear(self) -> None:
        """Forget what was sent, and drop what was not."""
        super().clear()
        self.rounds, self._is_spent = 0, False
