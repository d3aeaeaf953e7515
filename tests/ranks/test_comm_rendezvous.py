"""Who may come in: where the store listens, whose run it is, who is there twice, what an earlier world left behind."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import shardrun as sr
from shardrun.comm.process_group import interface_towards
from shardrun.errors import CommunicatorError, ConfigError, LaunchError, ShardrunError
from tests.support.rank_process import Seat, mark
from tests.support.ranks import Outcome, start_ranks

pytestmark = pytest.mark.sample(6)


def _free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _own_address() -> str | None:
    """An IPv4 address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if ipaddress.ip_address(address).is_loopback else address


def _listening() -> set[str]:
    """The addresses at which sockets of this process listen (Linux)."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def _address(words: str) -> str:
    raw = b"".join(bytes.fromhex(words[k : k + 8])[::-1] for k in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _open(seat: Seat, **changes: Any) -> sr.Communicator:
    given = {"rank": seat.rank, "world_size": seat.world_size, "timeout_s": 20.0, "init_timeout_s": 20.0}
    return sr.Communicator.open(sr.CommunicatorConfig(**given | changes))


# ---- where it listens ------------------------------------------------------------------------------------------------


def _listens(seat: Seat, changes: dict[str, Any], leave_interface: bool = False) -> set[str]:
    if leave_interface:
        del os.environ["GLOO_SOCKET_IFNAME"]
    comm = _open(seat, **changes)
    comm.vote()
    return _listening()


def test_store_and_data_sockets_listen_on_loopback_only() -> None:
    with start_ranks(2, _listens, {"master_port": _free_port()}, open_comm=False) as ranks:
        outcomes = ranks.collect()
    assert [outcome.value for outcome in outcomes] == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_with_leave_they_listen_on_the_address_that_is_given_and_no_other() -> None:
    address = _own_address()
    if address is None:
        pytest.skip("it is about an address that is not loopback, and no interface of this machine has one")
    given = {"master_addr": address, "master_port": _free_port(address), "allow_non_loopback": True}
    with start_ranks(2, _listens, given, True, open_comm=False) as ranks:
        outcomes = ranks.collect()
    assert [outcome.value for outcome in outcomes] == [{address}, {address}], outcomes[0].error
    with pytest.raises(ConfigError, match="not loopback"):
        sr.CommunicatorConfig(rank=0, world_size=2, master_addr=address, master_port=1)


def test_the_interface_of_an_address_is_known() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no such name.invalid") is None
    address = _own_address()
    if address is not None:
        assert interface_towards(address) not in (None, "lo")


def _refused_bind(address: str, port: int) -> str:
    config = sr.CommunicatorConfig(rank=0, world_size=2, master_addr=address, master_port=port, allow_non_loopback=True)
    with pytest.raises(LaunchError) as caught:
        sr.Communicator.open(config)
    return str(caught.value)


def test_a_port_in_use_and_an_address_of_another_machine_are_refused_at_once() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _refused_bind("127.0.0.1", port).startswith(
            f"the store of the rendezvous cannot listen on 127.0.0.1:{port}: Address already in use; another run"
        )
    assert "Cannot assign requested address" in _refused_bind("192.0.2.1", _free_port())
    assert time.monotonic() - began < 5.0


# ---- whose run it is -------------------------------------------------------------------------------------------------


@contextmanager
def _agent_store() -> Iterator[int]:
    """A store as torchrun's agent keeps it, over the life of several worlds."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@contextmanager
def _place(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "file":
        yield {"init_file": folder / "rendezvous"}
    elif kind == "port":
        yield {"master_port": _free_port()}
    else:
        with _agent_store() as port:
            yield {"master_port": port, "agent_store": True}


_PLACES = ("port", "file", "agent")


def _comes(seat: Seat, run_ids: list[str], place: dict[str, Any]) -> tuple[str, str, float]:
    """Rank 0 and 1 of a world of two, and the third process is one more rank 1."""
    rank = min(seat.rank, 1)
    if seat.rank == 2:
        _wait_for(Path(seat.init_file).with_name("mark-0-open"))
    began = time.monotonic()
    try:
        # Who cannot know that it is not what a dead world left behind waits to the end of its time.
        waits = seat.rank == 2 and run_ids[2] == run_ids[0] and ("init_file" in place or "agent_store" in place)
        limit = 2.0 if waits else 20.0
        comm = _open(Seat(rank, 2, seat.init_file), run_id=run_ids[seat.rank], init_timeout_s=limit, **place)
    except ShardrunError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    mark("open")
    if seat.rank == 0:
        _wait_for(Path(seat.init_file).with_name("mark-2-refused"))
    comm.vote()
    return "", "", 0.0


def _intruder(seat: Seat, run_ids: list[str], place: dict[str, Any]) -> tuple[str, str, float]:
    found = _comes(seat, run_ids, place)
    if seat.rank == 2:
        mark("refused")
    return found


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("kind", _PLACES)
@pytest.mark.parametrize("other", ["run-b", "", "run-a"])
def test_who_does_not_belong_is_refused_at_once_and_the_others_do_not_notice(
    kind: str, other: str, tmp_path: Path
) -> None:
    with (
        _place(kind, tmp_path) as place,
        start_ranks(3, _intruder, ["run-a", "run-a", other], place, open_comm=False, debug="OFF") as ranks,
    ):
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
    assert [outcome.value[0] for outcome in outcomes[:2]] == ["", ""]
    kind_of_error, told, waited = outcomes[2].value
    if other == "run-a" and kind != "port":
        assert kind_of_error == "CommunicatorError"
        assert "has not taken in rank 1 within 2 s" in told
        assert "another process was rank 1 before" in told
        return
    assert kind_of_error == "LaunchError"
    assert waited < 10.0, "at once, not at the end of its time"
    if other == "run-a":
        assert told.startswith("another process is rank 1 of run 'run-a' at ")
    else:
        assert f"belongs to run 'run-a', rank 1 here is of run '{other}': " in told
        assert ("a path that no file has yet" if kind == "file" else "check address and port") in told


def _second_job(seat: Seat, port: int) -> tuple[str, str, float]:
    """Ranks 0 and 1 of one job, then ranks 0 and 1 of another that was given the same port."""
    if seat.rank >= 2:
        _wait_for(Path(seat.init_file).with_name("mark-0-open"))
    began = time.monotonic()
    try:
        comm = _open(Seat(seat.rank % 2, 2, ""), run_id="ab"[seat.rank // 2], master_port=port)
    except ShardrunError as error:
        mark("refused")
        return type(error).__name__, str(error), time.monotonic() - began
    mark("open")
    for rank in (2, 3):
        _wait_for(Path(seat.init_file).with_name(f"mark-{rank}-refused"))
    comm.vote()
    return "", "", 0.0


def test_a_second_job_on_the_same_port_is_refused_on_each_of_its_ranks() -> None:
    with start_ranks(4, _second_job, _free_port(), open_comm=False, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    for outcome in outcomes:
        assert outcome.ok, outcome.error
    assert [outcome.value[0] for outcome in outcomes] == ["", "", "LaunchError", "LaunchError"]
    assert "Address already in use" in outcomes[2].value[1]
    assert "belongs to run 'a', rank 1 here is of run 'b'" in outcomes[3].value[1]
    assert all(outcome.value[2] < 5.0 for outcome in outcomes)


# ---- what an earlier world left behind -------------------------------------------------------------------------------


def _short_life(seat: Seat, place: dict[str, Any], fails: bool) -> tuple[int, list[str]]:
    comm = _open(seat, run_id="again", **place)
    found = comm.texts("number", str(seat.rank))
    if fails and seat.rank == 1:
        comm.poison("a fault")
        return len(comm.history()), found
    comm.agree("the end") if not fails else _fails(comm)
    return len(comm.history()), found


def _fails(comm: sr.Communicator) -> None:
    with pytest.raises(CommunicatorError, match="rank 1 failed first, in phase start-up: a fault"):
        comm.vote()


@pytest.mark.parametrize("kind", ["agent", "file"])
def test_a_new_world_in_an_old_store_reads_nothing_of_the_old(kind: str, tmp_path: Path) -> None:
    """As after a restart by torchrun, or with a file that was left over: old addresses, old words, the same run id."""
    with _place(kind, tmp_path) as place:
        for fails in (True, False, True):
            with start_ranks(3, _short_life, place, fails, open_comm=False, debug="OFF") as ranks:
                outcomes = ranks.collect(30.0)
            for outcome in outcomes:
                assert outcome.ok, outcome.error
                assert outcome.value[1] == ["0", "1", "2"]


def _late(seat: Seat, place: dict[str, Any]) -> list[str]:
    time.sleep(0.4 * seat.rank)
    return _open(seat, **place).texts("number", str(seat.rank))


def test_ranks_may_come_in_any_order(tmp_path: Path) -> None:
    for kind in _PLACES:
        with (
            _place(kind, tmp_path) as place,
            start_ranks(2, _late, place, open_comm=False, debug="OFF") as ranks,
        ):
            outcomes: list[Outcome] = ranks.collect(30.0)
        assert [outcome.value for outcome in outcomes] == [["0", "1"]] * 2, outcomes


def _under_torchrun(seat: Seat, port: int) -> tuple[str, list[str]]:
    os.environ |= {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SHARDRUN_RUN_ID": "from the environment",
    }
    comm = sr.Communicator.from_env(backend="gloo", timeout_s=20.0, init_timeout_s=10.0)
    assert torch.distributed.is_initialized()
    return comm.backend, comm.texts("number", str(seat.rank))


def test_torchruns_environment_leads_to_its_store() -> None:
    with _agent_store() as port, start_ranks(2, _under_torchrun, port, open_comm=False, debug="OFF") as ranks:
        outcomes = ranks.collect(30.0)
    assert [outcome.value for outcome in outcomes] == [("gloo", ["0", "1"])] * 2, outcomes
