"""Parameters as views into fixed flat storage, and their pending gradients in a flat FP32 range beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardrun.shard.layout import Bucket, FlatLayout, Fragment, Space

_HOOKS = WeakIdKeyDictionary()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class FlatBucket:
    """One bucket in memory: `world_size` equal slices of n elements, n a multiple of 256."""

    option_group: int
    param: Tensor
    """(world_size * n,) in the parameters' dtype: the live parameters."""
    grad: Tensor
    """(world_size * n,) float32: the pending gradients."""
    staging: Tensor
    """(world_size * n,) in the parameters' dtype, on the memory of the pending gradients, dead after the reduction."""
    own: Tensor
    """(n,) this rank's slice of `param`."""
    fragments: tuple[Fragment, ...]
    """What of which parameter stands in `own`."""


@dataclass(frozen=True)
class _Held:
    path: str
    parameter: nn.Parameter
    data_ptr: int
    grad: Tensor  # a view of the parameter's shape into the flat FP32 range


@dataclass(frozen=True)
class Pending:
    """The window's local gradients: which parameters have one (in layout order), and what is wrong on this rank."""

    present: tuple[bool, ...]
    problems: tuple[str, ...]


class FlatBuffers:
    """The flat storage of one session on one rank.

    Making one moves the trainable ones of the given parameters into it: their `.data` become contiguous views, values
    unchanged. From then on gradients are accumulated in FP32 in the flat range; `.grad` is a view of it. Presence of a
    gradient is `.grad` at the step: our view, another tensor (copied in), or None (absent).
    """

    def __init__(self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], rank: int, world_size: int) -> None:
        self.layout = layout
        self.buckets: list[FlatBucket] = []
        self._frozen = [(path, parameter) for path, parameter in parameters.items() if not parameter.requires_grad]
        self._held: list[_Held] = []
        self._sixteen_bit: list[Tensor] = []
        for space in layout.spaces:
            self._build(space, parameters, rank, world_size)
        for held in self._held:
            _hook(held.parameter, _adopt_into(held.grad))

    @property
    def paths(self) -> list[str]:
        """Paths of the trainable parameters in layout order."""
        return [held.path for held in self._held]

    def _build(self, space: Space, parameters: Mapping[str, nn.Parameter], rank: int, world_size: int) -> None:
        dtype = DTYPES[space.dtype]
        device = parameters[space.parameters[0].path].device
        offsets = space.memory_offsets(world_size)
        param = torch.zeros(offsets[-1], dtype=dtype, device=device)
        grad = torch.zeros(offsets[-1], dtype=torch.float32, device=device)
        staging = grad.view(dtype)[: offsets[-1]]
        if dtype != torch.float32:
            self._sixteen_bit.append(grad)
        for bucket, begin in zip(space.buckets, offsets, strict=False):
            n = bucket.slice_numel(world_size)
            whole = slice(begin, begin + n * world_size)
            own = param[begin + rank * n : begin + (rank + 1) * n]
            fragments = tuple(space.fragments(bucket, rank, world_size))
            self.buckets.append(
                FlatBucket(space.option_group, param[whole], grad[whole], staging[whole], own, fragments)
            )
            self._held.extend(_move_in(space, bucket, begin, parameters, param, grad))

    def collect(self) -> Pending:
        """The local gradients of the window. Local; foreign `.grad` tensors are copied in, nothing else is changed."""
        present = []
        problems = [
            f"{path}: was frozen at set-up and is trainable now; make a new session after unfreezing"
            for path, parameter in self._frozen
            if parameter.requires_grad
        ]
        for held in self._held:
            parameter, grad = held.parameter, held.parameter.grad
            if parameter.data_ptr() != held.data_ptr or not parameter.requires_grad:
                problems.append(_structure_problem(held))
            if grad is not None and grad is not held.grad:
                if grad.is_sparse or grad.shape != held.grad.shape:
                    problems.append(f"{held.path}: gradient of shape {tuple(grad.shape)} ({grad.layout}) does not fit")
                else:
                    held.grad.copy_(grad)
                    parameter.grad = held.grad
            present.append(grad is not None)
        return Pending(tuple(present), tuple(problems))

    def zero_absent(self, present: tuple[bool, ...]) -> None:
        """Fill the ranges of absent gradients with zeros: they hold what the last step staged there."""
        for held, here in zip(self._held, present, strict=True):
            if not here:
                held.grad.zero_()

    def non_finite(self) -> str | None:
        """Path of the first pending gradient that holds a NaN or an infinity; for the message, after one was found."""
        for held in self._held:
            if held.parameter.grad is not None and not bool(torch.isfinite(held.grad).all()):
                return held.path
        return None

    def clear(self) -> None:
        """Drop the window's gradients: every `.grad` becomes None."""
        for held in self._held:
            held.parameter.grad = None

    def clear_staged(self) -> None:
        """After a commit: drop the gradients; padding of the FP32 range is zero again, as the reduction relies on."""
        self.clear()
        for grad in self._sixteen_bit:  # FP32 spaces staged whole slices, whose padding is zero already
            grad.zero_()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(path, Parameter) in layout order."""
        return ((held.path, held.parameter) for held in self._held)


def _move_in(
    space: Space, bucket: Bucket, begin: int, parameters: Mapping[str, nn.Parameter], param: Tensor, grad: Tensor
) -> Iterator[_Held]:
    for placed in space.parameters:
        if not bucket.start <= placed.offset < bucket.stop:
            continue
        parameter = parameters[placed.path]
        at = begin + placed.offset - bucket.start
        view = param[at : at + placed.numel].view(parameter.shape)
        grad_view = grad[at : at + placed.numel].view(parameter.shape)
        view.copy_(parameter.data)
        pending, parameter.grad = parameter.grad, None
        parameter.data = view
        parameter.grad_dtype = torch.float32
        if pending is not None:
            grad_view.copy_(pending)
            parameter.grad = grad_view
        yield _Held(placed.path, parameter, parameter.data_ptr(), grad_view)


def _hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Make `hook` the one hook of shardrun on the parameter: a session made anew takes the place of the one before."""
    if parameter in _HOOKS:
        _HOOKS[parameter].remove()
    _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _adopt_into(view: Tensor) -> Callable[[Tensor], None]:
    """A post-accumulate hook: the first gradient of a window is copied into the flat range, later ones add there."""

    @torch.no_grad()
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not view and parameter.grad is not None and not parameter.grad.is_sparse:
            view.copy_(parameter.grad)
            parameter.grad = view

    return hook


def _structure_problem(held: _Held) -> str:
    if not held.parameter.requires_grad:
        return f"{held.path}: was trainable at set-up and is frozen now; make a new session after freezing"
    return f"{held.path}: its memory was replaced after set-up (moved to {held.parameter.device}?); make a new session"
