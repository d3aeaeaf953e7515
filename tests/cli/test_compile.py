"""train.compile with the real compiler, as programs; each compiles for some 20 s, so `make test` runs none of them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardrun.checkpoint.store import newest
from shardrun.run.metrics import read_rows
from tests.support.launching import ROOT, shardrun, started, until, write_config
from tests.support.verifying import verify_config

pytestmark = [pytest.mark.sample(0), pytest.mark.timeout(240)]


def gpt_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A language model of one block on two ranks, 4 updates over two micro-batches each."""
    folder.mkdir()
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    args = {"layers": 1, "width": 16, "heads": 2, "context": 16, "text": str(folder / "text.txt")}
    train = {"steps": 4, "micro_batch_size": 2, "global_batch_size": 8, **sections.pop("train", {})}
    recipe = str(ROOT / "recipes" / "gpt")
    return write_config(folder, recipe=recipe, recipe_args=args, train=train, eval={"at_end": False}, **sections)


def trained(folder: Path, config: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters."""
    with started(shardrun("train", config), folder) as program:
        assert program.wait(200) == 0, program.stderr
        assert program.left(5.0) == {}
    found = newest(folder / "run")
    assert found is not None
    return [row["loss"] for row in read_rows(folder / "run" / "metrics.jsonl")], load_file(
        found.path / "model.safetensors"
    )


def test_a_compiled_model_is_trained_alike_under_the_same_names(tmp_path: Path) -> None:
    losses, plain = trained(tmp_path / "plain", gpt_config(tmp_path / "plain"))
    config = gpt_config(tmp_path / "fast", train={"compile": True, "activation_checkpointing": ["blocks.*"]})
    fast_losses, fast = trained(tmp_path / "fast", config)
    assert fast.keys() == plain.keys()
    assert fast_losses == pytest.approx(losses, rel=1e-4)
    for path, tensor in plain.items():
        torch.testing.assert_close(fast[path], tensor, rtol=1e-2, atol=1e-4)


def test_a_compiled_run_resumes_bit_for_bit_with_short_batches_and_changing_buffers(tmp_path: Path) -> None:
    config = verify_config(
        tmp_path, topology={"world_size": 2}, train={"compile": True}, precision={"autocast": "bf16"}
    )
    with started(shardrun("verify-resume", config), tmp_path) as program:
        assert program.wait(230) == 0, program.stdout + program.stderr
        assert program.stdout.splitlines()[-1].startswith("bit-identical: stopped at 2 and 5 and resumed in fresh")


def test_a_rank_without_a_compiler_is_named_by_all(tmp_path: Path) -> None:
    config = gpt_config(tmp_path / "bare", train={"compile": True})
    recipe = tmp_path / "bare" / "recipe.py"
    text = (ROOT / "recipes" / "gpt.py").read_text()
    lacking = 'import os, torch._inductor.config\nif os.environ["RANK"] == "1":\n    '
    lacking += 'torch._inductor.config.cpp.cxx = (None, "/nowhere/g++")\n'
    recipe.write_text(text.replace("from typing import", lacking + "from typing import", 1))
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with started(shardrun("train", config, f"recipe={recipe}"), tmp_path, env) as program:
        assert program.wait(120) == 5
        lines = program.stderr.splitlines()
    assert lines[0] == "rank 1 failed at step 0, phase start-up"
    assert "No working C++ compiler found" in lines[1]
    assert "set train.compile: false" in lines[1]
    assert lines[2] == "rank 0: freed by it (start-up of step 0)"


def test_nothing_outlives_a_launcher_that_is_killed_while_its_ranks_compile(tmp_path: Path) -> None:
    config = gpt_config(tmp_path / "killed", train={"compile": True})
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with started(shardrun("train", config), tmp_path, env) as program:
        until(lambda: any("g++" in line for line in program.family().values()), 120, "no compiler was started")
        program.signal(signal.SIGKILL)
        assert program.left(10.0) == {}
