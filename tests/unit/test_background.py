"""A save in the background, in a world of one: what the training's own thread is spared."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
from torch import Tensor

from shardrun.checkpoint.commit import Snapshot, begin_save
from shardrun.comm.communicator import Communicator
from shardrun.records import durable
from tests.golden import state

COMM = Communicator.single()


def test_nothing_is_written_and_no_copy_let_go_of_in_the_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    main = threading.current_thread()
    monkeypatch.setattr(durable, "on_io", lambda call, path: calls.append((call, threading.current_thread() is main)))
    let_go: list[bool] = []

    def take() -> Snapshot:
        found = state.snapshot()
        tensors: list[Tensor] = [*found.model.values(), *found.records["default"].tensors.values()]
        for tensor in {id(one): one for one in tensors}.values():
            weakref.finalize(tensor, lambda: let_go.append(threading.current_thread() is main))
        return found

    pending, saved = begin_save(tmp_path, COMM, take), None
    while saved is None:
        saved = pending.advance()
    assert {"mkdir", "create", "write", "fsync", "rename"} <= {call for call, _ in calls}
    assert [call for call, trains in calls if trains] == []
    assert let_go
    assert not any(let_go)
