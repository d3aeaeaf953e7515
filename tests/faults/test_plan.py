"""A plan of faults: what it says, when it strikes, and what is said of one that cannot be meant."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardrun as sr
from shardrun.comm import faults
from shardrun.comm.faults import Fault, InjectedFault, plan
from shardrun.errors import UsageError
from shardrun.step import transaction

_STEP = [
    ("collect", 0),
    ("agree", 0),
    ("agree", 1),
    ("reduce", 0),
    ("reduce", 1),
    ("reduce", 2),
    ("vote", 0),
    ("vote", 1),
]


def _steps(observer: Callable[[str, int], None], steps: int, begun: int = 0) -> list[tuple[int, str, int]]:
    """Walk through `steps` steps; the places (step, phase, n-th collective in it) at which the observer raised."""
    struck, collective = [], begun
    for step in range(1, steps + 1):
        for phase, nth in _STEP:
            collective += nth > 0
            try:
                observer(phase, collective)
            except InjectedFault:
                struck.append((step, phase, nth))
    return struck


def test_a_plan_reads_as_it_is_written() -> None:
    made = plan(" kill rank 1 at reduce:1 of step 3;delay rank 0   by 0.5 s at gather ")
    assert made.faults == (
        Fault("kill rank 1 at reduce:1 of step 3", "kill", 1, "reduce", 1, step=3),
        Fault("delay rank 0 by 0.5 s at gather", "delay", 0, "gather", 0, lasts_s=0.5),
    )
    assert plan(str(made)) == made


@pytest.mark.parametrize(
    "text",
    [
        "fail rank 0 at decide",
        "hang rank 2 at collective 17",
        "hang rank 2 for 3s at collective 4 of step 2",
        "stop rank 1 for 2 s at reduce of every step",
        "stop rank 1 0.001 s after reduce:2",
        "kill rank 1 0.0003 s after vote:1 of step 3",
        "lie rank 1 about fingerprint at agree:1",
        "lie rank 1 about vote at vote",
        "lie rank 1 about parameter at idle of step 3",
        "lie rank 1 about parameter blocks.0.attn.qkv.weight at idle of step 3",
        "kill rank 0 at between steps of step 12",
        "kill rank 0 at start-up",
    ],
)
def test_every_form_is_read_and_said_again(text: str) -> None:
    (fault,) = plan(text, world_size=3).faults
    assert fault.text == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "fault '': ends where it must have fail, delay, hang, stop, kill or lie"),
        ("kil rank 1 at reduce", "found 'kil' where it may have fail, delay, hang, stop, kill or lie"),
        ("kill 1 at reduce", "found '1' where it may have rank"),
        ("kill rank one at reduce", "found 'one' where it may have the number of a rank, an integer from 0"),
        ("kill rank 3 at reduce", "rank is 3; with world_size 3 it must be 0 to 2"),
        (
            "kill rank 1 at reduction",
            "found 'reduction' where it may have collective K or one of the phases start-up, ",
        ),
        ("kill rank 1", "ends where it must have at"),
        ("kill rank 1 in reduce", "found 'in' where it may have at, or a time such as 0.5 s"),
        ("fail rank 1 by 2 s at reduce", "found 'by' where it may have at"),
        ("delay rank 1 at reduce", "found 'at' where it may have by"),
        ("delay rank 1 by soon at reduce", "found 'soon' where it may have a time such as 0.5 s"),
        ("delay rank 1 by -1 s at reduce", "found '-1' where it may have a time"),
        ("delay rank 1 by nan s at reduce", "found 'nan' where it may have a time"),
        ("delay rank 1 by 2 min at reduce", "found 'min' where it may have s"),
        ("kill rank 1 at reduce:0", "found '0' where it may have the number of a collective in that phase, an integer"),
        ("kill rank 1 at collective", "ends where it must have the number of a collective"),
        (
            "kill rank 1 at collective two",
            "found 'two' where it may have the number of a collective, an integer from 1",
        ),
        ("kill rank 1 at reduce of 3", "found '3' where it may have step or every"),
        ("kill rank 1 at reduce of step 0", "found '0' where it may have the number of a step, an integer from 1"),
        ("kill rank 1 at reduce of step 3 and then", "found 'and' where it may have its end, or ; and another fault"),
        ("lie rank 1 about weather at reduce", "found 'weather' where it may have fingerprint, vote or parameter"),
        ("fail rank 1 at commit", "in phase commit nothing may raise; delay, hang, stop and kill are possible there"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_possible_words(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(text, world_size=3)
    assert told in str(caught.value)


def test_all_faults_that_cannot_be_meant_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        plan("kil rank 1 at reduce; fail rank 1 at reduce; kill rank 9 at gather", world_size=2)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "fault 'kil rank 1 at reduce'",
        "fault 'kill rank 9 at gather'",
    ]


@pytest.mark.parametrize(
    ("place", "struck"),
    [
        ("reduce", [(1, "reduce", 0)]),
        ("reduce:2", [(1, "reduce", 2)]),
        ("reduce:3", []),
        ("reduce of step 3", [(3, "reduce", 0)]),
        ("vote:1 of every step", [(1, "vote", 1), (2, "vote", 1), (3, "vote", 1)]),
        ("collective 3", [(1, "reduce", 2)]),
        ("collective 5", [(2, "agree", 1)]),
        ("collective 1 of step 3", [(3, "agree", 1)]),
        ("collective 4 of every step", [(1, "vote", 1), (2, "vote", 1), (3, "vote", 1)]),
        ("collective 5 of step 1", []),
    ],
)
def test_a_fault_strikes_at_its_place_and_on_its_rank_only(place: str, struck: list[tuple[int, str, int]]) -> None:
    made = plan(f"fail rank 1 at {place}")
    assert _steps(made.observer(1), 3) == struck
    assert _steps(made.observer(0), 3) == []


def test_collectives_before_the_plan_came_do_not_count_in_a_phase() -> None:
    made = plan("fail rank 0 at agree:1 of step 1; fail rank 0 at collective 12")
    assert _steps(made.observer(0, begun=9), 1, begun=9) == [(1, "agree", 1), (1, "reduce", 2)]


def test_steps_may_be_numbered_by_the_caller() -> None:
    assert _steps(plan("fail rank 0 at reduce of step 120").observer(0, step=lambda: 120), 2) == [(1, "reduce", 0)]


def test_the_observer_that_was_there_hears_of_the_place_first() -> None:
    heard: list[tuple[str, int]] = []
    observer = plan("fail rank 0 at collect").observer(
        0, then=lambda phase, collective: heard.append((phase, collective))
    )
    with pytest.raises(InjectedFault, match="a fault on purpose: fail rank 0 at collect"):
        observer("collect", 0)
    assert heard == [("collect", 0)]


def test_installed_on_a_communicator_it_keeps_the_observer() -> None:
    comm, heard = sr.Communicator.single(), []
    comm.observer = lambda phase, collective: heard.append(phase)
    plan("fail rank 0 at agree of step 2").install(comm)
    comm.enter("collect")
    comm.enter("agree")
    comm.enter("collect")
    with pytest.raises(InjectedFault):
        comm.enter("agree")
    assert heard == ["collect", "agree"] * 2


def test_a_delay_and_a_hang_for_a_time_only_take_time() -> None:
    observer = plan("delay rank 0 by 0.05 s at collect; hang rank 0 for 0.05 s at collect").observer(0)
    started = time.monotonic()
    observer("collect", 0)
    assert 0.1 <= time.monotonic() - started < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lie_about_a_parameter_flips_one_bit_and_leaves_no_version(dtype: torch.dtype) -> None:
    held = {"a": torch.ones(3, dtype=dtype, requires_grad=True), "b": torch.ones(2, 2, dtype=dtype, requires_grad=True)}
    plan("lie rank 0 about parameter b at idle").observer(0, parameters=held)("idle", 0)
    assert torch.equal(held["a"], torch.ones(3, dtype=dtype))
    changed = (held["b"] != 1).nonzero().tolist()
    assert changed == [[0, 0]]
    assert 0 < abs(float(held["b"].detach()[0, 0]) - 1) < 0.01
    assert held["b"]._version == 0


@pytest.mark.parametrize("held", [None, {}, {"a": torch.ones(1)}])
def test_a_lie_needs_a_parameter_that_is_there(held: dict[str, torch.Tensor] | None) -> None:
    made = plan("lie rank 0 about parameter b at idle")
    with pytest.raises(UsageError, match=r"no such parameter on rank 0; possible: (a|none were given)"):
        made.observer(0, parameters=held)
    made.observer(1, parameters=held)


def test_every_phase_that_is_entered_anywhere_can_be_named() -> None:
    root = Path(sr.__file__).parent
    entered = {found for path in root.rglob("*.py") for found in re.findall(r"\.enter\(\"([^\"]+)\"", path.read_text())}
    assert {"collect", "vote", "save"} <= entered <= set(faults.PHASES)
    assert set(transaction.PHASES) <= set(faults.STEP_PHASES)
