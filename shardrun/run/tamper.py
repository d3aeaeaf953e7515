"""What is spoiled on purpose: everything before a restore, so that nothing is right by luck; one thing after it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shardrun.data.seeding import Purpose, derive_seed, seed_all
from shardrun.errors import UsageError
from shardrun.run.build import Built
from shardrun.run.probe import optimizer_leaves
from shardrun.run.progress import Progress

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- before the restore --------------------------------------------------------------------------------------------


def scramble(built: Built, seed: int) -> None:
    """Set all random streams elsewhere, differently on each rank; overwrite model and optimizer state. Local."""
    seed_all(derive_seed(Purpose.MODEL, seed, built.comm.rank))
    generator = torch.Generator().manual_seed(derive_seed(Purpose.MODEL, seed, built.comm.rank, 1))
    tensors = [parameter.data for parameter in built.model.parameters()] + list(built.model.buffers())
    for _, _, leaf, _ in optimizer_leaves(built):
        state = built.zero2.optimizer.state[leaf].values()
        tensors += [leaf.data, *(value for value in state if isinstance(value, Tensor))]
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
    """Change one element of one rank, or one unit that all ranks share, as a restore with a fault would. Local."""
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
    masters = [leaf for _, _, leaf, is_master in optimizer_leaves(built) if is_master]
    if _holds_state_last(built):
        if not masters:
            raise _nothing("master", "fp32 parameters have none; set precision.parameters: bf16")
        _flip(masters[0].data)


def _moment(built: Built, progress: Progress) -> None:
    _flip_state("moment", built, lambda tensor: tensor.dim() > 0, _flip)


def _step_count(built: Built, progress: Progress) -> None:
    _flip_state("step-count", built, lambda tensor: tensor.dim() == 0, lambda tensor: tensor.add_(1))


def _flip_state(name: str, built: Built, wanted: Callable[[Tensor], bool], change: Callable[[Tensor], object]) -> None:
    if not _holds_state_last(built):
        return
    for _, _, leaf, _ in optimizer_leaves(built):
        for value in built.zero2.optimizer.state[leaf].values():
            if isinstance(value, Tensor) and wanted(value):
                change(value)
                return
    raise _nothing(name, f"{built.zero2.kind.name} with these options keeps none")


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


def _holds_state_last(built: Built) -> bool:
    """Whether this is the last rank that holds a piece of any parameter; a tiny model leaves later ranks without."""
    world = built.comm.world_size
    return built.comm.rank == max(rank for rank in range(world) if built.zero2.layout.fragments(rank, world))


def _flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the first element."""
    first = tensor[(0,) * tensor.dim()]
    first.view(_INTEGERS[tensor.element_size()]).bitwise_xor_(1)


def _nothing(name: str, why: str) -> UsageError:
    return UsageError(f"--tamper {name}: nothing to change: {why}")
