"""Subgroups of a world: each talks for itself, all fail as one; slices of unequal size in both seams."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardrun as sr
from shardrun.comm import communicator as communicator_module
from shardrun.comm.group import Group
from shardrun.comm.slices import NativeSeam
from shardrun.errors import CallMismatch, CommunicatorError, ShardrunError, UsageError
from tests.support.rank_process import mark
from tests.support.ranks import Outcome, run_ranks, start_ranks
from tests.support.sessions import same_bits, told

pytestmark = pytest.mark.sample(10)


def _subgroup(comm: sr.Communicator, *ranks: int) -> sr.Communicator:
    """The subgroup of `ranks`, on one of its members."""
    made = comm.subgroup(ranks)
    assert made is not None
    return made


def _refused(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except ShardrunError as error:
        return told(error)
    return "nothing", ""


# ---- each for itself ------------------------------------------------------------------------------------------------


def _talk(group: sr.Communicator, number: int) -> dict[str, Any]:
    """Every operation once; `number` is this rank's in the world."""
    bucket = torch.arange(4.0) + 10 * number
    out, whole, sent = torch.empty(2), torch.empty(4), torch.tensor([number], dtype=torch.int16)
    group.reduce_slice(bucket, out)
    group.gather_slices(whole, out)
    group.broadcast_(sent, "number", root=1)
    compared = group.compare("talk", "", {"same": "x", "rank": str(group.rank)}, [number, 1])
    found = {
        "reduced": out.tolist(),
        "gathered": whole.tolist(),
        "sent": sent.tolist(),
        "sums": compared.sums,
        "differing": sorted(compared.differing),
        "agreed": group.agree("number", {"is": number}),
        "texts": group.texts("number", "ä" * number),
        "integers": group.sum_integers([number, 2**40]),
    }
    group.vote()
    return found


def _halves(comm: sr.Communicator) -> dict[str, Any]:
    low, high = comm.subgroup([0, 1]), comm.subgroup([2, 3])
    assert (low is None) == (comm.rank >= 2)
    assert (high is None) == (comm.rank < 2)
    half = low or high
    assert half is not None
    for _ in range(1 if low else 3):  # one half need not wait for the other
        found = _talk(half, comm.rank)
    comm.vote()
    return {**found, "rank": half.rank, "size": half.world_size, "ranks": half.ranks, "world": comm.ranks}


def test_two_halves_of_four_ranks_talk_independently() -> None:
    for number, found in enumerate(run_ranks(4, _halves)):
        first, second = (0, 1) if number < 2 else (2, 3)
        summed = [10.0 * (first + second) + 2 * k for k in range(4)]
        assert found == {
            "rank": number - first,
            "size": 2,
            "ranks": (first, second),
            "world": (0, 1, 2, 3),
            "reduced": summed[:2] if number == first else summed[2:],
            "gathered": summed,
            "sent": [second],
            "sums": [first + second, 2],
            "differing": ["rank"],
            "agreed": [{"is": first}, {"is": second}],
            "texts": ["ä" * first, "ä" * second],
            "integers": [first + second, 2**41],
        }


def _overlapping(comm: sr.Communicator) -> list[list[str]]:
    groups = [comm.subgroup(ranks) for ranks in ([0, 2], [1, 2], [2], [0, 1, 2])]
    return [group.texts("who", str(comm.rank)) for group in groups if group is not None]


def test_subgroups_may_overlap_and_may_be_the_whole_world() -> None:
    everybody = ["0", "1", "2"]
    assert run_ranks(3, _overlapping) == [
        [["0", "2"], everybody],
        [["1", "2"], everybody],
        [["0", "2"], ["1", "2"], ["2"], everybody],
    ]


def _alone(comm: sr.Communicator) -> dict[str, Any]:
    alone = comm.subgroup([comm.world_size - 1])
    before = comm.collective
    if alone is None:
        return {}
    out, whole = torch.empty(3), torch.empty(3)
    alone.reduce_slice(torch.arange(3.0), out, splits=[3])
    alone.gather_slices(whole, out, splits=[3])
    alone.broadcast_(whole, "nothing")
    alone.vote()
    texts = alone.texts("own", "a")
    return {"whole": whole.tolist(), "texts": texts, "seam": alone.seam, "ranks": alone.ranks, "rank": alone.rank} | {
        "sent": comm.collective - before
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_subgroup_of_one_member_sends_nothing(world_size: int) -> None:
    *others, last = run_ranks(world_size, _alone)
    assert others == [{}] * (world_size - 1)
    assert last == {
        "whole": [0.0, 1.0, 2.0],
        "texts": ["a"],
        "seam": "none",
        "ranks": (world_size - 1,),
        "rank": 0,
        "sent": 0,
    }


def _shared(comm: sr.Communicator) -> dict[str, Any]:
    first, second = _subgroup(comm, 0, 1), _subgroup(comm, 0, 1)
    seen: list[tuple[str, int]] = []
    second.observer = lambda phase, collective: seen.append((phase, collective))
    began = comm.collective
    first.enter("forward")
    second.vote()
    comm.vote()
    found = {
        "phases": {comm.phase, first.phase, second.phase},
        "seen": [(phase, number - began) for phase, number in seen],
        "numbers": {group.collective - began for group in (comm, first, second)},
        "same observer": comm.observer is first.observer is second.observer,
        "parents": (comm.parent is None, first.parent is comm, second.parent is comm),
    }
    first.close()
    found["later"] = [_refused(group.vote) for group in (comm, first, second)]
    found["poisoned"] = [group.is_poisoned for group in (comm, first, second)]
    return found


def test_a_world_and_its_subgroups_share_phase_number_observer_and_end() -> None:
    for found in run_ranks(2, _shared):
        closed = ("CommunicatorError", "communicator is closed since its first failure: it was closed")
        assert found == {
            "phases": {"forward"},
            "seen": [("forward", 0), ("forward", 1), ("forward", 2)],
            "numbers": {2},
            "same observer": True,
            "parents": (True, True, True),
            "later": [closed] * 3,
            "poisoned": [True] * 3,
        }


# ---- refused by all -------------------------------------------------------------------------------------------------


def _asking_for(comm: sr.Communicator, asked: list[Any]) -> tuple[str, str, list[str]]:
    kind, message = _refused(lambda: comm.subgroup(asked[comm.rank]))
    return kind, message, comm.texts("still open", str(comm.rank))


_LISTS: dict[str, tuple[list[Any], type[Exception], list[str]]] = {
    "other lists": ([[0, 1], [0, 1], [1, 2]], CallMismatch, ["rank 0 for 0,1; rank 1 for 0,1; rank 2 for 1,2"]),
    "a longer list": ([[0, 1], [0, 1], [0, 1, 2]], CallMismatch, ["rank 2 for 0,1,2"]),
    "falling": ([[1, 0]] * 3, UsageError, ["rank 0: 1 comes before 0", "rank 2: 1 comes before 0", "write 0,1"]),
    "twice": ([[1, 1]] * 3, UsageError, ["1 comes before 1", "write 1"]),
    "empty": ([[]] * 3, UsageError, ["empty"]),
    "outside on one rank": ([[0, 1], [0, 3], [0, 1]], UsageError, ["rank 1: rank 3 is not in this world of 3"]),
    "negative": ([[-1, 0]] * 3, UsageError, ["rank -1 is not in"]),
    "no list on one rank": ([[1], 1, [1]], UsageError, ["rank 1: ", "not 1", "subgroup([0, 1])"]),
    "texts": ([["0", "1"]] * 3, UsageError, ["list of ranks"]),
}


def _asking_for_all(comm: sr.Communicator) -> dict[str, tuple[str, str, list[str]]]:
    return {name: _asking_for(comm, asked) for name, (asked, _, _) in _LISTS.items()}


def test_lists_that_differ_or_cannot_be_meant_are_refused_by_all_ranks_alike() -> None:
    by_rank = run_ranks(3, _asking_for_all)
    for name, (_, kind, words) in _LISTS.items():
        for found in by_rank:
            assert found[name] == by_rank[0][name]
            raised, message, texts = found[name]
            assert raised == kind.__name__, name
            assert all(word in message for word in words), message
            assert texts == ["0", "1", "2"], "the world must stay open"


def test_a_world_of_one_refuses_what_cannot_be_meant() -> None:
    comm = sr.Communicator.single()
    with pytest.raises(UsageError, match=r"rank 1 is not in this world of 1; a subgroup takes 0 to 0"):
        comm.subgroup([1])
    assert not comm.is_poisoned


def _cut_again(comm: sr.Communicator) -> tuple[str, str]:
    return _refused(lambda: _subgroup(comm, 0, 1).subgroup([0]))


def test_a_subgroup_is_not_cut_again_and_says_the_way_out() -> None:
    for kind, message in run_ranks(2, _cut_again):
        assert kind == "UsageError"
        assert "the subgroup 0,1" in message
        assert "parent.subgroup(...)" in message


def _mixed_up(comm: sr.Communicator) -> list[tuple[str, str]]:
    half = comm.subgroup([1, 3])
    if half is None:
        return []
    brought = UsageError("a bad path") if half.rank == 1 else None
    return [
        _refused(lambda: half.texts("a" if half.rank else "b", "")),
        _refused(lambda: half.agree("x", error=brought)),
    ]


def test_messages_of_a_subgroup_say_which_ranks_of_the_world_are_meant() -> None:
    left, first, other, second = run_ranks(4, _mixed_up)
    assert left == other == []
    assert first == second
    (mixed, calls), (brought, message) = first
    assert mixed == "CallMismatch"
    assert "rank 1 (rank 0 of the subgroup 1,3) in texts: b" in calls
    assert "rank 3 (rank 1 of the subgroup 1,3) in texts: a" in calls
    assert (brought, message) == ("UsageError", "rank 3 (rank 1 of the subgroup 1,3): a bad path")


def test_a_long_list_of_ranks_is_shortened_in_messages() -> None:
    group = Group.subgroup(range(0, 128, 2), Group(4, range(128)), None)
    assert group.named(2) == "rank 4 (rank 2 of the subgroup 0,2,4,6,8,10,12,..,126 (64 ranks))"
    assert Group(0, range(4)).named(3) == "rank 3"


# ---- slices of unequal size -----------------------------------------------------------------------------------------

_SPLITS = {
    2: [[3, 5], [0, 8], [8, 0], [1, 0], [256, 255], [0, 0], [4, 4]],
    3: [[3, 5, 1], [0, 8, 2], [0, 0, 7], [5, 0, 0], [1, 0, 1], [257, 0, 511], [4, 4, 4]],
}


def _bucket(rank: int, numel: int) -> Tensor:
    """Values whose sum depends on the order of summation."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 5, (numel,), generator=generator)


def _rank_order_sum(buckets: list[Tensor]) -> Tensor:
    total = buckets[0].clone()
    for bucket in buckets[1:]:
        total += bucket
    return total


def _unequal(comm: sr.Communicator, splits: list[int], idle: int | None) -> list[str]:
    """What is not as it must be, by name."""
    start, own = sum(splits[: comm.rank]), splits[comm.rank]
    numel = sum(splits)
    buckets = [_bucket(rank, numel) * (rank != idle) for rank in range(comm.world_size)]
    mine = torch.full((numel,), torch.nan) if comm.rank == idle else buckets[comm.rank]
    before, out = mine.clone(), torch.full((own,), -1.0)
    comm.reduce_slice(mine, out, splits=splits, contributes=comm.rank != idle)
    expected = _rank_order_sum(buckets)
    wrong = [] if same_bits(out, expected[start : start + own]) else ["sum"]
    wrong += [] if same_bits(mine, before) else ["bucket was written"]
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        gathered = torch.zeros(numel, dtype=dtype)
        comm.gather_slices(gathered, expected[start : start + own].to(dtype), splits=splits)
        wrong += [] if same_bits(gathered, expected.to(dtype)) else [f"gathered {dtype}"]
    return wrong


def _all_unequal(comm: sr.Communicator) -> dict[str, list[str]]:
    found = {
        f"{splits} without {idle}": _unequal(comm, splits, idle)
        for splits in _SPLITS[comm.world_size]
        for idle in (None, 0, comm.world_size - 1)
    }
    one, other = torch.empty(4), torch.empty(4)
    bucket = _bucket(comm.rank, 4 * comm.world_size)
    comm.reduce_slice(bucket, one, splits=[4] * comm.world_size)
    comm.reduce_slice(bucket, other)
    return found | {"equal by name": [] if same_bits(one, other) else ["bits"]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_unequal_slices_are_the_sum_in_rank_order_bit_for_bit(world_size: int) -> None:
    for found in run_ranks(world_size, _all_unequal):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def _unequal_in_a_subgroup(comm: sr.Communicator) -> list[str]:
    group = comm.subgroup([0, 2, 3])
    return [] if group is None else _unequal(group, [2, 0, 5], None) + _unequal(group, [4, 1, 0], 1)


def test_unequal_slices_travel_in_a_subgroup_too() -> None:
    assert run_ranks(4, _unequal_in_a_subgroup) == [[], [], [], []]


def _native(comm: sr.Communicator, ranks: list[int]) -> list[str]:
    """The native seam over gloo, with whole numbers, whose sum no order changes."""
    made = comm.subgroup(ranks)
    if made is None:
        return []
    seam, wrong = NativeSeam(made.world_size, made._group), []
    for splits in _SPLITS[made.world_size][:-1]:
        start, own, numel = sum(splits[: made.rank]), splits[made.rank], sum(splits)
        buckets = [torch.arange(numel) % 97 + 1000.0 * rank for rank in range(made.world_size)]
        for contributes in (True, False):
            bucket, out = buckets[made.rank].clone(), torch.full((own,), -1.0)
            seam.reduce(bucket, out, splits, contributes=contributes or made.rank != 0)
            expected = torch.stack(buckets[0 if contributes else 1 :]).sum(0)
            wrong += [] if same_bits(out, expected[start : start + own]) else [f"sum {splits}"]
            wrong += [] if same_bits(bucket, buckets[made.rank]) else [f"bucket {splits} was written"]
        gathered = torch.zeros(numel, dtype=torch.bfloat16)
        seam.gather(gathered, buckets[0][start : start + own].bfloat16(), splits)
        wrong += [] if same_bits(gathered, buckets[0].bfloat16()) else [f"gathered {splits}"]
    return wrong


@pytest.mark.parametrize("ranks", [[0, 1], [1, 2], [0, 1, 2]])
def test_the_native_seam_reduces_and_gathers_unequal_slices(ranks: list[int]) -> None:
    assert run_ranks(3, _native, ranks) == [[], [], []]


def _misfit(comm: sr.Communicator) -> tuple[list[tuple[str, str]], bool]:
    bucket, out = torch.zeros(6), torch.zeros(2)
    cases: list[list[int] | None] = [[6], [2, 2], [8, -2], [3, 3], None]
    if comm.world_size == 1:
        cases = [[3, 3], [5], [-6], [6], None]
    return [_refused(lambda splits=splits: comm.reduce_slice(bucket, out, splits=splits)) for splits in cases], (  # type: ignore[misc]
        comm.is_poisoned
    )


def test_splits_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    refused, poisoned = _misfit(sr.Communicator.single())
    assert not poisoned
    assert [kind for kind, _ in refused] == ["UsageError"] * 5
    assert "slices of [3, 3] elements do not make up a bucket of 6 on 1 ranks" in refused[0][1]
    assert "the slice of rank 0 has 6 elements, its buffer 2" in refused[3][1]
    for refused, poisoned in run_ranks(2, _misfit):
        assert not poisoned
        assert [kind for kind, _ in refused] == ["UsageError"] * 5
        assert "slices of [6] elements do not make up a bucket of 6 on 2 ranks" in refused[0][1]
        assert "has 3 elements, its buffer 2" in refused[3][1]


# ---- all fail as one ------------------------------------------------------------------------------------------------


def _raise() -> None:
    raise ZeroDivisionError("a fault in user code")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_STRIKES = {"raise": _raise, "kill": _kill}
_VICTIM = 1
_TASKS: dict[str, Callable[[sr.Communicator], object]] = {
    "vote": lambda group: group.vote(),
    "exchange": lambda group: group.reduce_slice(torch.zeros(6), torch.zeros(6 // group.world_size), agreed=True),
}

# Which group each rank is in when rank 1 fails there; every other rank waits for one that waits for rank 1.
_CHAINS: dict[str, dict[int, tuple[int, ...]]] = {
    "subgroup, then parent": {0: (0, 1), 1: (0, 1), 2: (0, 2), 3: (0, 1, 2, 3)},
    "subgroup, then subgroups": {0: (0, 1), 1: (0, 1), 2: (0, 2), 3: (2, 3)},
    "parent, then subgroups": {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 2), 3: (2, 3)},
}


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _fail_in_a_chain(comm: sr.Communicator, chain: dict[int, tuple[int, ...]], task: str, kind: str, go: Path) -> Any:
    """Meet the fault; stay until every survivor has met it, so that it is closed connections that free them."""
    groups: dict[tuple[int, ...], sr.Communicator | None] = {(0, 1, 2, 3): comm}
    for members in ((0, 1), (0, 2), (2, 3)):
        groups[members] = comm.subgroup(members)
    mine = groups[chain[comm.rank]]
    assert mine is not None
    comm.vote()
    if comm.rank == _VICTIM:
        mark("ready")
        _wait_for(go.with_name("strike"))
        comm.observer = lambda phase, collective: _STRIKES[kind]()
    met = _refused(lambda: _TASKS[task](mine))
    mark("met")
    comm.observer = None
    began = comm.collective
    held = [group for group in groups.values() if group is not None]
    later = [_refused(call) for group in held for call in (group.vote, lambda: comm.subgroup([0]))]
    _wait_for(go)
    return met, later, [group.is_poisoned for group in held], comm.collective - began


@pytest.mark.parametrize("kind", ["raise", "kill"])
@pytest.mark.parametrize(
    ("chain", "task"), [*((name, "vote") for name in _CHAINS), ("subgroup, then parent", "exchange")]
)
def test_a_failure_in_any_group_closes_all_and_frees_every_waiting_rank(
    chain: str, task: str, kind: str, tmp_path: Path
) -> None:
    survivors = [0, 2, 3] if kind == "kill" else [0, 1, 2, 3]
    go = tmp_path / "go"
    with start_ranks(4, _fail_in_a_chain, _CHAINS[chain], task, kind, go, debug="OFF") as ranks:
        ranks.wait_for_mark(_VICTIM, "ready")
        time.sleep(0.1)  # let the others come to where they wait
        (tmp_path / "strike").touch()
        for rank in survivors:
            ranks.wait_for_mark(rank, "met", timeout_s=15.0)
        go.touch()
        outcomes = ranks.collect(30.0, survivors)
    for rank, outcome in zip(survivors, outcomes, strict=True):
        _check_closed(chain, rank, outcome)


def _check_closed(chain: str, rank: int, outcome: Outcome) -> None:
    assert outcome.ok, outcome.error
    (kind, message), later, poisoned, begun = outcome.value
    members = _CHAINS[chain][rank]
    where = f"rank {rank}"
    if len(members) < 4:
        where += f" (rank {members.index(rank)} of the subgroup {','.join(map(str, members))})"
    assert kind == "CommunicatorError"
    assert f"failed on {where}: " in message
    cause = message.removeprefix("communicator closed at ")
    assert set(later) == {("CommunicatorError", f"communicator is closed since its first failure: {cause}")}
    assert all(poisoned)
    assert begun == 0, "a later call must be refused before it begins"


def _fail_in_a_world(comm: sr.Communicator, go: Path) -> str:
    comm.vote()
    if comm.rank == _VICTIM:
        _kill()
    kind, message = _refused(comm.vote)
    mark("met")
    _wait_for(go)
    return f"{kind}: {message}"


def test_survivors_free_those_that_wait_for_them_alone(tmp_path: Path) -> None:
    """At five ranks not everybody waits for the dead one itself: the survivors' own connections must close too."""
    survivors = [0, 2, 3, 4]
    with start_ranks(5, _fail_in_a_world, tmp_path / "go", debug="OFF") as ranks:
        for rank in survivors:
            ranks.wait_for_mark(rank, "met", timeout_s=15.0)
        (tmp_path / "go").touch()
        assert all(outcome.value.startswith("CommunicatorError: ") for outcome in ranks.collect(30.0, survivors))


def _cannot_connect(comm: sr.Communicator) -> tuple[tuple[str, str], tuple[str, str], bool]:
    if comm.rank == 1:

        def fail(*_: object) -> None:
            raise OSError("no more sockets")

        vars(communicator_module)["open_subgroup"] = fail
    made = _refused(lambda: comm.subgroup([0, 1]))
    return made, _refused(comm.vote), comm.is_poisoned


def test_a_subgroup_that_cannot_connect_closes_the_world() -> None:
    found = run_ranks(3, _cannot_connect, comm_timeout_s=3.0)
    (first, _, _), (at_fault, later, _), (outside, told_later, _) = found
    assert all(poisoned for _, _, poisoned in found)
    assert at_fault[0] == later[0] == first[0] == "CommunicatorError"
    assert "connecting the subgroup 0,1" in at_fault[1]
    assert "failed on rank 1: no more sockets" in at_fault[1]
    assert "no more sockets" in later[1]
    assert outside == ("nothing", "")  # a rank that is no member connects to nobody, and learns it at the next call
    assert told_later[0] == CommunicatorError.__name__
