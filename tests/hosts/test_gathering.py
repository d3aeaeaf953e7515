"""How launchers find each other, and whom they refuse: node 0 and others as threads of this process."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardrun.errors import LaunchError, ShardrunError, UsageError
from shardrun.run import joining, reception
from shardrun.run.gathering import Party, differences, listening
from shardrun.run.hosts import Hosts, hosts_of, split_address
from shardrun.run.joining import join
from shardrun.run.link import Link
from shardrun.run.reception import Reception
from shardrun.run.wire import Message, Wire
from tests.hosts.network import free_port

SAME = {"optimizer.lr": 0.1, "train.steps": 5}


class Hall:
    """A meeting point on this machine: parties that come to it, each in a thread."""

    def __init__(self, run_dir: Path, nnodes: int = 2, wait_s: float = 20.0) -> None:
        self.run_dir, self.nnodes, self.wait_s = run_dir, nnodes, wait_s
        self.port = free_port()
        self.told: list[str] = []
        self._pool = ThreadPoolExecutor()
        self._comings: list[Future[Link]] = []
        run_dir.mkdir(exist_ok=True)

    def party(self, node: int, **changes: Any) -> Party:
        hosts = Hosts(changes.pop("nnodes", self.nnodes), node, "127.0.0.1", self.port)
        options = {"same": SAME, "run_dir": self.run_dir, "patience_s": 5.0, "wait_s": self.wait_s, **changes}
        return Party(hosts, **options)

    def host(self, **changes: Any) -> Future[Link]:
        def gather() -> Link:
            party = self.party(0, **changes)
            with listening(party.hosts) as listener:
                return Reception(party, listener, self.told.append, time.sleep).gather()

        return self._come(gather)

    def guest(self, node: int, **changes: Any) -> Future[Link]:
        return self._come(lambda: join(self.party(node, **changes), self.told.append, time.sleep))

    def _come(self, call: Callable[[], Link]) -> Future[Link]:
        self._comings.append(self._pool.submit(call))
        return self._comings[-1]

    def close(self) -> None:
        links = [coming.result() for coming in self._comings if coming.exception(30) is None]
        list(self._pool.map(Link.close, links))
        self._pool.shutdown()


@pytest.fixture
def hall_of(tmp_path: Path) -> Iterator[Callable[..., Hall]]:
    """Makes halls; all links are closed at the end."""
    halls: list[Hall] = []

    def make(**options: Any) -> Hall:
        halls.append(Hall(tmp_path / "run", **options))
        return halls[-1]

    yield make
    for hall in halls:
        hall.close()


@pytest.fixture
def hall(hall_of: Callable[..., Hall]) -> Hall:
    return hall_of()


def heard(link: Link, timeout_s: float = 5.0) -> list[Message]:
    end = time.monotonic() + timeout_s
    found: list[Message] = []
    while not found and time.monotonic() < end:
        found = link.heard()
        time.sleep(0.01)
    return found


def refused(future: Future[Link], kind: type[ShardrunError], pattern: str) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        future.result(30)
    assert type(caught.value) is kind


# ---- coming together -----------------------------------------------------------------------------------------------


def test_three_hosts_come_in_any_order_and_hear_of_each_other(hall_of: Callable[..., Hall]) -> None:
    hall = hall_of(nnodes=3)
    late = hall.guest(2)
    time.sleep(0.2)  # nobody listens yet
    lead, two, one = (future.result(20) for future in (hall.host(), late, hall.guest(1)))
    names = [re.sub(r"\(.*, ", "(", lead.names[node]) for node in range(3)]
    assert names == [f"node {node} (127.0.0.1)" for node in range(3)]
    assert one.names == two.names == lead.names
    assert not list(hall.run_dir.iterdir())
    one.say("failing")
    assert heard(lead) == [{"say": "failing", "node": 1}]
    assert heard(two) == [{"say": "failing", "node": 1}]
    two.say("ends", ends=[])
    assert heard(lead) == [{"say": "ends", "node": 2, "ends": []}]
    assert one.heard() == []
    two.close()
    lost = [{"say": "lost", "node": 2, "how": "the connection was closed"}]
    assert heard(lead) == lost
    assert heard(one) == lost
    assert lead.lost == one.lost == {2: "the connection was closed"}
    lead.close()
    assert heard(one) == [{"say": "lost", "node": 0, "how": "the connection was closed"}]


def test_what_is_said_last_arrives(hall: Hall) -> None:
    lead, one = (future.result(20) for future in (hall.host(), hall.guest(1)))
    text = "x" * 3_000_000  # more than the connection holds
    one.say("beat")  # never read by node 0
    lead.say("verdict", text=text)
    closing = threading.Thread(target=lead.close)
    closing.start()
    assert heard(one)[0]["text"] == text
    closing.join(5)


def test_a_silent_host_is_lost_after_the_timeout_and_sooner_once_something_failed(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardrun.run.link.LATER_S", 0.3)
    monkeypatch.setattr("shardrun.run.link.HURRIED_SILENCE_S", 0.1)
    lead, one = (future.result(20) for future in (hall.host(patience_s=0.2), hall.guest(1, patience_s=100.0)))
    began = time.monotonic()
    assert heard(lead)[0]["how"].startswith("nothing was heard for ")
    assert 0.3 < time.monotonic() - began < 3
    one.hurry()
    assert heard(one)[0]["how"] == "the connection was closed"


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "changes", "told"),
    [
        (1, {"same": {**SAME, "optimizer.lr": 0.2}},
         r"it would run something else than node 0 \(there / on node 0\): optimizer.lr: 0.2 / 0.1$"),
        (1, {"nnodes": 3}, "--nnodes is 3 there and 2 on node 0; give the same on all hosts"),
        (2, {"nnodes": 2}, "--node-rank is 2 there, and node 0 waits for node 1"),
    ],
)  # fmt: skip
def test_a_host_that_means_something_else_is_refused_and_the_right_one_may_still_come(
    hall: Hall, node: int, changes: Mapping[str, Any], told: str
) -> None:
    lead = hall.host()
    refused(hall.guest(node, **changes), UsageError, f"node 0 refuses: .*{told}")
    assert re.search(f"is refused: .*{told}", hall.told[0])
    hall.guest(1).result(20)
    lead.result(20)


def test_a_number_is_given_once(hall_of: Callable[..., Hall]) -> None:
    hall = hall_of(nnodes=3)
    lead, first = hall.host(), hall.guest(1)
    time.sleep(0.3)
    refused(hall.guest(1), UsageError, r"--node-rank 1 is taken by node 1 \(.*, 127.0.0.1\); give every host another")
    hall.guest(2).result(20)
    assert first.result(20).names == lead.result(20).names


def test_a_folder_that_is_not_shared_is_refused_by_all(
    hall_of: Callable[..., Hall], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "FOLDER_S", 0.5)
    hall = hall_of(nnodes=3)
    (tmp_path / "other").mkdir()
    futures = [hall.host(), hall.guest(1), hall.guest(2, run_dir=tmp_path / "other")]
    for future in futures:
        refused(future, LaunchError, rf"node 2 \(.*\) does not find in {tmp_path}/other what node 0 wrote there")
    assert not list(hall.run_dir.iterdir())


def test_those_who_do_not_come_are_named(hall_of: Callable[..., Hall], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "TOLD_AFTER_S", 0.1)
    hall = hall_of(nnodes=3, wait_s=3.0)
    one, lead = hall.guest(1, wait_s=30.0), hall.host()
    refused(lead, LaunchError, "node 2 of 3 did not come to 127.0.0.1:")
    refused(one, LaunchError, "is no launcher that waits for hosts, or has left: the connection was closed")
    assert re.search(rf"waiting for nodes? (1, )?2 of 3 to come to 127.0.0.1:{hall.port}$", hall.told[-1])


def test_nobody_listens(hall: Hall) -> None:
    refused(hall.guest(1, wait_s=0.5), LaunchError, "node 0 did not answer at 127.0.0.1:.*Connection refused; start it")


def test_an_address_that_is_not_of_this_host_or_in_use_is_refused(hall: Hall) -> None:
    with pytest.raises(LaunchError, match=r"node 0 cannot listen on --rendezvous 192\.0\.2\.7:29400: Cannot assign"):
        listening(Hosts(2, 0, "192.0.2.7", 29400)).__enter__()
    with socket.socket() as other:
        other.bind(("127.0.0.1", hall.port))
        other.listen()
        refused(hall.host(), LaunchError, "node 0 cannot listen on .*: Address already in use")


def test_a_name_that_means_another_machine_everywhere_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes the machine's own name beside 127.0.1.1."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr("shardrun.run.gathering.socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(LaunchError, match=r"a is 127\.0\.1\.1 on this host, where no other host can reach it"):
        listening(Hosts(2, 0, "a", 29400)).__enter__()


def test_a_name_without_an_address_is_refused(tmp_path: Path) -> None:
    party = Party(Hosts(2, 1, "no-such-host.invalid", 29400), SAME, tmp_path, 1.0, 1.0)
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid has no address here"):
        join(party, print, time.sleep)


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"say": "hello"}\n', b"[" * 500_000 + b"\n", b"\x16\x03" * 999_999, b""],
)
def test_strangers_at_the_door_do_no_harm(hall: Hall, greeting: bytes) -> None:
    lead = hall.host()
    time.sleep(0.1)
    with socket.create_connection(("127.0.0.1", hall.port)) as stranger:
        stranger.settimeout(10)
        threading.Thread(target=lambda: _try(lambda: stranger.sendall(greeting)), daemon=True).start()
        if greeting:
            assert _try(lambda: stranger.recv(1)) in (b"", None)
        one = hall.guest(1).result(20)
        assert lead.result(20).names == one.names


def _try(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError:
        return None


def test_what_listens_there_is_something_else(hall: Hall) -> None:
    with socket.create_server(("127.0.0.1", hall.port)) as other:
        guest = hall.guest(1)
        other.accept()[0].close()
        refused(guest, LaunchError, "is no launcher that waits for hosts, or has left: the conn")


def test_a_connection_that_breaks_says_so() -> None:
    one, two = _connected()
    wire = Wire(one)
    two.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    two.close()
    time.sleep(0.05)
    assert wire.receive() == []
    assert wire.ended == "the connection broke (Connection reset by peer)"
    wire.send("beat")
    wire.close()


def test_what_came_before_a_connection_broke_is_received() -> None:
    one, two = _connected()
    wire = Wire(one)
    two.sendall(b'{"say": "verdict"}\n')
    two.close()
    for _ in range(3):
        wire.send("beat")  # the first is answered by a reset, the next one fails
        time.sleep(0.05)
    assert wire.receive() == [{"say": "verdict"}]
    assert wire.ended is not None
    wire.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def test_differences_are_cut_after_eight() -> None:
    assert differences({"a": 1}, {"a": 1}) == []
    assert differences({"a": 1, "c": None}, {"b": 2, "c": None}) == ["a: 1 / not there", "b: not there / 2"]
    many = {str(number): number for number in range(10)}
    assert differences(many, {}) == [f"{number}: {number} / not there" for number in range(8)] + ["and 2 more"]


# ---- options -------------------------------------------------------------------------------------------------------


def options(**given: Any) -> Hosts | None:
    settings: dict[str, Any] = {"world_size": 4, "allow_non_loopback": True, "environ": {}, **given}
    nnodes, node_rank, rendezvous = (settings.pop(name, None) for name in ("nnodes", "node_rank", "rendezvous"))
    return hosts_of(nnodes, node_rank, rendezvous, **settings)


def test_hosts_share_the_ranks_equally() -> None:
    hosts = options(nnodes=2, node_rank=1, rendezvous="10.0.0.1:29400")
    assert hosts == Hosts(2, 1, "10.0.0.1", 29400)
    assert [hosts.ranks(4, node) for node in (0, 1)] == [range(2), range(2, 4)]
    assert hosts.place == "10.0.0.1:29400"
    v6 = options(nnodes=2, node_rank=0, rendezvous="[fd00::1]:29400")
    assert v6 is not None
    assert (v6.address, v6.place, v6.leads) == ("fd00::1", "[fd00::1]:29400", True)


@pytest.mark.parametrize("given", [{}, {"nnodes": 1}, {"nnodes": 1, "node_rank": 0, "rendezvous": "a:1"}])
def test_one_host_is_none_of_several(given: dict[str, Any]) -> None:
    assert options(**given) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]"])
def test_several_launchers_on_the_loopback_address_need_no_permission(address: str) -> None:
    assert options(nnodes=2, node_rank=0, rendezvous=f"{address}:29400", allow_non_loopback=False) is not None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"node_rank": 1}, "--node-rank 1 without --nnodes"),
        ({"nnodes": 2}, r"--nnodes 2 needs --node-rank \(0 to 1"),
        ({"nnodes": 2, "node_rank": 0}, "needs .* --rendezvous HOST:PORT"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "--node-rank is 2; with --nnodes 2 it must be 0 to 1"),
        ({"nnodes": 3, "node_rank": 0, "rendezvous": "a:1"}, "world_size is 4, which 3 hosts cannot share equally"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "10.0.0.1:1", "allow_non_loopback": False},
         "--rendezvous 10.0.0.1:1 is not on the loopback address, .* topology.allow_non_loopback=true"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "a:1", "environ": {"RANK": "3"}}, "has RANK=3"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "a"}, "it must be HOST:PORT"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        options(**given)


def test_a_task_of_slurm_knows_its_node() -> None:
    environ = {"SLURM_STEP_NODELIST": "n[0-1]", "SLURM_NODEID": "1"}
    hosts = options(nnodes=2, rendezvous="n0:29400", environ=environ)
    assert hosts is not None
    assert hosts.node_rank == 1


@pytest.mark.parametrize(
    "text", ["host", "host:", ":80", "host:x", "host:-1", "fd00::1:80", "host:0", "host:65536", "host:²"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rendezvous"):
        split_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80"])
def test_all_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="means all addresses; give the one address"):
        split_address(text)
