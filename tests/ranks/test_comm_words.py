"""Whose fault it was: what ranks learn from each other after a failure, with the store in a file or in rank 0."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.errors import CommunicatorError, StepFailed
from tests.support.models import MixedNet, loss_sum, seeded, token_batch
from tests.support.rank_process import Seat, mark
from tests.support.ranks import start_ranks
from tests.support.sessions import make_zero2

pytestmark = pytest.mark.sample(2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Stderr:
    """What this process writes to its file descriptor 2, C++ included."""

    def __enter__(self) -> _Stderr:
        self._file = tempfile.TemporaryFile()
        self._before = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._before, 2)
        self._file.seek(0)
        self.text = self._file.read().decode()


def _meets_a_fault(seat: Seat, port: int | None, kind: str, victim: int) -> dict[str, Any]:
    place: dict[str, Any] = {"init_file": seat.init_file} if port is None else {"master_port": port}
    config = sr.CommunicatorConfig(rank=seat.rank, world_size=seat.world_size, timeout_s=20.0, **place)
    with _Stderr() as stderr:
        comm = sr.Communicator.open(config)
        comm.enter("propose")
        comm.vote()
        if seat.rank == victim:
            time.sleep(0.2)  # the others are waiting by then
            _strike(kind)
        began = time.monotonic()
        with pytest.raises(CommunicatorError) as caught, comm.timeout(1.5 if kind == "stop" else 20.0):
            comm.vote()
        waited = time.monotonic() - began
    failure = comm.failure
    assert failure is not None
    return {
        "told": str(caught.value),
        "waited": waited,
        "kind": failure.kind,
        "missing": failure.missing,
        "culprit": failure.culprit,
        "stderr": stderr.text,
    }


def _strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    mark("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)


_CASES = [("kill", 0, True), ("kill", 1, True), ("kill", 0, False), ("stop", 0, True), ("stop", 1, True)]


def test_a_dead_or_stopped_rank_is_named_also_if_it_keeps_the_store() -> None:
    with ExitStack() as stack:
        running = {}
        for kind, victim, in_rank_0 in _CASES:
            port = _free_port() if in_rank_0 else None
            body = _meets_a_fault, port, kind, victim
            running[kind, victim, in_rank_0] = stack.enter_context(start_ranks(3, *body, open_comm=False, debug="OFF"))
        for (kind, victim, in_rank_0), ranks in running.items():
            outcomes = ranks.collect(40.0, [rank for rank in range(3) if rank != victim])
            for outcome in outcomes:
                assert outcome.ok, outcome.error
                _check_named(kind, victim, in_rank_0, outcome.value)


def _check_named(kind: str, victim: int, in_rank_0: bool, found: dict[str, Any]) -> None:
    case = f"{kind} {victim} {in_rank_0}: {found}"
    assert found["missing"] == (victim,), case
    assert found["culprit"] is None, case
    if in_rank_0 and victim == 0:
        why = "is gone" if kind == "kill" else "does not answer"
        assert f"rank 0, which keeps the store of the rendezvous, {why}" in found["told"], case
    else:
        assert f"rank {victim} is missing: no word from it" in found["told"], case
    assert found["kind"] == "closed" if kind == "kill" else found["kind"] in ("timeout", "closed"), case
    assert found["waited"] < 6.0, case
    assert "TCPStore" not in found["stderr"], "no C++ frames on the screen of a run that fails"


# ---- a fault of its own ----------------------------------------------------------------------------------------------


def _step_with_a_fault(comm: sr.Communicator) -> dict[str, Any]:
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    torch.autograd.backward(loss_sum(model, token_batch(comm.rank, 5)))
    if comm.rank == 2:

        def observe(phase: str, collective: int) -> None:
            if phase == "propose":
                raise ValueError("bad label 7")

        comm.observer = observe
    began = time.monotonic()
    with pytest.raises(StepFailed) as caught:
        zero2.step(local_weight=5)
    waited = time.monotonic() - began
    failure = comm.failure
    assert failure is not None
    return {"told": str(caught.value), "waited": waited, "culprit": failure.culprit, "kind": failure.kind}


def test_the_rank_that_raised_is_named_with_its_error_on_all_others() -> None:
    with start_ranks(3, _step_with_a_fault, comm_timeout_s=20.0, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
        found = outcome.value
        assert "rank 2 failed in phase propose of step 1: ValueError: bad label 7" in found["told"] or outcome.rank == 2
        assert "ValueError: bad label 7" in found["told"]
        assert found["culprit"] == (None if outcome.rank == 2 else 2)
        assert found["kind"] == ("failed" if outcome.rank == 2 else "closed")
        assert found["waited"] < 5.0, "2 s are promised on an idle machine; the timeout is 20 s"


def _leaves_in_peace(comm: sr.Communicator) -> dict[str, Any]:
    """A rank that closes has not failed: nobody is told that it did, and it leaves no word."""
    comm.vote()
    if comm.rank == 1:
        comm.close()
        return {"failure": comm.failure, "told": ""}
    with pytest.raises(CommunicatorError) as caught:
        comm.vote()
    assert comm.failure is not None
    return {"told": str(caught.value), "culprit": comm.failure.culprit, "missing": comm.failure.missing}


def test_a_rank_that_left_in_peace_is_not_called_a_culprit() -> None:
    with start_ranks(2, _leaves_in_peace, comm_timeout_s=20.0, debug="OFF") as ranks:
        waiting, left = ranks.collect(30.0)
    assert waiting.ok, waiting.error
    assert waiting.value["culprit"] is None
    assert waiting.value["missing"] == (1,)
    assert left.value["failure"].cause == "it was closed"


# ---- the ring --------------------------------------------------------------------------------------------------------


def _fails_after_steps(comm: sr.Communicator) -> dict[str, Any]:
    model = seeded(4, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in range(4):
        torch.autograd.backward(loss_sum(model, token_batch(step, 5)))
        if step == 3 and comm.rank == 1:
            comm.poison("a fault")
        try:
            zero2.step(local_weight=5)
        except (StepFailed, CommunicatorError):
            break
    return {"history": comm.history(), "text": comm.history_text(), "count": comm.collective}


def test_the_ring_tells_what_a_rank_did_before_it_failed() -> None:
    with start_ranks(2, _fails_after_steps, comm_timeout_s=20.0, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
    survivor, victim = (outcome.value for outcome in outcomes)
    history = survivor["history"]
    assert len(history) == min(64, survivor["count"])
    assert [call["collective"] for call in history] == list(
        range(survivor["count"] - len(history) + 1, survivor["count"] + 1)
    )
    last = history[-1]
    assert (last["phase"], last["what"], last["ended"]) == ("agree", "agreement", "unfinished")
    assert last["fingerprint"].startswith("step 4 of default: layout ")
    assert [size.split()[1] for size in last["sizes"]] == ["int64"]
    assert all(call["microseconds"] > 0 for call in history[:-1])
    assert {call["phase"] for call in history} >= {"agree", "reduce", "decide", "gather", "vote"}
    same = ("collective", "phase", "what", "fingerprint", "ranks", "sizes")
    both = zip(history, victim["history"], strict=False)
    assert all(ours[key] == theirs[key] for ours, theirs in both for key in same), "ranks can be laid side by side"
    assert "unfinished" in survivor["text"].splitlines()[-1]
    assert len(survivor["text"].splitlines()) == len(history) + 1


def _stalls_in_its_observer(comm: sr.Communicator) -> tuple[int, ...]:
    """The last rank hangs where a fault plan would have it hang, and wakes while the first still listens."""
    comm.vote()
    if comm.rank == 1:
        comm.observer = lambda phase, collective: time.sleep(1.6)
    with pytest.raises(CommunicatorError), comm.timeout(1.0):
        comm.vote()
    assert comm.failure is not None
    return comm.failure.missing


def test_a_rank_that_stalls_before_it_sends_is_missing_though_it_had_begun() -> None:
    with start_ranks(2, _stalls_in_its_observer, comm_timeout_s=20.0, debug="OFF") as ranks:
        waiting, sleeper = ranks.collect(30.0)
    assert waiting.ok, waiting.error
    assert sleeper.ok, sleeper.error
    assert (waiting.value, sleeper.value) == ((1,), ())
