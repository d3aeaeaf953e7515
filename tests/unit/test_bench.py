"""What bench makes of measurements, and what it refuses, without starting anything."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardrun.bench import pairs as paired
from shardrun.bench.contenders import COMPUTE, SHARDRUN, at_world_size, chosen, refuse_incomparable
from shardrun.bench.interval import interval
from shardrun.bench.rounds import Measured, Rounds, reference_of
from shardrun.bench.standing import rows
from shardrun.cli import bench as command
from shardrun.cli.app import app
from shardrun.config.load import load
from shardrun.config.schema import Config
from shardrun.errors import ConfigError, UsageError

CONFIGS = Path(__file__).parents[2] / "configs"
TEN = CONFIGS / "bench-10m.yaml"


def measured(
    steps: Sequence[float], losses: Sequence[float] = (4.0, 3.0, 2.0), distance: float = 0.0, slower: float = 0.0
) -> Measured:
    """Two ranks, the second `slower`; one window to warm up."""
    rank = {
        "losses": list(losses), "weights": [512] * 3, "distance": distance, "peak_bytes": 100, "gradient_bytes": 40,
        "state_bytes": 80, "first_window_s": 2.0, "configuration": "as it is", "device": "cpu",
    }  # fmt: skip
    ranks = [{**rank, "windows_s": [9.0, *steps]}, {**rank, "windows_s": [9.0, *(s + slower for s in steps)]}]
    return Measured([ranks[0], {**ranks[1], "peak_bytes": 120}], warmup=1)


def found(**ours: Any) -> Rounds:
    return {
        COMPUTE: [measured([1.0, 1.0]), measured([2.0, 2.0])],
        SHARDRUN: [measured([1.1, 1.3], **ours), measured([2.2, 2.6], **ours)],
        "ddp": [measured([1.5, 1.5]), measured([3.0, 3.0])],
    }


NAMES = (COMPUTE, SHARDRUN, "ddp")


def test_a_row_is_of_the_slowest_rank_and_against_compute_of_the_same_round() -> None:
    row = rows(NAMES, found(slower=0.1))[1]
    assert row.step_s == pytest.approx({"median": 1.85, "min": 1.2, "max": 2.7})
    assert row.ratio == pytest.approx((1.3 + 1.25) / 2)
    assert row.beyond_compute_s == pytest.approx((0.3 + 0.5) / 2)
    assert rows(NAMES, found())[2].shardrun_ratio == pytest.approx((1.2 / 1.5 + 2.4 / 3.0) / 2)
    assert row.tokens_per_s == pytest.approx(512 / 1.85)
    assert (row.peak_bytes, row.gradient_bytes, row.state_bytes, row.first_window_s) == (120, 40, 80, 2.0)
    assert [pytest.approx(one) for one in row.rounds_s or ()] == [[1.2, 1.4], [2.3, 2.7]]


@pytest.mark.parametrize(
    ("ours", "status", "why"),
    [
        ({}, "valid", None),
        ({"losses": (4.0, 3.002, 2.0)}, "valid", None),
        ({"losses": (4.0, 3.0, 2.01)}, "void", "a loss differs by 0.005 (tolerance 0.001)"),
        ({"losses": (4.0, 3.0, math.nan)}, "void", "a loss differs by nan (tolerance 0.001)"),
        ({"distance": 0.3}, "void", "the parameters differ by 0.3 of their way (tolerance 0.05)"),
        ({"distance": math.nan}, "void", "the parameters differ by nan of their way (tolerance 0.05)"),
    ],
)
def test_a_row_counts_only_where_the_same_was_computed(ours: dict[str, Any], status: str, why: str | None) -> None:
    table = {row.name: row for row in rows(NAMES, found(**ours))}
    assert (table[SHARDRUN].status, table[SHARDRUN].why) == (status, why)
    assert (table[COMPUTE].status, table["ddp"].status) == ("floor", "reference")


def test_ours_alone_is_not_compared() -> None:
    assert [row.status for row in rows((COMPUTE, SHARDRUN), found())] == ["floor", "not compared"]


def test_the_reference_is_ddp_or_else_plain_or_ours() -> None:
    assert reference_of([COMPUTE, SHARDRUN, "fsdp2", "ddp"]) == "ddp"
    assert reference_of([COMPUTE, SHARDRUN, "plain"]) == "plain"
    assert reference_of([COMPUTE, SHARDRUN, "fsdp2"]) == SHARDRUN
    assert reference_of([COMPUTE, SHARDRUN]) is None


# ---- what is asked for -----------------------------------------------------------------------------------------------


def test_peers_are_known_by_name() -> None:
    assert chosen(None, 2) == ("ddp", "zero1", "fsdp2", "deepspeed")
    assert chosen(None, 1) == ("plain",)
    assert chosen(" fsdp2,ddp,fsdp2", 4) == ("fsdp2", "ddp")
    assert chosen("", 2) == ()
    with pytest.raises(UsageError, match=r"no peer 'fsdp' for several ranks; did you mean fsdp2\?"):
        chosen("ddp,fsdp", 2)
    with pytest.raises(UsageError, match=r"no peer 'ddp' for world size 1; the peers of world size 1 are plain"):
        chosen("ddp", 1)


def test_more_ranks_have_more_to_do() -> None:
    config = load(TEN, ["train.global_batch_size=6"])
    assert at_world_size(config, None) == at_world_size(config, 2) == config
    four = at_world_size(config, 4)
    assert (four.topology.world_size, four.train.global_batch_size) == (4, 12)
    assert Config.model_validate(four.model_dump(mode="json")) == four
    with pytest.raises(ConfigError, match=r"--world 1: .* 6 over 2 ranks cannot be scaled to 1 in micro-batches of 2"):
        at_world_size(load(TEN, ["train.global_batch_size=6", "train.micro_batch_size=2"]), 1)


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ("moe", [], "groups and topology.axes"),
        ("muon", [], "elementwise one of torch.optim"),
        ("bench-10m", ["precision.parameters=bf16"], "precision.parameters=fp32 precision.autocast=bf16"),
        ("bench-10m", ["train.global_batch_size=3"], "3 is no multiple of 2 ranks times train.micro_batch_size 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(config: str, words: list[str], told: str) -> None:
    settings = load(CONFIGS / f"{config}.yaml", words)
    with pytest.raises(ConfigError, match=r"^bench: ") as caught:
        refuse_incomparable(settings)
    assert told in str(caught.value)


def test_a_run_that_is_shorter_than_what_is_measured_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", str(TEN), "train.steps=4", "--steps", "3"])
    assert result.exit_code == 2
    assert "train.steps is 4, and 2 steps to warm up and 3 steps to measure are asked for" in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--pairs", "4"], "there are 2 ranks; add --world 1"),
        (["--pairs", "4", "--world", "1", "train.max_grad_norm=1"], "give train.max_grad_norm=null"),
        (["--pairs", "5", "--world", "1"], "--pairs 5 is odd"),
        (["--pairs", "2000", "--world", "1"], "train.steps: 1000 is less than 2000 pairs"),
    ],
)
def test_pairs_that_could_not_end_with_the_same_bits_are_refused(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", str(TEN), *words])
    assert result.exit_code == 2
    assert told in result.output


# ---- what is shown ---------------------------------------------------------------------------------------------------


def bench(monkeypatch: pytest.MonkeyPatch, rounds: Rounds, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "run_rounds", lambda *asked: rounds)
    result = CliRunner().invoke(app, ["bench", str(TEN), "--against", "ddp", *words])
    return result.exit_code, result.stdout


def test_a_void_row_is_shown_as_such_and_exits_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = bench(monkeypatch, found(distance=0.3))
    assert code == 4
    assert "shardrun is void: the parameters differ by 0.3 of their way (tolerance 0.05)" in shown
    code, shown = bench(monkeypatch, found())
    assert code == 0
    assert "void" not in shown


def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = bench(monkeypatch, found(), "--json", "--steps", "2", "--rounds", "2")
    document = json.loads(shown)
    assert code == 0
    assert (document["schema_version"], document["world_size"], document["reference"]) == (1, 2, "ddp")
    assert [one["name"] for one in document["contenders"]] == list(NAMES)
    assert (document["steps"], document["rounds"], document["weight_per_step"]) == (2, 2, 512)


def test_a_peer_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else real(name))
    code, shown = bench(monkeypatch, found(), "--against", "ddp,deepspeed")
    assert code == 0
    assert "not installed; pip install 'shardrun[bench]'" in shown


def test_pairs_give_ratio_and_interval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = {"ours": [[1.0 + k / 100, 2.0] for k in range(24)], "plain": [[1.0, 2.0]] * 24, "device": "cpu"}
    monkeypatch.setattr(paired, "run_job", lambda job, where: [{**times, "differing": ["a.weight"]}])
    document = paired.measure_pairs(at_world_size(load(TEN), 1), 20, tmp_path)
    assert document["wall"]["ratio"] == pytest.approx(1.135)
    assert document["wall"]["interval"] == [pytest.approx(1.09), pytest.approx(1.19)]
    assert document["cpu"]["interval"] == [1.0, 1.0]
    monkeypatch.setattr(command, "measure_pairs", lambda *asked: document)
    result = CliRunner().invoke(app, ["bench", str(TEN), "--world", "1", "--pairs", "20"])
    assert result.exit_code == 4
    assert "void: a.weight and 0 more parameters differ at the end" in result.stdout


def test_the_interval_holds_the_median_19_times_of_20() -> None:
    middle, low, high = interval([float(k) for k in range(201)])
    assert (middle, low, high) == (100.0, 86.0, 115.0)
