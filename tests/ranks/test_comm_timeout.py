"""Every wait has an end and names who is missing: each operation, the rendezvous, blocks with a time of their own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.comm.rendezvous import meet
from shardrun.errors import CommunicatorError, StepFailed, UsageError
from tests.support.models import MixedNet, loss_sum, seeded, token_batch
from tests.support.rank_process import Seat, mark
from tests.support.ranks import Outcome, start_ranks
from tests.support.sessions import make_zero2

pytestmark = pytest.mark.sample(3)

_TIMEOUT_S = 1.0
_SLEEPER = 1
_SLEEPERS_S = 30.0


def _halves(comm: sr.Communicator) -> sr.Communicator:
    made = comm.subgroup([0, 1])
    return comm if made is None else made


_OPERATIONS: dict[str, Callable[[sr.Communicator, sr.Communicator], object]] = {
    "compare": lambda comm, half: comm.compare("a call", ""),
    "sums": lambda comm, half: comm.sum_integers([1]),
    "vote": lambda comm, half: comm.vote(),
    "broadcast": lambda comm, half: comm.broadcast_(torch.zeros(5), "weights", root=1, agreed=True),
    "reduce": lambda comm, half: comm.reduce_slice(torch.zeros(12), torch.zeros(12 // comm.world_size), agreed=True),
    "large gather": lambda comm, half: comm.gather_slices(torch.zeros(2_000_000), torch.zeros(1_000_000), agreed=True),
    "subgroup": lambda comm, half: comm.subgroup([0]),
    "connecting": lambda comm, half: comm.subgroup([0, 1]),
    "inside a subgroup": lambda comm, half: half.vote(),
}
_OF_THREE = ("compare", "reduce", "connecting", "inside a subgroup")  # the others on two ranks
_NAMED = {"sums": "agreement", "compare": "agreement", "subgroup": "agreement"}
_NAMED |= {"reduce": "reduce or gather", "large gather": "reduce or gather"}
_NAMED |= {
    "connecting": "connecting the subgroup 0,1",
    "inside a subgroup": "vote",
    "broadcast": "broadcast of weights",
}


def _one_does_not_come(comm: sr.Communicator, operation: str) -> dict[str, Any] | None:
    """What a waiting rank is told, and when; the sleeper says what it is told as it wakes up."""
    with comm.timeout(20.0):  # only what is to end in time has little of it: other processes may have the machine
        half = _halves(comm)
        comm.enter("reduce")
        comm.vote()
    if operation == "connecting" and comm.rank != _SLEEPER:  # the sleeper has come to the agreement, but no further
        setattr(comm, "_agreed_members", lambda ranks: (0, 1))  # noqa: B010
    if comm.rank == _SLEEPER:
        time.sleep(_TIMEOUT_S + 1.7)
    began = time.monotonic()
    try:
        with comm.timeout(_SLEEPERS_S if comm.rank == _SLEEPER else _TIMEOUT_S):
            _OPERATIONS[operation](comm, half)
    except CommunicatorError as error:
        waited, first = time.monotonic() - began, str(error)
    else:
        return None  # a rank that has nobody to wait for in this operation
    again_s = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(CommunicatorError, match="closed since its first failure") as again:
            comm.vote()
        again_s.append(time.monotonic() - began)
    failure = comm.failure
    assert failure is not None
    return {
        "told": first,
        "waited": waited,
        "again": min(again_s),
        "same": failure.cause in first and failure.cause in str(again.value),
        "kind": failure.kind,
        "phase": failure.phase,
        "missing": failure.missing,
        "last": comm.history()[-1],
    }


def test_every_operation_ends_in_time_and_names_the_rank_that_did_not_come() -> None:
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                start_ranks(
                    3 if name in _OF_THREE else 2, _one_does_not_come, name, comm_timeout_s=_TIMEOUT_S, debug="OFF"
                )
            )
            for name in _OPERATIONS
        }
        ends = {name: ranks.collect(40.0) for name, ranks in running.items()}
    for name, outcomes in ends.items():
        _check_waiting(name, outcomes)


def _check_waiting(name: str, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.ok, f"{name}: {outcome.error}"
    waiting = [outcome.value for outcome in outcomes if outcome.rank != _SLEEPER and outcome.value is not None]
    assert waiting, name
    # Who is first at the end of its time says so; it closes its connections, which frees the other at once.
    assert "timeout" in {found["kind"] for found in waiting}, name
    for found in waiting:
        assert found["missing"] == (_SLEEPER,), (name, found["told"])
        # On a busy machine the sleeper may wake up while the others still listen.
        assert re.search("rank 1 is missing: (no word from it|it came .* s later)", found["told"]), name
        assert f"({_NAMED.get(name, name)}, phase reduce)" in found["told"]
        assert found["waited"] < _TIMEOUT_S + 10.0, "the time, a second for the words of others, and a busy machine"
        assert found["again"] < 0.1, "promised are 10 ms, on an idle machine"
        assert found["same"]
        assert found["phase"] == "reduce"
        assert found["last"]["ended"] == "unfinished"
    timed_out = next(found for found in waiting if found["kind"] == "timeout")
    assert _TIMEOUT_S - 0.2 < _timed_out_after(timed_out["told"]) < _TIMEOUT_S + 10.0
    sleeper = outcomes[_SLEEPER].value
    if sleeper is not None:
        assert "had given up after" in sleeper["told"], (name, sleeper["told"])
        assert sleeper["waited"] < _SLEEPERS_S / 2, "it comes too late to wait"


def _timed_out_after(told: str) -> float:
    found = re.search(r"timed out after (\d+\.\d) s; rank 1 is missing", told)
    assert found is not None, told
    return float(found[1])


# ---- the step (C120) -------------------------------------------------------------------------------------------------


def _step_without_rank_1(comm: sr.Communicator) -> str:
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in (1, 2):
        torch.autograd.backward(loss_sum(model, token_batch(step, 5)))
        if comm.rank == 1 and step == 2:
            time.sleep(60)
        try:
            with comm.timeout(1.0 if step == 2 else 20.0):
                zero2.step(local_weight=5)
        except StepFailed as error:
            return str(error)
    return "no error"


def test_c120_the_error_names_rank_phase_step_and_how_long() -> None:
    with start_ranks(2, _step_without_rank_1, comm_timeout_s=20.0, debug="OFF") as ranks:
        (outcome,) = ranks.collect(20.0, ranks=[0])
    assert outcome.ok, outcome.error
    assert re.search(
        r"step 2 failed in phase agree: communicator closed at collective \d+ \(agreement, phase agree\) failed on "
        r"rank 0: timed out after \d+\.\d s; rank 1 is missing: no word from it\. Parameters and optimizer state are "
        r"those of step 1",
        outcome.value,
    ), outcome.value
    assert 0.8 < _timed_out_after(outcome.value) < 10.0


# ---- blocks with another time ----------------------------------------------------------------------------------------


def _longer_block(comm: sr.Communicator) -> dict[str, Any]:
    """A save may take longer than a step: both ways of waiting, in the world and in a subgroup."""
    with comm.timeout(20.0):
        group = comm.subgroup([0, 1])
        comm.vote()
    assert group is not None
    lazy = comm.rank == 1
    with comm.timeout(30.0):
        inside = comm.timeout_s, group.timeout_s
        with group.timeout(20.0):
            nested = comm.timeout_s
        if lazy:
            time.sleep(1.1)
        comm.vote()
        if lazy:
            time.sleep(1.1)
        group.reduce_slice(torch.zeros(4), torch.zeros(2))
    found = {"inside": inside, "nested": nested, "after": comm.timeout_s}
    if lazy:
        time.sleep(60.0)
    began = time.monotonic()
    try:
        comm.vote()
    except CommunicatorError as error:
        return found | {"told": str(error), "waited": time.monotonic() - began}
    return found


def _shorter_block(comm: sr.Communicator, exchange: bool) -> dict[str, Any]:
    comm.vote()
    if comm.rank == 1:
        time.sleep(60.0)
    began = time.monotonic()
    operation = _OPERATIONS["reduce" if exchange else "vote"]
    with pytest.raises(CommunicatorError) as caught, comm.timeout(0.7):
        operation(comm, comm)
    return {"told": str(caught.value), "waited": time.monotonic() - began, "after": comm.timeout_s}


def test_a_block_of_collectives_has_a_time_of_its_own() -> None:
    with ExitStack() as stack:
        longer = stack.enter_context(start_ranks(2, _longer_block, comm_timeout_s=0.9, debug="OFF"))
        shorter = [
            stack.enter_context(start_ranks(2, _shorter_block, exchange, comm_timeout_s=60.0, debug="OFF"))
            for exchange in (False, True)
        ]
        (in_longer,) = longer.collect(30.0, [0])
        in_shorter = [ranks.collect(30.0, [0])[0] for ranks in shorter]
    for outcome in (in_longer, *in_shorter):
        assert outcome.ok, outcome.error
    waiting = in_longer.value
    assert (waiting["inside"], waiting["nested"], waiting["after"]) == ((30.0, 30.0), 20.0, 0.9)
    assert 0.8 < _timed_out_after(waiting["told"]) < 10.0
    for outcome in in_shorter:
        assert 0.6 < _timed_out_after(outcome.value["told"]) < 10.0
        assert outcome.value["waited"] < 20.0
        assert outcome.value["after"] == 60.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e9])
def test_a_time_that_cannot_be_meant_is_refused_where_it_is_asked_for(seconds: float) -> None:
    comm = sr.Communicator.single()
    with pytest.raises(UsageError, match="must be above 0 and at most 604800 seconds"), comm.timeout(seconds):
        pass
    with pytest.raises(UsageError, match="init_timeout_s is"):
        sr.CommunicatorConfig(rank=0, world_size=1, init_timeout_s=seconds)
    assert not comm.is_poisoned


# ---- the rendezvous --------------------------------------------------------------------------------------------------


def _config(seat: Seat, **changes: Any) -> sr.CommunicatorConfig:
    given: dict[str, Any] = {"rank": seat.rank, "world_size": 3, "init_file": seat.init_file, "init_timeout_s": 2.0}
    return sr.CommunicatorConfig(**given | changes)


def _waits_at_the_rendezvous(seat: Seat, absent: int) -> tuple[str, float] | None:
    if seat.rank == absent:
        return None
    began = time.monotonic()
    with pytest.raises(CommunicatorError) as caught:
        sr.Communicator.open(_config(seat))
    return str(caught.value), time.monotonic() - began


def _waits_for_connections(seat: Seat) -> tuple[str, float] | None:
    """Rank 1 has come, but does not connect: the time of the rendezvous counts, not that of collectives."""
    if seat.rank == 1:
        meet(_config(seat))
        for rank in (0, 2):
            while not Path(seat.init_file).with_name(f"mark-{rank}-left").exists():
                time.sleep(0.01)
        return None
    began = time.monotonic()
    with pytest.raises(CommunicatorError) as caught:
        sr.Communicator.open(_config(seat))
    mark("left")
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_does_not_come_to_the_rendezvous_is_named() -> None:
    with ExitStack() as stack:
        running = [
            stack.enter_context(start_ranks(3, _waits_at_the_rendezvous, absent, open_comm=False, debug="OFF"))
            for absent in (0, 2)
        ]
        connecting = stack.enter_context(start_ranks(3, _waits_for_connections, open_comm=False, debug="OFF"))
        ends = [ranks.collect(30.0) for ranks in running]
        unconnected = connecting.collect(30.0)
    for absent, outcomes in zip((0, 2), ends, strict=True):
        for outcome in outcomes:
            assert outcome.ok, outcome.error
            if outcome.rank == absent:
                continue
            told, waited = outcome.value
            assert told.startswith(f"rank {absent} has not come to the rendezvous at ")
            assert "within 2 s" in told
            assert "init_timeout_s" in told
            assert 1.9 < waited < 20.0
    for rank in (0, 2):
        assert unconnected[rank].ok, unconnected[rank].error
        told, waited = unconnected[rank].value
        assert "found all 3 ranks at" in told
        assert "could not connect" in told
        assert waited < 20.0


def _vote_without_rank_1(comm: sr.Communicator) -> tuple[str, tuple[int, ...], float]:
    comm.vote()
    if comm.rank == 1:
        time.sleep(60.0)
    began = time.monotonic()
    with pytest.raises(CommunicatorError), comm.timeout(1.0):
        comm.vote()
    failure = comm.failure
    assert failure is not None
    return failure.kind, failure.missing, time.monotonic() - began


def test_a_missing_rank_is_named_also_where_torch_checks_every_call_by_one_more() -> None:
    """Under TORCH_DISTRIBUTED_DEBUG=DETAIL its checks keep the time with which the group was made."""
    with start_ranks(2, _vote_without_rank_1, comm_timeout_s=2.0, debug="DETAIL") as ranks:
        (outcome,) = ranks.collect(30.0, [0])
    assert outcome.ok, outcome.error
    kind, missing, waited = outcome.value
    assert (kind, missing) == ("timeout", (1,))
    assert waited < 20.0
