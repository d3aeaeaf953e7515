"""Gradients reduced inside backward, over sockets and in shared memory: the bits of a session that keeps them."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from shardrun.comm import shared_memory, slices
from shardrun.errors import NonFiniteError, StepFailed, StepRefused, UsageError
from shardrun.step import slices as step_slices
from tests.support.models import MixedNet, OddNet, TiedNet, loss_sum, seeded, token_batch
from tests.support.rank_process import await_mark, mark
from tests.support.ranks import run_ranks
from tests.support.sessions import make_zero2, same_bits

_SIZES = (256, 4096, 1 << 30)
"""Bytes of a bucket: one parameter each, a few, all of them."""
_STEPS = 4


def _loss(model: nn.Module, step: int, part: int, tokens: int) -> Tensor:
    inputs, targets = token_batch(100 * step + part, tokens)
    if isinstance(model, TiedNet):
        return torch.nn.functional.cross_entropy(model(targets), targets, reduction="sum")
    return loss_sum(model, (inputs, targets))


def _train(comm: sr.Communicator, build: type[nn.Module], bucket_bytes: int, streams: bool) -> dict[str, Tensor]:
    """A few steps with clipping, two micro-batches on every rank but the last, which has none in the second step."""
    model = seeded(5, build)
    zero2 = make_zero2(
        comm,
        model,
        lr=0.02,
        rules={"*bias": {"weight_decay": 0.0}},
        bucket_bytes=bucket_bytes,
        stream_gradients=streams,
    )
    for step in range(_STEPS):
        idle = step == 1 and 0 < comm.rank == comm.world_size - 1
        if not idle:
            with zero2.window(local_weight=0, last=False):
                torch.autograd.backward(_loss(model, step, 2 * comm.rank, 3))
        with zero2.window(local_weight=0 if idle else 5):
            if not idle:
                torch.autograd.backward(_loss(model, step, 2 * comm.rank + 1, 2))
        result = zero2.step(local_weight=0 if idle else 5, missing="zero", max_grad_norm=0.5)
        assert result.grad_norm is not None
    return {path: parameter.detach().clone() for path, parameter in model.named_parameters()}


def _all_ways(comm: sr.Communicator) -> tuple[str, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """How slices travel here, all models in all ways, and the first of them again with slices in many pieces."""
    ways = itertools.product((OddNet, MixedNet, TiedNet), _SIZES, (False, True))
    found = [_train(comm, *way) for way in ways]
    _as_if_slices_were_large()
    return comm.transport, found, [_train(comm, OddNet, 1 << 30, streams) for streams in (False, True)]


def _as_if_slices_were_large() -> None:
    for module, name, value in (
        (slices, "_CHUNK_NUMEL", 256),
        (slices, "PIECE_NUMEL", 256),
        (step_slices, "PIECE_NUMEL", 256),
        (shared_memory, "_SMALL", 0),
    ):
        assert getattr(module, name) > value
        setattr(module, name, value)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_depend_neither_on_buckets_nor_on_streaming_nor_on_the_transport(world_size: int) -> None:
    shared = run_ranks(world_size, _all_ways, timeout_s=120, debug="OFF")
    sent = run_ranks(world_size, _all_ways, timeout_s=120, debug="OFF", shared_memory=False)
    assert {told for told, _, _ in shared} == {"shared memory"}
    assert {told for told, _, _ in sent} == {"sockets (switched off)"}
    each = 2 * len(_SIZES)
    for _, found, in_pieces in (*shared, *sent):
        for parameters in in_pieces:
            assert all(same_bits(shared[0][1][0][path], parameter) for path, parameter in parameters.items())
        for number, parameters in enumerate(found):
            first = shared[0][1][number // each * each]
            assert all(same_bits(first[path], parameter) for path, parameter in parameters.items()), number


def test_a_rank_alone_streams_to_the_bits_of_keeping() -> None:
    kept, streamed = (_train(sr.Communicator.single(), OddNet, 256, streams) for streams in (False, True))
    assert all(same_bits(kept[path], parameter) for path, parameter in streamed.items())


# ---- accumulation in the slices --------------------------------------------------------------------------------------


def _accumulate(comm: sr.Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 0 has three micro-batches, the others one; reduced one by one, and all together."""
    results = []
    for sharded in (True, False):
        model = seeded(5, OddNet)
        zero2 = make_zero2(comm, model, torch.optim.SGD, lr=0.02, bucket_bytes=256, stream_gradients=True)
        for step in range(2):
            parts = 3 if comm.rank == 0 else 1
            for part in range(3 if sharded else parts):
                here = part < parts
                last = sharded or part == parts - 1
                with zero2.window(local_weight=4 * (here if sharded else parts), last=last):
                    if here:
                        torch.autograd.backward(_loss(model, step, 10 * comm.rank + part, 4))
            zero2.step(local_weight=4 * parts)
        results.append({path: parameter.detach().clone() for path, parameter in model.named_parameters()})
    return results[0], results[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_reduced_one_by_one_add_up(world_size: int) -> None:
    for sharded, local in run_ranks(world_size, _accumulate, debug="OFF"):
        for path, want in local.items():
            torch.testing.assert_close(sharded[path], want, rtol=1e-5, atol=1e-6)


def _not_finite(comm: sr.Communicator) -> list[str]:
    """The last rank sends a NaN in one of three windows of a step, the first one's counting for nothing."""
    model, told = seeded(5, OddNet), []
    zero2 = make_zero2(comm, model, torch.optim.SGD, lr=0.02, bucket_bytes=256, stream_gradients=True)
    for bad in (1, 2):
        for part, weight in enumerate((0, 4, 4)):
            factor = float("nan") if part == bad and comm.rank == comm.world_size - 1 else 1.0
            with zero2.window(local_weight=weight):
                torch.autograd.backward(_loss(model, bad, part, 4) * factor)
        with pytest.raises(NonFiniteError) as caught:
            zero2.step(local_weight=8)
        told.append(str(caught.value))
        zero2.discard_gradients()
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_not_finite_in_any_micro_batch_is_named(world_size: int) -> None:
    for found in run_ranks(world_size, _not_finite, debug="OFF"):
        for told in found:
            assert f"rank {world_size - 1} has a non-finite gradient for " in told


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refusals(comm: sr.Communicator) -> list[str]:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=True)
    before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    told = []

    def refused(**asked: Any) -> None:
        with pytest.raises(StepRefused) as caught:
            zero2.step(**{"local_weight": 3, **asked})
        told.append(str(caught.value))
        assert all(same_bits(before[path], parameter) for path, parameter in model.named_parameters())
        zero2.discard_gradients()

    refused()
    torch.autograd.backward(_loss(model, 0, comm.rank, 3))
    refused()
    with zero2.window(local_weight=3):
        torch.autograd.backward(_loss(model, 0, comm.rank, 3))
    refused(local_weight=4)
    with pytest.raises(StepRefused) as caught, zero2.window(local_weight=-comm.rank):
        raise AssertionError("not entered")
    told.append(str(caught.value))
    with zero2.window(local_weight=3):
        loss = _loss(model, 0, comm.rank, 3)
        torch.autograd.backward(loss * (float("nan") if comm.rank == 1 else 1.0))
    refused()
    refused()  # what was refused after the division cannot be stepped again
    with zero2.window(local_weight=3):
        torch.autograd.backward(_loss(model, 0, comm.rank, 3))
    zero2.step(local_weight=3)
    return told


def test_what_cannot_be_stepped_is_refused_on_all_ranks_and_the_next_window_is_fine() -> None:
    for told in run_ranks(2, _refusals, debug="OFF"):
        nothing, outside, weight, negative, poisoned, spent = told
        assert "no gradient was sent since the last step" in nothing
        assert "has a gradient that was not sent" in outside
        assert "local_weight is 4, and 3 in the windows before" in weight
        assert "rank 1: weight is -1" in negative
        assert "rank 1 has a non-finite gradient for up.weight" in poisoned
        assert "no gradient was sent since the last step" in spent


def _backward_twice(comm: sr.Communicator) -> None:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, stream_gradients=True)
    with zero2.window(local_weight=3):
        torch.autograd.backward(_loss(model, 0, 0, 3))
        if comm.rank == 0:
            torch.autograd.backward(_loss(model, 0, 1, 3))
        else:
            comm.vote()


def _twice(comm: sr.Communicator) -> str:
    with pytest.raises((UsageError, StepFailed)) as caught:
        _backward_twice(comm)
    return str(caught.value)


def test_a_second_backward_in_a_window_is_an_error() -> None:
    first, second = run_ranks(2, _twice, debug="OFF")
    assert "got a gradient twice in one window" in first
    assert "rank 0" in second


# ---- failures --------------------------------------------------------------------------------------------------------


def _try(comm: sr.Communicator, model: nn.Module, zero2: sr.SelectedZero2, how: str) -> None:
    with zero2.window(local_weight=3):
        if comm.rank == 1 and how == "raise":
            raise ZeroDivisionError("of the user")
        if comm.rank == 1 and how == "sleep":
            await_mark(0, "failed")
        torch.autograd.backward(_loss(model, 0, comm.rank, 3))


def _fails(comm: sr.Communicator, how: str, timeout_s: float) -> tuple[str, float, bool]:
    """What this rank is told, after how many seconds in the window, and whether it says that gradients are kept."""
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=True)
    comm.vote()  # all are there: only the window is to end in time
    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, StepFailed)) as caught, comm.timeout(timeout_s):
        _try(comm, model, zero2, how)
    waited = time.monotonic() - began
    mark("failed")
    assert comm.is_poisoned
    kept = getattr(caught.value, "gradients_kept", None)
    return f"{type(caught.value).__name__}: {caught.value}", waited, bool(kept)


@pytest.mark.parametrize("shared", [True, False])
def test_an_exception_in_a_window_frees_the_others_at_once(shared: bool) -> None:
    first, second = run_ranks(2, _fails, "raise", 30.0, debug="OFF", shared_memory=shared)
    assert second[0] == "ZeroDivisionError: of the user"
    assert first[0].startswith("StepFailed: step 1 failed"), first[0]
    assert "rank 1 failed" in first[0]
    assert first[1] < 15
    assert not first[2]


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(shared: bool) -> None:
    first, second = run_ranks(2, _fails, "sleep", 1.5, debug="OFF", shared_memory=shared)
    assert "timed out" in first[0]
    assert 1.4 < first[1] < 15
    assert "StepFailed" in second[0]


def _dies_before(comm: sr.Communicator) -> tuple[str, bool, str]:
    """Rank 1 leaves before the window that rank 0 enters."""
    zero2 = make_zero2(comm, seeded(5, OddNet), lr=0.02, stream_gradients=True)
    if comm.rank == 1:
        comm.poison("gone")
        return "", False, ""
    with pytest.raises(StepFailed) as caught, zero2.window(local_weight=1):
        raise AssertionError("the window must not be entered")
    return str(caught.value), caught.value.gradients_kept, caught.value.phase


@pytest.mark.parametrize("shared", [True, False])
def test_a_peer_that_is_gone_before_a_window_fails_the_step(shared: bool) -> None:
    (told, kept, phase), _ = run_ranks(2, _dies_before, debug="OFF", shared_memory=shared)
    assert told.startswith("step 1 failed in phase agree: ")
    assert "rank 1 failed" in told
    assert told.endswith("Parameters and optimizer state are those of step 0")
    assert (kept, phase) == (True, "agree")


# ---- shared memory ---------------------------------------------------------------------------------------------------


def _told(comm: sr.Communicator, lacking: int | None) -> tuple[str, dict[str, Tensor]]:
    if comm.rank == lacking:
        del os.memfd_create
    parameters = _train(comm, OddNet, 4096, streams=True)
    return comm.transport, parameters


def test_where_one_rank_cannot_share_all_send() -> None:
    (told, one), (also, other) = run_ranks(2, _told, 1, debug="OFF")
    assert told == also == "sockets (this system has no memory without a name (memfd))"
    ((shares, shared), _) = run_ranks(2, _told, None, debug="OFF")
    assert shares == "shared memory"
    assert all(same_bits(one[path], shared[path]) and same_bits(other[path], shared[path]) for path in one)


def _memory(comm: sr.Communicator) -> tuple[dict[str, int], int]:
    model = seeded(5, lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))))
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=4 * 64 * 64, stream_gradients=True)
    return zero2.gradient_nbytes, 4 * sum(parameter.numel() for parameter in model.parameters())


def test_streamed_gradients_need_a_few_buckets_and_no_more() -> None:
    for held, whole in run_ranks(2, _memory, debug="OFF"):
        assert held["pending"] < 0.35 * whole
        assert held["reduced"] == pytest.approx(0.5 * whole, rel=0.15)
        assert held["arriving"] == pytest.approx(0.5 * whole, rel=0.15)
