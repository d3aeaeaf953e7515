"""ZeRO as it is commonly written, in place: what the harness must find wrong, and what safety is measured against.

Layout, slices, reduction, optimizer kernels and norm are shardrun's own; what is left out is what makes a step whole:
no agreement, no proposal, no staging, no vote.
"""

from __future__ import annotations

from itertools import accumulate

import shardrun as sr
from shardrun.step.agreement import MEAN, Window
from shardrun.step.norm import clip_coefficient, from_limbs, norm_of, squares_of, to_limbs
from shardrun.step.sharded import ShardedOptimizer


def reduce_and_step(
    session: ShardedOptimizer, local_weight: int, lr: float | None, max_grad_norm: float | None
) -> None:
    """The mean gradient in this rank's slices, clipped, and the optimizer in place on the live ones; collective."""
    comm = session.comm
    comm.enter("collect")
    pending = session.collect(session.request(MEAN, local_weight, lr, "error", max_grad_norm), None)
    comm.enter("agree")  # only on the divisor
    (weight,) = comm.sum_integers([local_weight])
    window = Window(weight, True, dict(zip(session.paths, pending.present, strict=True)))
    comm.enter("reduce")
    session.reduce(window, pending)
    session.normalise(weight)
    comm.enter("decide")
    _clip(session, max_grad_norm)
    comm.enter("propose")
    rates = session.stepper.rates(lr)
    if session.strategy == "zero1":
        session.propose(window, rates)  # a matrix optimizer steps a shadow, which it takes over at once
    session.stepper.commit(window.present, rates)
    for s in session.slices:
        if s.has_master:
            s.bucket.own.copy_(s.leaf)


def _clip(session: ShardedOptimizer, max_grad_norm: float | None) -> None:
    if max_grad_norm is None:
        return
    total, bad = squares_of(session.gradients())
    *digits, _ = session.comm.sum_integers([*to_limbs(total), bad])
    coefficient = clip_coefficient(norm_of(from_limbs(digits)), max_grad_norm)
    if coefficient < 1.0:
        for grad in session.gradients():
            grad.mul_(coefficient)


class InPlaceGather(sr.SelectedZero2):
    """All-gathers the new slices straight into the live parameters."""

    def unsafe_step(self, *, local_weight: int, lr: float | None = None, max_grad_norm: float | None = None) -> None:
        """A step that is not whole: a failure on the way leaves part of it; collective."""
        reduce_and_step(self, local_weight, lr, max_grad_norm)
        self.comm.enter("gather")
        with self.comm.exchanges() as exchanges:
            for number in self._order:
                s = self.slices[number]
                own = s.bucket.own_staging  # where the others can read it, by the fastest way there is
                own.copy_(s.bucket.own)
                parts = [own if rank == self.rank else live for rank, live in enumerate(s.live)]
                exchanges.gather(parts, own, source=s.bucket.staging)
        self.comm.enter("idle")
        self.step_count += 1
        self.clear()


class OwnerBroadcast(sr.SelectedZero1):
    """Every owner broadcasts its new tensors straight into the live parameters."""

    def unsafe_step(self, *, local_weight: int, lr: float | None = None, max_grad_norm: float | None = None) -> None:
        """A step that is not whole: a failure on the way leaves part of it; collective."""
        reduce_and_step(self, local_weight, lr, max_grad_norm)
        self.comm.enter("gather")
        for s in self.slices:
            for owner, (size, end) in enumerate(zip(s.bucket.splits, accumulate(s.bucket.splits), strict=True)):
                self.comm.broadcast_(s.bucket.param[end - size : end], "owned tensors", owner, agreed=True)
        self.comm.enter("idle")
        self.step_count += 1
        self.clear()
