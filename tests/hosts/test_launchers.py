"""Two launchers as programs, over the pretended worker on this machine: what one host has to know of the other."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from tests.hosts.network import free_port
from tests.support.launching import Program, pretended, started


@contextmanager
def two_launchers(folder: Path, **options: Any) -> Iterator[list[Program]]:
    """Node 0 and node 1, with a rank each."""
    common = {"nnodes": 2, "port": free_port(), **options}
    with ExitStack() as stack:
        yield [stack.enter_context(started(pretended(folder, **common, node_rank=node), folder)) for node in (0, 1)]


def ended(programs: list[Program], timeout_s: float = 60.0) -> list[int]:
    codes = [program.wait(timeout_s) for program in programs]
    assert [program.left(0.5) for program in programs] == [{}, {}]
    return codes


def first_lines(programs: list[Program]) -> list[str]:
    return [program.stderr.splitlines()[0] for program in programs]


LONG = os.environ.get("SHARDRUN_LONG", "0") != "0"
SEED = 4
NODES = [f"node {node} ({gethostname()}, 127.0.0.1)" for node in (0, 1)]


def test_two_launchers_make_one_world(tmp_path: Path) -> None:
    with two_launchers(tmp_path, steps=3) as programs:
        assert ended(programs) == [0, 0]
    assert [program.stderr for program in programs] == ["", ""]
    shown = [program.stdout.splitlines() for program in programs]
    assert [lines[0] for lines in shown] == [f"all 2 hosts are there; this is {node}" for node in NODES]
    assert "step 3/3" in programs[0].stdout
    assert shown[0][-1] == "finished at step 3"
    assert [line for line in shown[1] if not line.startswith("[rank 1] ")] == shown[1][:1]
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == 0
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.parametrize("node", [0, 1])
def test_both_screens_tell_which_rank_failed_on_which_host_and_why(tmp_path: Path, node: int) -> None:
    with two_launchers(tmp_path, deeds={str(node): {"at": 2, "do": "raise"}}) as programs:
        assert ended(programs) == [1, 1]
    for program in programs:
        screen = program.stderr.splitlines()
        assert screen[:2] == [
            f"rank {node} on {NODES[node]} failed at step 2, phase forward",
            "  ValueError: bad label 7",
        ]
        assert "launch_worker.py:" in screen[2]
        assert f"rank {1 - node}: freed by it (reduce of step 2)" in screen
        assert screen[-1] == "exit code 1 (training failed)"
    document = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (document["rank"], document["host"], document["message"]) == (node, NODES[node], "bad label 7")


def test_a_code_is_the_same_on_all_hosts(tmp_path: Path) -> None:
    with two_launchers(tmp_path, deeds={"1": {"at": 2, "do": "refuse"}}) as programs:
        assert ended(programs) == [3, 3]
    assert [program.stderr.splitlines()[1] for program in programs] == [
        "  step-0000000001: hash of model.safetensors differs"
    ] * 2


def test_a_rank_that_does_not_come_is_named_on_both_hosts(tmp_path: Path) -> None:
    with two_launchers(tmp_path, deeds={"1": {"at": 2, "do": "sleep"}}, timeout_s=2.0) as programs:
        assert ended(programs) == [1, 1]
    missing = f"rank 1 on {NODES[1]} is missing from collective 2 (reduce of step 2): it was at step 2, phase forward"
    assert all(line.startswith(missing) for line in first_lines(programs)), first_lines(programs)


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_on_one_host_stops_all(tmp_path: Path, node: int) -> None:
    with two_launchers(tmp_path, steps=1000) as programs:
        programs[0].until("step 2/1000")
        programs[node].signal(signal.SIGTERM)
        assert ended(programs) == [75, 75]
    told = [f"SIGTERM on {NODES[node]}", f"SIGTERM on {NODES[node]}"]
    told[node] = "SIGTERM"
    for program, name in zip(programs, told, strict=True):
        assert f"{name}: finishing the step and saving; Ctrl-C (again) stops now without saving" in program.stdout
        assert program.stdout.splitlines()[-1] == "exit code 75 (stopped after saving, safe to start again)"


def test_a_second_ctrl_c_on_one_host_ends_all(tmp_path: Path) -> None:
    with two_launchers(tmp_path, steps=1000, save_s=60) as programs:
        programs[0].until("step 2/1000")
        programs[1].signal(signal.SIGINT)
        programs[0].until("finishing the step")
        time.sleep(0.3)
        programs[1].signal(signal.SIGINT)
        assert ended(programs, 15) == [130, 130]
    assert first_lines(programs) == ["interrupted, nothing saved"] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_takes_its_host_along(tmp_path: Path, node: int) -> None:
    with two_launchers(tmp_path, steps=100000) as programs:
        programs[0].until("step 2/100000")
        programs[node].signal(signal.SIGKILL)
        codes = ended(programs, 20)
    assert codes[node] == -signal.SIGKILL
    assert codes[1 - node] == 1
    line = programs[1 - node].stderr.splitlines()[0]
    assert line.startswith(
        f"{NODES[node]} with rank {node} is gone: the connection was closed; rank {1 - node} waited in "
    )
    document = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (document["exit_code"], document["rank"], document["host"]) == (1, node, NODES[node])
    assert "step" not in document


def test_a_launcher_that_is_stopped_is_given_up_and_finds_its_world_gone(tmp_path: Path) -> None:
    """As a host is that freezes: the others end in time, and it ends when it wakes."""
    with two_launchers(tmp_path, steps=100000, timeout_s=2.0) as programs:
        programs[0].until("step 2/100000")
        for pid in (programs[1].process.pid, *programs[1].family()):
            os.kill(pid, signal.SIGSTOP)
        assert programs[0].wait(20) == 1
        assert " is gone: nothing was heard for " in first_lines(programs[:1])[0]
        for pid in (programs[1].process.pid, *programs[1].family()):
            os.kill(pid, signal.SIGCONT)
        assert ended(programs, 20) == [1, 1]
    assert programs[1].stderr.startswith(f"{NODES[0]} with rank 0 is gone: ")


def test_a_failed_world_is_followed_by_a_new_one_on_all_hosts(tmp_path: Path) -> None:
    with two_launchers(tmp_path, max_restarts=2, deeds={"1": {"at": 2, "do": "kill"}}) as programs:
        assert ended(programs) == [1, 1]
    killed = f"rank 1 on {NODES[1]} killed by signal 9 (possibly out of memory) at step 2, phase forward"
    for program in programs:
        assert [line.partition(";")[0] for line in program.stdout.splitlines() if line.startswith("restart")] == [
            f"restart 1 of 2: {killed}",
            f"restart 2 of 2: {killed}",
        ]
        assert program.stderr.splitlines()[0] == killed
    assert programs[0].stdout.count("step 1/10") == 3


@pytest.mark.parametrize("trial", range(40 if LONG else 5))
def test_whatever_happens_whenever_both_hosts_end_alike_and_leave_nothing(tmp_path: Path, trial: int) -> None:
    """Something random at a random moment from the first meeting on: a rank or a launcher killed, a stop."""
    chance = random.Random(f"{SEED} {trial}")
    deed, node, restarts = (
        chance.choice(["rank", "launcher", "stop", "interrupt"]),
        chance.randrange(2),
        chance.randrange(3),
    )
    with two_launchers(tmp_path, steps=30, max_restarts=restarts, save_s=chance.choice([0.0, 0.5])) as programs:
        for program in programs:
            program.until("all 2 hosts are there")
        time.sleep(chance.uniform(0.0, 1.6))
        with suppress(ProcessLookupError, KeyError):
            if deed == "rank":
                programs[node].kill_rank(node)
            elif deed == "launcher":
                programs[node].signal(signal.SIGKILL)
            else:
                for _ in range(1 if deed == "stop" else 2):
                    programs[node].signal(signal.SIGINT)
                    time.sleep(0.15)
        codes = ended(programs, 30)
    told = f"{deed} of node {node}, {restarts} restarts: {codes}\n" + "\n".join(p.stderr for p in programs)
    if deed == "launcher" and -signal.SIGKILL in codes:
        assert codes[1 - node] in (0, 1), told
    elif -signal.SIGINT not in codes:  # the second one came when that launcher was through
        expected = {"rank": {1} if restarts == 0 else {0}, "stop": {75}, "interrupt": {75, 130}}.get(deed, set())
        assert codes[0] == codes[1], told
        assert codes[0] in {0} | expected, told
    assert "Traceback" not in told


def test_a_finished_run_leaves_no_trace_on_any_host(tmp_path: Path) -> None:
    with two_launchers(tmp_path, already=True) as programs:
        assert ended(programs) == [0, 0]
    assert not (tmp_path / "run" / "logs").exists()


def test_a_stop_while_a_host_waits_for_others_starts_nothing(tmp_path: Path) -> None:
    command = pretended(tmp_path, nnodes=2, node_rank=0, port=free_port())
    with started(command, tmp_path) as program:
        program.until("waiting for node 1 of 2 to come to 127.0.0.1:")
        program.signal(signal.SIGTERM)
        assert program.wait(10) == 130
        assert program.family() == {}


def test_a_host_waits_for_node_0_and_leaves_on_ctrl_c(tmp_path: Path) -> None:
    command = pretended(tmp_path, nnodes=2, node_rank=1, port=free_port())
    with started(command, tmp_path) as program:
        program.until("waiting for node 0 at 127.0.0.1:")
        program.signal(signal.SIGINT)
        assert program.wait(10) == 130
