"""The harness itself on real ranks: order, errors, deaths, hangs, and that a Communicator comes up."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, get_debug_level

from shardrun.comm.communicator import Communicator
from tests.support.rank_process import Seat, mark
from tests.support.ranks import RankFailed, RanksHung, run_ranks, start_ranks


def _open_gloo(seat: Seat) -> None:
    store = FileStore(seat.init_file, seat.world_size)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size)


def _sum_of_ranks(seat: Seat, add: torch.Tensor) -> torch.Tensor:
    _open_gloo(seat)
    value = torch.full((3,), float(seat.rank)) + add
    dist.all_reduce(value)
    return value


def test_results_come_back_in_rank_order_after_a_collective() -> None:
    results = run_ranks(3, _sum_of_ranks, torch.tensor([0.0, 1.0, 2.0]), open_comm=False)
    assert [result.tolist() for result in results] == [[3.0, 6.0, 9.0]] * 3


def _rank_one_raises(seat: Seat) -> None:
    _open_gloo(seat)
    if seat.rank == 1:
        raise ValueError("bad label 7")
    dist.all_reduce(torch.zeros(1))


def test_first_failing_rank_is_named_and_the_others_are_ended() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match="bad label 7") as caught:
        run_ranks(3, _rank_one_raises, open_comm=False)
    assert caught.value.rank == 1
    assert "_rank_one_raises" in caught.value.traceback
    assert time.monotonic() - started < 10


def _rank_zero_dies(seat: Seat) -> None:
    _open_gloo(seat)
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def test_a_killed_rank_is_blamed_before_those_that_followed() -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_ranks(2, _rank_zero_dies, open_comm=False)
    assert caught.value.rank == 0


def _leaves_early(seat: Seat) -> None:
    os._exit(0)


def test_leaving_without_a_report_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="exit code 0"):
        run_ranks(1, _leaves_early, open_comm=False)


def _sleep_in_a_named_function(seat: Seat) -> None:
    if seat.rank == 1:
        time.sleep(60)


def test_a_hang_shows_the_stack_of_the_rank_that_hangs() -> None:
    with pytest.raises(RanksHung, match="_sleep_in_a_named_function") as caught:
        run_ranks(2, _sleep_in_a_named_function, open_comm=False, timeout_s=2)
    assert list(caught.value.stacks) == [1]


def _wait_to_be_killed(seat: Seat) -> int:
    mark("ready")
    if seat.rank == 1:
        time.sleep(60)
    return seat.rank * 10


def test_a_rank_can_be_killed_by_number_and_the_others_still_report() -> None:
    with start_ranks(2, _wait_to_be_killed, open_comm=False) as ranks:
        ranks.wait_for_mark(1, "ready")
        pid = ranks.pid(1)
        ranks.send_signal(1, signal.SIGKILL)
        outcomes = ranks.collect(timeout_s=20)
    assert outcomes[0].ok
    assert outcomes[0].value == 0
    assert outcomes[1].killed_by == signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _settings(seat: Seat) -> tuple[int, bool, str, str]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ["GLOO_SOCKET_IFNAME"],
        str(get_debug_level()),
    )


def test_ranks_are_single_threaded_deterministic_and_on_loopback() -> None:
    assert run_ranks(1, _settings, open_comm=False) == [(1, True, "lo", "DebugLevel.DETAIL")]
    assert run_ranks(1, _settings, open_comm=False, debug="OFF")[0][3] == "DebugLevel.OFF"


def _unpicklable(seat: Seat) -> Any:
    return lambda: None


def test_a_result_that_cannot_travel_is_an_error_of_that_rank() -> None:
    with pytest.raises(RankFailed, match="_unpicklable"):
        run_ranks(1, _unpicklable, open_comm=False)


def _deprecated(seat: Seat) -> None:
    import warnings

    warnings.warn("old way", DeprecationWarning, stacklevel=1)


def test_a_warning_on_a_rank_is_an_error() -> None:
    with pytest.raises(RankFailed, match="old way"):
        run_ranks(1, _deprecated, open_comm=False)


def _agree(comm: Communicator, word: str) -> list[object]:
    return comm.agree("harness", [comm.rank, word])


def test_a_body_gets_a_communicator_of_its_world() -> None:
    assert run_ranks(2, _agree, "hello") == [[[0, "hello"], [1, "hello"]]] * 2
    assert run_ranks(1, _agree, "alone") == [[[0, "alone"]]]
