"""How a peer does a window: the loop that its users write around their model, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardrun.bench.measure import held_bytes, tensors_in
from shardrun.bench.work import Work
from shardrun.run.forward import Tally


class Peer:
    """Every rank makes one and trains the same windows; the classes below say what is special about each.

    Gradients are those of the mean over the window of this rank, which the peers average over ranks.
    """

    configuration: str
    """How it is set up, in the words of its own settings."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.module = self.wrap(work.model)
        self.optimizer = self.make_optimizer()
        self.trained = list(work.trained().values())
        self.gradient_bytes = 0
        """At the end of the last backward."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """What the loss is taken of."""
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over what `wrap` has left of the parameters."""
        return self.work.optimizer_class(self.work.parameter_groups(), **self.work.options)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; `last`: of its window."""
        return nullcontext()

    def backward(self, loss_sum: Tensor, weight: int | Tensor, count: int) -> None:
        """Backward of one of `count` micro-batches."""
        (loss_sum / (weight * count)).backward()  # type: ignore[no-untyped-call]

    def clip(self, max_grad_norm: float) -> None:
        """Clip the norm of the whole gradient."""
        nn.utils.clip_grad_norm_(self.trained, max_grad_norm)

    def accumulate(self, step: int, share: Iterator[tuple[int, Any]]) -> Tally:
        """Forward and backward of this rank's micro-batches of window `step`, counted from 0."""
        tally, batches = Tally(), list(share)
        for place, (number, batch) in enumerate(batches, start=1):
            with self.micro_batch(last=place == len(batches)):
                loss_sum, weight = self.work.loss(self.module, step, number, batch)
                self.backward(loss_sum, weight, len(batches))
            tally.add(loss_sum, weight)
        return tally

    def update(self, step: int, tally: Tally) -> None:
        """One update from the window's gradients, which are dropped after it."""
        self.work.set_rates(self.optimizer, step)
        if self.work.config.train.max_grad_norm is not None:
            self.clip(self.work.config.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # ---- what it holds -----------------------------------------------------------------------------------------

    def count_gradients(self) -> None:
        """Note what the gradients take; between backward and update."""
        self.gradient_bytes = held_bytes(parameter.grad for parameter in self.trained)

    @property
    def state_bytes(self) -> int:
        """What this rank holds of optimizer state."""
        return held_bytes(tensors_in(list(self.stepping.state.values())))

    @property
    def stepping(self) -> torch.optim.Optimizer:
        """The optimizer that holds the state of this rank."""
        return self.optimizer

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The whole trained parameters, one after the other; collective."""
        for path, parameter in self.work.trained().items():
            yield path, parameter.detach()


class Plain(Peer):
    """A world of one: gradients of the sum, divided once by the weight."""

    configuration = "loss_sum.backward(), one division, optimizer.step() on whole tensors, zero_grad(set_to_none=True)"

    def backward(self, loss_sum: Tensor, weight: int | Tensor, count: int) -> None:
        """Of the sum itself."""
        loss_sum.backward()  # type: ignore[no-untyped-call]

    def update(self, step: int, tally: Tally) -> None:
        """Divide, then as all."""
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        torch._foreach_div_(gradients, float(tally.weight))
        super().update(step, tally)


class Compute(Peer):
    """Every rank by itself, as if there were no other."""

    configuration = "no communication, no clipping; the ranks drift apart, so that nothing of it is compared"

    def clip(self, max_grad_norm: float) -> None:
        """Not part of the floor."""
