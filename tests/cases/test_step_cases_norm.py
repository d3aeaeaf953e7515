"""Public bug reports of comparable tools, held against the step: clipping by a global norm, non-finite values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardrun as sr
from tests.support.models import OddNet, Vectors, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.reference import PlainTorch
from tests.support.sessions import make_zero2, photograph, told

_SGD = torch.optim.SGD


def _clipped(comm: sr.Communicator, numel: int) -> tuple[float | None, list[float], float]:
    """Gradient 3 in the first element and 4 in the last, whichever rank's slice they fall in."""
    model = Vectors({"w": (numel,)})
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    gradient = torch.zeros(numel)
    gradient[0], gradient[-1] = 3.0, 4.0
    push(model, {"w": gradient})
    norm = zero2.step(local_weight=1, max_grad_norm=1.0).grad_norm
    w = model.get_parameter("w").detach()
    return norm, [-w[0].item(), -w[-1].item()], float(w[1:-1].abs().max())


@pytest.mark.parametrize("numel", [4, 1024])
def test_c053_the_norm_is_that_of_all_slices(numel: int) -> None:
    for norm, ends, middle in run_ranks(2, _clipped, numel):
        assert norm == 5.0
        assert ends == pytest.approx([0.6, 0.8], rel=1e-6)
        assert middle == 0.0


def _clipped_run(comm: sr.Communicator) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(4, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    norms = []
    for step in range(20):
        inputs, targets = token_batch(step, 10)
        share = slice(comm.rank, None, comm.world_size)
        torch.autograd.backward(loss_sum(model, (inputs[share], targets[share])))
        norm = zero2.step(local_weight=len(targets[share]), max_grad_norm=0.1).grad_norm
        assert norm is not None
        norms.append(norm)
    return norms, {path: p.detach() for path, p in model.named_parameters()}


def test_c055_sharded_and_unsharded_clip_alike() -> None:
    model = seeded(4, OddNet)
    named = dict(model.named_parameters())
    plain = PlainTorch(named, torch.optim.AdamW, lr=0.01, fused=True)
    norms = []
    for step in range(20):
        torch.autograd.backward(loss_sum(model, token_batch(step, 10)))
        norms.append(plain.step(plain.take_gradients(), 10, max_grad_norm=0.1))
    for sharded_norms, weights in run_ranks(2, _clipped_run):
        assert sharded_norms == pytest.approx(norms, rel=1e-5)
        for path, parameter in named.items():
            assert torch.allclose(weights[path], parameter, rtol=1e-5, atol=1e-6), path


def _twelve_tokens(comm: sr.Communicator, shares: list[int]) -> tuple[float, Tensor]:
    tokens = torch.randn(12, 7, generator=torch.Generator().manual_seed(5))
    first = sum(shares[: comm.rank])
    model = Vectors({"w": (7,)})
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    own = tokens[first : first + shares[comm.rank]]
    torch.autograd.backward((own * model.get_parameter("w")).sum())
    norm = zero2.step(local_weight=len(own), max_grad_norm=0.05).grad_norm
    assert norm is not None
    return norm, model.get_parameter("w").detach()


def test_c058_norm_and_clip_do_not_depend_on_the_world_size() -> None:
    ((norm, want),) = run_ranks(1, _twelve_tokens, [12])
    assert norm > 0.05
    assert float(want.norm()) == pytest.approx(0.05, rel=1e-4)
    for shares in ([10, 2], [4, 4, 4], [12, 0, 0]):
        for got_norm, got in run_ranks(len(shares), _twelve_tokens, shares):
            assert got_norm == pytest.approx(norm, rel=1e-6)
            assert torch.allclose(got, want, rtol=1e-6, atol=0.0)


def _nan_at_step_two(comm: sr.Communicator, culprit: int) -> dict[str, Any]:
    model = seeded(5, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in (1, 2):
        loss = loss_sum(model, token_batch(10 * step + comm.rank, 3))
        torch.autograd.backward(loss * float("nan") if (step, comm.rank) == (2, culprit) else loss)
        before = photograph(zero2)
        try:
            zero2.step(local_weight=3)
        except sr.errors.NonFiniteError as error:
            return {
                "step": step,
                "message": str(error),
                "changed": before.differences(photograph(zero2)),
                "steps": zero2.step_count,
            }
    return {}


@pytest.mark.parametrize("culprit", [1, 0])
def test_c059_a_nan_on_any_rank_stops_all_of_them_and_is_named(culprit: int) -> None:
    for facts in run_ranks(2, _nan_at_step_two, culprit):
        assert facts["step"] == 2
        assert "step 2" in facts["message"]
        assert f"rank {culprit} has a non-finite gradient" in facts["message"]
        assert facts["changed"] == []
        assert facts["steps"] == 1


def _one_nan_element(comm: sr.Communicator) -> tuple[str, list[str], bool]:
    model = seeded(6, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    kind = "nothing"
    for step in (1, 2, 3):
        torch.autograd.backward(loss_sum(model, token_batch(10 * step + comm.rank, 3)))
        if step == 3 and comm.rank == 1:
            grad = model.get_parameter("down.weight").grad
            assert grad is not None
            grad[1, 2] = float("nan")
        before = photograph(zero2)
        try:
            zero2.step(local_weight=3, max_grad_norm=1.0)
        except sr.errors.NonFiniteError as error:
            kind, _ = told(error)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return kind, before.differences(photograph(zero2)), finite


def test_c060_one_nan_element_never_reaches_a_weight_through_clipping() -> None:
    assert run_ranks(2, _one_nan_element) == [("NonFiniteError", [], True)] * 2


def _overflow_in_one_share(comm: sr.Communicator) -> tuple[str, list[str]]:
    """Finite on both ranks, infinite in their sum, and only in the slice of rank 1."""
    model = Vectors({"w": (1024,)})
    zero2 = make_zero2(comm, model, lr=0.01)
    gradient = torch.ones(1024)
    gradient[1000] = 3e38
    push(model, {"w": gradient})
    before = photograph(zero2)
    try:
        zero2.step(local_weight=1, max_grad_norm=1.0)
    except sr.errors.NonFiniteError as error:
        return str(error), before.differences(photograph(zero2))
    return "nothing", []


def test_c062_an_overflow_in_one_share_is_everybodys() -> None:
    for message, changed in run_ranks(2, _overflow_in_one_share, timeout_s=30):
        assert "refused before the update" in message
        assert changed == []
