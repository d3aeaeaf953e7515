"""The predicted time of a step: its terms from the bytes of a plan, ranks that share cores, and how `plan` shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardrun.cli.app import app
from shardrun.comm.cost_model import AGREEMENT, AGREEMENT_SENT, COPY, Line, Links, gather_by, reduce_by, save_links
from shardrun.config.load import from_mapping, load
from shardrun.errors import UsageError
from shardrun.run.compute_time import Compute, compute_of_bench
from shardrun.run.plan import plan
from shardrun.run.step_time import StepTime, predict
from shardrun.run.traffic import memory_traffic
from tests.support.training import document

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = CONFIGS / "quickstart.yaml"
TENTH = Compute(0.1, "as given")


def links(cores: int | None = 2, backend: str = "gloo", way: str = "exchange") -> Links:
    """Powers of ten, so that every term can be told in the sum."""
    lines = {
        reduce_by(way): {2: Line(1e-2, 1e-9), 8: Line(1e-2, 1e-9)},
        gather_by(way): {2: Line(2e-2, 2e-9), 8: Line(2e-2, 2e-9)},
        COPY: {2: Line(0.0, 4e-9)},
        AGREEMENT: {2: Line(1e-3, 0.0), 8: Line(3e-3, 0.0)},
    }
    return Links(backend, cores, 1, lines)


def seconds(found: StepTime) -> dict[str, float]:
    return {term.name: term.seconds for term in found.terms}


@pytest.mark.parametrize(("world", "crowd", "agreement"), [(2, 1, 1e-3), (4, 2, 1e-3 + 2e-3 / 3), (8, 4, 3e-3)])
def test_the_terms_of_a_step(world: int, crowd: float, agreement: float) -> None:
    planned = plan(load(QUICK, [f"topology.world_size={world}"]))
    _, _, held = next(planned.ranks())
    one, (group,) = held["default"], planned.groups
    found = predict(planned, links(), TENTH)
    assert seconds(found) == pytest.approx(
        {
            "compute": crowd * 0.1 * 4 / min(world, 4),  # 4 micro-batches over the world; of 8 ranks half have none
            "reduce": crowd * (group.buckets * 1e-2 + 1e-9 * one.reduce_read),
            "optimizer": crowd * 4e-9 * memory_traffic(group, 0) / 2,
            "gather": crowd * (group.buckets * 2e-2 + 2e-9 * one.gather_read),
            "agreements": crowd * (planned.rounds * agreement + 2e-2),  # and the losses for the log, gathered
        }
    )
    assert found.seconds == pytest.approx(sum(seconds(found).values()))
    assert (found.way, found.notes) == ("exchange", ())


def test_without_compute_the_rest_is_told() -> None:
    planned = plan(load(QUICK))
    found, whole = (predict(planned, links(), compute) for compute in (None, Compute(0.0, "")))
    assert "compute" not in seconds(found)
    assert found.seconds == whole.seconds
    assert found.notes == ("compute is not known and not in the sum: give --compute-s or --bench",)


def test_one_rank_sends_nothing_and_stages_nothing() -> None:
    planned = plan(load(QUICK, ["topology.world_size=1"]))
    (group,) = planned.groups
    found = predict(planned, links(), TENTH)
    assert list(seconds(found)) == ["compute", "optimizer"]
    # per element: 12 bytes of gradient where it is streamed to, 12 there, then 4 read of it, and 8 of the parameter and
    # 16 of both moments
    assert memory_traffic(group, 0) == pytest.approx(52 * group.elements, rel=0.01)


def test_a_rank_reads_and_writes_all_gradients_its_slice_and_the_other_parameters() -> None:
    """Of 4 bytes per element: 3 + 5 + 7 on the slice with AdamW (see memory_traffic), 2 on the other three, and 3 on
    all gradients; kept ones are not summed. Each further reduction: those 3, and 3 on the slice."""
    (group,) = plan(load(QUICK, ["topology.world_size=4"])).groups
    (kept,) = plan(load(QUICK, ["topology.world_size=4", "optimizer.strategy=zero1"])).groups
    words = ["topology.world_size=4", "train.accumulate=sharded", "train.global_batch_size=96"]
    (sharded,) = plan(load(QUICK, words)).groups
    for number in range(4):
        found = memory_traffic(group, number)
        assert found == pytest.approx(4 * group.elements * ((3 + 5 + 7) / 4 + 2 * 3 / 4 + 3), rel=0.01)
        more = memory_traffic(sharded, number) - found
        assert more == pytest.approx(2 * 4 * group.elements * (3 + 3 / 4), rel=0.01)
    moved = sum(memory_traffic(group, number) - memory_traffic(kept, number) for number in range(4))
    assert moved == pytest.approx(4 * 4 * group.elements, rel=0.01)


def test_subgroups_share_the_cores_with_the_whole_world() -> None:
    planned = plan(load(CONFIGS / "moe.yaml"))
    _, _, held = next(planned.ranks())
    found = seconds(predict(planned, links(), None))
    buckets = {g.name: sum(len(space.buckets) for space in g.footprint.layout.spaces) for g in planned.groups[:2]}
    assert planned.world_size == 4
    assert found["reduce"] == pytest.approx(
        2 * sum(1e-2 * buckets[name] + 1e-9 * one.reduce_read for name, one in held.items())
    )
    assert found["agreements"] == pytest.approx(2 * (planned.rounds * (1e-3 + 2e-3 / 3) + 2e-2))


_UNEQUAL = """
from torch import nn
from recipes.gpt import Args, build_data, loss
def build_model(args, world):
    part = world.coordinates["part"]
    return nn.ModuleDict({"common": nn.Linear(256, 1, bias=False), f"own{part}": nn.Linear(4096 * (2 - part), 1)})
"""


def test_the_rank_with_most_to_do_counts(tmp_path: Path) -> None:
    """The first part of the model is twice the second; each is on two of four ranks."""
    recipe = tmp_path / "unequal.py"
    recipe.write_text(_UNEQUAL)
    sgd = {"name": "sgd", "lr": 1.0}
    sections = {
        "topology": {"world_size": 4, "axes": {"part": 2, "copies": 2}},
        "optimizer": None,
        "groups": {
            "common": {"select": {"include": ["common.*"]}, "optimizer": sgd},
            "own": {"select": {"include": ["own*"]}, "replicas": "part", "optimizer": sgd},
        },
    }
    planned = plan(from_mapping(document(tmp_path, 4, sections, str(recipe))))
    assert [group.elements for group in planned.groups] == [256, 8193, 4097]
    most, least = (held for rank, _, held in planned.ranks() if rank in (0, 3))
    assert most["own"].reduce_read > least["own"].reduce_read
    found = seconds(predict(planned, links(), None))
    read = sum(one.reduce_read for one in most.values())
    assert found["reduce"] == pytest.approx(2 * (2 * 1e-2 + 1e-9 * read))
    moved = sum(memory_traffic(group, 0) for group in planned.groups[:2])
    assert found["optimizer"] == pytest.approx(2 * 4e-9 * moved / 2)


def test_of_devices_each_rank_has_its_own() -> None:
    planned = plan(load(QUICK, ["topology.world_size=8"]))
    found = predict(planned, links(cores=None, backend="nccl", way="native"), TENTH)
    assert (found.way, seconds(found)["compute"]) == ("native", 0.1)


def test_ranks_of_a_host_read_in_place_unless_they_are_told_not_to() -> None:
    over_sockets = {AGREEMENT_SENT: {2: Line(5e-3, 0.0)}}
    both = Links("gloo", 2, 1, {**links().lines, **links(way="shared memory").lines, **over_sockets})
    in_place = predict(plan(load(QUICK)), both, None)
    sent = predict(plan(load(QUICK, ["topology.shared_memory=false"])), both, None)
    assert (in_place.way, sent.way) == ("shared memory", "exchange")
    assert seconds(in_place)["agreements"] == pytest.approx(5 * 1e-3 + 2e-2)
    assert seconds(sent)["agreements"] == pytest.approx(5 * 5e-3 + 2e-2)
    told, other = ({term.name: term.of for term in one.terms}["reduce"] for one in (in_place, sent))
    assert "read by each rank of the others, by shared memory" in told
    assert "sent by each rank, by exchange" in other


def test_gradients_that_are_reduced_with_each_micro_batch_travel_as_often() -> None:
    once, thrice = (
        plan(load(QUICK, ["train.global_batch_size=48", f"train.accumulate={where}"])) for where in ("local", "sharded")
    )
    assert thrice.groups[0].held[0].reduce_read == 3 * once.groups[0].held[0].reduce_read
    (before, after) = (seconds(predict(one, links(), None)) for one in (once, thrice))
    assert after["reduce"] == pytest.approx(3 * before["reduce"])
    assert after["gather"] == before["gather"]


def test_what_was_not_measured_is_told() -> None:
    planned = plan(load(QUICK, ["topology.world_size=16", "topology.threads_per_rank=2"]))
    beyond, threads = predict(planned, links(), TENTH).notes
    assert beyond == "links were measured on 2, 8 ranks: 16 are beyond them, on one host that is like it"
    assert threads == "links were measured with 1 threads per rank, the config has 2"
    (muon,) = predict(plan(load(CONFIGS / "muon.yaml")), links(), TENTH).notes
    assert muon == "the arithmetic of muon on whole matrices is not in it, only the memory that it touches"
    bare = Links("gloo", 2, 1, {COPY: {2: Line(0.0, 1e-9)}})
    with pytest.raises(UsageError, match=r"no line of agreement was measured"):
        predict(planned, bare, TENTH)
    with pytest.raises(UsageError, match=r"found ways exchange, expected one of native"):
        predict(planned, links(backend="nccl"), TENTH)


# ---- compute from a comparison ---------------------------------------------------------------------------------------


def bench(folder: Path, **change: Any) -> Path:
    path = folder / "bench.json"
    row = {"name": "compute", "step_s": {"median": 1.0}}
    document = {"world_size": 4, "micro_batch_size": 8, "global_batch_size": 64, "contenders": [{"name": "ddp"}, row]}
    path.write_text(json.dumps({**document, **change}))
    return path


def test_compute_is_taken_from_the_floor_of_a_comparison(tmp_path: Path) -> None:
    """On 4 ranks and 2 cores, each with 2 micro-batches and the whole optimizer: 28 bytes per parameter with AdamW."""
    config = load(QUICK)
    (group,) = plan(config).groups
    optimizer_s = 4e-9 * 28 * group.elements / 2
    found = compute_of_bench(bench(tmp_path), config, links())
    assert found.seconds == pytest.approx((1.0 / 2 - optimizer_s) / 2, rel=1e-3)
    assert found.source == "from compute on 4 ranks in bench.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"contenders": []}, "not what `shardrun bench CONFIG --json` wrote: ValueError"),
        ({"world_size": None}, "TypeError"),
        ({"micro_batch_size": 4}, "measured with train.micro_batch_size 4, the config has 8"),
        ({"contenders": [{"name": "compute", "step_s": {"median": 1e-6}}]}, "it was measured of another config"),
    ],
)
def test_another_comparison_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compute_of_bench(bench(tmp_path, **change), load(QUICK), links())


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(QUICK), *words])


def test_the_command_shows_every_term_and_the_sum(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    save_links(links(), path)
    words = ["--world", "8", "--links", str(path), "--compute-s", "0.1"]
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "compute 400.00 1 micro-batch x 100 ms x 4 (8 ranks on 2 cores), as given" in lines
    rounds = plan(load(QUICK, ["topology.world_size=8"])).rounds
    told = f"{rounds} rounds over all ranks, and the losses for the log"
    assert f"agreements {12 * rounds + 80:.2f} {told}" in lines  # 4 x 3 ms each, and 4 x 20 ms for one gather
    found = json.loads(run(*words, "--json").stdout)["step_time"]
    assert [term["name"] for term in found["terms"]] == ["compute", "reduce", "optimizer", "gather", "agreements"]
    assert found["seconds"] == pytest.approx(sum(term["seconds"] for term in found["terms"]))
    assert f"step {1000 * found['seconds']:,.2f} one after the other" in lines
    assert "step_time" not in json.loads(run("--json").stdout)


def test_the_command_refuses_half_of_it(tmp_path: Path) -> None:
    alone = run("--compute-s", "0.1")
    assert alone.exit_code == 2
    assert "give both" in alone.output
    both = run("--links", "links.json", "--compute-s", "0.1", "--bench", "bench.json")
    assert (both.exit_code, "give one of them" in both.output) == (2, True)
    absent = run("--links", str(tmp_path / "absent.json"))
    assert (absent.exit_code, "absent.json: No such file" in absent.output) == (5, True)
