"""A rank is killed from outside at a moment that nobody chose, while large steps are under way."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch

import shardrun as sr
from shardrun.errors import StepFailed
from tests.support.models import Vectors, push
from tests.support.rank_process import mark
from tests.support.ranks import start_ranks
from tests.support.sessions import make_zero2, photograph

_TRIALS = 5


def _step_until_it_fails(comm: sr.Communicator) -> tuple[int, bool, list[str], str]:
    """Step count after the failure, whether in doubt, what changed against the last good step, and the phase."""
    torch.manual_seed(comm.rank)
    model = Vectors({"a": (300, 500), "b": (77_777,), "c": (1, 9)})
    zero2 = make_zero2(comm, model, lr=0.01, bucket_bytes=256 << 10)
    gradients = {path: torch.randn(p.shape) for path, p in model.named_parameters()}
    for step in range(10_000):
        push(model, gradients)
        before = photograph(zero2)
        if step == 2:
            mark("stepping")
        try:
            zero2.step(local_weight=1, max_grad_norm=1.0)
        except StepFailed as error:
            changed = before.differences(photograph(zero2), gradients=error.gradients_kept)
            return zero2.step_count, error.in_doubt, changed, error.phase
    return -1, False, ["never failed"], ""


@pytest.mark.parametrize("trial", range(_TRIALS))
def test_a_kill_at_any_moment_leaves_every_survivor_at_a_whole_step(trial: int) -> None:
    victim = trial % 3
    with start_ranks(3, _step_until_it_fails, comm_timeout_s=20, debug="OFF") as ranks:
        ranks.wait_for_mark(victim, "stepping")
        time.sleep(random.Random(trial).uniform(0.0, 0.2))
        ranks.send_signal(victim, signal.SIGKILL)
        survivors = ranks.collect(timeout_s=30, ranks=[rank for rank in range(3) if rank != victim])
    counts, doubts = set(), set()
    for outcome in survivors:
        assert outcome.ok, outcome.error
        count, in_doubt, changed, _ = outcome.value
        assert changed == [], outcome.value
        counts.add(count)
        doubts.add(in_doubt)
    assert len(counts) == 1 or (True in doubts and max(counts) - min(counts) == 1), (counts, doubts)
