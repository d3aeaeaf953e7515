"""Saving and restoring live state on one rank: what is refused leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardrun.checkpoint.load import Loaded, load
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.data import seeding
from shardrun.data.seeding import rng_states, seed_all
from shardrun.errors import CheckpointError, DivergenceError
from shardrun.records.tensors import tensors_sha256
from shardrun.run.build import Built, build
from shardrun.run.model import distinct_parameters, named_buffers
from shardrun.run.progress import Progress
from shardrun.run.replicas import FORMER_CHUNK, digests_of, joint_digest, parameter_digests
from shardrun.run.state import Lineage, restore, snapshot_aside, snapshot_of
from tests.support.training import RECIPES, document, save_now


def _built(folder: Path, **sections: Any) -> Built:
    config = document(folder, 1, {"optimizer": {"name": "adamw", "lr": 0.1}, **sections}, str(RECIPES / "run_net.py"))
    built = build(from_mapping(config), Communicator.single())
    batch = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])
    built.recipe.loss(built.model, batch, built.world)[0].backward()  # type: ignore[no-untyped-call]
    built.groups[0].sharded.step(local_weight=2)
    return built


def _saved(built: Built, folder: Path) -> Loaded:
    saved = save_now(built, folder, 1)
    loaded = load(saved.path, built.comm, {})
    assert loaded is not None
    return loaded


def _everything(built: Built) -> dict[str, Tensor]:
    live = {
        **distinct_parameters(built.model),
        **named_buffers(built.model),
        **built.groups[0].sharded.to_record().tensors,
    }
    return {name: tensor.detach().clone() for name, tensor in {**live, **rng_states()}.items()}


def _moved_on(built: Built) -> dict[str, Tensor]:
    """Change all that a restore replaces; returns what it is now."""
    with torch.no_grad():
        for tensor in [*built.model.parameters(), *built.model.buffers()]:
            tensor.add_(1)
    seed_all(99)
    return _everything(built)


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_digest_is_of_parameters_alone_each_once(tmp_path: Path) -> None:
    built = _built(tmp_path)

    def digest() -> str:
        snapshot = snapshot_of(built, Progress(step=1), Lineage("run", "attempt", None, None))
        assert snapshot.param_sha256 is not None
        return snapshot.param_sha256(snapshot.model)

    before = digest()
    with torch.no_grad():
        for buffer in built.model.buffers():  # of a module under two names, the first of which is not the sorted one
            buffer.add_(1)
        assert digest() == before
        built.model.get_parameter("norm_b.bias").add_(1)
    assert digest() != before


def test_what_changes_after_it_was_set_aside_is_not_saved_or_is_told(tmp_path: Path) -> None:
    """Forward may change buffers before the rest is copied; a parameter that it changes ends the save."""
    built = _built(tmp_path)
    before = _everything(built)
    lineage = Lineage("run", "attempt", None, None)
    take = snapshot_aside(built, Progress(step=1), lineage, parameter_digests(built.model))
    with torch.no_grad():
        for buffer in built.model.buffers():
            buffer.add_(1)
    seed_all(99)
    saved = take()
    assert saved.param_sha256 is not None
    saved.param_sha256(saved.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.model.items())
    assert all(torch.equal(tensor, before[name.removeprefix("buffer/")]) for name, tensor in saved.rank_state.items())
    live = {tensor.data_ptr() for tensor in [*built.model.parameters(), *built.model.buffers()]}
    assert live.isdisjoint(tensor.data_ptr() for tensor in [*saved.model.values(), *saved.rank_state.values()])

    take = snapshot_aside(built, Progress(step=1), lineage, parameter_digests(built.model))
    with torch.no_grad():
        built.model.get_parameter("norm_b.bias").add_(1)
    torn = take()
    assert torn.param_sha256 is not None
    with pytest.raises(DivergenceError, match=r"norm_a.bias \(1 of .* has changed since it was compared"):
        torn.param_sha256(torn.model)


def test_a_save_in_the_foreground_reads_live_state_and_a_record_of_the_library_is_a_copy(tmp_path: Path) -> None:
    built = _built(tmp_path)
    (group,) = built.groups
    kept = group.sharded.to_record().tensors
    saved = (
        snapshot_of(built, Progress(step=1), Lineage("run", "attempt", None, None)).records[group.record_name].tensors
    )
    assert _same(saved, kept)
    for state in group.sharded.stepper.optimizer.state.values():
        for value in state.values():
            value.add_(1)
    assert _same(group.sharded.to_record().tensors, {name: tensor + 1 for name, tensor in kept.items()})
    assert [name for name in kept if name.endswith("/exp_avg") and torch.equal(saved[name], kept[name])] == []


def test_parameters_are_those_that_were_compared_at_the_save(tmp_path: Path) -> None:
    built = _built(tmp_path)
    loaded = _saved(built, tmp_path)
    names = distinct_parameters(built.model)
    parameters = {name: loaded.model[name] for name in names}
    for of_format_1 in (joint_digest(digests_of(parameters, FORMER_CHUNK)), tensors_sha256(parameters)):
        loaded.manifest["param_sha256"] = of_format_1
        restore(built, loaded)
    loaded.manifest["param_sha256"] = "0" * 64
    with pytest.raises(CheckpointError, match=r"its parameters \(digest .* are not those that the ranks agreed on"):
        restore(built, loaded)


def test_a_restore_brings_everything_back(tmp_path: Path) -> None:
    built = _built(tmp_path)
    before = _everything(built)
    loaded = _saved(built, tmp_path)
    assert not _same(_moved_on(built), before)
    assert restore(built, loaded) == Progress(step=1)
    assert _same(_everything(built), before)


def _broken(loaded: Loaded, name: str, state: Tensor | None) -> None:
    loaded.rank_state.pop(name, None)
    if state is not None:
        loaded.rank_state[name] = state


@pytest.mark.parametrize(
    ("name", "state", "told"),
    [
        ("rng/numpy", None, "random stream rng/numpy: missing"),
        ("rng/torch", torch.zeros(3, dtype=torch.uint8), "random stream rng/torch: "),
        ("rng/other", torch.zeros(3, dtype=torch.uint8), "random stream rng/other: unknown"),
        pytest.param(
            "rng/cuda",
            torch.zeros(16, dtype=torch.uint8),
            "random stream rng/cuda: saved from a CUDA device, and there is none here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA"),
        ),
    ],
)
def test_streams_that_do_not_fit_are_refused_before_anything_is_replaced(
    tmp_path: Path, name: str, state: Tensor | None, told: str
) -> None:
    built = _built(tmp_path)
    loaded = _saved(built, tmp_path)
    _broken(loaded, name, state)
    before = _moved_on(built)
    with pytest.raises(CheckpointError, match=f"checkpoint step-0000000001 does not fit: {told}"):
        restore(built, loaded)
    assert _same(_everything(built), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_stream_of_a_device_that_is_not_here_is_left_out_if_that_is_accepted(tmp_path: Path) -> None:
    built = _built(tmp_path)
    before = _everything(built)
    loaded = _saved(built, tmp_path)
    loaded.rank_state["rng/cuda"] = torch.zeros(16, dtype=torch.uint8)
    _moved_on(built)
    restore(built, loaded, other_device=True)
    assert _same(_everything(built), before)
    assert built.notes[-1] == "rng/cuda of the checkpoint is left out: there is no CUDA device here"


def test_a_stream_that_the_checkpoint_lacks_is_the_devices_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = _built(tmp_path)
    loaded = _saved(built, tmp_path)
    cuda = torch.Generator()  # stands for the device's
    monkeypatch.setattr(seeding, "_uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", cuda.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", cuda.set_state)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": cuda.clone_state())
    before = cuda.get_state()
    with pytest.raises(CheckpointError, match="random stream rng/cuda: missing"):
        restore(built, loaded)
    restore(built, loaded, other_device=True)
    assert torch.equal(cuda.get_state(), before)
    assert built.notes[-1].startswith("rng/cuda is not in the checkpoint")
    loaded.rank_state["rng/torch"] = torch.zeros(3, dtype=torch.uint8)  # what else is wrong is still refused
    with pytest.raises(CheckpointError, match="random stream rng/torch"):
        restore(built, loaded, other_device=True)
