"""Phase 2 of a step: every rank shows what it is about to do, and any error or difference is raised by all.

[Note: agreeing in groups] A session alone needs one round. Several sessions of one step may have groups of their own,
and a rank that waits in one group for a rank that waits in another waits for ever. So the first round is the world's:
numbers that cancel exactly when every rank of every group has brought the same session in the same state (see
`fingerprint.balance`). Only then each group compares its gradients, and the last round is the world's again.
"""

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
from shardrun.comm.fingerprint import balance
from shardrun.comm.group import listed
from shardrun.errors import CallMismatch, EmptyWindowError, StepRefused, by_all
from shardrun.shard.flat_gradients import Pending

MAX_WEIGHT = 1 << 53
MEAN, SUM = "mean", "sum"
_NO_SAMPLE = "the global weight is 0, no rank has a sample"


class MissingGradientPolicy(enum.StrEnum):
    """What a missing gradient of a selected trainable parameter means."""

    ERROR = "error"
    """Every rank with weight > 0 must have one; otherwise the step is refused naming rank and path."""
    ZERO = "zero"
    """It counts as zeros; a parameter without one on every contributing rank is left alone."""


class _Internal(enum.Enum):
    ALIKE = "alike"


ALIKE = _Internal.ALIKE
"""Missing gradients of the free functions: all ranks lack the same ones. No policy that a caller can name."""


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
    max_grad_norm: object = None

    def terms(self) -> str:
        """What all ranks of the session's group must ask for alike; floats by their bits."""
        rates = " ".join(map(_bits, self.rates))
        return f"mode {self.mode}, {self.joint_terms()}, lr {rates}, options {self.options}"

    def joint_terms(self) -> str:
        """What all sessions of one step ask for alike."""
        return f"missing {self.missing}, max_grad_norm {_bits(self.max_grad_norm)}"

    def problems(self, world_size: int) -> list[str]:
        """What is wrong with it on this rank."""
        no_flag = self.mode == SUM and isinstance(self.weight, str)
        found = [f"local_active is {self.weight}"] if no_flag else weight_problems(self.weight, world_size)
        for rate in self.rates:
            if not (is_real(rate) and 0.0 <= rate < math.inf):
                found.append(f"learning rate is {rate!r}; it must be a number, finite and not negative")
        if self.max_grad_norm is not None and not (is_real(self.max_grad_norm) and self.max_grad_norm > 0.0):
            found.append(f"max_grad_norm is {self.max_grad_norm!r}; it must be a number above 0, or None")
        if self.missing is not ALIKE and self.missing not in list(MissingGradientPolicy):
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


def weight_problems(weight: object, world_size: int) -> list[str]:
    """What is wrong with this rank's weight; those of all ranks have to add up inside int64."""
    above = min(MAX_WEIGHT, (1 << 62) // world_size)
    try:
        number = integer_weight(weight)
    except TypeError:
        return [f"weight is {weight!r}; it must be an int or a 0-dim integer tensor"]
    return [] if 0 <= number < above else [f"weight is {number}; it must be 0 to {above - 1}"]


def agree_window(
    comm: Communicator, call: str, identity: str, request: Request, paths: Sequence[str], pending: Pending
) -> Window:
    """Compare `request` and the presence of gradients over all ranks of `comm`, which step one session; collective.

    `call` names the step, `identity` the session and its buckets: ranks in different steps, or in steps of different
    sessions however alike, meet here and not in a data collective.
    Raises StepRefused on every rank, or EmptyWindowError for a global weight of 0 in mean mode; nothing has changed.
    """
    problems = [*request.problems(comm.world_size), *pending.problems]
    weight = 0 if problems else integer_weight(request.weight)
    bitmap = pending.bitmap
    found = comm.compare(
        call,
        identity,
        {"terms": request.terms(), "presence": bitmap},
        [weight, int(weight > 0), len(problems)],
    )
    global_weight, contributors, failures = found.sums
    if failures:
        raise _refusal(call, _by_rank(comm, "problems", "; ".join(problems)))
    if "terms" in found.differing:
        asked = _by_rank(comm, "terms", request.terms())
        raise _refusal(call, f"the ranks ask for different steps: {asked}", ", ")
    shown = _shown(comm, bitmap, weight > 0, contributors, "presence" in found.differing)
    if told := _missing(request, paths, shown, comm.ranks):
        raise _refusal(call, told)
    if request.mode == MEAN and global_weight == 0:
        raise by_all(EmptyWindowError(f"{call} refused before the update: {_NO_SAMPLE}"))
    return Window(global_weight, weight > 0, _present(paths, shown))


@dataclass(frozen=True)
class Joining:
    """One session's part in a step of several: its group, what it asks for, and its gradients."""

    comm: Communicator
    name: str
    state: str
    """Its number, step and layout, as text: equal on all ranks of its group."""
    request: Request
    paths: Sequence[str]
    pending: Pending
    contributes: bool | None = None
    """Whether this rank's gradients count; None: if its weight is above 0."""

    @property
    def title(self) -> str:
        """The session as messages to the whole world name it; groups may hold different ones under one name."""
        return self.name if self.comm.parent is None else f"{self.name} of ranks {listed(self.comm.ranks)}"


def agree_windows(world: Communicator, call: str, weight: object, parts: Sequence[Joining]) -> tuple[list[Window], int]:
    """The windows of `parts`, and how many sessions of all ranks have a gradient; see [Note: agreeing in groups].

    Collective over the world, whose ranks may be in different groups. `weight` is this rank's, whichever sessions it
    has; the window of every session that is stepped by its mean has the sum over all ranks of the world. `parts` stand
    in the same order of groups on all ranks.
    """
    problems = weight_problems(weight, world.world_size)
    for part in parts:
        problems += [*part.request.problems(world.world_size), *part.pending.problems]
    joint = parts[0].request.joint_terms()
    means = sum(part.request.mode == MEAN for part in parts)
    own_weight = 0 if problems else integer_weight(weight)
    cancelling = [0, 0, 0]
    for part in parts:
        text = f"{part.state}; {part.request.terms()}"
        numbers = balance(text, part.comm.rank, part.comm.world_size, f"{part.name} {part.comm.ranks}")
        cancelling = [a + b for a, b in zip(cancelling, numbers, strict=True)]
    found = world.compare("take_step", "sessions", {"terms": joint}, [own_weight, means, len(problems), *cancelling])
    global_weight, means, failures, *rest = found.sums
    if failures:
        raise _refusal(call, _by_rank(world, "problems", "; ".join(dict.fromkeys(problems))))
    if "terms" in found.differing or any(rest):
        told = "; ".join([joint, *(f"{p.title}: {p.state}; {p.request.terms()}" for p in parts)])
        raise _refusal(call, f"the ranks ask for different steps: {_by_rank(world, 'sessions', told)}", ", ")
    windows, refused = [], []
    for part in parts:
        window, told = _group_window(part, own_weight, global_weight)
        windows.append(window)
        refused += [f"{part.title}: {told}"] if told else []
    moving = sum(any(window.present.values()) for window in windows)
    failures, moving = world.compare("take_step", "windows", {}, [len(refused), moving]).sums
    if failures:
        raise _refusal(call, "; ".join(dict.fromkeys(filter(None, world.texts("refusals", "; ".join(refused))))))
    if means and global_weight == 0:
        raise by_all(EmptyWindowError(f"{call} refused before the update: {_NO_SAMPLE}"))
    return windows, moving


def _group_window(part: Joining, own_weight: int, world_weight: int) -> tuple[Window, str]:
    """One session's window, agreed on in its own group, and why it is refused, if it is."""
    mean = part.request.mode == MEAN
    own = own_weight if mean else integer_weight(part.request.weight)
    contributes = own > 0 if part.contributes is None else part.contributes
    bitmap = part.pending.bitmap
    try:
        found = part.comm.compare("gradients", part.name, {"presence": bitmap}, [own, int(contributes)])
        active, contributors = found.sums
        shown = _shown(part.comm, bitmap, contributes, contributors, bool(found.differing))
    except CallMismatch as error:
        error.agreed = False  # the group has agreed on it, the rest of the world has not heard of it
        raise
    told = _missing(part.request, part.paths, shown, part.comm.ranks)
    return Window(world_weight if mean else active, contributes, _present(part.paths, shown)), told


def _shown(comm: Communicator, bitmap: str, contributes: bool, contributors: int, differs: bool) -> dict[int, str]:
    """Rank -> its bitmap of gradients, for contributing ranks; one entry, under -1, where all ranks show the same."""
    if not contributors:
        return {}
    if not differs:
        return {-1: bitmap}
    texts = comm.texts("presence", bitmap if contributes else "")
    return {rank: text for rank, text in enumerate(texts) if text}


def _present(paths: Sequence[str], shown: Mapping[int, str]) -> dict[str, bool]:
    return {path: any(text[k] == "1" for text in shown.values()) for k, path in enumerate(paths)}


def _missing(request: Request, paths: Sequence[str], shown: Mapping[int, str], ranks: Sequence[int]) -> str:
    """Which contributing rank lacks which gradient, if the policy forbids that; else nothing."""
    present = _present(paths, shown)
    for rank, bitmap in shown.items():
        absent = [path for path, here in zip(paths, bitmap, strict=True) if here == "0"]
        if request.missing is ALIKE:
            absent = [path for path in absent if present[path]]
        if absent and request.missing != MissingGradientPolicy.ZERO:
            who = "no rank has a gradient for" if rank < 0 else f"rank {ranks[rank]} has no gradient for"
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            why = "others have one" if request.missing is ALIKE else f"missing_gradients: {request.missing}"
            return f"{who} {absent[0]}{more} ({why})"
    return ""


def _by_rank(comm: Communicator, tag: str, text: str) -> str:
    return "; ".join(
        f"rank {rank}: {told}" for rank, told in zip(comm.ranks, comm.texts(tag, text), strict=True) if told
    )


def _refusal(call: str, told: str, joint: str = ": ") -> StepRefused:
    return by_all(StepRefused(f"{call} refused before the update{joint}{told}"))
