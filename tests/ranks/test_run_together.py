"""A training run of two ranks: what a window costs, and that no rank waits for one that failed or that stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.errors import CheckpointError
from shardrun.run.build import build
from shardrun.run.state import restore
from shardrun.run.tether import Tether
from shardrun.run.worker import run_worker
from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, document, save_now, train

NET = str(RECIPES / "run_net.py")


def _job(folder: Path, sections: Mapping[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    """Three windows of four samples on two ranks."""
    base = {
        "optimizer": {"name": "sgd", "lr": 0.01},
        "train": {"steps": 3, "micro_batch_size": 2, "global_batch_size": 4},
        **(sections or {}),
    }
    config = document(folder, 2, base, NET, **args)
    folder.mkdir(parents=True, exist_ok=True)
    return {"config": config, "run_dir": str(folder), "options": {}}


def _tether(seat: Seat) -> Tether:
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "SHARDRUN_INIT_FILE": seat.init_file}
    return Tether.from_env()


# ---- what a window costs -------------------------------------------------------------------------------------------


def _operations(seat: Seat, job: dict[str, Any]) -> list[str]:
    """What is compared and gathered in the course of a run, in order."""
    found: list[str] = []

    def noting(method: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(comm: Communicator, *args: Any, **more: Any) -> Any:
            found.append(name(*args))
            return method(comm, *args, **more)

        return call

    Communicator.compare = noting(Communicator.compare, lambda what, *_: str(what))  # type: ignore[method-assign]
    Communicator.gather_slices = noting(  # type: ignore[method-assign]
        Communicator.gather_slices, lambda bucket, own: f"gather {own.dtype} {own.numel()}"
    )
    assert run_worker(job, _tether(seat)) == 0
    return found


def test_the_log_of_a_window_costs_one_comparison_and_one_gather(tmp_path: Path) -> None:
    for found in run_ranks(2, _operations, _job(tmp_path), open_comm=False, debug="OFF"):
        second, third = (found.index(f"log of step {step}") for step in (2, 3))
        window = found[second:third]
        assert window[:2] == ["log of step 2", "gather torch.float64 1"]
        compared = [name for name in window if not name.startswith("gather")]
        assert compared == ["log of step 2", "window", "step 3 of default"]
        assert window.count("gather torch.float64 1") == 1


# ---- a rank that fails ---------------------------------------------------------------------------------------------


def _stay_alive(seat: Seat, job: dict[str, Any], flag: str) -> tuple[str, bool]:
    """The error, and whether the other rank came out as well while the process of the failed one was still there."""
    try:
        run_worker(job, _tether(seat))
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    Path(f"{flag}-{seat.rank}").touch()
    deadline = time.monotonic() + 10
    while not (freed := Path(f"{flag}-{1 - seat.rank}").exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return error, freed


@pytest.mark.parametrize(
    ("fault", "sections", "told"),
    [
        ("metrics", {"eval": {"every": 1}}, "no metric today"),
        ("on_save", {"checkpoint": {"every": 1}}, "no export today"),
    ],
)
def test_a_hook_that_raises_on_one_rank_frees_the_other_at_once(
    tmp_path: Path, fault: str, sections: dict[str, Any], told: str
) -> None:
    job = _job(tmp_path / "run", sections, fault=fault)
    ended = run_ranks(2, _stay_alive, job, str(tmp_path / "out"), open_comm=False, debug="OFF")
    assert [freed for _, freed in ended] == [True, True]
    assert ended[0][0] == f"ValueError: {told}"
    assert ended[1][0].startswith(("CommunicatorError: ", "StepFailed: "))


def _restore_with_a_broken_stream(comm: Communicator, job: dict[str, Any], broken: int) -> tuple[str, bool]:
    """The refusal, and whether all that the model holds is as it was before."""
    from shardrun.checkpoint.load import load

    built = build(from_mapping(job["config"]), comm)
    saved = save_now(built, Path(job["run_dir"]), 1)
    loaded = load(saved.path, comm, {})
    assert loaded is not None
    if comm.rank == broken:
        del loaded.rank_state["rng/torch"]
    live = [*built.model.parameters(), *built.model.buffers()]
    with torch.no_grad():
        before = [tensor.add_(1).clone() for tensor in live]
    with pytest.raises(CheckpointError) as caught:
        restore(built, loaded)
    return str(caught.value), all(torch.equal(tensor, old) for tensor, old in zip(live, before, strict=True))


def test_a_stream_that_does_not_fit_on_one_rank_is_refused_by_all_before_anything_is_replaced(tmp_path: Path) -> None:
    told = "rank 1: checkpoint step-0000000001 does not fit: random stream rng/torch: missing"
    assert run_ranks(2, _restore_with_a_broken_stream, _job(tmp_path), 1) == [(told, True)] * 2


# ---- a wish to stop ------------------------------------------------------------------------------------------------


def _stop_in_validation(seat: Seat, job: dict[str, Any]) -> tuple[int, list[str]]:
    """Rank 1 hears of the wish while the first validation is under way."""
    tether = _tether(seat)
    if seat.rank == 1:
        seen: list[str] = []
        plain_set = tether.status.set

        def watching(step: int, phase: str, collective: int) -> None:
            plain_set(step, phase, collective)
            if phase == "validation" and not seen:
                seen.append(phase)
                tether._on_signal(15, None)

        tether.status.set = watching  # type: ignore[method-assign]
    code = tether.run(lambda tied: run_worker(job, tied))
    return code, sorted(path.name for path in (Path(job["run_dir"]) / "checkpoints").glob("step-*"))


def test_a_wish_to_stop_during_a_validation_is_heard_at_its_end(tmp_path: Path) -> None:
    sections = {"eval": {"every": 2}, "train": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 4}}
    job = _job(tmp_path, sections)
    ended = run_ranks(2, _stop_in_validation, job, open_comm=False, debug="OFF")
    assert ended == [(75, ["step-0000000001", "step-0000000002"])] * 2
    assert train(job["config"]).codes == [0, 0]
