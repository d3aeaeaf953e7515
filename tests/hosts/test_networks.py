"""Two and three hosts with addresses of their own, joined by `shardrun train --nnodes` and by torchrun.

The hosts are network namespaces of this machine. `make test` has one of the cases; `make long` has all of them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardrun.checkpoint.inspect import inspect
from shardrun.run.metrics import read_rows
from tests.hosts.network import Network, ends, network, on_hosts, why_not
from tests.support.launching import Program, final_tensors, shardrun, started, write_config

WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)), pytest.mark.sample(1)]

STEPS = 16
TIMEOUT_S = 6
PORT = 29400

Join = Callable[[Network, Path], list[list[str]]]


def by_launchers(net: Network, config: Path) -> list[list[str]]:
    """One launcher of shardrun on each host."""
    where = ["--nnodes", net.count, "--rendezvous", f"{net.address(0)}:{PORT}"]
    return [shardrun("train", config, *where, "--node-rank", host) for host in range(net.count)]


def by_torchrun(net: Network, config: Path) -> list[list[str]]:
    """One torchrun on each host."""
    where = ["--nnodes", net.count, "--nproc-per-node", 1, "--master-addr", net.address(0), "--master-port", PORT]
    return [
        [sys.executable, "-m", "torch.distributed.run", *map(str, where), "--node-rank", str(host),
         "-m", "shardrun", "train", str(config)]
        for host in range(net.count)
    ]  # fmt: skip


def config_in(folder: Path, world_size: int, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    topology = {"world_size": world_size, "timeout_s": TIMEOUT_S, "allow_non_loopback": True}
    return write_config(
        folder,
        recipe_args={"step_s": 0.1},
        train={"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 2 * world_size, "max_grad_norm": 1.0},
        optimizer={"name": "adamw", "lr": 0.01},
        checkpoint={"every": 5},
        topology={**topology, **sections.pop("topology", {})},
        **sections,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """What training gave, without what the clock gave."""
    own = ("seconds", "tokens_per_s")
    return [
        {key: value for key, value in row.items() if key not in own} for row in read_rows(folder / "run/metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the run of one host, never interrupted, at a world size."""
    done: dict[int, Path] = {}

    def run(world_size: int) -> Path:
        if world_size not in done:
            folder = tmp_path_factory.mktemp(f"straight-{world_size}")
            with started(shardrun("train", config_in(folder, world_size)), folder) as program:
                assert program.wait(120) == 0, program.stderr
            done[world_size] = folder
        return done[world_size]

    return run


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Network]:
    """As many hosts as the test asks for by its parameter `hosts`."""
    with network(request.getfixturevalue("hosts")) as made:
        yield made


def finishes_as_one_host_does(net: Network, join: Join, config: Path, straight: Path) -> list[Program]:
    """Start it (again) on all hosts, and compare the end with the run that was never interrupted."""
    with on_hosts(net, join(net, config), config.parent) as programs:
        codes, _ = ends(programs, 120)
        assert codes == [0] * net.count, "\n".join(program.stdout + program.stderr for program in programs)
    assert final_tensors(config.parent / "run") == final_tensors(straight / "run")
    assert rows(config.parent) == rows(straight)
    return programs


# ---- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [2])
def test_two_hosts_train_to_the_bits_of_one(
    net: Network, hosts: int, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    config = config_in(tmp_path / "two", hosts)
    with on_hosts(net, by_launchers(net, config), config.parent) as programs:
        programs[0].until("step 2/")
        assert listening(programs[0]) == {net.address(0)}
        assert listening(programs[1]) == {net.address(1)}
        assert ends(programs, 120)[0] == [0, 0]
    assert [program.stderr for program in programs] == ["", ""]
    assert final_tensors(config.parent / "run") == final_tensors(straight(2) / "run")
    assert rows(config.parent) == rows(straight(2))
    shown = [program.stdout.splitlines() for program in programs]
    assert shown[0][0] == "all 2 hosts are there; this is node 0 (h0, 10.77.0.1)"
    assert shown[1] == ["all 2 hosts are there; this is node 1 (h1, 10.77.0.2)"]
    assert not list((config.parent / "run").glob(".hosts-*"))


@pytest.mark.parametrize(("hosts", "join"), [(3, by_launchers), (2, by_torchrun), (3, by_torchrun)])
def test_more_hosts_and_torchrun_train_to_the_bits_of_one(
    net: Network, hosts: int, join: Join, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    finishes_as_one_host_does(net, join, config_in(tmp_path / "several", hosts), straight(hosts))


def listening(program: Program) -> set[str]:
    """The addresses on which anything listens on the program's host, as the kernel lists them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{program.process.pid}/net/{table}").read_text().splitlines()[1:]:
            local, state = (row.split()[column] for column in (1, 3))
            if state == "0A":
                number = bytes.fromhex(local.split(":")[0])[::-1]
                found.add(".".join(map(str, number)))
    return found


# ---- apart -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "join", "victim"),
    [(2, by_launchers, 1), (3, by_launchers, 2), (3, by_launchers, 0), (2, by_torchrun, 1)],
)
def test_a_cut_link_ends_all_in_time_and_the_same_command_goes_on(
    net: Network, hosts: int, join: Join, victim: int, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    config = config_in(tmp_path / "cut", hosts)
    with on_hosts(net, join(net, config), config.parent) as programs:
        programs[0].until("step 7/")
        net.cut(victim)
        codes, seconds = ends(programs, 60)
    print(f"cut link of host {victim} of {hosts}, {join.__name__}: all ended after {seconds:.1f} s")
    assert codes == [1] * hosts
    assert seconds < TIMEOUT_S + 20
    if join is by_launchers:
        for host, program in enumerate(programs):
            away = [other for other in range(1, hosts) if host == 0 and victim in (0, other)] or [0]
            away = [victim] if host != victim and victim != 0 else away
            assert said(program) == (away, "nothing was heard for")
    else:
        for program in programs:
            assert re.search(r"(is missing from collective|communicator closed at collective) \d", program.stderr)
    intact(config.parent / "run")
    net.mend(victim)
    finishes_as_one_host_does(net, join, config, straight(hosts))


@pytest.mark.parametrize("hosts", [2])
def test_a_link_that_is_back_before_the_timeout_has_no_effect(
    net: Network, hosts: int, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    config = config_in(tmp_path / "short", hosts)
    with on_hosts(net, by_launchers(net, config), config.parent) as programs:
        programs[0].until("step 7/")
        net.cut(1)
        time.sleep(TIMEOUT_S / 3)
        net.mend(1)
        codes, _ = ends(programs, 60)
    assert codes == [0, 0], programs[0].stderr + programs[1].stderr
    assert final_tensors(config.parent / "run") == final_tensors(straight(hosts) / "run")


@pytest.mark.parametrize(
    ("hosts", "join", "victim"),
    [(2, by_launchers, 0), (2, by_launchers, 1), (3, by_launchers, 1), (2, by_torchrun, 1)],
)
def test_a_killed_host_ends_all_in_time_and_the_same_command_goes_on(
    net: Network, hosts: int, join: Join, victim: int, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    config = config_in(tmp_path / "killed", hosts)
    with on_hosts(net, join(net, config), config.parent) as programs:
        programs[0].until("step 7/")
        net.kill(victim)
        codes, seconds = ends(programs, 60)
    print(f"host {victim} of {hosts} killed, {join.__name__}: all ended after {seconds:.1f} s")
    assert codes == [-9 if host == victim else 1 for host in range(hosts)]
    assert seconds < 20
    for host, program in enumerate(programs):
        if host != victim and join is by_launchers:
            assert said(program) == ([victim], "the connection was closed")
        elif host != victim:
            assert re.search(r"(is missing from collective|communicator closed at collective) \d", program.stderr)
    document = json.loads((config.parent / "run" / "exit.json").read_text())
    assert document["exit_code"] == 1
    if join is by_launchers:
        assert (document["rank"], document["host"]) == (victim, f"node {victim} (h{victim}, {net.address(victim)})")
    intact(config.parent / "run")
    finishes_as_one_host_does(net, join, config, straight(hosts))


@pytest.mark.parametrize(("hosts", "victim"), [(2, 1), (2, 0)])
def test_a_killed_rank_costs_a_restart_on_all_hosts_and_no_more(
    net: Network, hosts: int, victim: int, tmp_path: Path, straight: Callable[[int], Path]
) -> None:
    config = config_in(tmp_path / "restarted", hosts, topology={"max_restarts": 1})
    with on_hosts(net, by_launchers(net, config), config.parent) as programs:
        programs[0].until("step 7/")
        programs[victim].kill_rank(victim)
        codes, _ = ends(programs, 120)
    assert codes == [0] * hosts, "\n".join(program.stdout + program.stderr for program in programs)
    for program in programs:
        restarts = [line for line in program.stdout.splitlines() if line.startswith("restart ")]
        assert len(restarts) == 1
        assert restarts[0].startswith(f"restart 1 of 1: rank {victim} on node {victim} (h{victim}, ")
    assert final_tensors(config.parent / "run") == final_tensors(straight(hosts) / "run")
    assert rows(config.parent) == rows(straight(hosts))


def said(program: Program) -> tuple[list[int], str]:
    """The hosts that a launcher's screen says are gone, and how; it names what a rank that is left waited for."""
    first = program.stderr.splitlines()[0]
    found = re.fullmatch(
        r"(node .+ with rank .+) (?:is|are) gone: (.+?)(?: \d+ s)?; rank \d waited in collective \d+ "
        r"\((?:agree|reduce|decide|gather|vote|between steps|idle|save) of step \d+\)",
        first,
    )
    assert found is not None, program.stderr
    return [int(number) for number in re.findall(r"node (\d) \(h\1, ", found[1])], found[2]


def intact(run_dir: Path) -> None:
    """The checkpoint of step 5 or a later one is there, and every byte in the folder is as it was written."""
    shown = inspect(run_dir, verify=True)
    assert shown["good"], shown
    assert shown["checkpoints"][0]["step"] >= 5
