"""What the communicator asks of NCCL, on a real device with a group of one: the only world that fits one GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardrun.comm.device import DeviceWatch, prepare_environment, trace_file
from shardrun.comm.nccl import NcclBackend
from shardrun.comm.process_group import close_process_groups, set_group_timeout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NcclBackend, str]]:
    """NCCL beside gloo, as a world opens it, and where its flight recorder is written."""
    environ = dict(os.environ)
    prepare_environment(environ, tmp_path, "test")
    for name in environ.keys() - os.environ.keys():
        monkeypatch.setenv(name, environ[name])
    written = trace_file(environ, 0)
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    dist.all_reduce(torch.ones(8, device=device))
    asked = NcclBackend(device, written)
    yield asked, written
    if dist.is_initialized():
        close_process_groups(DeviceWatch(asked))


def _cycles(seconds: float) -> int:
    """For torch.cuda._sleep: at least so many seconds on any device of today."""
    return int(seconds * 2.5e9)


def test_a_settled_device_has_done_everything(backend: tuple[NcclBackend, str]) -> None:
    watch = DeviceWatch(backend[0])
    total = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(_cycles(0.2))  # type: ignore[no-untyped-call]
    dist.all_reduce(total)
    mark = backend[0].mark()
    assert not backend[0].reached(mark)
    watch.settle(30.0)
    assert backend[0].reached(mark)
    assert backend[0].error() == ""


def test_a_busy_device_is_left_at_the_timeout(backend: tuple[NcclBackend, str]) -> None:
    watch = DeviceWatch(backend[0])
    torch.cuda._sleep(_cycles(3.0))  # type: ignore[no-untyped-call]
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done after 0\.5 s"):
        watch.settle(0.5)
    assert time.monotonic() - began < 1.0
    torch.cuda.synchronize()


def test_groups_are_aborted_and_forgotten_and_the_flight_recorder_is_written(backend: tuple[NcclBackend, str]) -> None:
    asked, written = backend
    set_group_timeout(None, 20.0)
    watch = DeviceWatch(asked, written)
    began = time.monotonic()
    assert close_process_groups(watch, dump=True) == ""
    assert not dist.is_initialized()
    assert time.monotonic() - began < 10.0
    assert Path(written).stat().st_size > 0
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3.0, "the device goes on"
