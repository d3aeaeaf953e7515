"""Ranks that srun starts: what its environment says, and two of them as programs under an environment like it."""

from __future__ import annotations

import os
import random
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardrun.cli import train
from shardrun.errors import LaunchError, UsageError
from shardrun.run.slurm import expand, rank_of_srun
from tests.support.launching import final_tensors, shardrun, started, write_config

RUN_ID = "SHARDRUN_RUN_ID"
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TASK.items() if name not in names}


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03]", ["n01", "n02", "n03"]),
        ("n[9-11],login", ["n9", "n10", "n11", "login"]),
        ("a[1,3-4]-ib,b-[007-008]", ["a1-ib", "a3-ib", "a4-ib", "b-007", "b-008"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_a_list_of_hosts_is_read_as_slurm_writes_it(hosts: str, names: list[str]) -> None:
    assert expand(hosts) == names


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"SLURM_STEP_NODELIST has 'n\[x-y\]', which is no list of hosts"):
        expand("n[x-y]")


def test_a_task_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrun.run.slurm.socket.gethostbyname", {"n01": "10.1.0.1"}.__getitem__)
    found = rank_of_srun(TASK)
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.1.0.1",
        "MASTER_PORT": found and found["MASTER_PORT"],
        RUN_ID: "slurm-4711.0",
    }
    ports = {
        int((rank_of_srun({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) or {})["MASTER_PORT"])
        for job in range(4711, 4731)
        for step in range(3)
    }
    assert len(ports) == 60
    assert all(20_000 <= port < 30_000 for port in ports)


def test_an_address_that_is_given_counts() -> None:
    for environ, rendezvous in (
        (TASK, "10.9.0.1:77"),
        ({**TASK, "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "77"}, None),
    ):
        found = rank_of_srun(environ, rendezvous)
        assert found is not None
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.9.0.1", "77")


def test_the_ranks_of_one_host_stay_on_the_loopback_address() -> None:
    found = rank_of_srun({**TASK, "SLURM_STEP_NODELIST": "n07"})
    assert found is not None
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "4")


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, without("SLURM_PROCID"), {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
     {**TASK, "RANK": "0"}],
    ids=["no job", "a batch script", "no task", "one task", "under torchrun"],
)  # fmt: skip
def test_what_is_no_task_among_several_starts_its_ranks_itself(environ: dict[str, str]) -> None:
    assert rank_of_srun(environ) is None


@pytest.mark.parametrize("answer", ["127.0.1.1", OSError(-2, "Name or service not known")])
def test_a_first_host_that_the_others_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, answer: str | OSError
) -> None:
    def look_up(name: str) -> str:
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("shardrun.run.slurm.socket.gethostbyname", look_up)
    with pytest.raises(LaunchError, match=r"the first host of this SLURM step, n01, .* set MASTER_ADDR, or give"):
        rank_of_srun(TASK)


def test_a_world_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_STEP_NODELIST": "n07"}.items():
        monkeypatch.setenv(name, value)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SHARDRUN_RUN_ID",
    ):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match=re.escape("WORLD_SIZE=4, topology.world_size is 2; start as many ranks")):
        train.run(write_config(tmp_path), [])
    assert not (tmp_path / "run").exists()


@pytest.mark.sample(0)  # starts three programs; `make long` does it
def test_two_tasks_train_to_the_bits_of_the_launcher(tmp_path: Path) -> None:
    folders = [tmp_path / "own", tmp_path / "srun"]
    for folder in folders:
        folder.mkdir()
    configs = [write_config(folder, train={"steps": 2}) for folder in folders]
    with started(shardrun("train", configs[0]), folders[0]) as program:
        assert program.wait(120) == 0, program.stderr
    job = {**TASK, "SLURM_JOB_ID": str(random.randrange(10**6) + os.getpid()), "SLURM_STEP_NODELIST": "here"}
    job["SLURM_STEP_NUM_TASKS"] = "2"
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                started(
                    shardrun("train", configs[1], "topology.max_restarts=1"),
                    folders[1],
                    {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                )
            )
            for rank in (0, 1)
        ]
        assert [program.wait(120) for program in programs] == [0, 0], programs[0].stderr + programs[1].stderr
    assert final_tensors(folders[1] / "run") == final_tensors(folders[0] / "run")
    assert "topology.max_restarts 1 is for ranks that shardrun starts itself" in programs[0].stdout
    assert programs[0].stdout.splitlines()[-1] == "finished at step 2"
    assert programs[1].stdout == ""
