"""`shardrun train --fault`: real faults of real ranks; each ends in one screen, and the same command goes on."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.store import newest, scan
from shardrun.run.metrics import read_rows
from tests.support.launching import Program, final_tensors, shardrun, started, write_config

pytestmark = pytest.mark.sample(2)

TIMEOUT_S = 3.0
STEPS = 10
"""One for the last fault, and one after it."""


def ended(config: Path, *words: str) -> tuple[int, Program]:
    """Train until the end or the fault; nothing may be left a moment later."""
    with started(shardrun("train", config, *words), config.parent) as program:
        code = program.wait(120)
        assert program.left(0.5) == {}
        return code, program


def config_in(folder: Path, **sections: Any) -> Path:
    folder.mkdir()
    return write_config(
        folder,
        optimizer={"name": "adamw"},
        train={"steps": STEPS, "max_grad_norm": 1.0},
        checkpoint={"every": 1, "keep": 3},
        topology={"timeout_s": TIMEOUT_S, **sections},
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """What training gave, without what the clock gave."""
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in row.items() if k not in clock} for row in read_rows(folder / "run" / "metrics.jsonl")]


@dataclass(frozen=True)
class Case:
    """A fault, the first lines of the screen that it ends in (patterns), and who else is told of and how."""

    fault: str
    lines: tuple[str, ...]
    other: str
    logged: int | None = 1
    """The rank whose log has its last collectives; None where none lives to write them."""


CASES = [
    Case(
        "kill rank 1 at reduce:1 of step 2",
        (r"rank 1 killed by signal 9 \(possibly out of memory\) at step 2, phase reduce",),
        "rank 0: freed by it (reduce of step 2)",
        logged=0,
    ),
    Case(
        "hang rank 1 at gather:1 of step 3",
        (
            r"rank 1 is missing from collective \d+ \(gather of step 3\): it was at step 3, phase gather, for \d s "
            "when rank 0 gave up",
        ),
        "rank 0: freed by it (gather of step 3)",
        logged=0,
    ),
    Case(
        "fail rank 0 at reduce:1 of step 4",
        (
            "rank 0 failed at step 4, phase reduce",
            r"  step 4 failed in phase reduce: communicator closed at collective \d+ \(reduce, phase reduce\) failed "
            "on rank 0: a fault on purpose: fail rank 0 at reduce:1 of step 4. Parameters and optimizer state are "
            "those of step 3",
        ),
        "rank 1: freed by it (reduce of step 4)",
        logged=0,
    ),
    Case(
        "fail rank 1 at forward of step 5",
        (
            "rank 1 failed at step 5, phase forward",
            "  InjectedFault: a fault on purpose: fail rank 1 at forward of step 5",
        ),
        "rank 0: freed by it (agree of step 5)",
    ),
    Case(
        "lie rank 1 about fingerprint at agree of step 6",
        ("rank . failed at step 6, phase agree", "  the ranks are in different operations and nothing was sent: .*"),
        "the same error",
    ),
    Case(
        "lie rank 1 about vote at vote of step 7",
        (
            "rank . failed at step 7, phase vote",
            r"  step 7 failed in phase vote: .* 1 of 2 ranks said yes in the vote. Another rank may already be at step "
            "7; here parameters and optimizer state are those of step 6",
        ),
        "the same error",
    ),
    Case(
        "kill rank 0 at save:4 of step 8",
        (r"rank 0 killed by signal 9 \(possibly out of memory\) at step 8, phase save",),
        "rank 1: freed by it (save of step 8)",
    ),
    Case(
        "kill rank 0 at data of step 10",
        (r"rank 0 killed by signal 9 \(possibly out of memory\) at step 10, phase data",),
        "rank 1: freed by it",
    ),
]


def check_screen(case: Case, program: Program, run_dir: Path, last: int) -> None:
    """One screen: the cause once, the other rank in a line, the last good checkpoint, the way on."""
    screen = program.stderr.splitlines()
    for line, pattern in zip(screen, case.lines, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert sum(case.other in line for line in screen) == 1, screen
    assert f"last checkpoint: {run_dir}/checkpoints/step-{last:010d}" in screen
    assert screen[-2].startswith("go on with:      python -m shardrun train ")
    assert "--fault" not in program.stderr
    assert screen[-1] == "exit code 1 (training failed)"
    assert len(screen) <= 14
    assert "Traceback" not in program.stdout + program.stderr
    assert "frame #" not in program.stdout, "torch's own words"
    assert (program.stdout + program.stderr).count("microseconds") == 0


def test_a_run_that_goes_wrong_in_eight_ways_ends_as_one_that_never_did(tmp_path: Path) -> None:
    straight = config_in(tmp_path / "straight")
    assert ended(straight)[0] == 0
    config, run_dir = config_in(tmp_path / "faults"), tmp_path / "faults" / "run"
    for case in CASES:
        began = time.monotonic()
        code, program = ended(config, "--fault", case.fault)
        step = int(re.findall(r"of step (\d+)", case.fault)[0])
        assert code == 1, (case, program.stdout, program.stderr)
        assert next(one.step for one in scan(run_dir) if one.complete) == step - 1
        check_screen(case, program, run_dir, step - 1)
        assert time.monotonic() - began < 60
        document = json.loads((run_dir / "exit.json").read_text())
        assert (document["exit_code"], document["step"]) == (1, step)
        if case.logged is not None:
            log = (run_dir / "logs" / f"rank-{case.logged}.log").read_text()
            told = log.rpartition(f"the last collectives of rank {case.logged}:\n")[2].splitlines()
            assert 3 < len(told) <= 65
            assert told[0].split()[:3] == ["collective", "started", "microseconds"]
            assert all(re.match(r" *\d+ +\d\d:\d\d:\d\d\.\d{3} ", line) for line in told[1:])
    assert ended(config)[0] == 0
    assert final_tensors(run_dir) == final_tensors(tmp_path / "straight" / "run")
    assert rows(tmp_path / "faults") == rows(tmp_path / "straight")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "memory",
            "rank 1 ran out of memory at step 2, phase forward; a smaller train.micro_batch_size or "
            "train.activation_checkpointing needs less",
        ),
        (
            "abort",
            "rank 1 killed by signal 6 (SIGABRT: it aborted itself, often after a failed collective; its log has what "
            "it said) at step 2, phase forward",
        ),
    ],
)
def test_lack_of_memory_and_aborts_are_explained_in_one_line(tmp_path: Path, fault: str, said: str) -> None:
    code, program = ended(write_config(tmp_path, recipe_args={"fault": fault}))
    assert code == 1
    screen = program.stderr.splitlines()
    assert screen[0] == said
    assert "rank 0: freed by it (agree of step 2)" in screen
    assert f"last checkpoint: {tmp_path}/run/checkpoints/step-0000000001" in screen
    assert len(screen) <= 14


def test_a_fault_that_cannot_be_meant_is_refused_before_a_start(tmp_path: Path) -> None:
    config = config_in(tmp_path / "refused")
    code, program = ended(config, "--fault", "kill rank 2 at reduce; bla")
    assert (code, program.stdout) == (2, "")
    assert program.stderr.splitlines() == [
        "error: fault 'kill rank 2 at reduce': rank is 2; with world_size 2 it must be 0 to 1",
        "fault 'bla': found 'bla' where it may have fail, delay, hang, stop, kill or lie",
    ]
    assert not (tmp_path / "refused" / "run").exists()


def test_a_fault_is_not_repeated_in_the_worlds_that_follow(tmp_path: Path) -> None:
    config = config_in(tmp_path / "again", max_restarts=1)
    code, program = ended(config, "--fault", "kill rank 1 at reduce:1 of step 3", "train.steps=4")
    assert (code, program.stderr) == (0, "")
    assert re.findall("^restart . of .: rank 1 killed by signal 9", program.stdout, re.MULTILINE) == [
        "restart 1 of 1: rank 1 killed by signal 9"
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "kill rank 1 at reduce:1 of step 3",
            r"rank 1 is missing from collective \d+ \(reduce of step 3\): no word from it when its connection to rank "
            "0 ended",
        ),
        ("fail rank 1 at reduce:1 of step 3", "rank 1 failed at step 3, phase reduce"),
        ("lie rank 1 about parameter at save of step 3", "all ranks stopped at step 3, phase save"),
    ],
)
def test_ranks_of_torchrun_show_one_screen(tmp_path: Path, fault: str, said: str) -> None:
    config = config_in(tmp_path / "torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardrun"]
    with started([*command, "train", str(config), "--fault", fault], config.parent) as program:
        assert program.wait(120) == 1
    shown = [line for line in program.stderr.splitlines() if re.fullmatch(said, line)]
    assert len(shown) == 1, program.stderr
    assert program.stderr.count("last checkpoint: ") == 1
    document = json.loads((tmp_path / "torchrun" / "run" / "exit.json").read_text())
    assert (document["exit_code"], document["step"], document["reason"]) == (1, 3, shown[0])
    assert document["rank"] == (0 if "all ranks" in said else 1)
    found = newest(tmp_path / "torchrun" / "run")
    assert found is not None
    assert (found.step, found.complete) == (2, True)
