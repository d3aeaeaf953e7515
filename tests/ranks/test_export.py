"""Checkpoints in the forms of others: read by their own libraries, with the same bits."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.export import Exported, export_hf, export_safetensors
from shardrun.checkpoint.export_torch import export_torch
from shardrun.checkpoint.import_model import import_model
from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.manifest import MANIFEST, read_manifest, seal
from shardrun.checkpoint.reshard import reshard
from shardrun.checkpoint.snapshot import ModelParts, model_specs
from shardrun.comm.communicator import Communicator
from shardrun.errors import CheckpointError, ConfigError, UsageError
from shardrun.run.recipe import load_recipe
from tests.golden import state
from tests.golden.runs import flip, put
from tests.support.ranks import run_ranks
from tests.support.training import RECIPES, Trained, document, trained

pytestmark = pytest.mark.sample(5)

ADAMW = {"name": "adamw", "lr": 0.1, "options": [{"match": ["l2"], "weight_decay": 0.0, "lr_scale": 0.5}]}


def two_layers(run_dir: Path, steps: int = 2, world_size: int = 2) -> dict[str, Any]:
    sections = {"optimizer": ADAMW, "train": {"steps": steps, "global_batch_size": 2}}
    return document(run_dir, world_size, sections, str(RECIPES / "train_two_layers.py"))


def gpt(run_dir: Path, optimizer: dict[str, Any], **precision: str) -> Trained:
    (run_dir.parent / "text.txt").write_text("to be, or not to be, that is the question. " * 60)
    sections = {"optimizer": optimizer, "train": {"steps": 2, "global_batch_size": 2}, "precision": precision}
    args = {"layers": 1, "width": 16, "heads": 2, "context": 8, "text": str(run_dir.parent / "text.txt")}
    return trained(document(run_dir, 2, sections, str(RECIPES.parents[2] / "recipes" / "gpt.py"), **args))


def loaded(done: Exported) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(done.path / "checkpoint.pt", weights_only=True)
    return found


# ---- torch -----------------------------------------------------------------------------------------------------------


def test_plain_torch_goes_on_from_the_exported_state_with_the_same_bits(tmp_path: Path) -> None:
    begun = trained(two_layers(tmp_path / "run"), stop_at=1)
    saved = loaded(export_torch(begun.checkpoint(1), tmp_path / "out"))
    assert (saved["step"], saved["counters"]["updates"], saved["masters"]) == (1, 1, {})
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty(3)) for name in ("l1", "l2")})
    model.load_state_dict(saved["model"])
    groups = saved["optimizer"]["param_groups"]
    assert [(one["params"], one["lr"], one["weight_decay"]) for one in groups] == [
        (["l1"], 0.1, 0.01),
        (["l2"], 0.05, 0.0),
    ]
    optimizer = torch.optim.AdamW([{"params": [model[name] for name in one["params"]]} for one in groups])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    model["l1"].grad, model["l2"].grad = torch.ones(3), torch.full((3,), 5.0)
    optimizer.step()
    wanted = trained(two_layers(tmp_path / "run")).model(2)
    assert all(torch.equal(model[name], wanted[name]) for name in ("l1", "l2"))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw", "lr": 0.01},
        {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 1e-3, "match": ["embed.*"]}},
    ],
    ids=["adamw", "muon"],
)
def test_state_is_whole_by_name_in_the_shape_of_the_parameter(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    run = gpt(tmp_path / "run", optimizer, parameters="bf16")
    saved = loaded(export_torch(run.checkpoint(2), tmp_path / "out"))
    model = safetensors.torch.load_file(run.checkpoint(2) / "model.safetensors")
    assert saved["model"].keys() == model.keys() | {"head.weight"}
    assert saved["model"]["head.weight"].data_ptr() == saved["model"]["embed.weight"].data_ptr()
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in model.items())
    live = run.state(2)
    for name, tensor in live.items():
        path, _, key = name.rpartition("/")
        held = saved["masters"][path] if key == "master" else saved["optimizer"]["state"][path][key]
        assert held.shape == (model[path].shape if tensor.dim() else ()), name
        assert torch.equal(held.reshape(-1), tensor.reshape(-1)), name
    by_name = [saved["masters"], *saved["optimizer"]["state"].values()]
    again = [held for name, held in saved["optimizer"]["state"].items() if name == "head.weight"]
    assert len(live) == sum(map(len, by_name)) - sum(map(len, again)) - len({"head.weight"} & saved["masters"].keys())
    assert saved["masters"].keys() == saved["model"].keys()
    groups = saved["optimizer"]["param_groups"]
    assert sorted(path for one in groups for path in one["params"]) == sorted(saved["model"])
    if optimizer["name"] == "muon":
        assert [(one["optimizer"], one["lr"]) for one in groups] == [("muon", 0.02), ("adamw", 1e-3)]
        assert "embed.weight" in groups[1]["params"]


def test_ties_and_the_groups_of_a_config_are_known_to_torch(tmp_path: Path) -> None:
    """Which of two tied names torch asks for is up to the model."""
    recipe = tmp_path / "tied.py"
    recipe.write_text(TIED)
    groups = {
        "first": {"select": {"include": ["w", "again"]}, "optimizer": {"name": "adamw", "lr": 0.25}},
        "second": {"select": {"include": ["scale"]}, "optimizer": {"name": "adamw", "lr": 0.125, "weight_decay": 0}},
    }
    asked = document(tmp_path / "run", 1, {"groups": groups, "train": {"steps": 2, "micro_batch_size": 1}}, str(recipe))
    del asked["optimizer"]
    saved = loaded(export_torch(trained(asked).checkpoint(2), tmp_path / "out"))
    made: dict[str, Any] = {}
    exec(TIED, made)
    model = made["build_model"](None)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW([{"params": [model.w]}, {"params": [model.scale]}])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    assert [(one["lr"], one["weight_decay"]) for one in optimizer.param_groups] == [(0.25, 0.01), (0.125, 0)]
    state = optimizer.state[model.w]
    assert torch.equal(state["exp_avg"], saved["optimizer"]["state"]["w"]["exp_avg"])
    assert torch.equal(state["exp_avg"], saved["optimizer"]["state"]["again"]["exp_avg"])
    assert state["step"] == 2


TIED = """
import torch
from pydantic import BaseModel
from torch.utils.data import TensorDataset


class Args(BaseModel):
    pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4, 4))
        self.again = self.w
        self.scale = torch.nn.Parameter(torch.tensor(2.0))


def build_model(args):
    return Net()


def build_data(args, split):
    return TensorDataset(torch.arange(32.0).reshape(8, 4))


def loss(model, batch):
    return (batch[0] @ model.w * model.scale).sum(), len(batch[0])
"""


def test_it_does_not_matter_how_many_ranks_have_saved(tmp_path: Path) -> None:
    begun = trained(two_layers(tmp_path / "run"), stop_at=1)
    first = loaded(export_torch(begun.checkpoint(1), tmp_path / "two"))
    again = loaded(export_torch(reshard(begun.checkpoint(1), tmp_path / "ckpt", 3).path, tmp_path / "three"))
    assert first["optimizer"]["param_groups"] == again["optimizer"]["param_groups"]
    for path, held in first["optimizer"]["state"].items():
        assert all(torch.equal(again["optimizer"]["state"][path][key], value) for key, value in held.items())


# ---- safetensors -----------------------------------------------------------------------------------------------------


def test_a_plain_model_is_the_very_file_and_a_start_for_another_run(tmp_path: Path) -> None:
    begun = trained(two_layers(tmp_path / "run"), stop_at=1)
    code = "import sys; sys.modules['torch'] = None; from shardrun.__main__ import main; sys.exit(main())"
    words = ["export", str(begun.run_dir), "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert (told["step"], told["files"], told["format"]) == (1, ["model.safetensors"], "safetensors")
    exported = tmp_path / "out" / "model.safetensors"
    assert exported.read_bytes() == (begun.checkpoint(1) / "model.safetensors").read_bytes()
    config = two_layers(tmp_path / "other", steps=1)
    config["init_from"] = str(exported)
    config["optimizer"] = {"name": "sgd", "lr": 1.0}
    started = trained(config).model(1)
    assert torch.equal(started["l1"], begun.model(1)["l1"] - 1)


@pytest.mark.parametrize("export", [export_safetensors, export_torch])
def test_damage_is_found_and_nothing_is_left(tmp_path: Path, export: Callable[[Path, Path], Exported]) -> None:
    source = put(tmp_path / "run")
    model = source / "model.safetensors"
    flip(model, 8 * model.stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"model.safetensors: blake3:.* its content was changed"):
        export(source, tmp_path / "out")
    model.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: is missing"):
        export(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def in_parts(comm: Communicator, run_dir: Path) -> None:
    """Rank 0 writes one half of the model, rank 1 the other."""
    made = state.snapshot(comm.rank, comm.world_size)
    names = sorted(made.model)
    parts = ModelParts(model_specs(made.model), made.aliases, [0, 1], names[comm.rank :: 2])
    aliases = {alias: name for alias, name in made.aliases.items() if name in parts.own}
    rank_state = {"buffer/mine": torch.zeros(2)}
    save(run_dir, comm, dataclasses.replace(made, parts=parts, aliases=aliases, rank_state=rank_state))


def test_a_model_in_several_files_travels_whole(tmp_path: Path) -> None:
    run_ranks(2, in_parts, tmp_path / "run")
    source = tmp_path / "run" / "checkpoints" / "step-0000000003"
    wider = reshard(source, tmp_path / "three", 3).path
    assert inspect(wider, verify=True)["good"]
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors has rank 1, which a world of 1"):
        reshard(source, tmp_path / "one", 1)
    done = export_safetensors(wider, tmp_path / "out")
    assert done.files == (
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    )  # fmt: skip
    import_model(done.path, tmp_path / "whole.safetensors")
    model = state.parameters()
    assert state.same_tensors(safetensors.torch.load_file(tmp_path / "whole.safetensors"), model) == []
    saved = loaded(export_torch(wider, tmp_path / "torch"))
    assert state.same_tensors(saved["model"], {**model, "head.weight": model["emb.weight"]}) == []


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def llama(run_dir: Path, parameters: str, **args: Any) -> Path:
    """The checkpoint of a tiny Llama."""
    pytest.importorskip("transformers", reason="the extra hf is not installed: pip install 'shardrun[hf]'")
    sections = {
        "optimizer": {"name": "adamw", "lr": 0.01},
        "train": {"steps": 2, "global_batch_size": 2},
        "precision": {"parameters": parameters},
    }
    return trained(document(run_dir, 1, sections, str(RECIPES / "hf_llama.py"), **args)).checkpoint(2)


@pytest.mark.parametrize(("tied", "parameters"), [(False, "fp32"), (True, "bf16")])
def test_transformers_opens_the_folder_and_gives_the_same_logits(tmp_path: Path, tied: bool, parameters: str) -> None:
    source = llama(tmp_path / "run", parameters, tied=tied)
    done = export_hf(source, tmp_path / "out")
    assert (done.files, done.notes) == (("config.json", "model.safetensors"), ())
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    opened = auto.from_pretrained(done.path).eval()
    recipe = importlib.import_module("tests.support.recipes.hf_llama")
    own = recipe.build_model(recipe.Args(tied=tied)).to(next(opened.parameters()).dtype).eval()
    assert next(opened.parameters()).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[parameters]
    safetensors.torch.load_model(own, source / "model.safetensors")
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, own(tokens).logits)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == tied
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        done = export_hf(source, tmp_path / "unseen")
    assert done.notes == ("transformers is not installed here, so that nobody has tried to open the folder with it",)


def test_a_folder_that_transformers_would_open_as_another_model_is_not_published(tmp_path: Path) -> None:
    source = llama(tmp_path / "run", "fp32")
    saved = read_manifest(source)[0]
    for change, words in (
        ({"hidden_size": 20}, r"of its tensors \d+ mismatched, "),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "1 missing, score.weight among them; 1 unexpected, lm_",
        ),
        ({"architectures": ["Trainer"]}, "has no model 'Trainer'"),
        ({"num_attention_heads": "two"}, "LlamaForCausalLM of transformers cannot be made of this hf_config: "),
    ):
        body = {key: value for key, value in saved.items() if key not in ("digest", "format", "version")}
        (source / MANIFEST).write_bytes(seal({**body, "hf_config": {**saved["hf_config"], **change}}))
        with pytest.raises(CheckpointError, match=words):
            export_hf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_recipe_without_a_hugging_face_config_is_told_the_way_out(tmp_path: Path) -> None:
    begun = trained(two_layers(tmp_path / "run"), stop_at=1)
    with pytest.raises(
        UsageError, match=r"its recipe named no Hugging Face config; give the recipe .* hf_config\(args\)"
    ):
        export_hf(begun.checkpoint(1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_hf_config_returns_is_checked_when_the_recipe_is_loaded(tmp_path: Path) -> None:
    recipe = tmp_path / "odd.py"
    for returned, words in (
        ("[1]", "hf_config returned a list of 1, expected a dict"),
        ("{'model_type': 'llama'}", "hf_config returned model_type 'llama' and architectures None, expected the type"),
        ("{'model_type': 'llama', 'architectures': ['A'], 'eps': float('nan')}", "a dict that is not plain JSON"),
    ):
        lines = [
            "from tests.support.recipes.train_two_layers import *",
            "def hf_config(args):",
            f"    return {returned}",
        ]
        recipe.write_text("\n".join([*lines, ""]))
        with pytest.raises(ConfigError, match=words):
            load_recipe(str(recipe), {})
