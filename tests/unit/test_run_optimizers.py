"""Optimizers from the config to saved and restored state, on one rank in this process; what is shown and refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardrun.checkpoint.inspect import inspect
from shardrun.checkpoint.load import load
from shardrun.cli import inspect_ckpt
from shardrun.comm.communicator import Communicator
from shardrun.config.load import from_mapping
from shardrun.errors import ConfigError, UsageError
from shardrun.records.record import Zero1Record
from shardrun.run.build import Built, build
from shardrun.run.model import distinct_parameters
from shardrun.run.optimizer import Placement, mean_step, streams_gradients
from shardrun.run.plan import plan
from shardrun.run.probe import live_leaves
from shardrun.run.report_tables import names, start_tables
from shardrun.run.state import restore
from shardrun.run.tamper import scramble
from shardrun.shard.layout import Entry, plan_layout
from shardrun.shard.owners import plan_owned_layout
from shardrun.shard.streamed_gradients import StreamedGradients
from tests.support.launching import ROOT
from tests.support.training import RECIPES, document, save_now

OWN = str(RECIPES / "own_optimizer.py")
GROUP = {"match": ["*.bias"], "lr_scale": 0.5}
OF_MATRICES = {"match": ["second.weight"], "lr_scale": 0.5}
ELEMENTWISE, MATRIX = {"kind": "elementwise"}, {"kind": "matrix"}
SECTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"options": [{**GROUP, "betas": [0.5, 0.6]}]},
    "adam": {"amsgrad": True},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "nadam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "radam": {},
    "adamax": {"options": [GROUP]},
    "adagrad": {"initial_accumulator_value": 0.1, "options": [{**GROUP, "lr_decay": 0.1}]},
    "adadelta": {"options": [{**GROUP, "rho": 0.5}]},
    "rmsprop": {"momentum": 0.5, "centered": True, "options": [{**GROUP, "alpha": 0.5}]},
    "rprop": {"options": [{**GROUP, "etas": [0.4, 1.3]}]},
    "asgd": {"t0": 1.0, "options": [{**GROUP, "weight_decay": 0.1}]},
    "muon": {"rest": {"name": "sgd", "momentum": 0.5, "lr": 0.1}, "options": [{**GROUP, "weight_decay": 0.0}]},
    "muon beside rprop": {"name": "muon", "rest": {"name": "rprop"}, "options": [{**OF_MATRICES, "momentum": 0.5}]},
    "signs": {**ELEMENTWISE, "factory": "signs", "options": [{**GROUP, "factory_options": {"momentum": 0.25}}]},
    "Rows": {**MATRIX, "factory": "Rows", "options": [{**GROUP, "factory_options": {"decay": 0.25}}]},
    "Rows of matrices": {
        **MATRIX,
        "factory": "Rows",
        "takes": "matrices",
        "rest": {"name": "adamw", "lr": 0.1},
        "options": [{**OF_MATRICES, "factory_options": {"decay": 0.25}}],
    },
    "Adafactor": {**MATRIX, "factory": "Adafactor", "factory_options": {"weight_decay": 0.1}},
}
WHOLE = {"muon", "muon beside rprop", "Rows", "Rows of matrices", "Adafactor"}
WAYS = [(name, "zero1") for name in SECTIONS] + [(name, "zero2") for name in SECTIONS if name not in WHOLE]


def section(name: str, strategy: str | None = None) -> dict[str, Any]:
    own = SECTIONS[name]
    said = {} if "factory" in own or "name" in own else {"name": name}
    return {**said, "lr": 0.05, **own, **({"strategy": strategy} if strategy else {})}


def built(
    folder: Path, optimizer: dict[str, Any], seed: int = 0, saved: Placement | None = None, **sections: Any
) -> Built:
    config = document(folder, 1, {"optimizer": optimizer, "run": {"seed": seed}, **sections}, OWN)
    return build(from_mapping(config), Communicator.single(), {"default": saved} if saved else None)


def step(one: Built, number: int) -> None:
    """Windows that differ; the first reaches one layer only, so that first updates and later ones mix."""
    generator = torch.Generator().manual_seed(number)
    x, labels = torch.randn(6, 7, generator=generator), torch.arange(6) % 3
    first = one.model.get_submodule("first")
    assert isinstance(first, nn.Linear)
    total = first(x.to(first.weight.dtype)).float().square().sum() if number == 0 else None
    total = one.recipe.loss(one.model.eval(), (x, labels), one.world)[0] if total is None else total
    total.backward()
    mean_step(one.groups[0].sharded)(local_weight=6, lr=0.05 / (number + 1), missing="zero", max_grad_norm=math.inf)


def live(one: Built) -> dict[str, Any]:
    """Everything that a step depends on."""
    found: dict[str, Any] = dict(distinct_parameters(one.model))
    for leaf in live_leaves(one.groups[0].sharded):
        found |= {f"{leaf.name}/{key}": value for key, value in leaf.state.items()}
        found[f"{leaf.name}/leaf"] = leaf.tensor
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in found.items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not (type(one[name]) is type(other[name]) and _equal(one[name], other[name]))]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "strategy"), WAYS)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(
    tmp_path: Path, name: str, strategy: str, dtype: str
) -> None:
    precision = {"parameters": dtype}
    straight = built(tmp_path, section(name, strategy), precision=precision)
    before = live(straight)
    for number in range(2):
        step(straight, number)
    saved = save_now(straight, tmp_path, 2)
    at_save = live(straight)
    assert not any(torch.equal(before[name], at_save[name]) for name in before if name.endswith("/leaf"))
    step(straight, 2)

    loaded = load(saved.path, Communicator.single(), {})
    assert loaded is not None
    assert isinstance(loaded.records["default"], Zero1Record) == (strategy == "zero1")
    saved_at = Placement.of(loaded.manifest["groups"]["default"])
    resumed = built(tmp_path, section(name, strategy), 9, saved_at, precision=precision)
    step(resumed, 7)  # state of its own that a restore has to replace
    scramble(resumed, 3)
    restore(resumed, loaded)
    assert differing(live(resumed), at_save) == []
    step(resumed, 2)
    assert differing(live(resumed), live(straight)) == []


@pytest.mark.parametrize("precision", [{}, {"parameters": "bf16"}, {"parameters": "bf16", "master_weights": False}])
@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "rprop", "signs"])
def test_both_strategies_give_the_same_bits(tmp_path: Path, name: str, precision: dict[str, Any]) -> None:
    sides = [built(tmp_path, section(name, way), precision=precision) for way in ("zero2", "zero1")]
    for one in sides:
        for number in range(3):
            step(one, number)
    assert differing(*(dict(distinct_parameters(one.model)) for one in sides)) == []


# ---- what is shown ---------------------------------------------------------------------------------------------------


def tables(one: Built) -> dict[str, list[list[Any]]]:
    return {table["title"]: table["rows"] for table in start_tables(one)}


def test_the_split_and_the_rates_of_both_optimizers_are_shown(tmp_path: Path) -> None:
    shown = tables(built(tmp_path, section("muon")))
    assert shown["muon + sgd under zero1"] == [
        ["muon 0", 2, "150", "0.05", "0.1", "plain"],
        ["sgd 1", 2, "18", "0.05", "0", "fused"],
    ]
    assert shown["split"] == [
        ["muon", 2, "600", "first.weight, second.weight"],
        ["sgd", 2, "72", "first.bias, second.bias"],
    ]
    assert "owners" not in shown  # on one rank
    one = tables(built(tmp_path, section("adamw", "zero1")))
    assert one["adamw under zero1"] == [[0, 2, "150", "0.05", "0.01", "fused"], [1, 2, "18", "0.025", "0.01", "fused"]]
    assert "split" not in one
    assert "adamw under zero2" in tables(built(tmp_path, section("adamw")))


def test_layers_that_differ_in_their_number_are_named_once() -> None:
    paths = [f"blocks.{n}.{leaf}" for n in range(12) for leaf in ("qkv.weight", "up2.weight")]
    assert names(paths) == "blocks.*.qkv.weight, blocks.*.up2.weight"
    assert names([f"{letter}.weight" for letter in "abcdefgh"]).endswith("f.weight, 2 more")
    assert names(["0", "a.1"]) == "*, a.*"


def test_what_is_declared_is_said_to_be_checked_and_not_proven(tmp_path: Path) -> None:
    (note,) = built(tmp_path, section("Rows")).notes
    assert note.startswith(
        "optimizer: Rows of the recipe is declared matrix; a few small tensors were stepped to check"
    )
    assert note.endswith("is no proof")
    assert built(tmp_path, section("muon")).notes == []


def test_owned_state_is_shown_in_its_own_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = built(tmp_path, section("Rows of matrices"), precision={"parameters": "bf16"})
    for number in range(2):
        step(one, number)
    saved = save_now(one, tmp_path, 2)
    found = inspect(saved.path, verify=True)
    assert found["problems"] == []
    assert {file["path"] for file in found["files"] if file["role"] == "record"} == {
        "zero1/default/rank-00000-of-00001.safetensors"
    }
    group = found["groups"]["default"]
    assert group["optimizer"]["strategy"] == "zero1"
    assert group["optimizer"]["owners"] == dict.fromkeys(distinct_parameters(one.model), 0)
    shown = {row["name"]: (row["dtype"], row["shape"]) for row in group["state"]}
    for path, (rows, columns) in {"first.weight": (15, 7), "second.weight": (3, 15)}.items():
        assert shown.pop(f"{path}/size") == ("float32", [rows, 1])
        assert shown.pop(f"{path}/largest:float") == ("float64", [])
        assert shown.pop(f"{path}/master") == ("float32", [rows, columns])
    assert shown.keys() == {
        f"{p}.bias/{k}" for p in ("first", "second") for k in ("step", "exp_avg", "exp_avg_sq", "master")
    }
    assert all(held["start"] == 0 for row in group["state"] for held in row["held_by"])
    assert inspect_ckpt.run(saved.path, verify=True, json=False) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("group default: ")]
    assert "strategy zero1" in line
    assert "owners" not in line


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "error", "said"),
    [
        (
            {"factory": "sings", "kind": "elementwise"},
            ConfigError,
            "has no sings; did you mean signs?",
        ),
        ({"factory": "adan", "kind": "elementwise"}, ConfigError, "has no adan; define it there, or import it there"),
        ({"factory": "no_optimizer", "kind": "matrix"}, ConfigError, "no_optimizer of .* is 5, expected a torch"),
        (
            {"factory": "normed", "kind": "elementwise"},
            UsageError,
            "normed is declared elementwise, but a vector cut at",
        ),
        ({"factory": "build_model", "kind": "matrix"}, UsageError, "build_model: an update of small tensors .* raised"),
        ({"factory": "Rows", "kind": "matrix", "factory_options": {"dcay": 1}}, UsageError, "keyword argument 'dcay'"),
        (
            {"factory": "Rows", "kind": "matrix", "factory_options": {"owners": 1}},
            ConfigError,
            "factory_options.owners: a name of shardrun's own, which cannot be handed to Rows",
        ),
        (
            {"name": "muon", "options": [{"match": ["*.bias"], "momentum": 0.5}]},
            UsageError,
            "adamw: option group 1: torch.optim.AdamW does not take .*'momentum'",
        ),
        (
            {"factory": "Rows", "kind": "elementwise"},
            UsageError,
            r"Rows: its state size has the shape \(1061, 1\) for a vector",
        ),
    ],
)
def test_an_optimizer_that_is_not_what_was_said_is_refused(
    tmp_path: Path, optimizer: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        built(tmp_path, {"lr": 0.1, **optimizer})


@pytest.mark.parametrize("optimizer", [section("muon"), section("Rows of matrices")])
def test_an_optimizer_of_matrices_without_a_matrix_is_refused(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    optimizer = {**optimizer, "options": []}
    with pytest.raises(ConfigError, match="has nothing to step: none of the 2 selected trainable parameters is one"):
        built(tmp_path, optimizer, select={"include": ["*.bias"]})


def test_matrices_may_be_left_to_the_rest_by_name(tmp_path: Path) -> None:
    rest = {"name": "adamw", "lr": 0.1, "match": ["second.*"]}
    shown = tables(built(tmp_path, {"name": "muon", "lr": 0.02, "rest": rest}))["split"]
    assert [row[3] for row in shown] == ["first.weight", "first.bias, second.weight, second.bias"]
    own = {**section("Rows"), "options": [], "rest": rest}
    assert tables(built(tmp_path, own))["split"][0][3] == "first.weight, first.bias"
    with pytest.raises(ConfigError, match="muon has nothing to step: none of the 4 selected"):
        built(tmp_path, {"name": "muon", "lr": 0.02, "rest": {**rest, "match": ["*"]}})
    with pytest.raises(ConfigError, match=r"optimizer.rest.match: \['third.\*'\] matches none of 4 selected trainable"):
        built(tmp_path, {"name": "muon", "lr": 0.02, "rest": {**rest, "match": ["third.*"]}})


# ---- where parameters stand in a checkpoint --------------------------------------------------------------------------


@given(st.data())
def test_a_saved_layout_is_planned_again_from_its_placement(data: st.DataObject) -> None:
    """Whatever order the model defines its parameters in, and whatever the owners would be now."""
    world = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 2000), min_size=1, max_size=12))
    entries = [
        Entry(f"p{number}", size, data.draw(st.sampled_from(["float32", "bfloat16"])), data.draw(st.integers(0, 2)))
        for number, size in enumerate(sizes)
    ]
    owners = {entry.path: data.draw(st.integers(0, world - 1)) for entry in entries}
    bucket = data.draw(st.integers(1, 4000))
    layout = plan_owned_layout(entries, owners, bucket, world)
    saved = Placement.of({"layout": layout.to_json(), "optimizer": {"owners": owners}})
    by_path = {entry.path: entry for entry in entries}
    assert sorted(saved.order) == sorted(by_path)
    again = plan_owned_layout([by_path[path] for path in saved.order], saved.owners or {}, bucket, world)
    assert again == layout
    cut = plan_layout(entries, bucket)
    saved = Placement.of({"layout": cut.to_json(), "optimizer": {}})
    assert saved.bucket_bytes is not None
    assert plan_layout([by_path[path] for path in saved.order], saved.bucket_bytes // 4) == cut


def test_only_a_group_of_all_ranks_streams(tmp_path: Path) -> None:
    """Where replica sets are lists of ranks, what a rank contributes does not follow from its weight."""
    for replicas, streams in (("world", True), ([[0, 1]], True), ([[0], [1]], False)):
        part = {"optimizer": {"name": "adamw", "lr": 0.1}, "replicas": replicas}
        sections = document(tmp_path, 2, {"groups": {"part": part}}, OWN)
        del sections["optimizer"]
        config = from_mapping(sections)
        assert streams_gradients(config, config.parts["part"].optimizer) == streams


def test_a_resumed_run_sends_its_buckets_in_the_order_of_one_that_is_begun(tmp_path: Path) -> None:
    asked = section("adamw") | {"options": [{"match": ["*bias"], "weight_decay": 0.0}]}
    begun = built(tmp_path, asked).groups[0].sharded
    meta = begun.record_meta()
    saved = Placement.of({"layout": meta["layout"], "optimizer": meta["optimizer"]})
    resumed = built(tmp_path, asked, saved=saved).groups[0].sharded
    sent = [
        one.flat.gradients.sequence for one in (begun, resumed) if isinstance(one.flat.gradients, StreamedGradients)
    ]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert len(sent[0]) > 1
    assert resumed.session.order != resumed.session.defined


def test_a_run_over_sockets_has_no_more_buckets_than_it_needs(tmp_path: Path) -> None:
    numbers = {}
    for shared in (True, False):
        sections = {"topology": {"shared_memory": shared}}
        config = document(tmp_path, 2, sections, str(ROOT / "recipes" / "gpt.py"), layers=4, width=256, heads=4)
        (group,) = plan(from_mapping(config)).groups
        numbers[shared] = sum(len(space.buckets) for space in group.footprint.layout.spaces)
    assert numbers[False] == 1
    assert 4 < numbers[True] <= 16
