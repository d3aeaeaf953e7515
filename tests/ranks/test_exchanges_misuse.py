"""Exchanges and windows that are mixed up, left half way, or contribute what the step does not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from shardrun.errors import CommunicatorError, NonFiniteError, StepRefused, UsageError
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import make_zero2, same_bits


def _loss(model: nn.Module, part: int) -> Tensor:
    return loss_sum(model, token_batch(part, 3))


def _two_at_once(comm: sr.Communicator) -> tuple[str, bool]:
    """A rank whose second model has no gradients sends its buckets in another order than the others."""
    one, two = (seeded(seed, OddNet) for seed in (5, 6))
    first, second = (
        make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=True, name=name)
        for model, name in ((one, "one"), (two, "two"))
    )
    with (  # noqa: PT012
        pytest.raises(UsageError) as caught,
        first.window(local_weight=3),
        second.window(local_weight=3),
    ):
        loss = _loss(one, comm.rank)
        torch.autograd.backward(loss if comm.rank else loss + _loss(two, 0))
    return str(caught.value), comm.is_poisoned


def test_windows_of_two_sessions_at_once_are_refused_on_all_ranks() -> None:
    for told, closed in run_ranks(2, _two_at_once, debug="OFF"):
        assert "exchanges are under way already" in told
        assert closed


def _left_half_way(comm: sr.Communicator) -> tuple[bool, str]:
    bucket, out = comm.flat_zeros(512, torch.device("cpu")), torch.zeros(256)
    try:
        with comm.exchanges() as exchanges:
            exchanges.reduce(bucket, out)
            if comm.rank == 1:
                raise ZeroDivisionError("of the user")
    except (ZeroDivisionError, CommunicatorError):
        pass
    with pytest.raises(CommunicatorError) as caught:
        comm.reduce_slice(bucket, out, agreed=True)
    return comm.is_poisoned, str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_exchanges_that_are_left_half_way_close_the_communicator(shared: bool) -> None:
    for closed, told in run_ranks(2, _left_half_way, debug="OFF", shared_memory=shared):
        assert closed
        assert "ZeroDivisionError: of the user" in told


def _history(comm: sr.Communicator) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    bucket, out = comm.flat_zeros(512, torch.device("cpu")), torch.zeros(256)
    with comm.exchanges() as exchanges:
        exchanges.reduce(bucket, out)
        under_way = comm.history()[-1:]
        exchanges.reduce(bucket, out)
    return under_way, comm.history()[-2:]


def test_an_exchange_is_unfinished_in_the_history_until_its_end() -> None:
    for (begun,), done in run_ranks(2, _history, debug="OFF"):
        assert begun["ended"] == "unfinished"
        assert [call["what"] for call in done] == ["reduce", "reduce"]
        assert all(call["microseconds"] is not None for call in done)


def _sum_mode(comm: sr.Communicator) -> tuple[str, str]:
    told: list[str] = []
    for active, weight in ((comm.rank == 0, 3), (True, 3 * (comm.rank == 0))):
        model = seeded(5, OddNet)
        zero2 = make_zero2(comm, model, lr=0.02, stream_gradients=True, name=f"session {len(told)}")
        with zero2.window(local_weight=weight):
            torch.autograd.backward(_loss(model, comm.rank))
        with pytest.raises(StepRefused) as caught:
            zero2.step_sum(local_active=active)
        told.append(str(caught.value))
    return told[0], told[1]


def test_a_sum_counts_whom_the_windows_counted() -> None:
    for inactive, active in run_ranks(2, _sum_mode, debug="OFF"):
        assert "rank 1: local_active is False, but its windows had a weight of 3" in inactive
        assert "rank 1: local_active is True, but its windows had a weight of 0" in active


def _weightless_window(comm: sr.Communicator) -> dict[str, Tensor]:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=True)
    with zero2.window(local_weight=3):
        torch.autograd.backward(_loss(model, 0))
    with zero2.window(local_weight=0):
        torch.autograd.backward(_loss(model, 1) * float("nan"))
    zero2.step(local_weight=3)
    return {path: parameter.detach().clone() for path, parameter in model.named_parameters()}


def test_a_window_of_weight_0_contributes_nothing_on_one_rank_as_on_two() -> None:
    model = seeded(5, OddNet)
    zero2 = make_zero2(sr.Communicator.single(), model, lr=0.02, stream_gradients=True)
    with zero2.window(local_weight=3):
        torch.autograd.backward(_loss(model, 0))
    zero2.step(local_weight=3)
    found = _weightless_window(sr.Communicator.single())
    assert all(same_bits(found[path], parameter) for path, parameter in model.named_parameters())
    for parameters in run_ranks(2, _weightless_window, debug="OFF"):
        assert all(bool(torch.isfinite(parameter).all()) for parameter in parameters.values())


def _nan_in_an_earlier_window(comm: sr.Communicator) -> str:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=True)
    for part in range(2):
        with zero2.window(local_weight=3):
            bad = comm.rank == comm.world_size - 1 and part == 0
            torch.autograd.backward(_loss(model, part) * (float("nan") if bad else 1.0))
    with pytest.raises(NonFiniteError) as caught:
        zero2.step(local_weight=6)
    return str(caught.value)


def test_the_rank_and_parameter_of_a_nan_are_named_whichever_window_it_was_in() -> None:
    for told in run_ranks(2, _nan_in_an_earlier_window, debug="OFF"):
        assert "rank 1 has a non-finite gradient for" in told


def _mapped_buffers() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:shardrun" in line for line in maps)


def _dropped(comm: sr.Communicator) -> tuple[int, int, int]:
    comm.flat_zeros(256, torch.device("cpu"))  # with it comes the board
    before = _mapped_buffers()
    buffer = comm.flat_zeros(1 << 16, torch.device("cpu"))
    held = _mapped_buffers()
    del buffer
    return before, held, _mapped_buffers()


def test_memory_of_other_ranks_is_let_go_with_the_own_buffer() -> None:
    for before, held, after in run_ranks(2, _dropped, debug="OFF"):
        assert held == before + 2
        assert after == before
