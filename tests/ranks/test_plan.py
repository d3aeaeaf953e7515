"""A plan against what real runs measure: memory of every rank, files of a checkpoint, bytes that are sent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardrun as sr
from shardrun.comm.shared_memory import Place
from shardrun.config.load import from_mapping, load
from shardrun.config.schema import Config
from shardrun.run.plan import Planned, plan
from tests.support.launching import ROOT
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, Trained, document, trained

pytestmark = pytest.mark.sample(6)

_QUICK = [
    "train.steps=1",
    "eval.every=null",
    "eval.at_end=false",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
]
_BF16 = ["precision.parameters=bf16"]
_SGD = "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"
_ADAMW1 = "optimizer={name: adamw, lr: 0.1, strategy: zero1}"
_OTHER = ["topology.world_size=3", "topology.axes={}", "groups.experts.replicas=[[0, 1, 2]]"]

CASES = {
    "quickstart": ("quickstart", _QUICK),
    "quickstart bf16": ("quickstart", [*_QUICK, *_BF16]),
    "quickstart bf16 without masters": ("quickstart", [*_QUICK, *_BF16, "precision.master_weights=false"]),
    "quickstart over sockets": ("quickstart", [*_QUICK, "topology.shared_memory=false"]),
    "quickstart kept": ("quickstart", [*_QUICK, "train.stream_gradients=false"]),
    "quickstart on 3": ("quickstart", [*_QUICK, "topology.world_size=3"]),
    "sgd": ("quickstart", [*_QUICK, *_BF16, _SGD]),
    "owners": ("quickstart", [*_QUICK, *_BF16, _ADAMW1]),
    "subset": ("subset", _QUICK),
    "single": ("single", [*_QUICK, "train.epochs=null"]),
    "muon": ("muon", _QUICK),
    "muon bf16 on 3": ("muon", [*_QUICK, *_BF16, "topology.world_size=3"]),
    "moe": ("moe", [*_QUICK]),
    "moe bf16": ("moe", [*_QUICK, *_BF16]),
    "moe 1 x 2": ("moe", [*_QUICK, "topology.world_size=2", "topology.axes={replicas: 1, experts: 2}"]),
    "moe on 3 without an axis": ("moe", [*_QUICK, *_OTHER]),
    "sharded sums": ("quickstart", [*_QUICK, "train.accumulate=sharded"]),
}  # fmt: skip


def settings_of(name: str, folder: Path) -> Config:
    config, words = CASES[name]
    return load(ROOT / "configs" / f"{config}.yaml", [*words, f"run.dir={folder}"])


def start_of(done: Trained) -> dict[str, Any]:
    return next(event for event in done.events if event["event"] == "start")


def measured(table: Mapping[str, Any]) -> list[dict[str, int | str]]:
    """Rows of the memory table of a start, the rank and its weights filled in where they are not written again."""
    rows: list[dict[str, int | str]] = []
    for row in table["rows"]:
        one = {
            head: int(cell.replace(",", "")) if cell and head not in ("bytes", "group") else cell
            for head, cell in zip(table["columns"], row, strict=True)
        }
        rows.append({**one, **({} if one["weights"] != "" else {"weights": rows[-1]["weights"]})})
    return rows


def rows_of(planned: Planned) -> list[dict[str, int | str]]:
    several = len(planned.config.parts) > 1
    return [
        {
            "bytes": f"rank {rank}",
            **({"group": name} if several else {}),
            "weights": place.weights,
            "gradients": held.pending,
            "slices in a step": held.in_step,
            "optimizer state": held.state,
        }
        for rank, place, groups in planned.ranks()
        for name, held in groups.items()
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_run_holds_and_saves_what_was_planned(name: str, tmp_path: Path) -> None:
    config = settings_of(name, tmp_path)
    planned = plan(config)
    done = trained(config.model_dump(mode="json"))
    start = start_of(done)
    assert measured(next(table for table in start["tables"] if table["title"] == "memory")) == rows_of(planned)
    assert start["transport"] == planned.transport
    folder = done.checkpoint(1)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.safetensors")}
    assert sizes.keys() == {file.path for file in planned.files}
    for file in planned.files:
        if file.role == "state":  # python's random stream is written in decimal digits
            assert sizes[file.path] == pytest.approx(file.bytes, rel=0.005)
        else:
            assert sizes[file.path] == file.bytes, file.path


def test_state_that_only_an_update_shows_is_not_claimed(tmp_path: Path) -> None:
    own = {"factory": "Rows", "kind": "matrix", "lr": 0.01, "takes": "matrices"}
    config = document(tmp_path, 2, {"optimizer": own}, str(RECIPES / "own_optimizer.py"))
    planned = plan(from_mapping(config))
    assert planned.notes == ["the state of Rows is not known before its first update, and not counted"]
    tables = start_of(trained(config))["tables"]
    assert measured(next(table for table in tables if table["title"] == "memory")) == rows_of(planned)


# ---- on the wire -----------------------------------------------------------------------------------------------------


def _moved(comm: sr.Communicator, document: dict[str, Any]) -> tuple[int, int, int, str]:
    """Of one step: bytes that this rank sends, and reads in other ranks' memory, and rounds that it takes part in; and
    how slices travel."""
    from shardrun.run.build import build
    from shardrun.run.forward import loss_of
    from shardrun.run.groups import step_groups

    built = build(from_mapping(document), comm)
    windows = built.loader.windows(0)
    (_, share) = next(windows)
    batches = [batch for _, batch in share]
    bytes_sent, bytes_read, rounds, total = 0, 0, 0, 0
    isend, add_up, of = dist.isend, sr.Communicator.add_up, Place.of

    def counted_isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal bytes_sent
        bytes_sent += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    def counted_add_up(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return add_up(*args)

    def counted_of(place: Place, rank: int, low: int, numel: int) -> Any:
        nonlocal bytes_read
        found = of(place, rank, low, numel)
        bytes_read += found.nbytes if place._region.mapped[rank] is not None else 0
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "isend", counted_isend)
        patched.setattr(sr.Communicator, "add_up", counted_add_up)
        patched.setattr(Place, "of", counted_of)
        for number, batch in enumerate(batches, 1):
            loss, weight = loss_of(built, batch)
            total += int(weight)
            sharded, last = built.accumulates_sharded, number == len(batches)
            reducing: Any = nullcontext()
            if built.streaming is not None:
                reducing = built.streaming.window(local_weight=weight if sharded else total, last=sharded or last)
            with reducing:
                loss.backward()  # type: ignore[no-untyped-call]
        step_groups(built.groups, total, 0, built.missing, 1.0)
    return bytes_sent, bytes_read, rounds, comm.transport


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
@pytest.mark.parametrize("name", ["quickstart on 3", "sharded sums", "muon bf16 on 3", "moe"])
def test_a_step_moves_what_was_planned(name: str, shared: bool, tmp_path: Path) -> None:
    given = settings_of(name, tmp_path)
    config = given.model_copy(update={"topology": given.topology.model_copy(update={"shared_memory": shared})})
    planned = plan(config)
    found = run_ranks(planned.world_size, _moved, config.model_dump(mode="json"), debug="OFF", shared_memory=shared)
    held = [list(one.values()) for _, _, one in planned.ranks()]
    assert [sent for sent, _, _, _ in found] == [sum(g.reduce_sent + g.gather_sent for g in one) for one in held]
    assert [read for _, read, _, _ in found] == [sum(g.reduce_read + g.gather_read for g in one) for one in held]
    assert all(bool(g.reduce_read) is shared for one in held for g in one)
    # One round more is that of the log, after the step.
    assert {rounds for _, _, rounds, _ in found} == {planned.rounds - 1}
    assert {transport for *_, transport in found} == {planned.transport}
