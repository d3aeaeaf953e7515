"""Streamed gradients of a rank that reduces with nobody: in a world of one, and in a group of one of a larger world."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from shardrun.errors import StepRefused, UsageError
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import make_zero2, same_bits


def _loss(model: nn.Module, part: int) -> Tensor:
    return loss_sum(model, token_batch(part, 3))


def _trained(comm: sr.Communicator, *, streams: bool, parts: int = 1) -> list[Tensor]:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=streams)
    for step in range(3):
        for part in range(parts):
            with zero2.window(local_weight=3):
                torch.autograd.backward(_loss(model, 10 * step + part))
        zero2.step(local_weight=3 * parts, max_grad_norm=0.5)
    state = [value for held in zero2.optimizer.state.values() for value in held.values()]
    return [parameter.detach() for parameter in model.parameters()] + [one for one in state if isinstance(one, Tensor)]


def _groups_of_one(comm: sr.Communicator, parts: int) -> list[bool]:
    own = next(one for one in [comm.subgroup([rank]) for rank in range(comm.world_size)] if one is not None)
    alone = _trained(sr.Communicator.single(), streams=False, parts=parts)
    return [
        same_bits(one, other)
        for streams in (False, True)
        for one, other in zip(_trained(own, streams=streams, parts=parts), alone, strict=True)
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_group_of_one_in_a_larger_world_trains_to_the_bits_of_a_world_of_one(parts: int) -> None:
    for same in run_ranks(2, _groups_of_one, parts, debug="OFF"):
        assert same
        assert all(same)


def _exchanges_of_both(comm: sr.Communicator) -> str:
    own = next(one for one in [comm.subgroup([rank]) for rank in range(comm.world_size)] if one is not None)
    with comm.exchanges():
        with own.exchanges():
            pass
        with pytest.raises(UsageError) as caught, comm.exchanges():
            pass
    with comm.exchanges():
        pass
    return str(caught.value)


def test_exchanges_of_a_group_of_one_do_not_hide_that_others_are_under_way() -> None:
    for told in run_ranks(2, _exchanges_of_both, debug="OFF"):
        assert "exchanges are under way already" in told


def test_a_step_inside_of_a_window_is_refused_and_the_window_is_good() -> None:
    model, twin = (seeded(5, OddNet) for _ in range(2))
    inside, after = (make_zero2(sr.Communicator.single(), m, lr=0.02, stream_gradients=True) for m in (model, twin))
    for step in range(3):
        with inside.window(local_weight=3):
            torch.autograd.backward(_loss(model, step))
            with pytest.raises(StepRefused, match=r"a window\(\.\.\.\) of this session has not ended"):
                inside.step(local_weight=3, missing="zero")
            with pytest.raises(UsageError, match="in a window"), inside.window(local_weight=3):
                pass
        with after.window(local_weight=3):
            torch.autograd.backward(_loss(twin, step))
        norms = [zero2.step(local_weight=3, max_grad_norm=math.inf).grad_norm for zero2 in (inside, after)]
        assert norms[0] == norms[1]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("factor", [100.0, math.nan])
def test_a_window_without_weight_counts_as_zeros(factor: float, first: bool) -> None:
    """Also of parameters that no window before has reached."""
    norms = []
    for idle in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(8, 1, bias=False) for name in "ab"})
        zero2 = make_zero2(sr.Communicator.single(), model, lr=0.1, stream_gradients=True)
        windows = [("a", 4, 1.0), ("b", 0, factor)][:: -1 if first else 1] if idle else [("a", 4, 1.0)]
        for name, weight, by in windows:
            with zero2.window(local_weight=weight):
                torch.autograd.backward(by * model[name](torch.ones(4, 8)).sum())
        norms.append(zero2.step(local_weight=4, missing="zero", max_grad_norm=math.inf).grad_norm)
    assert norms[0] == norms[1]
