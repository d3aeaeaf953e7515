"""Phase 2 of a step: every rank shows what it is about to do, and any error or difference is raised by all."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, TypeGuard

import torch
from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.errors import EmptyWindowError, StepRefused, by_all
from shardrun.shard.flat_buffer import Pending

MAX_WEIGHT = 1 << 53


class MissingGradientPolicy(enum.StrEnum):
    """What a missing gradient of a selected trainable parameter means."""

    ERROR = "error"
    """Every rank with weight > 0 must have one; otherwise the step is refused naming rank and path."""
    ZERO = "zero"
    """It counts as zeros; a parameter without one on every contributing rank is left alone."""


@dataclass(frozen=True)
class Request:
    """What the caller of a step asks for, the same on every rank but for the weight."""

    mode: str
    """mean: divide by the exact global weight; sum: no division."""
    weight: object
    """Mean: samples or tokens in this rank's loss sum. Sum: 1 if this rank contributes, else 0."""
    missing: object
    rates: Sequence[object]
    """Learning rate of each option group."""
    options: str
    """The optimizer's other options, as text."""
    max_grad_norm: object

    def terms(self) -> str:
        """What all ranks must ask for alike; floats by their bits."""
        rates, norm = " ".join(map(_bits, self.rates)), _bits(self.max_grad_norm)
        return f"mode {self.mode}, missing {self.missing}, lr {rates}, max_grad_norm {norm}, options {self.options}"

    def problems(self) -> list[str]:
        """What is wrong with it on this rank."""
        found = []
        try:
            weight = integer_weight(self.weight)
            if not 0 <= weight < MAX_WEIGHT:
                found.append(f"weight is {weight}; it must be 0 to {MAX_WEIGHT - 1}")
        except TypeError:
            found.append(f"weight is {self.weight!r}; it must be an int or a 0-dim integer tensor")
        for rate in self.rates:
            if not (is_real(rate) and 0.0 <= rate < math.inf):
                found.append(f"learning rate is {rate!r}; it must be a number, finite and not negative")
        if self.max_grad_norm is not None and not (is_real(self.max_grad_norm) and self.max_grad_norm > 0.0):
            found.append(f"max_grad_norm is {self.max_grad_norm!r}; it must be a number above 0, or None")
        if self.missing not in list(MissingGradientPolicy):
            found.append(f"missing is {self.missing!r}; it must be one of {', '.join(MissingGradientPolicy)}")
        return found


@dataclass(frozen=True)
class Window:
    """What all ranks agreed on: the exact global weight, whether this rank contributes, and who takes part."""

    global_weight: int
    contributes: bool
    present: Mapping[str, bool]
    """Path -> whether any contributing rank has a gradient for it; the others are left alone."""


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is a number that can be a rate or a norm."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bits(value: object) -> str:
    return float(value).hex() if is_real(value) else repr(value)


def integer_weight(weight: object) -> int:
    """The weight as an int; TypeError for anything but an int or a 0-dim integer tensor."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0 or weight.is_floating_point() or weight.is_complex() or weight.dtype == torch.bool:
            raise TypeError("not a 0-dim integer tensor")
        return int(weight.item())
    if isinstance(weight, bool) or not isinstance(weight, SupportsIndex):
        raise TypeError("not an int")
    return index(weight)


def agree_window(
    comm: Communicator, call: str, layout: str, request: Request, paths: Sequence[str], pending: Pending
) -> Window:
    """Compare `request` and the presence of gradients over all ranks; collective.

    `call` names the step and `layout` all its buckets: ranks in different steps meet here, not in a data collective.
    Raises StepRefused on every rank, or EmptyWindowError for a global weight of 0 in mean mode; nothing has changed.
    """
    problems = [*request.problems(), *pending.problems]
    weight = 0 if problems else integer_weight(request.weight)
    bitmap = "".join("1" if here else "0" for here in pending.present)
    found = comm.compare(
        call,
        f"layout {layout}",
        {"terms": request.terms(), "presence": bitmap},
        [weight, int(weight > 0), len(problems)],
    )
    global_weight, contributors, failures = found.sums
    if failures:
        told = _by_rank(comm, "problems", "; ".join(problems))
        raise by_all(StepRefused(f"{call} refused before the update: {told}"))
    if "terms" in found.differing:
        asked = _by_rank(comm, "terms", request.terms())
        raise by_all(StepRefused(f"{call} refused before the update, the ranks ask for different steps: {asked}"))
    bitmaps = [bitmap] if contributors else []
    if contributors and "presence" in found.differing:
        shown = comm.texts("presence", bitmap if weight > 0 else "")
        bitmaps = [text for text in shown if text]
        _refuse_missing(call, request, paths, {rank: text for rank, text in enumerate(shown) if text})
    elif contributors:
        _refuse_missing(call, request, paths, {None: bitmap})
    if request.mode == "mean" and global_weight == 0:
        raise by_all(
            EmptyWindowError(f"{call} refused before the update: the global weight is 0, no rank has a sample")
        )
    present = {path: any(text[k] == "1" for text in bitmaps) for k, path in enumerate(paths)}
    return Window(global_weight, weight > 0, present)


def _by_rank(comm: Communicator, tag: str, text: str) -> str:
    return "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(comm.texts(tag, text)) if told)


def _refuse_missing(call: str, request: Request, paths: Sequence[str], bitmaps: Mapping[int | None, str]) -> None:
    if request.missing != MissingGradientPolicy.ERROR:
        return
    for rank, bitmap in bitmaps.items():
        absent = [path for path, here in zip(paths, bitmap, strict=True) if here == "0"]
        if absent:
            who = "no rank has a gradient for" if rank is None else f"rank {rank} has no gradient for"
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            told = f"{call} refused before the update: {who} {absent[0]}{more} (missing_gradients: error)"
            raise by_all(StepRefused(told))
