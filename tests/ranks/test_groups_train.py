"""Several groups in one run: dense weights on all ranks, experts on some, one step over all of them."""

from __future__ import annotations

import hashlib
import os
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardrun.checkpoint.manifest import MANIFEST, read_manifest, seal
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.run.build import Built, build
from shardrun.run.model import named_tensors
from shardrun.run.plan import plan
from shardrun.run.resharding import find_source
from shardrun.run.state import resume, saved_order
from tests.golden.runs import flip
from tests.support.launching import ROOT
from tests.support.ranks import run_ranks
from tests.support.training import Trained, document, train, trained

MOE = str(ROOT / "recipes" / "moe.py")
_ARGS: dict[str, Any] = {"context": 16, "layers": 2, "width": 16, "heads": 2, "experts": 4, "top_k": 2, "balance": 0.1}
_STEPS = 50 if os.environ.get("SHARDRUN_LONG") else 6
pytestmark = pytest.mark.sample(5)
_ADAMW: dict[str, Any] = {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}


def moe(folder: Path, replicas: int, experts: int, steps: int = 6, **sections: Any) -> dict[str, Any]:
    """A tiny mixture of experts on replicas x experts ranks; the same global batches on all of them."""
    base = {
        "topology": {"axes": {"replicas": replicas, "experts": experts}},
        "groups": {
            "dense": {"select": {"exclude": ["*.experts.*"]}, "optimizer": _ADAMW},
            "experts": {"select": {"include": ["*.experts.*"]}, "replicas": "experts", "optimizer": _ADAMW},
        },
        "train": {"steps": steps, "micro_batch_size": 2, "global_batch_size": 8, "max_grad_norm": 1.0},
        "data": {"shuffle": True},
        **sections,
    }
    found = document(folder, replicas * experts, base, MOE, **{**_ARGS, **sections.get("recipe_args", {})})
    del found["optimizer"]
    return found


def model(done: Trained, step: int) -> dict[str, torch.Tensor]:
    """All tensors of the model, whichever rank wrote them."""
    files = sorted(done.checkpoint(step).glob("model*.safetensors"))
    held = [load_file(file) for file in files]
    assert sum(map(len, held)) == len(set().union(*held)), "each tensor once"
    return {name: tensor for one in held for name, tensor in one.items()}


def state(done: Trained, step: int) -> dict[str, torch.Tensor]:
    """All state of all groups by file and name."""
    folder = done.checkpoint(step)
    files = sorted(file for file in folder.glob("zero*/*/*.safetensors"))
    return {f"{file.relative_to(folder)} {name}": t for file in files for name, t in load_file(file).items()}


def test_losses_do_not_depend_on_where_the_experts_live(tmp_path: Path) -> None:
    """Up to rounding, as sums over other ranks are taken in another order; and the first ones are those in float64."""
    runs = {
        (replicas, experts): trained(moe(tmp_path / f"{replicas}x{experts}", replicas, experts, _STEPS))
        for replicas, experts in ((1, 1), (1, 2), (2, 1), (2, 2))
    }
    alone, exact = runs[1, 1], _in_float64(moe(tmp_path / "exact", 1, 1, 5))
    assert len(alone.steps) == _STEPS
    for done in runs.values():
        assert [row["loss"] for row in done.steps[:5]] == pytest.approx(exact, rel=1e-5)
        for row, twin in zip(done.steps, alone.steps, strict=True):
            assert row["loss"] == pytest.approx(twin["loss"], rel=1e-4)
            assert row["grad_norm"] == pytest.approx(twin["grad_norm"], rel=1e-3)
        held, other = model(done, _STEPS), model(alone, _STEPS)
        assert held.keys() == other.keys()
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-2, atol=1e-3)


def _in_float64(config: dict[str, Any]) -> list[float]:
    """Losses of the same windows with plain torch on one rank, everything in float64."""
    built = build(from_mapping(config), Communicator.single())
    twin = built.recipe.build_model(built.world)
    twin.load_state_dict(built.model.state_dict())
    twin.double().train()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=_ADAMW["lr"], weight_decay=_ADAMW["weight_decay"])
    losses = []
    for _, share in islice(built.loader.windows(), config["train"]["steps"]):
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for _, batch in share:
            loss_sum, weight = moe_loss(built, twin, batch)
            total, tokens = total + loss_sum, tokens + weight
        torch.autograd.backward(total / tokens)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / tokens)
    return losses


def moe_loss(built: Built, twin: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """The recipe's loss without its cast to float32, which a float64 twin does without."""
    inputs, labels = batch
    logits = twin(inputs).flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    for module in twin.modules():
        balance = getattr(module, "balance_loss", None)
        total = total if balance is None else total + _ARGS["balance"] * balance()
    return total, int((labels != -100).sum())


def test_a_resume_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    straight = trained(moe(tmp_path / "straight", 2, 2))
    trained(moe(tmp_path / "resumed", 2, 2), stop_at=3)
    resumed = trained(moe(tmp_path / "resumed", 2, 2))
    assert resumed.steps == straight.steps
    for look in (model, state):
        held, twin = look(resumed, 6), look(straight, 6)
        assert held.keys() == twin.keys()
        assert all(torch.equal(tensor, twin[name]) for name, tensor in held.items())


def test_each_expert_is_saved_once_and_its_state_is_cut_over_those_who_hold_it(tmp_path: Path) -> None:
    done = trained(moe(tmp_path, 2, 2, steps=1))
    files = sorted(str(file.relative_to(done.checkpoint(1))) for file in done.checkpoint(1).rglob("*.safetensors"))
    assert [file for file in files if not file.startswith("state")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        *(f"zero2/dense/rank-{rank:05d}-of-00004.safetensors" for rank in range(4)),
        *(f"zero2/experts-{part}/rank-{rank:05d}-of-00002.safetensors" for part in range(2) for rank in range(2)),
    ]
    experts = [name for name in model(done, 1) if ".experts." in name]
    assert len(experts) == len({*experts}) == 2 * 4 * 3


def test_strategies_and_schedules_may_differ_from_group_to_group(tmp_path: Path) -> None:
    """Muon for the dense matrices, whole with owners; AdamW for the experts, cut; and a resume of both."""
    muon = {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 3e-3, "match": ["embed.*"]}}
    groups = {
        "dense": {"select": {"exclude": ["*.experts.*"]}, "optimizer": muon},
        "experts": {
            "select": {"include": ["*.experts.*"]},
            "replicas": "experts",
            "optimizer": _ADAMW,
            "schedule": {"name": "linear", "warmup_steps": 2},
        },
    }
    straight = trained(moe(tmp_path / "straight", 2, 2, 4, groups=groups))
    trained(moe(tmp_path / "resumed", 2, 2, 4, groups=groups), stop_at=2)
    resumed = trained(moe(tmp_path / "resumed", 2, 2, 4, groups=groups))
    assert resumed.steps == straight.steps
    held, twin = state(resumed, 4), state(straight, 4)
    assert {name.split("/")[0] for name in held} == {"zero1", "zero2"}
    assert held.keys() == twin.keys()
    assert all(torch.equal(tensor, twin[name]) for name, tensor in held.items())


def test_an_expert_without_a_token_stands_still(tmp_path: Path) -> None:
    """Eight experts for few tokens: in a window without any for it, one is neither updated nor decayed nor counted."""
    few = {"experts": 8, "top_k": 1, "context": 1, "layers": 1, "balance": 0.0}
    train_section = {"steps": 4, "micro_batch_size": 1, "global_batch_size": 2}
    every = {"every": 1, "keep": 4}
    done = trained(moe(tmp_path, 1, 2, recipe_args=few, train=train_section, checkpoint=every))
    states, models = ([look(done, step) for step in range(1, 5)] for look in (whole, model))
    stood = moved = 0
    for (before, now), (old_model, new_model) in zip(pairwise(states), pairwise(models), strict=True):
        for name, count in now.items():
            path, _, key = name.rpartition("/")
            if ".experts." not in path or key != "step":
                continue
            still = torch.equal(count, before[name])
            stood, moved = stood + still, moved + (not still)
            assert torch.equal(new_model[path], old_model[path]) == still
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(now[f"{path}/{moment}"], before[f"{path}/{moment}"]) == still
    assert stood > moved > 0


def test_ranks_with_fewer_micro_batches_go_through_the_model_as_often(tmp_path: Path) -> None:
    """Three micro-batches for two ranks that exchange tokens; validation too."""
    uneven = {"steps": 3, "micro_batch_size": 2, "global_batch_size": 6}
    some = {"at_end": True, "max_samples": 5}
    done = trained(moe(tmp_path / "two", 1, 2, train=uneven, eval=some))
    alone = trained(moe(tmp_path / "one", 1, 1, train=uneven, eval=some))
    for row, twin in zip(done.steps, alone.steps, strict=True):
        assert row["loss"] == pytest.approx(twin["loss"], rel=1e-5)
    assert done.rows[-1]["val_loss"] == pytest.approx(alone.rows[-1]["val_loss"], rel=1e-5)


def test_a_replica_of_an_expert_that_changes_is_found(tmp_path: Path) -> None:
    path = "blocks.0.moe.experts.2.up.weight"
    config = moe(tmp_path, 2, 2, train={"steps": 4, "micro_batch_size": 2, "global_batch_size": 8})
    config["train"]["check_replicas_every"] = 1
    done = train(config, fault=f"lie rank 3 about parameter {path} at forward of step 2")
    assert set(done.codes) == {1}
    for error in done.errors:
        assert error.startswith(f"DivergenceError: step 2 is not made, because {path} is not the same on all ranks: ")
        assert "rank 1 and rank 3 differ" in error


_NUMBERED_BY_RANK = f"""
import sys
sys.path.insert(0, {str(ROOT / "recipes")!r})
import torch
import moe
from moe import Args, build_data, loss

def build_model(args, world):
    model = moe.build_model(args, world)
    for module in model.modules():
        if isinstance(module, moe.Moe):
            module.experts = torch.nn.ModuleDict({{str(n): one for n, one in enumerate(module.experts.values())}})
    return model
"""
_GLOBAL_NAME = """
def global_name(path, world):
    if ".experts." not in path:
        return path
    before, _, after = path.partition(".experts.")
    number, _, rest = after.partition(".")
    return f"{before}.experts.{int(number) + 2 * world.coordinates['experts']}.{rest}"
"""


def test_parts_that_are_numbered_by_rank_are_known_by_their_global_name(tmp_path: Path) -> None:
    """As if the model had had these names: in selections, messages and checkpoints. Without it they are refused."""
    recipe = tmp_path / "by_rank.py"
    recipe.write_text(_NUMBERED_BY_RANK)
    config = {**moe(tmp_path / "numbered", 1, 2, steps=2), "recipe": str(recipe)}
    refused = train(config)
    assert set(refused.codes) == {2}
    told = "blocks.0.moe.experts.0.down.weight is trained by experts-0 and by experts-1, which are on different ranks"
    assert all(told in error for error in refused.errors), refused.errors
    recipe.write_text(_NUMBERED_BY_RANK + _GLOBAL_NAME)
    numbered, plain = trained(config), trained(moe(tmp_path / "plain", 1, 2, steps=2))
    assert numbered.steps == plain.steps
    planned = {file.path: file.bytes for file in plan(from_mapping(config)).files if file.role != "state"}
    assert planned == {path: (numbered.checkpoint(2) / path).stat().st_size for path in planned}
    for look in (model, state):
        held, twin = look(numbered, 2), look(plain, 2)
        assert held.keys() == twin.keys()
        assert all(torch.equal(tensor, twin[name]) for name, tensor in held.items())
    elsewhere = trained({**moe(tmp_path / "numbered", 2, 1, steps=3)}, reshard=True, accept_changes=True)
    assert elsewhere.steps[-1]["step"] == 3


_UNLIKE = f"""
import sys
sys.path.insert(0, {str(ROOT / "recipes")!r})
import torch
import moe
from moe import Args, build_data, loss

def build_model(args, world):
    model = moe.build_model(args, world)
    if world.rank == 3:
        model.blocks[0].moe.experts["2"].up.weight = torch.nn.Parameter(torch.ones(2, 2))
    return model
"""


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"dense": {"optimizer": _ADAMW}},
            ".up.weight is selected by dense and by experts; exclude it from one of them",
        ),
        (
            {"dense": {"select": {"exclude": ["*.expert.*"]}, "optimizer": _ADAMW}},
            "groups.dense.select: '*.expert.*' matches none of",
        ),
        (
            {"experts": {"select": {"include": ["*.experts.*"]}, "optimizer": _ADAMW}},
            "the ranks select different parameters",
        ),
    ],
)
def test_groups_that_cannot_be_meant_are_refused_by_all(tmp_path: Path, groups: dict[str, Any], said: str) -> None:
    config = moe(tmp_path, 1, 2)
    done = train({**config, "groups": {**config["groups"], **groups}})
    assert set(done.codes) == {2}
    assert all(said in error for error in done.errors), done.errors


def test_records_that_do_not_fit_are_refused_together_whichever_group_they_are_of(tmp_path: Path) -> None:
    """Well sealed, but some of the state is not there."""
    asked = moe(tmp_path / "run", 1, 2)
    checkpoint = trained(asked, stop_at=2).checkpoint(2)
    manifest, _ = read_manifest(checkpoint)
    lost = []
    for entry in (one for one in manifest["files"] if one["role"] == "record"):
        path = checkpoint / entry["path"]
        tensors = load_file(path)
        lost.append(next(name for name in sorted(tensors) if name.endswith("/exp_avg")))
        del tensors[lost[-1]]
        path.unlink()
        save_file(tensors, path)
        entry |= {"bytes": path.stat().st_size, "hash": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"}
    (checkpoint / MANIFEST).write_bytes(seal({key: value for key, value in manifest.items() if key != "digest"}))
    refused = train(asked)
    assert set(refused.codes) == {3}
    told = "".join(refused.errors)
    assert len(lost) == 4
    assert [name for name in lost if f"{name}: expected, not in the record" not in told] == []


def test_what_one_replica_set_refuses_is_told_to_the_others(tmp_path: Path) -> None:
    """At set-up ranks 1 and 3 raise together; ranks 0 and 2 are elsewhere, and no step has begun that would tell."""
    recipe = tmp_path / "unlike.py"
    recipe.write_text(_UNLIKE)
    done = train({**moe(tmp_path, 2, 2, steps=1), "recipe": str(recipe)})
    assert done.codes == [1, 2, 1, 2]
    for rank in (0, 2):
        assert "ContractError: the ranks select different parameters" in done.errors[rank], done.errors[rank]


# ---- other places ----------------------------------------------------------------------------------------------------


def whole(done: Trained, step: int) -> dict[str, torch.Tensor]:
    """All state by path and key, put together from the ranks' fragments."""
    manifest, _ = read_manifest(done.checkpoint(step))
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for entry in manifest["files"]:
        if entry["role"] == "record":
            for name, tensor in load_file(done.checkpoint(step) / entry["path"]).items():
                start = entry["fragments"][name.rpartition("/")[0]][0]
                pieces.setdefault(name, []).append((start, tensor))
    return {
        name: held[0][1] if held[0][1].dim() == 0 else torch.cat([t for _, t in sorted(held, key=lambda one: one[0])])
        for name, held in pieces.items()
    }


def _taken_up(comm: Communicator, job: dict[str, Any]) -> list[tuple[str, int, torch.Tensor]]:
    """(name, first element, elements) of all that a rank holds after it has gone on from a checkpoint elsewhere."""
    source = find_source(comm, job)
    built = build(from_mapping(job["config"]), comm, saved_order(comm, source))
    resume(built, job, source)
    held = [(f"model {name}", 0, tensor) for name, tensor in named_tensors(built.model).items()]
    for group in built.groups:
        record = group.sharded.to_record()
        for name, tensor in record.tensors.items():
            held.append((name, record.meta["fragments"][name.rpartition("/")[0]][0], tensor))
    return [(name, start, tensor.detach().clone()) for name, start, tensor in held]


def _together(ranks: list[list[tuple[str, int, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The whole tensors; replicas have to hold the same."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for held in ranks:
        for name, start, tensor in held:
            same = pieces.setdefault(name, {}).setdefault(0 if tensor.dim() == 0 else start, tensor)
            assert torch.equal(same, tensor), name
    return {
        name: held[0] if held[0].dim() != 1 or len(held) == 1 else torch.cat([t for _, t in sorted(held.items())])
        for name, held in pieces.items()
    }


@pytest.mark.parametrize(
    ("saved", "replicas", "experts"), [((2, 2), 2, 1), ((2, 2), 1, 4), ((2, 2), 1, 2), ((1, 2), 2, 2), ((1, 1), 1, 4)]
)
def test_experts_move_to_other_ranks_with_all_their_state(
    tmp_path: Path, saved: tuple[int, int], replicas: int, experts: int
) -> None:
    """To the bit; it has to be asked for; and training goes on from there."""
    before = trained(moe(tmp_path / "before", *saved, steps=4), stop_at=2)
    config = moe(tmp_path / "before", replicas, experts, steps=4)
    refused = train(config)
    assert set(refused.codes) <= {2, 3}
    assert all("--reshard" in error for error in refused.errors), refused.errors
    job = {"config": config, "run_dir": str(tmp_path / "before"), "options": {"reshard": True}}
    held = _together(run_ranks(replicas * experts, _taken_up, job))
    wanted = {**{f"model {name}": t for name, t in model(before, 2).items()}, **whole(before, 2)}
    assert wanted.keys() == {name for name in held if name != "model head.weight"}
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
    assert [row["step"] for row in trained(config, reshard=True).steps][-2:] == [3, 4]


def test_what_does_not_fit_is_not_regrouped(tmp_path: Path) -> None:
    done = trained(moe(tmp_path, 1, 2, steps=2), stop_at=1)
    wider = moe(tmp_path, 2, 1, recipe_args={"width": 32})
    refused = train(wider, reshard=True, accept_changes=True)
    assert set(refused.codes) == {3}
    assert "blocks.0.attn.out.weight: shape saved [16, 16], this run [32, 32]" in refused.errors[0]
    file = next(done.checkpoint(1).glob("zero2/experts-1/rank-00000-*"))
    flip(file, 8 * file.stat().st_size - 3)
    damaged = train(moe(tmp_path, 2, 1), reshard=True)
    assert set(damaged.codes) == {3}
    assert "its content was changed" in damaged.errors[0]
