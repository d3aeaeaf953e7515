"""Public bug reports about configs, as checks: C123, C124, C125, C129."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardrun.config.load import load, resolved_yaml
from shardrun.errors import ConfigError, SelectionError
from shardrun.shard.selection import select_parameters

CONFIG = """\
recipe: recipe.py
optimizer:
  name: adamw
  lr: 0.0001
train:
  steps: 10
  micro_batch_size: 2
  global_batch_size: 4
"""


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.py").write_text("raise RuntimeError('a bad config must not run its recipe')\n")
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, list(overrides))
    return caught.value.problems


def shardrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardrun", *words], capture_output=True, text=True, timeout=60, env={**os.environ}
    )


def test_c123_unknown_keys_end_the_run_before_it_starts(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG + "learnig_rate: 0.1\nlog: {max_grad_norm: 1.0}\n")
    result = shardrun("train", str(path), f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert f"{path}:9:1: learnig_rate: unknown key (found 0.1); did you mean optimizer.lr?" in result.stderr
    expected = f"{path}:10:7: log.max_grad_norm: unknown key (found 1.0); did you mean train.max_grad_norm? ("
    assert expected in result.stderr
    assert "2 problems in the config; nothing was started" in result.stderr
    assert not (tmp_path / "run").exists()


def test_c124_a_number_in_exponent_form_is_a_number(tmp_path: Path) -> None:
    short = write(tmp_path, CONFIG.replace("0.0001", "1e-4"))
    config = load(short)
    assert type(config.parts["default"].optimizer.lr) is float
    assert config.parts["default"].optimizer.lr == 0.0001
    assert resolved_yaml(config) == resolved_yaml(load(write(tmp_path, CONFIG)))
    printed = shardrun("validate", str(short), "--json")
    assert json.loads(printed.stdout)["config"]["optimizer"]["lr"] == 0.0001
    stored = tmp_path / "config.resolved.yaml"
    stored.write_text(resolved_yaml(config))
    assert load(stored).parts["default"].optimizer.lr == 0.0001
    assert load(short, ["optimizer.lr=2E-4"]).parts["default"].optimizer.lr == 0.0002


def test_c125_the_same_key_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG + "log:\n  every: 1\n" + CONFIG.replace("recipe: recipe.py\n", ""))
    assert problems(path) == [
        f"{path}:11:1: optimizer: written twice, on line 2 and line 11; keep one of them",
        f"{path}:14:1: train: written twice, on line 5 and line 14; keep one of them",
    ]
    path = write(tmp_path, CONFIG.replace("  micro", "  steps: 1000\n  micro"))
    assert problems(path) == [f"{path}:7:3: train.steps: written twice, on line 6 and line 7; keep one of them"]
    assert shardrun("validate", str(path)).returncode == 2


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "key",
    [
        "train.micro_batch_size",
        "train.global_batch_size",
        "train.steps",
        "topology.world_size",
        "topology.threads_per_rank",
        "checkpoint.every",
        "checkpoint.keep",
        "log.every",
        "eval.every",
        "schedule.total_steps",
        "data.prefetch",
    ],
)
def test_c129_what_has_to_be_positive_is_refused_with_its_range(tmp_path: Path, key: str, value: int) -> None:
    found = problems(write(tmp_path, CONFIG), f"{key}={value}")
    assert found == [f"override '{key}={value}': {key}: {value} is out of range; allowed: at least 1"]


def test_c129_all_of_them_are_named_at_once(tmp_path: Path) -> None:
    text = CONFIG.replace("steps: 10", "steps: 0").replace("size: 2", "size: 0").replace("size: 4", "size: -1")
    path = write(tmp_path, text + "checkpoint: {every: 0, keep: 0}\ntopology: {world_size: 0}\n")
    result = shardrun("validate", str(path))
    assert result.returncode == 2
    keys = [line.split(": ")[1] for line in result.stderr.splitlines() if "allowed: at least 1" in line]
    assert keys == [
        "train.steps",
        "train.micro_batch_size",
        "train.global_batch_size",
        "checkpoint.every",
        "checkpoint.keep",
        "topology.world_size",
    ]


def test_c129_accumulation_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    found = problems(write(tmp_path, CONFIG), "train.micro_batch_size=3")
    assert [problem.split(": ", 1)[1] for problem in found] == [
        "train.global_batch_size: 4 is no multiple of train.micro_batch_size, which is 3"
    ]


def test_c129_a_pattern_without_a_match_is_an_error_that_names_it() -> None:
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(3, 2)])})
    with pytest.raises(SelectionError, match=r"'blocks\.\*\.wieght' matches none of 2 parameters.*blocks\.0\.weight"):
        select_parameters(model, include=["blocks.*.wieght"])
