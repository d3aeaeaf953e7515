"""`shardrun plan`: any world in one process, and what it refuses. What ranks really hold: tests/ranks/test_plan.py."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardrun.cli.app import app
from shardrun.cli.plan_view import ranges
from shardrun.config.load import from_mapping, load
from shardrun.errors import ConfigError, SelectionError
from shardrun.run.plan import Planned, plan
from shardrun.shard.layout import Entry, Fragment, align, plan_layout
from shardrun.shard.streamed_gradients import SLOTS
from shardrun.step.draft import BUCKET_BYTES
from tests.support.training import RECIPES, document

CONFIGS = Path(__file__).parents[2] / "configs"
LLAMA = str(RECIPES / "llama_shapes.py")
ADAMW = {"name": "adamw", "lr": 1e-4, "options": [{"match": ["*norm.weight"], "weight_decay": 0}]}
MUON = {"name": "muon", "lr": 0.01, "strategy": "zero1", "rest": {"name": "adamw", "match": ["embed.*", "head.*"]}}


def llama(folder: Path, world: int, optimizer: dict[str, Any], **args: Any) -> Planned:
    sections = {"optimizer": optimizer, "precision": {"parameters": "bf16"}}
    return plan(from_mapping(document(folder, world, sections, LLAMA, **args)))


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
def test_seventy_billion_parameters_on_1024_ranks(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = llama(tmp_path, 1024, optimizer)
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB; the weights have 141 GB
    (group,) = planned.groups
    assert group.elements == 70_553_706_496
    rows = [held["default"] for _, _, held in planned.ranks()]
    assert len(rows) == 1024
    # FP32 masters and moments: two of all parameters, or two of embedding and head and one of the rest.
    least = 12 * group.elements if optimizer is ADAMW else 8 * group.elements
    assert least <= sum(one.state for one in rows) < 1.05 * least
    biggest = 4 * max(spec.numel for spec in group.footprint.draft.specs.values())
    if optimizer is ADAMW:  # streamed, through a few slots of which each takes the largest tensor
        assert all(SLOTS * biggest <= one.pending < SLOTS * (biggest + BUCKET_BYTES) for one in rows)
    else:
        assert all(4 * group.elements <= one.pending < 4.1 * group.elements for one in rows)


def test_what_is_held_does_not_depend_on_the_world_but_for_padding(tmp_path: Path) -> None:
    small = {"layers": 2, "width": 256, "narrow": 64, "hidden": 384, "vocabulary": 1000}
    alone = llama(tmp_path, 1, ADAMW, **small)
    for world in (2, 3, 5, 64):
        planned = llama(tmp_path, world, ADAMW, **small)
        states = [held["default"].state for _, _, held in planned.ranks()]
        (whole,) = (held["default"].state for _, _, held in alone.ranks())
        buckets = sum(len(space.buckets) for space in planned.groups[0].footprint.layout.spaces)
        assert whole <= sum(states) <= whole + 12 * 256 * buckets * world
        elements = [file.bytes for file in planned.files if file.role == "record"]
        assert len(elements) == world


def test_a_rank_reads_what_it_misses(tmp_path: Path) -> None:
    """Equal slices: its own of all others' FP32 gradients, and all but its own of the bf16 weights."""
    planned = llama(tmp_path, 4, ADAMW, layers=1, width=256, narrow=256, hidden=256, vocabulary=256)
    for _, _, held in planned.ranks():
        assert held["default"].reduce_read == held["default"].pending * 3 // 4
        assert held["default"].gather_read == held["default"].pending // 2 * 3 // 4
        assert (held["default"].reduce_sent, held["default"].gather_sent) == (0, 0)
    (alone,) = llama(tmp_path, 1, ADAMW, layers=1).ranks()
    assert (alone[2]["default"].reduce_read, alone[2]["default"].gather_read) == (0, 0)


def test_experts_are_planned_at_every_place() -> None:
    words = ["topology.world_size=24", "topology.axes={replicas: 6, experts: 4}"]
    planned = plan(load(CONFIGS / "moe.yaml", words))
    assert [group.record for group in planned.groups] == ["dense", *(f"experts-{part}" for part in range(4))]
    assert [place.ranks[:2] for place in planned.places] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sum(file.role == "model" for file in planned.files) == 4
    assert {file.rank for file in planned.files if file.role == "model"} == {0, 1, 2, 3}
    assert all({*held} == {"dense", "experts"} for _, _, held in planned.ranks())


def test_gradients_that_wait_for_the_last_micro_batch_are_told() -> None:
    def notes(*words: str) -> list[str]:
        return plan(load(CONFIGS / "quickstart.yaml", words)).notes

    told = "gradients of default wait whole, 1,871,232 bytes more, from one of 2 micro-batches to the next"
    assert notes() == [f"{told}; with train.accumulate: sharded none of it"]
    assert notes("topology.world_size=1") == [told.replace("of 2", "of 4")]
    for words in (["train.accumulate=sharded"], ["train.stream_gradients=false"], ["train.global_batch_size=16"]):
        assert notes(*words) == []


def test_a_manifest_that_would_be_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(CONFIGS / "quickstart.yaml", ["train.global_batch_size=16"])
    assert plan(config).notes == []
    monkeypatch.setattr("shardrun.run.plan.MAX_BYTES", 1000)
    (note,) = plan(config).notes
    assert note.startswith("no checkpoint of this run could be saved: its manifest would list")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_recipe_that_reads_values_is_told_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        llama(tmp_path, 2, ADAMW, layers=1, reads_values=True)
    assert str(caught.value).startswith(f"recipe: build_model of {LLAMA} cannot run on the meta device, where a plan")
    assert "Tensor.item() cannot be called on meta tensors" in str(caught.value)
    assert "llama_shapes.py:" in str(caught.value)


_OWN = """
from recipes.gpt import Args, build_data, loss
def build_model(args):
    print("building")
    {}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return args.layers", "build_model returned int, expected a torch.nn.Module; return the model itself"),
        ("return nothing", "NameError: name 'nothing' is not defined (at {}:5); tensors have no values there"),
        ("return", "build_model returned NoneType"),
        ("x = 1\nwrong", "cannot be loaded: NameError: name 'wrong' is not defined (at {}:6)"),
    ],
)
def test_an_error_of_the_recipe_is_told_with_its_place(tmp_path: Path, body: str, said: str) -> None:
    recipe = tmp_path / "own.py"
    recipe.write_text(_OWN.format(body))
    found = CliRunner().invoke(app, ["plan", str(CONFIGS / "single.yaml"), f"recipe={recipe}", "--json"])
    assert found.exit_code == 2, found.output
    message = json.loads(found.stdout)["error"]["message"]  # whatever the recipe prints
    assert said.format(recipe) in message


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["topology.world_size=6"], ConfigError, "replicas 2 x experts 2 are 4 ranks, but topology.world_size is 6"),
        (["recipe_args.experts=3"], ConfigError, "ValueError: 3 experts on 2 ranks"),
        (["groups.dense.select.exclude=[]"], SelectionError, "is selected by dense and by experts"),
        (["groups.dense.replicas=experts"], SelectionError, "trained by dense-0 and by dense-1, which are on"),
        (["groups.dense.select.exclude=['*.expert.*']"], SelectionError, "groups.dense.select: '*.expert.*' matches"),
        (["groups.dense.optimizer.options=[{match: [nothing], weight_decay: 0}]"], ConfigError, "matches none of 18"),
    ],
)
def test_what_a_run_would_refuse(words: list[str], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        plan(load(CONFIGS / "moe.yaml", words))
    assert said in str(caught.value)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_a_document() -> None:
    config = str(CONFIGS / "quickstart.yaml")
    shown = CliRunner().invoke(app, ["plan", config, "--world", "3", "optimizer.lr=1"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("plan for 3 ranks; nothing was started")
    assert "0 to 2" in shown.output
    found = CliRunner().invoke(app, ["plan", config, "--world", "3", "--json"])
    assert CliRunner().invoke(app, ["plan", config, "--world", "3", "--json"]).stdout == found.stdout
    planned = json.loads(found.stdout)
    assert (planned["schema_version"], planned["world_size"], len(planned["ranks"])) == (1, 3, 3)
    assert planned["checkpoint_bytes"] == sum(file["bytes"] for file in planned["files"])
    twice = CliRunner().invoke(app, ["plan", config, "--world", "3", "topology.world_size=2"])
    assert twice.exit_code == 2


def test_the_command_says_how_slices_travel() -> None:
    config = str(CONFIGS / "quickstart.yaml")
    shown = {
        words: " ".join(CliRunner().invoke(app, ["plan", config, *words]).output.split())
        for words in [(), ("topology.shared_memory=false",), ("topology.allow_non_loopback=true",)]
    }
    in_place, sockets, hosts = shown.values()
    assert "read of other ranks in a step by rank" in in_place
    assert "by shared memory; and" in in_place
    assert "gradients as backward makes them" in in_place
    assert ", gradients 1.9 MB" not in in_place
    assert "sent in a step by rank" in sockets
    assert "by sockets (switched off); and" in sockets
    assert "by sockets (hosts may be several; groups on one of them read in place); and" in hosts


def test_many_replica_sets_that_differ_in_their_numbers_alone_are_one_line() -> None:
    words = ["topology.world_size=16", "topology.axes={replicas: 2, experts: 8}", "recipe_args.experts=8"]
    shown = CliRunner().invoke(app, ["plan", str(CONFIGS / "moe.yaml"), *words])
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["experts-0", "and", "7", "more", "adamw", "zero2", "kept", "2", "each", "9", "221,184"] in lines
    assert sum(line[:1] == ["experts-0"] for line in lines) == 1


def test_ranges_of_ranks() -> None:
    assert ranges([0]) == "0"
    assert ranges([0, 1, 2, 4, 6, 7]) == "0 to 2, 4, 6 to 7"
    assert ranges([*range(0, 20, 2)]) == "0, 2, 4, 6 and 6 more"


# ---- the integers under it -------------------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@given(NUMELS, st.integers(1, 9), st.sampled_from([1, 700, 1 << 20]))
@settings(max_examples=200, deadline=None)
def test_fragments_are_found_as_by_looking_at_every_parameter(numels: list[int], world: int, bucket: int) -> None:
    layout = plan_layout([Entry(f"p{k}", numel, "float32", 0) for k, numel in enumerate(numels)], bucket)
    (space,) = layout.spaces
    for one in space.buckets:
        for rank in range(world):
            size = align(-(-(one.stop - one.start) // world))
            low = one.start + rank * size
            high = min(low + size, one.stop)
            slow = [
                Fragment(p.path, start - p.offset, stop - p.offset, start - low)
                for p in space.parameters
                for start, stop in [(max(low, p.offset), min(high, p.offset + p.numel))]
                if start < stop
            ]
            assert list(space.fragments(one, rank, world)) == slow
            first, last = one.extent(rank, world)
            assert bool(slow) == (first < last)
