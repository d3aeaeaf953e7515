"""SelectedZero2 in a world of one: the bits of plain torch, and everything that needs no second rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardrun as sr
from shardrun.errors import NonFiniteError, StepRefused
from tests.support.models import OddNet, Vectors, loss_sum, seeded, token_batch
from tests.support.parity import SCENARIOS, compare_with_plain_torch
from tests.support.reference import Float64Twin, PlainTorch
from tests.support.sessions import make_zero2


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


_BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("weight_deacy", {"weight_deacy": 0.1}),
    ("learning rate", {"lr": -1.0}),
    ("learning rate", {"lr": float("nan")}),
    ("eps", {"eps": -1.0}),
    ("beta", {"betas": (1.5, 0.999)}),
    ("weight_decay", {"weight_decay": -1.0}),
    ("capturable", {"capturable": True}),
    ("foreach", {"fused": True, "foreach": True}),
    ("beta", {"rules": {"a": {"betas": (5.0, 0.9)}}}),
    ("weight_deacy", {"rules": {"a": {"weight_deacy": 0.1}}}),
    ("lr_scale", {"rules": {"a": {"lr_scale": -1.0}}}),
    ("lr", {"rules": {"a": {"lr": 0.5}}}),
    ("nesterov", {"optimizer": torch.optim.SGD, "nesterov": True}),
    ("dampening", {"optimizer": torch.optim.SGD, "momentum": 0.9, "nesterov": True, "dampening": 0.5}),
    ("momentum", {"momentum": 0.9}),
]


@pytest.mark.parametrize(("word", "options"), _BAD_OPTIONS)
def test_options_that_the_optimizer_does_not_have_or_cannot_take_are_refused_at_setup(
    word: str, options: dict[str, Any]
) -> None:
    """torch takes unknown keys of a param group without a word, so a misspelt one would train on with the default."""
    model = Vectors({"a": (3,)}, value=1.0)
    with pytest.raises((ValueError, TypeError), match=r"(?i)" + word.replace("_", "[_ ]")):
        make_zero2(sr.Communicator.single(), model, **options)
    assert model.get_parameter("a").tolist() == [1.0] * 3


def test_an_option_group_for_a_path_that_is_not_selected_is_refused() -> None:
    model = Vectors({"a": (3,), "b": (3,)})
    session = sr.SelectedDataParallel(sr.Communicator.single(), model, sr.select_parameters(model, include=["a"]))
    with pytest.raises(sr.errors.UsageError, match="b"):
        sr.SelectedZero2(session, torch.optim.AdamW, option_groups=[sr.OptionGroup(frozenset({"b"}), {})])


def _sockets() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return sorted(link for link in links if link.startswith("socket:"))


def test_a_world_of_one_opens_no_socket_and_no_process_group() -> None:
    before = _sockets()
    comm = sr.Communicator.open(sr.CommunicatorConfig(rank=0, world_size=1))
    model = seeded(1, OddNet)
    zero2 = make_zero2(comm, model)
    torch.autograd.backward(loss_sum(model, token_batch(0, 3)))
    zero2.step(local_weight=3, max_grad_norm=1.0)
    zero2.load_record(zero2.to_record())
    assert comm.agree("anything", [1]) == [[1]]
    assert not torch.distributed.is_initialized()
    assert _sockets() == before


def test_a_refused_window_of_streamed_gradients_cannot_be_stepped_again() -> None:
    """They are divided where they stand; a step without new ones would move nothing, and say nothing."""
    model = seeded(1, OddNet)
    zero2 = make_zero2(sr.Communicator.single(), model, lr=0.02, stream_gradients=True)

    def step() -> sr.StepResult:
        return zero2.step(local_weight=11, missing="zero")

    torch.autograd.backward(loss_sum(model, token_batch(0, 11)) * float("nan"))
    with pytest.raises(NonFiniteError):
        step()
    with pytest.raises(StepRefused, match=r"gradients of the step that was refused are gone, .* run a backward again"):
        step()
    torch.autograd.backward(loss_sum(model, token_batch(0, 11)))
    assert step().absent == ()
    assert len(step().absent) == len(zero2.paths)  # nothing was refused before: a step without gradients, as asked for
    torch.autograd.backward(loss_sum(model, token_batch(0, 11)) * float("nan"))
    with pytest.raises(NonFiniteError):
        step()
    zero2.discard_gradients()
    assert len(step().absent) == len(zero2.paths)
