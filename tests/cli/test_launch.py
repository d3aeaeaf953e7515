"""The launcher as a program, over a pretended worker: every way to end, and that nothing outlives it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Program, pretended, started, until, write_config


def deed(rank: int, at: int, do: str, **others: Any) -> dict[str, Any]:
    return {"deeds": {str(rank): {"at": at, "do": do}}, **others}


def ended(tmp_path: Path, *arguments: str, **options: Any) -> tuple[int, Program]:
    """Run to the end; nothing may be left a moment later."""
    with started(pretended(tmp_path, *arguments, **options), tmp_path) as program:
        code = program.wait()
        assert program.left(0.5) == {}
        return code, program


def exit_document(tmp_path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((tmp_path / "run" / "exit.json").read_text())
    return document


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_done_exits_with_0(tmp_path: Path, world_size: int) -> None:
    code, program = ended(tmp_path, world_size=world_size, steps=3)
    assert (code, program.stderr) == (0, "")
    # What other ranks print comes when it comes; the order of rank 0's events is what counts.
    lines = [line for line in program.stdout.splitlines() if not line.startswith("[rank")]
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[0].startswith(f"{world_size} rank")
    assert lines[-1] == "finished at step 3"
    assert exit_document(tmp_path)["exit_code"] == 0


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("exit3", "rank 1 left at step 2 of 10 with code 3"),
        ("exit_text", "rank 1 left at step 2 of 10 with code 1: no more data"),
        ("os_exit0", "rank 1 left at step 2 of 10 with code 0"),
        ("kill", "rank 1 killed by signal 9 (possibly out of memory) at step 2, phase forward"),
    ],
)
def test_a_worker_that_leaves_early_fails_the_run(tmp_path: Path, do: str, said: str) -> None:
    code, program = ended(tmp_path, **deed(1, 2, do))
    assert code == 1
    assert program.stderr.splitlines()[0] == said
    assert "rank 0: freed by it (reduce of step 2)" in program.stderr.splitlines()
    assert "Traceback" not in program.stdout + program.stderr
    assert (exit_document(tmp_path)["rank"], exit_document(tmp_path)["step"]) == (1, 2)


def test_rank_0_is_named_as_well_as_any_other(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(0, 3, "kill"))
    assert code == 1
    assert program.stderr.startswith("rank 0 killed by signal 9 (possibly out of memory) at step 3, phase forward\n")


def test_an_exception_is_shown_once_with_the_place_in_the_users_file(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 2, "raise"))
    assert code == 1
    screen = program.stderr.splitlines()
    assert screen[0] == "rank 1 failed at step 2, phase forward"
    assert screen[1] == "  ValueError: bad label 7"
    assert screen[2].strip().startswith("at ")
    assert "launch_worker.py:" in screen[2]
    assert screen[2].endswith("in misbehave")
    assert "rank 0: freed by it (reduce of step 2)" in screen
    assert screen[-1] == "exit code 1 (training failed)"
    assert (program.stdout + program.stderr).count("bad label 7") == 1
    assert len(screen) <= 12
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "Traceback" in log
    assert str(tmp_path / "run" / "logs" / "rank-1.log") in program.stderr


def test_an_error_of_shardruns_own_gives_its_code_and_no_frames(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 2, "refuse"))
    assert code == 3
    assert program.stderr.splitlines()[1] == "  step-0000000001: hash of model.safetensors differs"
    assert "  at " not in program.stderr


def test_a_worker_that_dies_at_import_fails_the_run(tmp_path: Path) -> None:
    code, program = ended(tmp_path, "--name-error")
    assert code == 1
    assert "left at step 0 with code 1" in program.stderr
    assert "] NameError: name 'undefined_name' is not defined" in program.stdout


def test_a_rank_that_does_not_come_to_a_collective_is_named(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 2, "sleep"), timeout_s=3)
    assert code == 1
    said = program.stderr.splitlines()[0]
    assert said.startswith(
        "rank 1 is missing from collective 2 (reduce of step 2): it was at step 2, phase forward, for "
    )
    assert "rank 0: freed by it (reduce of step 2)" in program.stderr.splitlines()


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    code, _ = ended(tmp_path, **deed(1, 2, "child"), steps=3)
    assert code == 0
    code, _ = ended(tmp_path, **deed(1, 2, "child_then_raise"))
    assert code == 1


def test_processes_that_a_worker_forks_can_be_ended_by_sigterm(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 2, "fork_and_end"), steps=3)
    assert (code, program.stderr) == (0, "")


def test_a_worker_that_is_done_and_hangs_on_its_way_out_is_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, program = ended(tmp_path, "--hang-at-exit", steps=1)
    assert (code, program.stderr) == (0, "")
    assert 9 < time.monotonic() - begun < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_finishes_the_step_saves_and_exits_with_75(tmp_path: Path, number: signal.Signals) -> None:
    with started(pretended(tmp_path, steps=1000, save_s=0.5), tmp_path) as program:
        program.until("step 2/1000")
        program.signal(number)
        assert program.wait() == 75
        assert program.left(0.5) == {}
    lines = program.stdout.splitlines()
    assert f"{number.name}: finishing the step and saving; Ctrl-C (again) stops now without saving" in lines
    assert any(line.startswith("stopped at step ") for line in lines)
    assert lines[-2:] == ["go on with: the command", "exit code 75 (stopped after saving, safe to start again)"]
    assert "Traceback" not in program.stdout + program.stderr


def test_a_stop_signal_before_the_workers_listen_is_not_lost(tmp_path: Path) -> None:
    with started(pretended(tmp_path, steps=1000), tmp_path) as program:
        until(lambda: len(program.ranks()) == 2, 30, "no workers")
        program.signal(signal.SIGTERM)
        assert program.wait() == 75


def test_a_signal_to_the_whole_process_group_is_one_request(tmp_path: Path) -> None:
    with started(pretended(tmp_path, steps=1000), tmp_path) as program:
        program.until("step 2/1000")
        os.killpg(program.process.pid, signal.SIGINT)
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.wait() == 75


def test_a_second_ctrl_c_stops_now(tmp_path: Path) -> None:
    with started(pretended(tmp_path, steps=1000, save_s=60), tmp_path) as program:
        program.until("step 2/1000")
        program.signal(signal.SIGINT)
        program.until("finishing the step")
        time.sleep(0.3)
        program.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert program.process.poll() is None
        program.signal(signal.SIGINT)
        assert program.wait(10) == 130
        assert program.left(0.5) == {}
    assert program.stderr.splitlines()[0] == "interrupted, nothing saved"
    assert program.stderr.splitlines()[-1] == "exit code 130 (interrupted, nothing saved)"


@pytest.mark.parametrize("stopped", [False, True])
def test_no_worker_outlives_a_killed_launcher(tmp_path: Path, stopped: bool) -> None:
    with started(pretended(tmp_path, steps=100000), tmp_path) as program:
        program.until("step 2/100000")
        if stopped:
            os.kill(program.ranks()[1], signal.SIGSTOP)
        program.signal(signal.SIGKILL)
        program.wait()
        assert program.left(5) == {}


def test_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    with (
        started(pretended(tmp_path, run="a", steps=5), tmp_path) as one,
        started(pretended(tmp_path, run="b", steps=5), tmp_path) as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0)


def test_output_is_marked_by_rank_and_never_cut(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 2, "half_line"), steps=3)
    assert code == 0
    lines = program.stdout.splitlines()
    assert "[rank 1] half a line and the rest" in lines
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[rank {rank}] user print")] == [
            f"[rank {rank}] user print {step}" for step in (1, 2, 3)
        ]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text().splitlines()
    assert [line for line in log if line.startswith("step")] == [line for line in lines if line.startswith("step")]
    assert "user print 2" in log
    assert "half a line and the rest" in (tmp_path / "run" / "logs" / "rank-1.log").read_text().splitlines()


@pytest.mark.parametrize("how", ["closed", "broken", "full"])
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path, how: str) -> None:
    command = pretended(tmp_path, steps=5)
    if how == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        code = _code_of(command, tmp_path, subprocess.DEVNULL)
    elif how == "full":
        with open("/dev/full", "w") as full:
            code = _code_of(command, tmp_path, full.fileno())
    else:
        read, write = os.pipe()
        os.close(read)
        code = _code_of(command, tmp_path, write)
        os.close(write)
    assert code == 0
    assert exit_document(tmp_path)["exit_code"] == 0


def _code_of(command: list[str], tmp_path: Path, stdout: int) -> int:
    with started(command, tmp_path, stdout=stdout) as program:
        code = program.wait()
        assert program.stderr == ""
        return code


@contextmanager
def paused_reader(kind: str) -> Iterator[tuple[int, int]]:
    """(reading end, writing end) of a pipe or a terminal that nobody reads; both hold only a few kB."""
    read, write = os.openpty() if kind == "terminal" else os.pipe()
    if kind == "pipe":
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def trained_past(tmp_path: Path, step: int) -> None:
    """Wait until the log of rank 0 has this step; whether anything is read from the screen plays no part."""
    log = tmp_path / "run" / "logs" / "rank-0.log"
    until(lambda: log.exists() and f"step {step}/" in log.read_text(), 30, f"training stands still before step {step}")


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_pauses_stops_neither_the_training_nor_a_ctrl_c(tmp_path: Path, kind: str) -> None:
    with paused_reader(kind) as (_, write):
        command = pretended(tmp_path, steps=100000, step_s=0.001, save_s=60)
        with started(command, tmp_path, stdout=write, stderr=write) as program:
            trained_past(tmp_path, 600)
            program.signal(signal.SIGINT)
            time.sleep(0.5)
            assert program.process.poll() is None
            program.signal(signal.SIGINT)
            assert program.wait(10) == 130
            assert program.left(0.5) == {}
    assert exit_document(tmp_path)["exit_code"] == 130


@pytest.mark.parametrize("json_output", [False, True])
def test_a_reader_that_pauses_and_goes_on_gets_what_is_told_once(tmp_path: Path, json_output: bool) -> None:
    with paused_reader("pipe") as (read, write):
        command = pretended(tmp_path, steps=100000, step_s=0.001, json=json_output)
        with started(command, tmp_path, stdout=write) as program:
            trained_past(tmp_path, 200)
            program.signal(signal.SIGTERM)
            os.set_blocking(read, False)
            shown = b""
            while program.process.poll() is None:
                try:
                    shown += os.read(read, 1 << 16)
                except BlockingIOError:
                    time.sleep(0.01)
            assert program.wait() == 75
            assert program.stderr == ""
        with suppress(BlockingIOError):
            shown += os.read(read, 1 << 16)
    lines = shown.decode().splitlines()
    assert len([line for line in lines if "user print" in line]) >= 400
    if json_output:
        assert json.loads(lines[-1])["exit_code"] == 75
    else:
        assert any(line.startswith("SIGTERM: finishing the step") for line in lines)
        assert lines[-1].startswith("exit code 75")


def test_json_output_is_json_alone(tmp_path: Path) -> None:
    code, program = ended(tmp_path, **deed(1, 3, "raise"), json=True)
    assert code == 1
    documents = [json.loads(line) for line in program.stdout.splitlines()]
    assert {document["schema_version"] for document in documents} == {1}
    assert [d["step"] for d in documents if d["event"] == "step"] == [1, 2]
    assert {"event": "output", "rank": 1, "text": "user print 1", "schema_version": 1} in documents
    last = documents[-1]
    assert (last["event"], last["exit_code"], last["rank"], last["type"]) == ("exit", 1, 1, "ValueError")
    assert last["message"] == "bad label 7"


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file where the folder should be")
    code, program = ended(tmp_path, steps=3)
    assert code == 0
    assert program.stdout.count("the log of this rank ends here") == 2


@pytest.mark.parametrize("hangs", ["output", "start"])
def test_what_came_before_a_hang_is_in_the_log_of_a_killed_launch(tmp_path: Path, hangs: str) -> None:
    with started(pretended(tmp_path, hangs=hangs), tmp_path) as program:
        last = "user print while loading" if hangs == "output" else "2 ranks on cpu"
        program.until(last)
        log = tmp_path / "run" / "logs" / "rank-0.log"
        until(log.exists, 5, "no log")
        time.sleep(0.1)
        program.signal(signal.SIGKILL)
        program.wait()
    lines = log.read_text().splitlines()
    assert lines[0] == "about to load"
    assert lines[1].startswith(last)


@pytest.mark.parametrize("before", [None, "an earlier start\n"])
def test_a_run_that_is_already_finished_leaves_its_logs_as_they_are(tmp_path: Path, before: str | None) -> None:
    logs = tmp_path / "run" / "logs"
    if before is not None:
        logs.mkdir(parents=True)
        (logs / "rank-0.log").write_text(before)
        os.utime(logs / "rank-0.log", ns=(10**18, 10**18))
    code, program = ended(tmp_path, already=True)
    assert (code, program.stderr) == (0, "")
    assert "[rank 0] user print while loading" in program.stdout.splitlines()
    if before is None:
        assert not logs.exists()
    else:
        assert [path.name for path in logs.iterdir()] == ["rank-0.log"]
        assert (logs / "rank-0.log").read_text() == before
        assert (logs / "rank-0.log").stat().st_mtime_ns == 10**18


def test_exit_json_never_tells_of_an_earlier_start(tmp_path: Path) -> None:
    with started(pretended(tmp_path, steps=1000), tmp_path) as program:
        program.until("step 2/1000")
        assert not (tmp_path / "run" / "exit.json").exists()
        program.signal(signal.SIGTERM)
        assert program.wait() == 75
    assert exit_document(tmp_path)["exit_code"] == 75
    with started(pretended(tmp_path, steps=1000), tmp_path) as program:
        program.until("step 2/1000")
        program.signal(signal.SIGKILL)
        program.wait()
    assert not (tmp_path / "run" / "exit.json").exists()
    # A finished run says so, whatever was there; what says so already stays as it is.
    (tmp_path / "run" / "exit.json").write_text('{"exit_code": 75}')
    assert ended(tmp_path, already=True)[0] == 0
    assert exit_document(tmp_path)["exit_code"] == 0
    os.utime(tmp_path / "run" / "exit.json", ns=(10**18, 10**18))
    before = exit_document(tmp_path)
    assert ended(tmp_path, already=True)[0] == 0
    assert exit_document(tmp_path) == before
    assert (tmp_path / "run" / "exit.json").stat().st_mtime_ns == 10**18


def test_exit_json_of_a_rank_of_torchrun_tells_of_no_earlier_start_and_of_a_second_ctrl_c(tmp_path: Path) -> None:
    config = write_config(tmp_path, topology={"world_size": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text('{"exit_code": 75}')
    worker = (
        "import sys, time, types\n"
        "def run_worker(document, tether):\n    print('at work', flush=True)\n    time.sleep(600)\n"
        "sys.modules['shardrun.run.worker'] = types.SimpleNamespace(run_worker=run_worker)\n"
        "from pathlib import Path\nfrom shardrun.cli import train\n"
        f"sys.exit(train.run(Path({str(config)!r}), []))\n"
    )
    command = ["env", "RANK=0", "WORLD_SIZE=1", sys.executable, "-c", worker]
    with started(command, tmp_path) as program:
        program.until("at work")
        assert not (tmp_path / "run" / "exit.json").exists()
        program.signal(signal.SIGINT)
        time.sleep(0.3)
        program.signal(signal.SIGINT)
        assert program.wait(10) == 130
    assert exit_document(tmp_path)["exit_code"] == 130


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("tempfile.tempdir = '/no/such/folder'", "/no/such/folder: cannot be used for the launch's own files"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))", "{tmp}: cannot be used for the launch's own files"),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (6, 4096))", "cannot start"),
    ],
)
def test_a_launch_without_room_for_its_own_files_is_a_launch_error(tmp_path: Path, fault: str, said: str) -> None:
    script = (
        "import os, resource, sys, tempfile\nfrom pathlib import Path\n"
        "from shardrun.errors import LaunchError\nfrom shardrun.report import TrainScreen\n"
        "from shardrun.run.launch import launch\nfrom shardrun.run.worker_process import Job\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n{fault}\n"
        "try:\n    launch(Job({'a': 1}, Path('.'), 2, command=(sys.executable,)), TrainScreen())\n"
        "except LaunchError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n    print(error)\n    sys.exit(error.exit_code)\n"
    )
    with started([sys.executable, "-c", script], tmp_path) as program:
        assert program.wait() == 5, program.stderr
    assert program.stdout.startswith(said.format(tmp=tmp_path))
    assert not list(tmp_path.glob("shardrun-*"))


def test_a_program_that_is_not_there_is_a_launch_error(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\n"
        "from shardrun.errors import LaunchError\nfrom shardrun.report import TrainScreen\n"
        "from shardrun.run.launch import launch\nfrom shardrun.run.worker_process import Job\n"
        "try:\n    launch(Job({}, Path('.'), 2, command=('no-such-program',)), TrainScreen())\n"
        "except LaunchError as error:\n    print(error)\n"
    )
    with started([sys.executable, "-c", script], tmp_path) as program:
        assert program.wait() == 0
    assert program.stdout == "cannot start no-such-program: No such file or directory\n"


def test_the_launcher_does_without_torch(tmp_path: Path) -> None:
    script = "import sys, shardrun.cli.train; sys.exit('torch' in sys.modules)"
    with started([sys.executable, "-c", script], tmp_path) as program:
        assert program.wait() == 0


def test_a_world_of_one_makes_no_socket(tmp_path: Path) -> None:
    code, _ = ended(tmp_path, world_size=1, steps=1)
    assert code == 0
    script = (
        "import socket, sys\n"
        "def refuse(event, arguments):\n"
        "    if event.startswith('socket.'): raise SystemExit(event)\n"
        "sys.addaudithook(refuse)\n"
        "from tests.support import launch_driver\n"
        f"sys.argv = ['x', {str(tmp_path / 'run')!r}, '{{\"world_size\": 1, \"steps\": 2}}']\n"
        "sys.exit(launch_driver.main())\n"
    )
    with started([sys.executable, "-c", script], tmp_path) as program:
        assert program.wait() == 0, program.stderr


def test_ranks_write_the_flight_recorder_of_nccl_beside_their_logs(tmp_path: Path) -> None:
    with started(pretended(tmp_path, world_size=1, steps=1000), tmp_path) as program:
        program.until("step 1/1000")
        environment = Path(f"/proc/{program.ranks()[0]}/environ").read_bytes().split(b"\0")
    assert f"TORCH_FR_DUMP_TEMP_FILE={tmp_path}/run/logs/nccl-trace-rank-".encode() in environment
