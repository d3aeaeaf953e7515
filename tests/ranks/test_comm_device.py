"""A step whose collectives fail late, as on NCCL: real ranks and gloo for control, a fake device. Not run on NCCL."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardrun as sr
from shardrun.comm import device as device_module
from shardrun.comm.device import DeviceWatch
from shardrun.errors import CommunicatorError, StepFailed
from tests.support.fake_nccl import FINE, LATE_ERROR, NEVER, WATCHDOG, FakeNccl
from tests.support.models import MixedNet, loss_sum, seeded, token_batch
from tests.support.rank_process import await_mark, mark
from tests.support.ranks import start_ranks
from tests.support.sessions import make_zero2, photograph

pytestmark = pytest.mark.sample(3)

_VICTIM = 1


def _hang() -> None:
    """torch's way of closing NCCL waits for the device."""
    time.sleep(3600)


def _attach(comm: sr.Communicator, fake: FakeNccl) -> None:
    comm._state.device = DeviceWatch(fake, "/var/traces/rank-0")
    setattr(dist, "destroy_process_group", _hang)  # noqa: B010


@dataclass
class _At:
    """An observer that gives the fake another manner when a phase begins."""

    fake: FakeNccl
    phase: str
    manner: str

    def __call__(self, phase: str, collective: int) -> None:
        if phase == self.phase:
            self.fake.manner = self.manner


def _step_on_a_device(comm: sr.Communicator, phase: str, manner: str, stay_s: float = 0.0) -> dict[str, Any]:
    timeout_s = 1.0 if manner == NEVER else comm.timeout_s
    fake = FakeNccl()
    _attach(comm, fake)
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    torch.autograd.backward(loss_sum(model, token_batch(comm.rank, 5)))
    zero2.step(local_weight=5, max_grad_norm=0.5)
    torch.autograd.backward(loss_sum(model, token_batch(9 + comm.rank, 5)))
    before = photograph(zero2)
    if comm.rank == _VICTIM:
        comm.observer = _At(fake, phase, manner)
    began = time.monotonic()
    with pytest.raises(StepFailed) as caught, comm.timeout(timeout_s):
        zero2.step(local_weight=5, max_grad_norm=0.5)
    waited = time.monotonic() - began
    mark("failed")
    failure = comm.failure
    assert failure is not None
    if comm.rank == _VICTIM:
        time.sleep(stay_s)
    return {
        "told": str(caught.value),
        "waited": waited,
        "phase": caught.value.phase,
        "kept": caught.value.gradients_kept,
        "changed": before.differences(photograph(zero2)),
        "kind": failure.kind,
        "called": fake.called,
        "text": comm.history_text(),
    }


@pytest.mark.parametrize(
    ("phase", "manner"), [("reduce", LATE_ERROR), ("gather", WATCHDOG), ("reduce", NEVER), ("gather", NEVER)]
)
def test_a_step_that_fails_late_fails_before_the_vote_and_changes_nothing(phase: str, manner: str) -> None:
    with start_ranks(2, _step_on_a_device, phase, manner, comm_timeout_s=20.0, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        found = outcome.value
        gone = [] if found["kept"] else [name for name in found["changed"] if name.startswith("gradient ")]
        assert [name for name in found["changed"] if name not in gone] == []
        assert found["waited"] < 10.0
        assert found["called"].count("abort") == 1
        assert found["called"][0] == "take over", "before torch forgets its groups"
        assert "flight recorder of NCCL, if there was a failure: /var/traces/rank-0" in found["text"]
    victim, other = outcomes[_VICTIM].value, outcomes[0].value
    assert victim["phase"] == phase
    assert victim["kind"] == ("timeout" if manner == NEVER else "closed")
    assert ("timed out after" if manner == NEVER else "NCCL reports COMM_ERROR") in victim["told"]
    assert "(settle, phase " in victim["told"]
    assert victim["called"] == ["take over", "dump", "abort"]
    assert victim["kept"] == (phase == "reduce")
    assert other["phase"] in {"reduce": ("decide",), "gather": ("vote",)}[phase]


def test_peers_are_freed_though_destroying_would_hang_and_the_process_goes_on() -> None:
    with start_ranks(2, _step_on_a_device, "reduce", LATE_ERROR, 30.0, comm_timeout_s=20.0, debug="OFF") as ranks:
        ranks.wait_for_mark(_VICTIM, "failed")
        (outcome,) = ranks.collect(10.0, [0])
        assert ranks.missing == [_VICTIM]
    assert outcome.ok, outcome.error
    assert outcome.value["waited"] < 10.0


def _abort_hangs(comm: sr.Communicator) -> tuple[str, float, list[str]]:
    device_module.ABORT_S = 0.3
    fake = FakeNccl(abort_hangs=True)
    _attach(comm, fake)
    comm.vote()
    if comm.rank == _VICTIM:
        fake.manner = LATE_ERROR
        with pytest.raises(CommunicatorError, match="NCCL reports COMM_ERROR"):
            comm.settle()
        await_mark(0, "freed")
    began = time.monotonic()
    with pytest.raises(CommunicatorError) as caught:
        comm.vote()
    waited = time.monotonic() - began
    mark("freed")
    return str(caught.value), waited, fake.called


def test_an_abort_that_hangs_is_told_and_keeps_neither_this_rank_nor_its_peers() -> None:
    with start_ranks(2, _abort_hangs, comm_timeout_s=20.0, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        told, waited, called = outcome.value
        assert waited < 15.0, "the other rank is freed, long before its time, although the abort of its peer hangs"
        assert "the device's groups were not aborted within 0 s" in told
        assert called[0] == "take over"


def _closes(comm: sr.Communicator) -> tuple[int, list[str], bool]:
    fake = FakeNccl(FINE, queries=50)
    _attach(comm, fake)
    comm.settle()
    count = comm.collective
    comm.vote()
    comm.agree("the end")
    comm.close()
    return count, fake.called, dist.is_initialized()


def test_a_world_that_is_left_in_peace_is_aborted_too_and_writes_no_trace() -> None:
    with start_ranks(2, _closes, comm_timeout_s=20.0, debug="OFF") as ranks:
        for outcome in ranks.collect(30.0):
            assert outcome.ok, outcome.error
            assert outcome.value == (1, ["take over", "abort"], False)
