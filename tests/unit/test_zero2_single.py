"""SelectedZero2 in a world of one: the bits of plain torch, and everything that needs no second rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardrun as sr
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.parity import SCENARIOS, compare_with_plain_torch
from tests.support.reference import Float64Twin, PlainTorch


@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_plain_torch_bit_for_bit_over_twenty_steps(name: str) -> None:
    assert compare_with_plain_torch(sr.Communicator.single(), SCENARIOS[name]) == []


_RULES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
]


@pytest.mark.parametrize(("rule", "optimizer", "options"), _RULES)
def test_the_two_references_agree(rule: str, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """The formulas written out in float64 and torch's own optimizers: neither is right only by being alone."""
    model = seeded(1, OddNet)
    named = dict(model.named_parameters())
    twin = Float64Twin(named, rule, **options)
    plain = PlainTorch(named, optimizer, **options)
    for step in range(10):
        torch.autograd.backward(loss_sum(model, token_batch(step, 11)))
        sums = plain.take_gradients()
        ours, theirs = twin.step(sums, 11, max_grad_norm=0.5), plain.step(sums, 11, max_grad_norm=0.5)
        assert ours == pytest.approx(theirs, rel=1e-6)
    for path, parameter in named.items():
        assert torch.allclose(twin.parameters[path], parameter.double(), rtol=1e-5, atol=1e-6), path
