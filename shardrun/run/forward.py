"""What one micro-batch and one window cost: the recipe's loss on this rank, and sums over ranks for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.data.loader import MicroBatchLoader
from shardrun.data.order import Window
from shardrun.errors import UsageError
from shardrun.run.build import Built


def loss_of(built: Built, batch: Any) -> tuple[Tensor, int | Tensor]:
    """The loss SUM of a micro-batch and its weight, on this rank's device, under autocast if asked for."""
    with _autocast(built):
        return built.recipe.loss(built.model, on_device(batch, built.comm.device), built.world)


def _autocast(built: Built) -> AbstractContextManager[object]:
    if not built.autocast:
        return nullcontext()
    return torch.autocast(built.comm.device.type, dtype=torch.bfloat16)


def empty_loss(built: Built, loader: MicroBatchLoader, window: Window, own: int) -> Tensor | None:
    """The loss sum of an empty micro-batch, where this rank has one fewer (`own`) than another one in `window`.

    Where ranks exchange tokens inside the model, each of them has to pass through it equally often. None elsewhere.
    """
    if not built.exchanging or own == loader.most_micro_batches(window):
        return None
    built.comm.enter("validation" if built.comm.phase == "validation" else "forward")
    loss_sum, weight = loss_of(built, _without_rows(loader.first_batch))
    if int(weight) != 0:
        raise UsageError(
            f"{built.recipe.source}: loss gives an empty micro-batch the weight {int(weight)}, expected 0: ranks "
            "with fewer micro-batches than others pass batches without samples through the model (topology.axes)"
        )
    return loss_sum


def _without_rows(batch: Any) -> Any:
    """`batch` with every tensor in it cut to no rows; one without dimensions has none."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return type(batch)({key: _without_rows(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_rows, batch))
    return type(batch)(map(_without_rows, batch)) if isinstance(batch, list | tuple) else batch


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; lists, tuples and mappings are gone through."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: on_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


@dataclass
class Tally:
    """What this rank's micro-batches come to: the sum of their losses, in float64, and of their weights."""

    loss: float | Tensor = 0.0
    weight: int | Tensor = 0

    def add(self, loss_sum: Tensor, weight: int | Tensor) -> None:
        """Count a micro-batch. Of one without weight the loss does not count, as in the step, even if it is NaN."""
        loss = loss_sum.detach().double()
        if isinstance(weight, Tensor):  # on a device, and not read before the window is over
            weight = weight.long()
            self.loss = self.loss + torch.where(weight > 0, loss, 0.0)
        elif weight > 0:
            self.loss = self.loss + loss
        self.weight = self.weight + weight


def sum_over_ranks(comm: Communicator, tag: str, loss: float, counts: Sequence[int]) -> tuple[float, list[int]]:
    """The float64 `loss` added in rank order, and each of the integer `counts` added exactly; collective."""
    sums = comm.compare(f"log of {tag}", "", sums=counts).sums
    own = torch.tensor([loss], dtype=torch.float64)  # read on the host: over gloo, whatever the device
    every = own.new_empty(comm.world_size)
    comm.gather_slices(every, own, agreed=True)
    total = 0.0
    for part in every.tolist():
        total += part
    return total, sums
