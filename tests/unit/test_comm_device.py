"""What is asked of a device that fails late (NCCL): bounded waits, late errors, aborts that hang. Not run on NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardrun.comm import device
from shardrun.comm.device import DeviceWatch, prepare_environment, trace_file
from tests.support.fake_nccl import FINE, LATE_ERROR, NEVER, WATCHDOG, FakeNccl


class _Clock:
    """Time that passes only by sleeping, and a little at each look at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps = 0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


def _watch(fake: FakeNccl) -> tuple[DeviceWatch, _Clock]:
    clock = _Clock()
    return DeviceWatch(fake, clock=clock, sleep=clock.sleep), clock


def test_a_device_that_comes_through_soon_is_not_slept_for() -> None:
    fake = FakeNccl(FINE, queries=20)
    watch, clock = _watch(fake)
    watch.settle(5.0)
    assert clock.naps == 0
    assert fake.called == []


def test_a_slow_device_is_slept_for_and_has_its_time() -> None:
    fake = FakeNccl(FINE, queries=3000)
    watch, clock = _watch(fake)
    watch.settle(5.0)
    assert 0 < clock.naps < 3000
    assert clock.now < 5.0


def test_an_error_that_shows_only_at_a_later_query_is_raised_long_before_the_timeout() -> None:
    watch, clock = _watch(FakeNccl(LATE_ERROR, queries=100))
    with pytest.raises(RuntimeError, match="NCCL reports COMM_ERROR"):
        watch.settle(60.0)
    assert clock.now < 1.0


def test_a_collective_that_never_ends_is_left_at_the_timeout() -> None:
    watch, clock = _watch(FakeNccl(NEVER))
    with pytest.raises(TimeoutError, match=r"not done after 7\.0 s"):
        watch.settle(7.0)
    assert 7.0 < clock.now < 7.1


def test_a_device_that_an_abort_let_through_is_not_taken_for_done() -> None:
    """The watchdog sets the error and then aborts: the event is reached, the buffers hold part of a sum."""
    watch, _ = _watch(FakeNccl(WATCHDOG, queries=0))
    with pytest.raises(RuntimeError, match="COMM_ERROR"):
        watch.settle(60.0)


@pytest.mark.parametrize("dump", [True, False])
def test_the_flight_recorder_is_written_before_the_abort_that_would_falsify_it(dump: bool) -> None:
    fake = FakeNccl(NEVER)
    watch, _ = _watch(fake)
    assert watch.abort(dump=dump) == ""
    assert fake.called == (["dump"] if dump else []) + ["abort"]
    assert fake.reached(fake.mark()), "an abort frees the device"


def test_an_abort_and_a_dump_that_hang_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ABORT_S", 0.05)
    monkeypatch.setattr(device, "DUMP_S", 0.05)
    fake = FakeNccl(NEVER, abort_hangs=True, dump_hangs=True)
    began = time.monotonic()
    told = _watch(fake)[0].abort(dump=True)
    assert time.monotonic() - began < 2.0
    assert fake.called == ["dump", "abort"], "a dump that hangs does not keep the abort"
    assert "flight recorder was not written" in told
    assert "not aborted" in told


def test_an_abort_that_raises_has_ended() -> None:
    class Broken(FakeNccl):
        def abort(self) -> None:
            raise RuntimeError("unhandled system error")

    assert _watch(Broken())[0].abort(dump=False) == ""


# ---- torch's environment ---------------------------------------------------------------------------------------------


def test_the_flight_recorder_is_on_and_no_process_is_ended_by_default() -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, Path("/var/traces"), "run-7")
    assert environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/var/traces/shardrun-run-7-nccl-rank-",
    }
    assert trace_file(environ, 3) == "/var/traces/shardrun-run-7-nccl-rank-3"


def test_what_a_user_has_set_stays_also_under_its_older_name() -> None:
    chosen = {
        "NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/data/trace_",
    }
    environ = dict(chosen)
    prepare_environment(environ, Path("/var/traces"), "run")
    assert environ == {**chosen, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    assert trace_file(environ, 0) == "/data/trace_0"
    assert trace_file({}, 0) == ""
