"""Gradients that belong nowhere are refused, and say what to do."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import shardrun as sr
from shardrun.errors import StepRefused
from shardrun.optim.kinds import elementwise, fused_is_sound
from shardrun.step.agreement import Request
from tests.support.models import OddShapes, Vectors, push, seeded
from tests.support.sessions import make_zero2, photograph


def test_a_gradient_of_a_frozen_parameter_is_refused() -> None:
    model = seeded(1, OddShapes)
    zero2 = make_zero2(sr.Communicator.single(), model, lr=0.1)
    push(model, {"long": torch.ones(257)})
    model.get_parameter("frozen").grad = torch.ones(4, 3)
    before = photograph(zero2)
    with pytest.raises(StepRefused, match="frozen: is frozen and has a gradient"):
        zero2.step(local_weight=1, missing="zero")
    assert before.differences(photograph(zero2)) == []
    model.get_parameter("frozen").grad = None
    assert zero2.step(local_weight=1, missing="zero").absent == ("temperature", "turned", "one", "cube", "unused")


def test_a_gradient_for_an_unknown_parameter_is_refused() -> None:
    model = Vectors({"a": (3,), "b": (2,)})
    model.get_parameter("b").requires_grad_(False)
    store = sr.ParamStore(model)
    for unknown in ("c", "b"):
        with pytest.raises(StepRefused, match=f"grads has {unknown} .1 in all., no trainable parameter"):
            sr.step_sgd(
                store, sr.SGDConfig(lr=1.0), sr.Communicator.single(), {"a": torch.ones(3), unknown: torch.ones(2)}
            )
    assert torch.equal(model.get_parameter("a"), torch.zeros(3))


def test_weights_of_all_ranks_add_up_inside_int64() -> None:
    largest = (1 << 62) // (1 << 15) - 1
    fits = Request("mean", largest, "zero", (0.1,), "")
    assert fits.problems(1 << 15) == []
    assert largest * (1 << 15) < 1 << 63
    assert "weight is" in Request("mean", largest + 1, "zero", (0.1,), "").problems(1 << 15)[0]
    assert "weight is" in Request("mean", 1 << 53, "zero", (0.1,), "").problems(1)[0]


def test_a_fused_kernel_that_skips_16_bit_leaves_is_refused_in_the_free_functions_too() -> None:
    sound = fused_is_sound(elementwise("sgd"), torch.device("cpu"), torch.bfloat16)
    model, comm = Vectors({"a": (64,)}, value=-0.29, dtype=torch.bfloat16), sr.Communicator.single()
    push(model, {"a": torch.full((64,), -1.0)})
    with nullcontext() if sound else pytest.raises(sr.errors.UsageError, match="sgd: fused is set"):
        sr.step_sgd(sr.ParamStore(model), sr.SGDConfig(lr=0.1, fused=True), comm)
    if not sound:  # else this torch steps rightly, and has done so
        sr.step_sgd(sr.ParamStore(model), sr.SGDConfig(lr=0.1), comm)
    assert model.get_parameter("a").float().mean().item() == pytest.approx(-0.19, abs=0.002)


def test_foreach_is_the_callers_choice_in_the_free_functions_but_not_beside_fused() -> None:
    model, comm = Vectors({"a": (3,)}), sr.Communicator.single()
    push(model, {"a": torch.ones(3)})
    with pytest.raises(sr.errors.UsageError, match="foreach and fused are both set"):
        sr.step_adamw(sr.ParamStore(model), sr.AdamWConfig(lr=0.1, foreach=True, fused=True), comm)
    sr.step_adamw(sr.ParamStore(model), sr.AdamWConfig(lr=0.1, foreach=True, weight_decay=0.0), comm)
    assert model.get_parameter("a").tolist() == pytest.approx([-0.1] * 3)
