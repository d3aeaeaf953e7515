"""What happens to a model between two steps: it is noticed, or it does no harm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardrun as sr
from shardrun.errors import StepRefused
from tests.support.models import Vectors, push
from tests.support.sessions import make_zero1, make_zero2, photograph


def _single() -> sr.Communicator:
    return sr.Communicator.single()


@pytest.mark.parametrize("make", [make_zero1, make_zero2])
def test_a_graph_from_before_a_step_is_refused_as_by_torch(make: type) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    zero = make(_single(), model, torch.optim.SGD, lr=0.1)
    first, stale = (model(torch.ones(1, 3)).square().sum() for _ in range(2))
    torch.autograd.backward(first)
    zero.step(local_weight=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(stale)


def test_a_parameter_that_is_no_longer_its_masters_value_is_refused_however_it_was_written() -> None:
    model = Vectors({"w": (300,)}, value=1.0, dtype=torch.bfloat16)
    zero2 = make_zero2(_single(), model, torch.optim.SGD, lr=0.001)
    model.get_parameter("w").data[7] = 5.0  # no version counter sees this
    push(model, {"w": torch.ones(300)})
    before = photograph(zero2)
    with pytest.raises(StepRefused, match="w: its value is not that of its FP32 master"):
        zero2.step(local_weight=1)
    assert before.differences(photograph(zero2)) == []
    zero2.refresh_masters()
    zero2.step(local_weight=1)
    assert model.get_parameter("w")[7].item() == 5.0


@pytest.mark.parametrize("record_first", [True, False])
def test_model_and_record_are_loaded_in_either_order_and_one_without_the_other_is_refused(record_first: bool) -> None:
    model = Vectors({"w": (300,)}, value=1.0, dtype=torch.bfloat16)
    zero2 = make_zero2(_single(), model, torch.optim.SGD, lr=0.001)
    for _ in range(3):
        push(model, {"w": torch.ones(300)})
        zero2.step(local_weight=1)
    record, weights = zero2.to_record(), copy.deepcopy(model.state_dict())
    master = record.tensors["w/master"].clone()
    fresh = Vectors({"w": (300,)}, value=9.0, dtype=torch.bfloat16)
    other = make_zero2(_single(), fresh, torch.optim.SGD, lr=0.0)
    if record_first:
        other.load_record(record)
        push(fresh, {"w": torch.ones(300)})
        with pytest.raises(StepRefused, match="its value is not that of its FP32 master"):
            other.step(local_weight=1)
        other.discard_gradients()
        fresh.load_state_dict(weights)
    else:
        fresh.load_state_dict(weights)
        other.load_record(record)
    push(fresh, {"w": torch.ones(300)})
    other.step(local_weight=1)
    assert torch.equal(other.to_record().tensors["w/master"], master)
    assert torch.equal(fresh.get_parameter("w"), weights["w"])


def test_a_parameter_unfrozen_before_the_first_use_of_its_session_is_refused() -> None:
    model = Vectors({"a": (4,), "b": (5,)})
    model.get_parameter("b").requires_grad_(False)
    session = sr.DataParallel(_single(), model)
    model.get_parameter("b").requires_grad_(True)
    push(model, {"a": torch.ones(4), "b": torch.ones(5)})
    with pytest.raises(StepRefused, match="b: was frozen at set-up and is trainable now"):
        session.reduce(local_weight=1)


def test_a_parameter_frozen_before_the_first_use_of_its_session_is_refused() -> None:
    model = Vectors({"a": (4,), "b": (5,)})
    session = sr.SelectedDataParallel(_single(), model, sr.select_parameters(model))
    model.get_parameter("b").requires_grad_(False)
    zero2 = sr.SelectedZero2(session, torch.optim.SGD, lr=0.1)
    push(model, {"a": torch.ones(4)})
    with pytest.raises(StepRefused, match="b: was trainable at set-up and is frozen now"):
        zero2.step(local_weight=1, missing="zero")


def test_a_store_whose_model_changed_is_refused() -> None:
    model = Vectors({"a": (4,), "b": (5,)})
    model.get_parameter("b").requires_grad_(False)
    store, comm = sr.ParamStore(model), _single()
    push(model, {"a": torch.ones(4)})
    sr.step_sgd(store, sr.SGDConfig(lr=0.1), comm)
    model.get_parameter("b").requires_grad_(True)
    push(model, {"a": torch.ones(4), "b": torch.ones(5)})
    with pytest.raises(StepRefused, match="b: was frozen at set-up and is trainable now"):
        sr.step_sgd(store, sr.SGDConfig(lr=0.1), comm)
    model.get_parameter("b").requires_grad_(False)
    model.get_parameter("b").grad = None
    model.a = nn.Parameter(torch.ones(4))
    with pytest.raises(StepRefused, match="a: the model holds another object there"):
        sr.step_sgd(store, sr.SGDConfig(lr=0.1), comm)


def test_a_module_in_anothers_place_and_another_dtype_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    zero2 = make_zero2(_single(), model, torch.optim.SGD, lr=0.1)
    model[1] = nn.Sequential(nn.Linear(4, 2))
    torch.autograd.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(StepRefused, match="1: the model holds another object there than at set-up"):
        zero2.step(local_weight=1, missing="zero")
    cast = Vectors({"a": (4,)})
    session = sr.DataParallel(_single(), cast)
    push(cast, {"a": torch.ones(4)})
    session.reduce(local_weight=1)
    cast.zero_grad()
    cast.to(torch.bfloat16)
    push(cast, {"a": torch.ones(4)})
    with pytest.raises(StepRefused, match=r"a: was .4,. torch.float32 on cpu at set-up and is .4,. torch.bfloat16"):
        session.reduce(local_weight=1)


def test_gradients_that_carry_a_graph_are_taken_without_it() -> None:
    model = Vectors({"a": (300,)}, value=1.0)
    zero2 = make_zero2(_single(), model, torch.optim.SGD, lr=0.1)
    for norm in (None, 1.0):
        parameter = model.get_parameter("a")
        (parameter.grad,) = torch.autograd.grad((parameter**3).sum(), [parameter], create_graph=True)
        zero2.step(local_weight=1, max_grad_norm=norm)
        assert not zero2.slices[0].bucket.grad.requires_grad
        assert not zero2.slices[0].reduced.requires_grad


def test_the_policy_of_the_free_functions_is_no_policy_for_others() -> None:
    model = Vectors({"a": (3,)})
    zero2 = make_zero2(_single(), model, torch.optim.SGD, lr=0.1)
    push(model, {"a": torch.ones(3)})
    with pytest.raises(StepRefused, match="missing is 'alike'; it must be one of error, zero"):
        zero2.step(local_weight=1, missing="alike")
