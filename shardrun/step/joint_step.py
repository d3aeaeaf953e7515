"""The eight phases, in order, for one session or several that take one step together.

A strategy (zero2, zero1, data_parallel, replicated) says what each phase does with its own slices; this file says when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.errors import NonFiniteError, StepFailed, UsageError, by_all
from shardrun.shard.flat_gradients import Pending
from shardrun.step.agreement import (
    MEAN,
    SUM,
    Joining,
    MissingGradientPolicy,
    Request,
    Window,
    agree_window,
    agree_windows,
    is_real,
)
from shardrun.step.norm import clip_coefficient, count_non_finite, from_limbs, norm_of, squares_of, to_limbs
from shardrun.step.transaction import signals_deferred, transaction


@dataclass(frozen=True)
class StepResult:
    """What a committed step returns."""

    global_weight: int
    """Exact denominator of the mean, or the number of active ranks of a sum."""
    grad_norm: float | None
    """L2 norm of the reduced gradient before clipping; None unless `max_grad_norm` was given."""
    remaining_gradients: dict[str, Tensor]
    """Gradients of unselected parameters, the very same tensor objects."""
    absent: tuple[str, ...]
    """Selected trainable parameters without a gradient on any contributing rank: left alone."""


class Strategy(Protocol):
    """What each phase does; all of it local but `reduce` and `gather`, which the session's whole group enters."""

    name: str
    comm: Communicator
    step_count: int
    """Committed steps."""
    torn: bool
    """Whether a commit, or the loading of a record, began and did not end."""
    stages_on_gradients: bool
    """Whether `gather` writes to the memory of the pending gradients."""
    streams: bool
    """Whether gradients are gone as soon as they are reduced."""

    @property
    def paths(self) -> Sequence[str]:
        """Trainable paths in the order of `Pending.present`."""

    @property
    def identity(self) -> str:
        """Number and layout of the session: equal on all ranks that step the same one in the same buckets."""

    def collect(self, request: Request, contributes: bool | None) -> Pending:
        """What this rank has for the window; `contributes` as in Part."""

    def reduce(self, window: Window, pending: Pending) -> None: ...
    def normalise(self, divisor: int | None) -> None: ...
    def gradients(self) -> Sequence[Tensor]:
        """(n,) slices of the reduced gradient, as the optimizer is to see them, to be judged and clipped."""

    def non_finite(self, pending: Pending) -> str | None: ...
    def propose(self, window: Window, rates: Sequence[float]) -> None: ...
    def gather(self, window: Window) -> None: ...
    def commit(self, window: Window, rates: Sequence[float]) -> None: ...
    def clear(self) -> None: ...


@dataclass
class Part:
    """One session in a step: what is asked of it, and what the phases found."""

    strategy: Strategy
    request: Request
    misuse: tuple[str, ...] = ()
    """What is wrong with the call on this rank."""
    contributes: bool | None = None
    """Whether this rank's gradients count; None: if its weight is above 0."""
    pending: Pending = field(default=Pending((), ()))
    window: Window = field(default=Window(0, False, {}))

    @property
    def moves(self) -> bool:
        """Whether any contributing rank of its group has a gradient."""
        return any(self.window.present.values())

    @property
    def rates(self) -> list[float]:
        """The agreed learning rates."""
        return [float(rate) for rate in self.request.rates if is_real(rate)]


@torch.no_grad()
def run_step(
    comm: Communicator,
    call: str,
    parts: Sequence[Part],
    max_grad_norm: float | None = None,
    *,
    joint: bool = False,
    weight: object = 0,
    judge: bool = True,
) -> float | None:
    """All phases; every rank of `comm` enters, with one session on `comm` or (`joint`) some on subgroups of it.

    `weight` is this rank's in a joint step, whichever sessions it has.
    `judge`: refuse gradients that are not finite, and clip. Returns the norm before clipping if `max_grad_norm` was
    given. Raises StepRefused kin on all ranks with nothing changed, or StepFailed.
    """
    for part in parts:
        require_whole(part.strategy)
    with transaction(comm, call.partition(" of ")[0], parts[0].strategy.step_count + 1, partial(_drop_lost, parts)):
        comm.enter("collect")
        for part in parts:
            pending = part.strategy.collect(part.request, part.contributes)
            part.pending = replace(pending, problems=(*part.misuse, *pending.problems))

        comm.enter("agree")
        anything = _agree(comm, call, parts, weight) if joint else _agree_alone(comm, call, *parts)
        moving = [part for part in parts if part.moves]
        norm = None if max_grad_norm is None else 0.0
        if anything:
            comm.enter("reduce")  # where gradients meet: every rank receives the sum of its own slices
            for part in moving:
                part.strategy.reduce(part.window, part.pending)
            comm.settle()  # "decide" reads on the host what the device received: not before it is there, and in time

            comm.enter("normalise")
            for part in moving:
                part.strategy.normalise(part.window.global_weight if part.request.mode == MEAN else None)

            comm.enter("decide")
            norm = _decide(comm, call, moving, max_grad_norm) if judge else None

            comm.enter("propose")
            for part in moving:
                part.strategy.propose(part.window, part.rates)

            comm.enter("gather")
            for part in moving:
                part.strategy.gather(part.window)
            comm.settle()

            with signals_deferred():
                comm.enter("vote")
                comm.vote()

                comm.enter("commit", cannot_fail=True)
                _commit(moving)
                comm.enter("idle", cannot_fail=True)
        _drop([part for part in parts if not part.moves])
    return norm


def _commit(moving: Sequence[Part]) -> None:
    """Switch all sessions over; should the machine fail underway, none of them may be used again."""
    for part in moving:
        part.strategy.torn = True
    for part in moving:
        part.strategy.commit(part.window, part.rates)
    for part in moving:
        part.strategy.torn = False


def require_whole(strategy: Strategy) -> None:
    if strategy.torn:
        step = strategy.step_count + 1
        raise StepFailed(
            f"a failure inside the commit of step {step}, or while a record was loaded, left the state of "
            f"{strategy.name} half way; start again from the last checkpoint",
            step=step,
            phase="commit",
            gradients_kept=False,
            in_doubt=True,
        )


def _drop(parts: Sequence[Part]) -> None:
    for part in parts:
        part.strategy.clear()


def _drop_lost(parts: Sequence[Part], staged: bool) -> bool:
    """After a failure: nobody may take for gradients what is none any more, or what was gathered (`staged`)."""
    lost = [p for p in parts if p.strategy.streams or (staged and p.strategy.stages_on_gradients)]
    _drop(lost)
    return bool(lost)


def _agree_alone(comm: Communicator, call: str, part: Part) -> bool:
    """Give the only session its window; whether it moves."""
    strategy = part.strategy
    part.window = agree_window(comm, call, strategy.identity, part.request, strategy.paths, part.pending)
    return part.moves


def _agree(comm: Communicator, call: str, parts: Sequence[Part], weight: object) -> bool:
    """Give every part its window; whether any session on any rank moves."""
    joining = [
        Joining(
            part.strategy.comm,
            part.strategy.name,
            f"step {part.strategy.step_count + 1}, {part.strategy.identity}",
            part.request,
            part.strategy.paths,
            part.pending,
            part.contributes,
        )
        for part in parts
    ]
    windows, moving = agree_windows(comm, call, weight, joining)
    for part, window in zip(parts, windows, strict=True):
        part.window = window
    return moving > 0


def _decide(comm: Communicator, call: str, moving: Sequence[Part], max_grad_norm: float | None) -> float | None:
    """Refuse non-finite gradients and clip by the global norm; every rank takes the same branch.

    Every element counts once: a rank adds its own slices only, and groups hold different parameters.
    """
    judged = [grad for part in moving for grad in part.strategy.gradients()]
    if max_grad_norm is None:
        total, bad = 0, count_non_finite(judged)
    else:
        total, bad = squares_of(judged)
    *digits, bad = comm.sum_integers([*to_limbs(total), bad])
    if bad:
        own = next(filter(None, (p.strategy.non_finite(p.pending) for p in moving if p.window.contributes)), "")
        found = zip(comm.ranks, comm.texts("non-finite gradients", own), strict=True)
        where = [f"rank {rank} has a non-finite gradient for {path}" for rank, path in found if path]
        told = "; ".join(where) or "every local gradient is finite, their FP32 sum overflowed"
        raise by_all(NonFiniteError(f"{call} refused before the update: {told}"))
    if max_grad_norm is None:
        return None
    norm = norm_of(from_limbs(digits))
    coefficient = clip_coefficient(norm, max_grad_norm)
    if coefficient < 1.0:
        for grad in judged:
            grad.mul_(coefficient)
    return norm


class Stepping(Strategy, Protocol):
    """A strategy with an optimizer, which `take_step` can join with others."""

    def request(
        self, mode: str, weight: object, lr: float | None, missing: object, max_grad_norm: float | None
    ) -> Request:
        """What is asked of this session in one step."""

    def result(self, window: Window, norm: float | None) -> StepResult:
        """What its caller gets."""


def take_step(
    sessions: Sequence[Stepping],
    *,
    local_weight: int | Tensor,
    local_active: Mapping[str, bool] | None = None,
    local_contributes: Mapping[str, bool] | None = None,
    lr: float | Mapping[str, float] | None = None,
    missing: MissingGradientPolicy | str = MissingGradientPolicy.ERROR,
    max_grad_norm: float | None = None,
) -> dict[str, StepResult]:
    """Step several sessions as one: one agreement, one joint norm, one decision, one commit; name -> its result.

    Collective over the world of their communicators: every rank calls, with its own sessions, which may be on the world
    or on subgroups of it and have names of their own. Sessions named in `local_active` are stepped by their sum, with
    this rank active or not; the others by their mean over the weight of the whole WORLD, whatever their group
    (`local_weight`: samples or tokens in this rank's loss sum; it counts whichever sessions a rank has). A rank of
    weight 0 contributes zeros; `local_contributes` says otherwise of a session whose gradients come from the samples of
    other ranks too, as those of experts do that were sent tokens. `lr` is the base rate of all, or name -> base rate; a
    session without one takes what its `optimizer.param_groups` say. The norm counts every element of every group once.
    Raises StepRefused kin on all ranks of the world with nothing changed, or StepFailed.
    """
    if not sessions:
        raise UsageError("take_step: no session; every rank brings at least one")
    ordered = sorted(sessions, key=lambda s: (-s.comm.world_size, s.comm.ranks, s.name))  # the same on all ranks
    worlds = [session.comm.parent or session.comm for session in ordered]
    world = max(worlds, key=lambda comm: comm.world_size)  # where the other ranks wait, should there be several
    active, contributes = local_active or {}, local_contributes or {}
    rates = lr if isinstance(lr, Mapping) else {session.name: lr for session in sessions}
    misuse = tuple(_misuse(sessions, worlds, {"local_active": active, "local_contributes": contributes, "lr": rates}))
    parts = []
    for session in ordered:
        mode, weight = (SUM, as_flag(active[session.name])) if session.name in active else (MEAN, local_weight)
        request = session.request(mode, weight, rates.get(session.name), missing, max_grad_norm)
        parts.append(Part(session, request, misuse, contributes.get(session.name)))
    call = f"step {ordered[0].step_count + 1} of {' + '.join(session.name for session in sessions)}"
    norm = run_step(world, call, parts, max_grad_norm, joint=True, weight=local_weight)
    return {part.strategy.name: session.result(part.window, norm) for session, part in zip(ordered, parts, strict=True)}


def as_flag(active: object) -> object:
    """A truth value as the weight of a sum; anything else is left for the agreement to refuse."""
    return int(active) if isinstance(active, bool) else f"{active!r}, not True or False"


def _misuse(
    sessions: Sequence[Stepping],
    worlds: Sequence[Communicator],
    given: Mapping[str, Mapping[str, object]],
) -> Iterator[str]:
    """What is wrong with the call on this rank; all ranks hear of it."""
    names = [session.name for session in sessions]
    if len(set(names)) < len(names):
        yield f"sessions of one step have names of their own, found {', '.join(names)}"
    for what, by_name in given.items():
        for name in sorted(by_name.keys() - set(names)):
            yield f"{what} names {name}, which is none of the sessions {', '.join(names)}"
    if any(world is not worlds[0] for world in worlds):
        yield "the sessions of one step are on one world or on subgroups of it, found sessions of different worlds"
