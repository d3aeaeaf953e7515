"""Signals while a checkpoint is written or read: deferred until all is whole; the exit code then says how it went.

A delay on purpose in one collective of the save or of the restore makes the moment.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardrun.checkpoint.store import scan
from shardrun.run import status
from tests.support.launching import ROOT, Program, final_tensors, shardrun, started, until, write_config

pytestmark = pytest.mark.sample(2)

STEPS = 7
_LATE_S = 1.0


def config_in(folder: Path) -> Path:
    folder.mkdir()
    return write_config(
        folder,
        optimizer={"name": "adamw"},
        train={"steps": STEPS, "max_grad_norm": 1.0},
        checkpoint={"every": 2, "keep": 9},
    )


def run(config: Path, *words: str) -> Program:
    """Train until the end or the fault."""
    with started(shardrun("train", config, *words), config.parent) as program:
        program.wait(120)
        return program


def wait_at(folder: Path, collective: int, phase: str, step: int) -> None:
    """Wait until rank 1 is late in a collective, for longer than it stays in one without a fault.

    The launcher's own folder is in `folder`.
    """

    def there() -> bool:
        found = [status.read(path) for path in folder.glob("shardrun-*/rank-1.status")]
        place = (phase, step)
        return any(
            (one.phase, one.step) == place
            and (not collective or one.collective == collective)
            and time.time() - one.since > _LATE_S
            for one in found
        )

    until(there, 60, f"rank 1 has never been in {phase} of step {step}, collective {collective}")


def signalled(
    config: Path, fault: str, numbers: Sequence[int], phase: str, step: int, collective: int = 0
) -> tuple[int, Program]:
    """Send each signal while the fault delays a collective of that phase."""
    control = config.parent / "control"
    control.mkdir(exist_ok=True)
    command = shardrun("train", config, "--fault", fault)
    with started(command, config.parent, {"TMPDIR": str(control)}) as program:
        wait_at(control, collective, phase, step)
        for number in numbers:
            program.signal(number)
            time.sleep(0.3)
        code = program.wait(60)
        assert program.left(5) == {}
        return code, program


def saved(config: Path) -> list[int]:
    """Steps of the checkpoints, oldest first; all are whole."""
    found = scan(config.parent / "run")
    assert all(one.complete for one in found), found
    return sorted(one.step for one in found)


def number_of_restore(config: Path) -> int:
    """Which collective of a start that goes on is the restore, from the log of one that failed after it."""
    run(config, "--fault", "fail rank 1 at data")
    log = (config.parent / "run" / "logs" / "rank-1.log").read_text()
    return int(re.findall(r"^ *(\d+) .*: agree: restore$", log, re.MULTILINE)[-1])


def test_signals_in_a_save_or_a_restore_leave_all_whole(tmp_path: Path) -> None:
    assert run(config_in(tmp_path / "straight")).process.returncode == 0
    config = config_in(tmp_path / "signals")

    code, program = signalled(config, "delay rank 1 by 4 s at save:9 of step 2", [signal.SIGINT], "save", 2)
    assert (code, program.stderr) == (75, "")
    assert "stopped at step 2, saved as" in program.stdout, "nobody waits for another window once it is saved"
    assert "step 3/" not in program.stdout
    assert saved(config) == [1, 2]

    number = number_of_restore(config)
    fault = f"delay rank 1 by 4 s at collective {number}"
    code, program = signalled(config, fault, [signal.SIGTERM], "start-up", 0, number)
    assert (code, program.stderr) == (75, "")
    assert "resumed at step 2 from" in program.stdout
    assert "stopped at step 3, saved as" in program.stdout
    assert saved(config) == [1, 2, 3]

    fault = "delay rank 1 by 20 s at save:9 of step 4"
    code, program = signalled(config, fault, [signal.SIGINT, signal.SIGINT], "save", 4)
    assert code == 130
    assert program.stderr.splitlines()[0] == "interrupted, nothing saved"
    assert saved(config) == [1, 2, 3]

    fault = f"delay rank 1 by 20 s at collective {number}"
    code, _ = signalled(config, fault, [signal.SIGINT, signal.SIGINT], "start-up", 0, number)
    assert code == 130
    assert saved(config) == [1, 2, 3]

    assert run(config).process.returncode == 0
    assert saved(config) == [1, 2, 3, 4, 6, 7]
    assert final_tensors(tmp_path / "signals" / "run") == final_tensors(tmp_path / "straight" / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_worker_alone_in_a_save_is_heard_by_all(tmp_path: Path, number: signal.Signals) -> None:
    """As a scheduler may send it; the others hear of it right after the save."""
    config = config_in(tmp_path / "one")
    control = tmp_path / "one" / "control"
    control.mkdir()
    command = shardrun("train", config, "--fault", "delay rank 1 by 4 s at save:9 of step 1")
    with started(command, config.parent, {"TMPDIR": str(control)}) as program:
        wait_at(control, 0, "save", 1)
        os.kill(program.ranks()[1], number)
        assert program.wait(60) == 75
    assert "stopped at step 1, saved as" in program.stdout
    assert saved(config) == [1]


# ---- before anything is started --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_launch_leaves_with_130(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "never.yaml"
    os.mkfifo(config)  # to be read once somebody writes
    with started(shardrun("train", config), tmp_path) as program:
        writer = os.open(config, os.O_WRONLY)  # waits for the reader
        time.sleep(0.1)
        program.signal(number)
        assert program.wait(10) == 130
        os.close(writer)
    assert (program.stdout, program.stderr) == ("", "interrupted\n")


def test_an_interruption_that_compiled_code_has_turned_into_another_error_is_one(tmp_path: Path) -> None:
    script = """
import os, signal
from shardrun import __main__
from shardrun.cli import app

def swallowing(prog_name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("SchemaError") from None

app.app = swallowing
__main__.main()
"""
    with started([sys.executable, "-c", script], tmp_path) as program:
        assert program.wait(30) == 130
    assert program.stderr == "interrupted\n"


# ---- while workers start ---------------------------------------------------------------------------------------------


@pytest.fixture
def slow_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which loading torch takes a minute and says when it begins."""
    folder = tmp_path / "slow"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("import time\nprint('loading torch', flush=True)\ntime.sleep(60)\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_no_worker_that_still_loads_torch_outlives_the_command(tmp_path: Path, slow_torch: dict[str, str]) -> None:
    with started(shardrun("train", write_config(tmp_path)), tmp_path, slow_torch) as program:
        until(lambda: program.stdout.count("loading torch") == 2, 60, "no worker loads torch")
        program.signal(signal.SIGKILL)
        program.wait()
        assert program.left(5) == {}


def test_a_second_ctrl_c_ends_workers_that_still_load_torch(tmp_path: Path, slow_torch: dict[str, str]) -> None:
    with started(shardrun("train", write_config(tmp_path)), tmp_path, slow_torch) as program:
        until(lambda: program.stdout.count("loading torch") == 2, 60, "no worker loads torch")
        program.signal(signal.SIGINT)
        program.until("finishing the step")
        time.sleep(0.3)
        program.signal(signal.SIGINT)
        assert program.wait(20) == 130
        assert program.left(5) == {}
    assert program.stderr.splitlines()[0] == "interrupted, nothing saved"
