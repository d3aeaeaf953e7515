"""What is spoiled on purpose: everything before a restore, so that nothing is right by luck; one thing after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import UsageError, by_all
from shardrun.run.build import Built
from shardrun.run.probe import LiveLeaf, every_leaf
from shardrun.run.progress import Progress

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- before the restore --------------------------------------------------------------------------------------------


def scramble(built: Built, seed: int) -> None:
    """Set all random streams elsewhere, differently on each rank; overwrite model and optimizer state. Local."""
    seed_all(derive_seed(Purpose.MODEL, seed, built.comm.rank))
    generator = torch.Generator().manual_seed(derive_seed(Purpose.MODEL, seed, built.comm.rank, 1))
    tensors = [parameter.data for parameter in built.model.parameters()] + list(built.model.buffers())
    for leaf in every_leaf(built):
        tensors += [leaf.tensor, *(value for value in leaf.state.values() if isinstance(value, Tensor))]
        numbers = {key: value for key, value in leaf.state.items() if not isinstance(value, Tensor)}
        leaf.state.update({key: type(value)(not value) for key, value in numbers.items()})
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        elif tensor.is_floating_point() or tensor.is_complex():
            noise = torch.rand(tensor.shape, generator=generator) + 0.5
            tensor.copy_(noise.to(tensor.device, tensor.dtype))
        else:
            tensor.add_(1)


# ---- after it ------------------------------------------------------------------------------------------------------


def tamper(name: str, built: Built, progress: Progress) -> None:
    """Change one element of one rank, or one unit that all ranks share, as a restore with a fault would. Collective."""
    TAMPERS[check_tamper(name)](built, progress)


def check_tamper(name: str) -> str:
    """`name` if there is such a control; UsageError with all of them otherwise."""
    if name not in TAMPERS:
        raise UsageError(f"--tamper {name}: unknown; one of {', '.join(TAMPERS)}")
    return name


def _parameter(built: Built, progress: Progress) -> None:
    if _is_last(built):
        _flip(next(iter(built.model.parameters())).data)


def _buffer(built: Built, progress: Progress) -> None:
    buffers = [buffer for buffer in built.model.buffers() if buffer.numel()]
    if not buffers:
        raise _nothing("buffer", "the model has none")
    if _is_last(built):
        _flip(buffers[0])


def _master(built: Built, progress: Progress) -> None:
    masters = [leaf.tensor for leaf in every_leaf(built) if leaf.is_master]
    why = "fp32 parameters have none; set precision.parameters: bf16"
    _on_last_holder("master", built, [partial(_flip, tensor) for tensor in masters], why)


def _moment(built: Built, progress: Progress) -> None:
    moments = [value for leaf in every_leaf(built) for value in _tensors(leaf) if value.dim() > 0]
    _on_last_holder("moment", built, [partial(_flip, tensor) for tensor in moments], _keeps_none(built))


def _step_count(built: Built, progress: Progress) -> None:
    changes: list[Callable[[], object]] = []
    for leaf in every_leaf(built):
        changes += [partial(tensor.add_, 1) for tensor in _tensors(leaf) if tensor.dim() == 0]
        counts = [key for key, value in leaf.state.items() if type(value) is int]
        changes += [partial(leaf.state.update, {key: leaf.state[key] + 1}) for key in counts]
    _on_last_holder("step-count", built, changes, _keeps_none(built))


def _tensors(leaf: LiveLeaf) -> list[Tensor]:
    return [value for value in leaf.state.values() if isinstance(value, Tensor)]


def _keeps_none(built: Built) -> str:
    kinds = " and ".join(dict.fromkeys(group.sharded.kind.name for group in built.groups))
    return f"{kinds} with these options keeps none"


def _on_last_holder(name: str, built: Built, changes: Sequence[Callable[[], object]], why: str) -> None:
    """Make the first change on the last rank that has one: owners and tiny models leave ranks without. Collective."""
    holders = [rank for rank, has_one in enumerate(built.comm.agree(f"tamper {name}", bool(changes))) if has_one]
    if not holders:
        raise by_all(_nothing(name, why))
    if built.comm.rank == holders[-1]:
        changes[0]()


def _schedule(built: Built, progress: Progress) -> None:
    progress.updates += 1


def _data_position(built: Built, progress: Progress) -> None:
    progress.position += 1


def _counter(built: Built, progress: Progress) -> None:
    progress.tokens += 1


def _draw(draw: Callable[[], object]) -> Callable[[Built, Progress], None]:
    def change(built: Built, progress: Progress) -> None:
        if _is_last(built):
            draw()

    return change


TAMPERS: dict[str, Callable[[Built, Progress], None]] = {
    "parameter": _parameter,
    "master": _master,
    "moment": _moment,
    "step-count": _step_count,
    "schedule": _schedule,
    "data-position": _data_position,
    "rng-python": _draw(random.random),
    "rng-numpy": _draw(np.random.random),
    "rng-torch": _draw(lambda: torch.rand(())),
    "counter": _counter,
    "buffer": _buffer,
}


def _is_last(built: Built) -> bool:
    return built.comm.rank == built.comm.world_size - 1


def _flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the first element."""
    first = tensor[(0,) * tensor.dim()]
    first.view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1)


def _nothing(name: str, why: str) -> UsageError:
    return UsageError(f"--tamper {name}: nothing to change: {why}")
