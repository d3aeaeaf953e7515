"""Ranks in different collectives, or in one with other shapes or dtypes: all are told what each was doing, none dies.

gloo ends a process by SIGABRT where the sizes of a collective differ, and gives rubbish where only its kind does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import shardrun as sr
from shardrun.errors import CommunicatorError
from tests.faults.conftest import Outcomes
from tests.support.ranks import run_ranks
from tests.support.sessions import told

pytestmark = pytest.mark.sample(1)

_zeros = torch.zeros

_CALLS: dict[str, Callable[[sr.Communicator], object]] = {
    "broadcast of 5": lambda comm: comm.broadcast_(_zeros(5), "x"),
    "broadcast of 6": lambda comm: comm.broadcast_(_zeros(6), "x"),
    "broadcast of 5 float64": lambda comm: comm.broadcast_(_zeros(5).double(), "x"),
    "broadcast from 1": lambda comm: comm.broadcast_(_zeros(5), "x", 1),
    "broadcast of y": lambda comm: comm.broadcast_(_zeros(5), "y"),
    "agree": lambda comm: comm.agree("a", 1),
    "agree on b": lambda comm: comm.agree("b", 1),
    "texts": lambda comm: comm.texts("a", "a long text that the others do not expect"),
    "compare": lambda comm: comm.compare("mine", "", {"this": "that"}, [1]),
    "compare 2": lambda comm: comm.compare("mine", "", {"this": "that"}, [1, 2]),
    "vote": lambda comm: comm.vote(),
    "sum of 2": lambda comm: comm.sum_integers([1, 2]),
    "sum of 32": lambda comm: comm.sum_integers([1] * 32),
    "reduce": lambda comm: comm.reduce_slice(_zeros(6 * comm.world_size), _zeros(6)),
    "reduce of more": lambda comm: comm.reduce_slice(_zeros(8 * comm.world_size), _zeros(8)),
    "reduce of float64": lambda comm: comm.reduce_slice(_zeros(6 * comm.world_size).double(), _zeros(6).double()),
    "reduce in other slices": lambda comm: comm.reduce_slice(
        _zeros(6 * comm.world_size), _zeros(0 if comm.rank else 6 * comm.world_size), splits=_all_to_one(comm)
    ),
    "reduce that does not fit": lambda comm: comm.reduce_slice(_zeros(7), _zeros(5)),
    "gather": lambda comm: comm.gather_slices(_zeros(6 * comm.world_size), _zeros(6)),
    "gather of bf16": lambda comm: comm.gather_slices(_zeros(6 * comm.world_size).bfloat16(), _zeros(6).bfloat16()),
    "subgroup": lambda comm: comm.subgroup([0, 1]),
}


def _all_to_one(comm: sr.Communicator) -> list[int]:
    return [6 * comm.world_size, *[0] * (comm.world_size - 1)]


_PAIRS = [
    ("broadcast of 5", "broadcast of 6"),
    ("broadcast of 5", "broadcast of 5 float64"),
    ("broadcast of 5", "broadcast from 1"),
    ("broadcast of 5", "broadcast of y"),
    ("broadcast of 5", "agree"),
    ("agree", "agree on b"),
    ("texts", "agree"),
    ("compare", "compare 2"),
    ("compare", "sum of 32"),
    ("vote", "agree"),
    ("vote", "sum of 2"),
    ("vote", "reduce"),
    ("sum of 2", "sum of 32"),
    ("sum of 2", "gather"),
    ("reduce", "reduce of more"),
    ("reduce", "reduce of float64"),
    ("reduce", "reduce in other slices"),
    ("reduce", "reduce that does not fit"),
    ("reduce", "gather"),
    ("reduce", "agree"),
    ("gather", "gather of bf16"),
    ("gather", "broadcast of 5"),
    ("subgroup", "vote"),
]


def _meet(comm: sr.Communicator) -> list[tuple[tuple[str, str], float]]:
    """What this rank is told, and after how long, in one world pair by pair; rank 1 makes the second call of each."""
    found = []
    for one, other in [*_PAIRS, *((other, one) for one, other in _PAIRS)]:
        said, began = ("", ""), time.monotonic()
        try:
            _CALLS[other if comm.rank == 1 else one](comm)
        except CommunicatorError as error:
            said = told(error)
        found.append((said, time.monotonic() - began))
        assert not comm.is_poisoned, (one, other)
    assert comm.agree("still here", comm.rank) == list(range(comm.world_size))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_in_different_collectives_are_told_what_each_was_doing(world_size: int, ended: Outcomes) -> None:
    ranks = run_ranks(world_size, _meet, debug="OFF")
    pairs = [*_PAIRS, *((other, one) for one, other in _PAIRS)]
    for (one, other), *answers in zip(pairs, *ranks, strict=True):
        seen = [said for said, _ in answers]
        assert len(set(seen)) == 1, (one, other, seen)
        kind, message = seen[0]
        assert kind == "CallMismatch", (one, other, message)
        assert message.startswith("the ranks are in different operations and nothing was sent: rank 0 in "), message
        first, _, second = message.partition("rank 0 in ")[2].partition("; rank 1 in ")
        assert first.split(":")[0].split()[0] in (one, _word(one)), message
        assert second.split(":")[0].split(";")[0].split()[0] in (other, _word(other)), message
    ended(
        "14 another collective, shape or dtype",
        f"{len(pairs)} pairs {world_size}",
        "refused by all, then all go on",
        max(seconds for answers in ranks for _, seconds in answers),
    )


def _word(name: str) -> str:
    return "mine" if name.startswith("compare") else name.split()[0]


def _misuse_together(comm: sr.Communicator) -> tuple[tuple[str, str], bool]:
    try:
        _CALLS["reduce that does not fit"](comm)
    except sr.errors.UsageError as error:
        return told(error), comm.is_poisoned
    return ("", ""), comm.is_poisoned


def test_slices_that_fit_on_no_rank_are_refused_by_all_and_nothing_is_closed() -> None:
    for (kind, message), poisoned in run_ranks(2, _misuse_together, debug="OFF"):
        assert kind == "UsageError"
        assert "slices of equal elements do not make up a bucket of 7 on 2 ranks" in message
        assert not poisoned
