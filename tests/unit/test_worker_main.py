"""What a rank does before its part of the job begins."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import pytest

from shardrun.run.tether import Tether
from shardrun.run.worker_main import work


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("thawed")
def test_modules_are_loaded_without_collections_and_left_out_of_all_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}

    class Loading(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name != "run_worker":
                raise AttributeError(name)
            seen["loading"] = gc.isenabled()
            return run_worker

    def run_worker(job: Mapping[str, Any], tether: Tether) -> int:
        seen["running"] = gc.isenabled()
        return len(job)

    monkeypatch.setitem(sys.modules, "shardrun.run.worker", Loading("shardrun.run.worker"))
    assert gc.get_freeze_count() == 0
    assert work({"config": {}}, cast(Tether, None)) == 1
    assert seen == {"loading": False, "running": True}
    assert gc.get_freeze_count() > 1000
