"""Pending gradients of a window, accumulated in FP32 in flat ranges that a reduction reads and never writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardrun.shard.layout import FlatLayout, Fragment, Space

_HOOKS = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Pending:
    """The window's local gradients: which parameters have one (in layout order), and what is wrong on this rank."""

    present: tuple[bool, ...]
    problems: tuple[str, ...]

    @property
    def bitmap(self) -> str:
        """`present` as a text of ones and zeros."""
        return "".join("1" if here else "0" for here in self.present)


@dataclass(frozen=True)
class Held:
    """One trainable parameter; `grad` is its place in the flat range, viewed in its shape."""

    path: str
    parameter: nn.Parameter
    grad: Tensor
    dtype: torch.dtype
    """The parameter's, at set-up."""


@dataclass(frozen=True)
class GradientBucket:
    """One bucket of one rank in memory: (sum(splits),) elements, rank r's slice after those of the ranks before it."""

    space: Space
    grad: Tensor
    """(sum(splits),) float32: the pending gradients."""
    splits: tuple[int, ...]
    """Elements of each rank's slice, multiples of 256."""
    own: slice
    """Where this rank's slice stands."""
    fragments: tuple[Fragment, ...]
    """What of which parameter stands in it."""
    members: tuple[tuple[Held, int], ...]
    """Every parameter of the bucket with the element at which it begins, in memory's order."""

    def gaps(self) -> list[Tensor]:
        """The padding between parameters and behind the last one, as views of `grad`."""
        ends = [0, *(at + held.grad.numel() for held, at in self.members)]
        begins = [*(at for _, at in self.members), self.grad.numel()]
        return [self.grad[low:high] for low, high in zip(ends, begins, strict=True) if low < high]


class Zeros(Protocol):
    """(numel,) float32 zeros on a device."""

    def __call__(self, numel: int, device: torch.device) -> Tensor: ...


def _zeros(numel: int, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=torch.float32, device=device)


def _device(layout: FlatLayout, parameters: Mapping[str, nn.Parameter]) -> torch.device:
    first = next((space.parameters[0].path for space in layout.spaces), None)
    return torch.device("cpu") if first is None else parameters[first].device


class FlatGradients:
    """The pending FP32 gradients of one session on one rank.

    With `adopt`, gradients are accumulated in the flat range itself from then on: `.grad` is a view of it, also for
    16-bit parameters. Without, `.grad` is left as torch makes it, and copied in at the step. Presence of a gradient is
    `.grad` at the step: our view, another tensor (copied in), or None (absent).
    """

    streams = False
    """Whether gradients are sent while backward goes on, and not kept."""

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world_size: int,
        *,
        adopt: bool = True,
        zeros: Zeros = _zeros,
    ) -> None:
        """`zeros` makes the flat ranges, on all ranks alike."""
        self.buckets: list[GradientBucket] = []
        self.held: list[Held] = []
        self.adopts = adopt
        sizes = [sum(bucket.splits(world_size)) for space in layout.spaces for bucket in space.buckets]
        self.memory = self._memory(layout, sizes, partial(zeros, device=_device(layout, parameters)))
        """(elements of the bucket,) float32 for each bucket in the order of the layout."""
        for space in layout.spaces:
            self._build(space, parameters, rank, world_size)
        placed = {id(held.parameter) for held in self.held}
        self._frozen = [(path, parameter) for path, parameter in parameters.items() if id(parameter) not in placed]
        """Frozen when the contract was made, whatever they are by now."""
        for held in self.held if adopt else ():
            self._take_over(held)

    @property
    def paths(self) -> list[str]:
        """Paths of the trainable parameters in layout order."""
        return [held.path for held in self.held]

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets on this rank."""
        return sum(grad.nbytes for grad in self.memory)

    def _memory(self, layout: FlatLayout, sizes: Sequence[int], zeros: Callable[[int], Tensor]) -> list[Tensor]:
        """One range after another."""
        return list(zeros(sum(sizes)).split(sizes)) if sizes else []  # type: ignore[no-untyped-call]

    def _build(self, space: Space, parameters: Mapping[str, nn.Parameter], rank: int, world_size: int) -> None:
        begins = space.memory_offsets(world_size)
        places = list(space.places(world_size))
        for bucket, begin, end in zip(space.buckets, begins, begins[1:], strict=False):
            grad = self.memory[len(self.buckets)]
            members = tuple(
                (Held(one.path, p, grad[at - begin : at - begin + one.numel].view(p.shape), p.dtype), at - begin)
                for one, at in places
                if begin <= at < end
                for p in (parameters[one.path],)
            )
            self.held += [held for held, _ in members]
            splits = tuple(bucket.splits(world_size))
            low = sum(splits[:rank])
            own, fragments = slice(low, low + splits[rank]), tuple(space.fragments(bucket, rank, world_size))
            self.buckets.append(GradientBucket(space, grad, splits, own, fragments, members))

    @torch.no_grad()
    def _take_over(self, held: Held) -> None:
        """Accumulate in the flat range from now on."""
        if not held.parameter.requires_grad:
            return  # frozen after the contract was made: the next step refuses that
        pending = held.parameter.grad
        if pending is not None and not pending.is_sparse:
            held.grad.copy_(pending)
            _set_grad(held.parameter, held.grad)
        elif pending is None:
            held.parameter.grad_dtype = torch.float32
        hook_up(held.parameter, _adopt_into(held.grad))

    def collect(self, grads: Mapping[str, Tensor | None] | None = None) -> Pending:
        """The local gradients of the window, those in `grads` or every `.grad`; local.

        What does not stand in the flat range yet is copied there; nothing else is changed.
        """
        present = []
        problems = self._of_frozen()
        for held in self.held:
            grad = held.parameter.grad if grads is None else grads.get(held.path)
            problem = structure_problem(held) or (grad is not None and form_problem(held, grad))
            if problem:
                problems.append(problem)
            elif grad is not None and grad is not held.grad:
                held.grad.copy_(grad)
                if self.adopts:
                    _set_grad(held.parameter, held.grad)
            present.append(grad is not None)
        return Pending(tuple(present), tuple(problems))

    def _of_frozen(self) -> list[str]:
        """What is wrong with the parameters that were frozen at set-up."""
        problems = [
            f"{path}: was frozen at set-up and is trainable now; make a new session after unfreezing"
            for path, parameter in self._frozen
            if parameter.requires_grad
        ]
        problems += [
            f"{path}: is frozen and has a gradient, which nobody would apply; set its .grad to None"
            for path, parameter in self._frozen
            if not parameter.requires_grad and parameter.grad is not None
        ]
        return problems

    def zero_absent(self, present: tuple[bool, ...]) -> None:
        """Fill the ranges of absent gradients with zeros: they hold what an earlier step left there."""
        for held, here in zip(self.held, present, strict=True):
            if not here:
                held.grad.zero_()

    def non_finite(self, present: tuple[bool, ...]) -> str | None:
        """Path of the first pending gradient that holds a NaN or an infinity; for the message, after one was found."""
        for held, here in zip(self.held, present, strict=True):
            if here and not bool(torch.isfinite(held.grad).all()):
                return held.path
        return None

    def clear(self) -> None:
        """Drop the window's gradients: every `.grad` becomes None."""
        for held in self.held:
            held.parameter.grad = None


def hook_up(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` whenever a backward has accumulated a gradient; a session made anew takes the place of the last."""
    if parameter in _HOOKS:
        _HOOKS[parameter].remove()
    _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _adopt_into(view: Tensor) -> Callable[[Tensor], None]:
    """A post-accumulate hook: the first gradient of a window is copied into the flat range, later ones add there."""

    @torch.no_grad()
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not view and parameter.grad is not None and not parameter.grad.is_sparse:
            view.copy_(parameter.grad)
            _set_grad(parameter, view)

    return hook


def _set_grad(parameter: Tensor, grad: Tensor) -> None:
    """Make `grad` the parameter's `.grad`, of whichever dtype either is; later gradients add up in its dtype."""
    if parameter.grad_dtype != grad.dtype:
        parameter.grad = None
        parameter.grad_dtype = grad.dtype
    parameter.grad = grad


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Add up the gradients of a 16-bit parameter in float32 from now on, those that are pending included."""
    pending = parameter.grad
    if pending is None:
        parameter.grad_dtype = torch.float32
    elif not pending.is_sparse and pending.dtype != torch.float32:
        _set_grad(parameter, pending.float())


def like_parameter(held: Held, grad: Tensor) -> Tensor:
    """`grad` (in the parameter's shape) in the parameter's memory order: torch's fused kernels on the CPU walk raw
    memory and ignore strides."""
    if held.parameter.is_contiguous():
        return grad
    return torch.empty_like(held.parameter, dtype=grad.dtype).copy_(grad)


def deliver(held: Held, grad: Tensor, *, adopted: bool) -> Tensor:
    """Make a reduced gradient the parameter's `.grad`, and return it as it is there.

    `adopted`: the next window accumulates in FP32 again, from its first backward on. torch assigns no gradient of
    another dtype than `grad_dtype`, so one that has it is assigned and then given the memory of `grad`.
    """
    parameter = held.parameter
    if adopted and grad.dtype != torch.float32:
        parameter.grad = shell = grad.new_zeros((), dtype=torch.float32).expand(grad.shape)
        shell.data = grad
        return shell
    _set_grad(parameter, grad)
    return grad


def structure_problem(held: Held) -> str:
    """What has happened to the parameter since set-up that a step cannot go on with."""
    if not held.parameter.requires_grad:
        return f"{held.path}: was trainable at set-up and is frozen now; make a new session after freezing"
    parameter, grad = held.parameter, held.grad
    if (parameter.device, parameter.shape, parameter.dtype) != (grad.device, grad.shape, held.dtype):
        now = f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device}"
        at_setup = f"{tuple(grad.shape)} {held.dtype} on {grad.device}"
        return f"{held.path}: was {at_setup} at set-up and is {now} now; make a new session after moving a model"
    return ""


def form_problem(held: Held, grad: Tensor) -> str:
    """Why `grad` cannot be its gradient."""
    if grad.layout != torch.strided or grad.shape != held.grad.shape:
        return f"{held.path}: gradient of shape {tuple(grad.shape)} ({grad.layout}) does not fit"
    return ""
