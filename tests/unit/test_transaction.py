"""What must not be left half way: signals wait for its end, none is lost, and a failure inside is not forgotten."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.errors import StepFailed
from shardrun.step.transaction import signals_deferred
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.sessions import make_zero2, photograph

_Number = signal.Signals


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Names of the SIGUSR1 and SIGTERM that were handled; SIGINT raises KeyboardInterrupt."""
    found: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        found.append(_Number(number).name)

    ours = {_Number.SIGUSR1: note, _Number.SIGTERM: note, _Number.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_raises_while_handlers_are_put_back_costs_no_other(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C as soon as its handler is back, which is the first one."""
    exchange = signal.signal

    def interrupting(number: int, handler: Any) -> Any:
        before = exchange(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)
        return before

    def hold_one() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []

    monkeypatch.setattr(signal, "signal", interrupting)
    with pytest.raises(KeyboardInterrupt):
        hold_one()
    monkeypatch.undo()
    assert heard == ["SIGUSR1"]
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == ["SIGUSR1", "SIGTERM", "SIGUSR1"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def _trained(seed: int, steps: int) -> sr.SelectedZero2:
    zero2 = make_zero2(sr.Communicator.single(), seeded(seed, OddNet), optimizer=torch.optim.AdamW, lr=0.01)
    for step in range(steps):
        torch.autograd.backward(loss_sum(zero2.session.model, token_batch(step, 3)))
        zero2.step(local_weight=3)
    return zero2


def _while_loading(zero2: sr.SelectedZero2, strike: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `strike` happen when half of a record has been taken over."""
    load = zero2._masters.load
    monkeypatch.setattr(zero2._masters, "load", lambda tensors: (strike(), load(tensors)))


def test_an_interrupt_while_a_record_is_loaded_waits_for_its_end(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = _trained(1, 3), _trained(2, 1)
    other.session.model.load_state_dict(one.session.model.state_dict())
    _while_loading(other, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        other.load_record(one.to_record())
    assert photograph(one).differences(photograph(other)) == []
    assert other.step_count == 3


def test_a_record_that_was_loaded_half_way_is_neither_stepped_from_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = _trained(1, 3), _trained(2, 1)
    _while_loading(other, lambda: torch.empty(1 << 60), monkeypatch)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        other.load_record(one.to_record())
    assert other.comm.failure is not None
    assert other.comm.failure.cause.startswith("rank 0 failed in load_record of default: RuntimeError: ")
    for call in (lambda: other.step(local_weight=3), other.to_record):
        with pytest.raises(StepFailed, match="or while a record was loaded, left the state of default half way"):
            call()
