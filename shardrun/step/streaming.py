"""Gradients that a ZeRO-2 session reduces inside backward, and does not keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.comm.data_plane import Exchanges
from shardrun.errors import CommunicatorError, ShardrunError, StepRefused, by_all
from shardrun.shard.streamed_gradients import StreamedGradients
from shardrun.step.agreement import MEAN, Request, integer_weight, weight_problems
from shardrun.step.slices import Slice
from shardrun.step.transaction import failed


class Streaming:
    """The windows of a session on `comm`; `identity` has its name, number and layout. See [Note: streaming]."""

    def __init__(
        self, comm: Communicator, identity: str, gradients: StreamedGradients, slices: Sequence[Slice]
    ) -> None:
        self.comm = comm
        self.gradients = gradients
        self._identity = identity
        self._slices = slices
        self._weight = 0
        self._spare: Tensor | None = None

    @contextmanager
    def window(self, step: int, local_weight: object) -> Iterator[None]:
        """Reduce what a backward in this block, and those before it, leave; collective. See SelectedZero2.window."""
        self.comm.require_open()
        try:
            weight = self._agree(step, local_weight)
        except BaseException as error:
            if isinstance(error, ShardrunError) and error.agreed:
                raise
            self._release_others(step, error)
            if not isinstance(error, Exception):
                raise
            raise failed(self.comm, f"step {step}", step, error, kept=self.gradients.rounds == 0) from error
        try:
            with self.comm.exchanges() as exchanges:
                send = partial(self._send, exchanges=exchanges, contributes=weight > 0)
                with self.gradients.receiving(send, counts=weight > 0):
                    self.comm.enter("backward")
                    yield
                self.comm.enter("reduce")
        except BaseException as error:
            self.gradients.clear()
            self._release_others(step, error)
            if isinstance(error, CommunicatorError):
                raise failed(self.comm, f"step {step}", step, error, kept=False) from error
            raise
        self._weight = weight if self.gradients.rounds == 1 else self._weight + weight

    def _agree(self, step: int, local_weight: object) -> int:
        """This rank's weight, once all ranks are known to be in the same window."""
        problems = weight_problems(local_weight, self.comm.world_size)
        where = f"part {self.gradients.rounds + 1} of step {step}"
        self.comm.enter("agree")
        found = self.comm.compare("window", f"{where}, {self._identity}", {}, [len(problems)])
        if found.sums[0]:
            texts = self.comm.texts("problems", "; ".join(problems))
            told = "; ".join(f"{self.comm.named(rank)}: {text}" for rank, text in enumerate(texts) if text)
            raise by_all(StepRefused(f"{where} refused before its backward: {told}"))
        return integer_weight(local_weight)

    def _send(self, number: int, *, exchanges: Exchanges, contributes: bool) -> None:
        """Reduce one bucket into this rank's slice of it, or add to what earlier parts of the step left there."""
        s = self._slices[number]
        if s.reduced is s.bucket.grad:
            return  # a rank alone: it is there
        self.comm.enter("reduce")
        if self.gradients.rounds == 0:
            exchanges.reduce(s.bucket.grad, s.reduced, contributes=contributes)
        else:
            more = self._room(s.reduced.numel())
            exchanges.reduce(s.bucket.grad, more, contributes=contributes, then=partial(_add, s.reduced, more))
        self.comm.enter("backward")

    def _room(self, numel: int) -> Tensor:
        """(numel,) float32 for the sum of a later part; free again when the next exchange begins."""
        if self._spare is None:
            self._spare = torch.empty_like(max((s.reduced for s in self._slices), key=Tensor.numel))
        return self._spare[:numel]

    def _release_others(self, step: int, error: BaseException) -> None:
        """They wait for gradients that this rank will not send."""
        if self.comm.world_size > 1 and not self.comm.is_poisoned:
            told = f"{type(error).__name__}: {error}"
            self.comm.poison(
                f"{self.comm.named(self.comm.rank)} failed in phase {self.comm.phase} of step {step}: {told}"
            )

    def problems(self, request: Request, contributes: bool | None) -> list[str]:
        """Why a step that this rank asks for so cannot take what was sent; `contributes` as in Part."""
        unknown = weight_problems(request.weight, self.comm.world_size)
        if unknown or self.comm.world_size == 1 or not self.gradients.rounds:
            return []
        given, sent = integer_weight(request.weight), self._weight
        found = []
        if request.mode == MEAN and given != sent:
            found.append(f"local_weight is {given}, and {sent} in the windows before")
        counts = given > 0 if contributes is None else contributes
        if counts != (sent > 0) and not found:
            asked = f"local_active is {given > 0}" if contributes is None else f"local_contributes is {contributes}"
            found.append(f"{asked}, but its windows had a weight of {sent}, and whether they count goes by that")
        return found


@torch.no_grad()
def _add(total: Tensor, more: Tensor) -> None:
    total.add_(more)
