"""Parameters as views into fixed flat storage, with their pending gradients in a flat FP32 range beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardrun.shard.flat_gradients import FlatGradients, GradientBucket, Pending
from shardrun.shard.layout import FlatLayout, Fragment, Space

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class FlatBucket:
    """One bucket in memory; every slice has a multiple of 256 elements, n of them are this rank's."""

    option_group: int
    param: Tensor
    """(sum(splits),) in the parameters' dtype: the live parameters."""
    grad: Tensor
    """(sum(splits),) float32: the pending gradients; where they are streamed, a slot that other buckets use too."""
    staging: Tensor
    """(sum(splits),) in the parameters' dtype, on the memory of `grad`, dead after the reduction."""
    own: Tensor
    """(n,) this rank's slice of `param`."""
    own_staging: Tensor
    """(n,) this rank's slice of `staging`."""
    own_gaps: tuple[Tensor, ...]
    """What of `own_staging` belongs to no parameter."""
    rank: int
    splits: tuple[int, ...]
    """Elements of each rank's slice."""
    fragments: tuple[Fragment, ...]
    """What of which parameter stands in `own`."""


class FlatBuffers:
    """The flat storage of one session on one rank.

    Making one moves the trainable ones of the given parameters into it: their `.data` become contiguous views, values
    unchanged. `gradients` are those of the same layout.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        gradients: FlatGradients,
        rank: int,
        world_size: int,
    ) -> None:
        self.layout = layout
        self.gradients = gradients
        self.buckets: list[FlatBucket] = []
        self._data_ptrs: dict[str, int] = {}
        pending = iter(gradients.buckets)
        for space in layout.spaces:
            param = _move_in(space, parameters, world_size)
            begin = 0
            for _ in space.buckets:
                bucket = next(pending)
                self.buckets.append(_bucket(space, bucket, param[begin : begin + bucket.grad.numel()], rank))
                begin += bucket.grad.numel()
        for path, parameter in self.parameters():
            self._data_ptrs[path] = parameter.data_ptr()

    @property
    def paths(self) -> list[str]:
        """Paths of the trainable parameters in layout order."""
        return self.gradients.paths

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(path, Parameter) in layout order."""
        return ((held.path, held.parameter) for held in self.gradients.held)

    def collect(self) -> Pending:
        """The local gradients of the window, and what is wrong with the parameters' memory; local."""
        pending = self.gradients.collect()
        replaced = [
            f"{path}: its memory was replaced after set-up; change values in place or make a new session"
            for path, parameter in self.parameters()
            if parameter.requires_grad and parameter.data_ptr() != self._data_ptrs[path]
        ]
        told = {problem.partition(":")[0] for problem in pending.problems}
        more = [problem for problem in replaced if problem.partition(":")[0] not in told]
        return replace(pending, problems=(*pending.problems, *more))

    def clear(self) -> None:
        """Drop the window's gradients: every `.grad` becomes None."""
        self.gradients.clear()

    def clear_staged(self) -> None:
        """After a commit: drop the gradients; padding of the FP32 range is zero again, as the reduction relies on."""
        self.clear()
        # The commit wrote through the flat storage: a graph that was built before it must not be used for a backward.
        torch.autograd.graph.increment_version([parameter for _, parameter in self.parameters()])
        if self.gradients.streams:
            return  # who writes to a slot leaves no gap in it
        for bucket in self.buckets:  # FP32 spaces staged whole slices, whose padding is zero already
            if bucket.param.dtype != torch.float32:
                bucket.grad.zero_()


def _bucket(space: Space, pending: GradientBucket, param: Tensor, rank: int) -> FlatBucket:
    staging = pending.grad.view(param.dtype)[: param.numel()]
    own = staging[pending.own]
    ends = [0, *(one.offset + one.stop - one.start for one in pending.fragments)]
    begins = [*(one.offset for one in pending.fragments), own.numel()]
    return FlatBucket(
        space.option_group,
        param,
        pending.grad,
        staging,
        param[pending.own],
        own,
        tuple(own[low:high] for low, high in zip(ends, begins, strict=True) if low < high),
        rank,
        pending.splits,
        pending.fragments,
    )


def _move_in(space: Space, parameters: Mapping[str, nn.Parameter], world_size: int) -> Tensor:
    """Flat storage (all buckets of `space`,) that holds the parameters' values, and is their memory from now on."""
    device = parameters[space.parameters[0].path].device
    param = torch.zeros(space.memory_offsets(world_size)[-1], dtype=DTYPES[space.dtype], device=device)
    for placed, at in space.places(world_size):
        parameter = parameters[placed.path]
        view = param[at : at + placed.numel].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
    return param
