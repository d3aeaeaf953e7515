"""`shardrun train` as a program: stop and go on, refusals before a start, torchrun, sockets, and a killed parent."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from shardrun.checkpoint.lock import RunLock
from shardrun.checkpoint.store import newest
from shardrun.cli import train
from shardrun.config.load import load, resolved_yaml
from shardrun.errors import CheckpointError, LaunchError, UsageError
from tests.support.launching import Program, shardrun, started, write_config


def ended(config: Path, *words: str, folder: Path | None = None) -> tuple[int, Program]:
    with started(shardrun("train", config, *words), folder or config.parent) as program:
        code = program.wait(120)
        assert program.left(0.5) == {}
        return code, program


def tree(folder: Path) -> dict[str, str]:
    """Hash of every file; the lock has the name of its last owner."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors(folder: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint's files; their headers name the run."""
    found = newest(folder / "run")
    assert found is not None
    assert found.complete, found.why
    content = {}
    for path in sorted(found.path.rglob("*.safetensors")):
        raw = path.read_bytes()
        content[str(path.relative_to(found.path))] = raw[8 + int.from_bytes(raw[:8], "little") :]
    return content


def test_a_run_stops_goes_on_and_knows_when_it_is_finished(tmp_path: Path) -> None:
    options = [{"match": ["*"], "lr_scale": 2.0}]  # saved with other things that a going on compares
    config = write_config(tmp_path, train={"steps": 4}, optimizer={"options": options})
    code, program = ended(config, "--stop-at", "2")
    assert (code, program.stderr) == (75, "")
    again = f"python -m shardrun train {config}"
    assert program.stdout.splitlines()[-2:] == [
        f"go on with: {again}",
        "exit code 75 (stopped after saving, safe to start again)",
    ]
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == 75
    code, program = ended(config)
    assert (code, program.stderr) == (0, "")
    assert f"resumed at step 2 from {tmp_path}/run/checkpoints/step-0000000002" in program.stdout.splitlines()
    assert re.findall(r"^step (\d)/4", program.stdout, re.MULTILINE) == ["3", "4"]
    # The saved config runs as it stands, and a finished run is left as it is.
    before = tree(tmp_path / "run")
    code, program = ended(tmp_path / "run" / "config.resolved.yaml", folder=tmp_path)
    assert (code, program.stderr) == (0, "")
    assert program.stdout.splitlines()[-1] == "already finished at step 4: nothing to do"
    assert tree(tmp_path / "run") == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a finished run of two steps on one rank."""
    config = write_config(tmp_path_factory.mktemp("trained"), train={"steps": 2}, topology={"world_size": 1})
    assert ended(config)[0] == 0
    return config


def test_a_config_that_changed_in_meaning_is_refused_with_the_differences(trained: Path) -> None:
    before = tree(trained.parent / "run")
    with pytest.raises(UsageError) as refused:
        train.run(trained, ["optimizer.lr=0.5", "log.every=7"])
    assert "optimizer.lr: saved 0.01, now 0.5" in str(refused.value)
    assert "log.every" not in str(refused.value)
    assert "--accept-changes" in str(refused.value)
    assert refused.value.exit_code == 2
    assert tree(trained.parent / "run") == before


def test_a_change_is_let_through_when_it_is_accepted(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained.parent, tmp_path, dirs_exist_ok=True)
    words = [f"run.dir={tmp_path / 'run'}", "optimizer.lr=0.5", "train.steps=3"]
    code, program = ended(tmp_path / "run.yaml", "--accept-changes", *words)
    assert (code, program.stderr) == (0, "")
    assert "optimizer.lr: saved 0.01, now 0.5" in program.stdout.splitlines()
    saved = yaml.safe_load((tmp_path / "run" / "config.resolved.yaml").read_text())
    assert saved["optimizer"]["lr"] == 0.5


def test_fresh_starts_anew_in_a_folder_beside(trained: Path) -> None:
    before = tree(trained.parent / "run")
    code, program = ended(trained, "--fresh", "--stop-at", "1", "optimizer.lr=0.5")
    assert code == 75
    assert tree(trained.parent / "run") == before
    folder = trained.parent / "run-2"
    assert newest(folder) is not None
    assert f"go on with: python -m shardrun train {trained} optimizer.lr=0.5 run.dir={folder}" in program.stdout
    code, program = ended(trained, "optimizer.lr=0.5", f"run.dir={folder}")
    assert code == 0
    assert f"resumed at step 1 from {folder}" in program.stdout


def test_fresh_and_a_required_resume_contradict_each_other(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint={"resume": "required"})
    with pytest.raises(UsageError, match="--fresh starts anew"):
        train.run(config, [], fresh=True)
    assert not (tmp_path / "run").exists()


def test_only_what_was_saved_holds_a_config_to_itself(tmp_path: Path) -> None:
    """What a start wrote into the folder and never trained with binds nobody; a checkpoint does."""
    config = write_config(tmp_path, topology={"world_size": 1}, train={"steps": 1})
    resolved = tmp_path / "run" / train.RESOLVED
    resolved.parent.mkdir()
    resolved.write_text(resolved_yaml(load(config, ["optimizer.lr=0.5"])))
    code, program = ended(config)
    assert (code, program.stderr) == (0, "")
    # A start that no rank accepts leaves the run open to the config that it was trained with.
    assert ended(config, "optimizer.name=adamw", "--accept-changes")[0] == 3
    code, program = ended(config)
    assert code == 0
    assert "already finished" in program.stdout


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with RunLock(tmp_path / "run"), pytest.raises(LaunchError, match=f"in use by pid {os.getpid()}"):
        train.run(config, [])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    config = write_config(tmp_path)
    with pytest.raises(LaunchError, match="cannot be used as run folder"):
        train.run(config, [])


def test_json_output_of_a_run_is_json_alone(tmp_path: Path) -> None:
    code, program = ended(write_config(tmp_path, train={"steps": 2}, topology={"world_size": 1}), "--json")
    assert (code, program.stderr) == (0, "")
    documents = [json.loads(line) for line in program.stdout.splitlines()]
    assert documents[0]["event"] == "start"
    assert [d["step"] for d in documents if d["event"] == "step"] == [1, 2]
    assert (documents[-1]["event"], documents[-1]["exit_code"]) == ("exit", 0)


# ---- torchrun ------------------------------------------------------------------------------------------------------


def torchrun(config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardrun",
            "train", str(config), *words]  # fmt: skip


def test_ranks_of_torchrun_train_to_the_same_bits(tmp_path: Path) -> None:
    folders = [tmp_path / "own", tmp_path / "torchrun"]
    for folder in folders:
        folder.mkdir()
    configs = [write_config(folder, train={"steps": 2}) for folder in folders]
    assert ended(configs[0])[0] == 0
    with started(torchrun(configs[1]), folders[1]) as program:
        assert program.wait(120) == 0, program.stderr
    assert tensors(folders[0]) == tensors(folders[1])
    lines = program.stdout.splitlines()
    assert len([line for line in lines if line.startswith("2 ranks on cpu")]) == 1
    assert len([line for line in lines if line.startswith("step 2/2")]) == 1
    assert "step 2/2" in (folders[1] / "run" / "logs" / "rank-0.log").read_text()
    assert json.loads((folders[1] / "run" / "exit.json").read_text())["exit_code"] == 0


def test_a_failing_rank_of_torchrun_tells_the_cause_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, recipe_args={"fault": "raise"})
    with started(torchrun(config), tmp_path) as program:
        assert program.wait(120) == 1
    assert program.stderr.count("ValueError: bad label 7") == 1
    assert "rank 1 failed at step 2, phase forward" in program.stderr.splitlines()
    document = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (document["exit_code"], document["rank"], document["message"]) == (1, 1, "bad label 7")


@pytest.mark.parametrize(("words", "said"), [([], "WORLD_SIZE=3, topology.world_size is 2"), (["--fresh"], "--fresh")])
def test_what_ranks_of_torchrun_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2" if words else "3")
    with pytest.raises(UsageError, match=re.escape(said)):
        train.run(write_config(tmp_path), [], fresh=bool(words))
    assert not (tmp_path / "run").exists()


# ---- life and sockets ----------------------------------------------------------------------------------------------


def listening(program: Program) -> list[str]:
    """Addresses on which processes of the program listen, as the kernel lists them."""
    inodes = set()
    for pid in program.family():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (row.split()[column] for column in (1, 3, 9))
            if state == "0A" and inode in inodes:
                found.append(local.split(":")[0])
    return found


def test_ranks_listen_on_loopback_only_and_die_with_a_killed_parent(tmp_path: Path) -> None:
    config = write_config(tmp_path, recipe_args={"step_s": 0.05}, train={"steps": 10000}, data={"workers": 1})
    with started(shardrun("train", config), tmp_path) as program:
        program.until("step 2/")
        addresses = listening(program)
        assert addresses
        assert set(addresses) == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
        assert len(program.family()) >= 4  # two ranks with a loader process each
        program.signal(signal.SIGKILL)
        program.wait()
        assert program.left(5) == {}
    code, program = ended(config, "--stop-at", "2")
    assert (code, program.stderr) == (75, "")


def network_calls(log: Path) -> list[str]:
    """The lines of strace that are calls, not signals and exits."""
    return [line for line in log.read_text().splitlines() if re.match(r"\d+ +[a-z0-9_]+\(", line)]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_world_of_one_makes_no_socket_call(tmp_path: Path) -> None:
    config = write_config(tmp_path, train={"steps": 2}, topology={"world_size": 1})
    log = tmp_path / "calls"
    probe = ["strace", "-f", "--seccomp-bpf", "-e", "trace=%network", "-o", str(log)]
    with started([*probe, "true"], tmp_path) as program:
        if program.wait() != 0:
            pytest.skip(f"socket calls are seen by strace alone, and it may trace nothing here: {program.stderr}")
    with started([*probe, *shardrun("train", config)], tmp_path) as program:
        assert program.wait(120) == 0, program.stderr
    assert network_calls(log) == []
    with started([*probe, sys.executable, "-c", "import socket; socket.socket()"], tmp_path) as program:
        assert program.wait() == 0
    assert network_calls(log)


def test_required_resume_finds_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, train={"steps": 2}, topology={"world_size": 1})
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        train.run(config, ["checkpoint.resume=required"])
    assert not (tmp_path / "run").exists()
    code, program = ended(trained, "checkpoint.resume=required")
    assert (code, program.stdout.splitlines()[-1]) == (0, "already finished at step 2: nothing to do")


# ---- going on ------------------------------------------------------------------------------------------------------


def again(program: Program) -> str:
    """The command that the program says to go on with, or to start again with."""
    found = re.findall(r"^(?:go on with|start again): +(.+)$", program.stdout + program.stderr, re.MULTILINE)
    assert len(found) == 1, found
    return str(found[0])


def test_the_command_to_go_on_keeps_what_was_asked_for_until_a_checkpoint_is_there(
    trained: Path, tmp_path: Path
) -> None:
    source = trained.parent / "run"
    words = ["--resume-from", str(source), "--accept-changes"]
    one_rank = {"world_size": 1}
    config = write_config(
        tmp_path, recipe_args={"fault": "raise", "rank": 0, "at": 1}, train={"steps": 5}, topology=one_rank
    )
    code, program = ended(config, *words)
    assert code == 1
    assert newest(tmp_path / "run") is None
    assert again(program) == f"python -m shardrun train {config} --resume-from {source} --accept-changes"
    # The same command without the fault saves, and from then on the folder speaks for itself.
    write_config(tmp_path, train={"steps": 5}, topology=one_rank, optimizer={"lr": 0.5})
    code, program = ended(config, *words, "--stop-at", "3")
    assert code == 75
    assert again(program) == f"python -m shardrun train {config}"
    assert ended(config)[0] == 0


def test_another_checkpoint_holds_the_config_before_a_start(trained: Path, tmp_path: Path) -> None:
    source = trained.parent / "run"
    config = write_config(tmp_path, train={"steps": 5}, topology={"world_size": 1})
    with pytest.raises(UsageError, match=re.escape(f"{source}: this run was trained with another config")) as refused:
        train.run(config, ["optimizer.lr=0.5"], resume_from=source)
    assert "optimizer.lr: saved 0.01, now 0.5" in str(refused.value)
    with pytest.raises(UsageError):
        train.run(config, ["optimizer.lr=0.5"], resume_from=source, fresh=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_stop_that_lies_behind_is_refused(trained: Path, stop_at: int) -> None:
    before = tree(trained.parent / "run")
    with pytest.raises(UsageError, match=f"--stop-at {stop_at} lies behind: .* is of step 2; give a step after 2"):
        train.run(trained, ["train.steps=5"], stop_at=stop_at)
    assert tree(trained.parent / "run") == before
    # A finished run has nothing to stop, whatever its length is counted in.
    for length in ([], ["train.steps=null", "train.tokens=8"]):
        code, program = ended(trained, "--stop-at", str(stop_at), *length)
        assert code == 0, program.stderr
        assert "already finished at step 2: nothing to do" in program.stdout
    with pytest.raises(UsageError, match="lies behind"):
        train.run(trained, ["train.steps=null", "train.epochs=1"], stop_at=stop_at)
