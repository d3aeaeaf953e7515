"""DataParallel and the free functions in a world of one: plain torch to the last bit, and silent on the network."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardrun as sr
from shardrun.errors import EmptyWindowError, StepRefused, UsageError
from tests.support.models import OddNet, OddShapes, TiedNet, Vectors, loss_sum, push, seeded, token_batch
from tests.support.sessions import same_bits, snapshot, snapshot_store

_BF16 = torch.bfloat16
Config = sr.SGDConfig | sr.AdamConfig
_STEPS: dict[str, tuple[Callable[..., None], type[torch.optim.Optimizer]]] = {
    "sgd": (sr.step_sgd, torch.optim.SGD),
    "adam": (sr.step_adam, torch.optim.Adam),
    "adamw": (sr.step_adamw, torch.optim.AdamW),
}
_CASES: dict[str, tuple[str, Config, torch.dtype]] = {
    "sgd": ("sgd", sr.SGDConfig(lr=0.05, weight_decay=0.1), torch.float32),
    "sgd momentum": ("sgd", sr.SGDConfig(lr=0.05, momentum=0.9, nesterov=True), torch.float32),
    "sgd fused": ("sgd", sr.SGDConfig(lr=0.05, momentum=0.9, dampening=0.2, fused=True), torch.float32),
    "sgd bf16": ("sgd", sr.SGDConfig(lr=0.05, momentum=0.9), _BF16),
    "adam": ("adam", sr.AdamConfig(lr=0.01, weight_decay=0.1), torch.float32),
    "adam fused": ("adam", sr.AdamConfig(lr=0.01, amsgrad=True, fused=True), torch.float32),
    "adam bf16": ("adam", sr.AdamConfig(lr=0.01, maximize=True), _BF16),
    "adamw": ("adamw", sr.AdamWConfig(lr=0.01), torch.float32),
    "adamw fused": ("adamw", sr.AdamWConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, fused=True), torch.float32),
    "adamw bf16 fused": ("adamw", sr.AdamWConfig(lr=0.01, weight_decay=0.3, fused=True), _BF16),
    "adamw bf16": ("adamw", sr.AdamWConfig(lr=0.01, fused=False), _BF16),
}


def _differences(one: nn.Module, other: nn.Module) -> list[str]:
    named = zip(one.named_parameters(), other.parameters(), strict=True)
    return [path for (path, ours), theirs in named if not same_bits(ours, theirs)]


def _state_differences(store: sr.ParamStore, plain: torch.optim.Optimizer) -> list[str]:
    assert store.optimizer is not None
    ours, theirs = store.optimizer.state_dict()["state"], plain.state_dict()["state"]
    if ours.keys() != theirs.keys():
        return [f"state of {sorted(ours)}, expected {sorted(theirs)}"]
    return [
        f"{number}/{key}"
        for number, held in theirs.items()
        for key, value in held.items()
        if not (value is ours[number][key] is None or same_bits(ours[number][key], value))
    ]


def _mean_loss(model: nn.Module, step: int) -> Tensor:
    inputs, targets = token_batch(step, 6)
    return F.cross_entropy(model(inputs).float(), targets)


def _sockets() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return sorted(link for link in links if link.startswith("socket:"))


@pytest.mark.parametrize("name", _CASES)
def test_a_free_function_is_backward_and_step_bit_for_bit_and_sends_nothing(name: str) -> None:
    kind, config, dtype = _CASES[name]
    call, optimizer = _STEPS[kind]
    sockets = _sockets()
    comm = sr.Communicator.open(sr.CommunicatorConfig(rank=0, world_size=1))
    model = seeded(1, OddNet).to(dtype)
    twin = copy.deepcopy(model)
    store, plain = sr.ParamStore(model), optimizer(twin.parameters(), **dataclasses.asdict(config))
    for step in range(8):
        for number in range(1 + step % 2):  # with accumulation, as torch has it in the parameters' dtype
            for one in (model, twin):
                torch.autograd.backward(_mean_loss(one, 10 * step + number))
        call(store, config, comm)
        plain.step()
        plain.zero_grad()
        assert _differences(model, twin) == [], step
        assert all(parameter.grad is None for parameter in model.parameters()), "consumed"
    assert _state_differences(store, plain) == []
    assert not torch.distributed.is_initialized()
    assert _sockets() == sockets


@pytest.mark.parametrize("fused", [False, True])
def test_odd_shapes_late_gradients_and_other_memory_orders_are_stepped_as_by_torch(fused: bool) -> None:
    """Transposed, channels-last and 0-dim parameters, each with its first gradient in another step."""
    for kind, config in (
        ("adamw", sr.AdamWConfig(lr=0.1, fused=fused)),
        ("sgd", sr.SGDConfig(momentum=0.9, fused=fused)),
    ):
        call, optimizer = _STEPS[kind]
        model = seeded(2, OddShapes)
        model.register_parameter("nhwc", nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)))
        twin = copy.deepcopy(model)
        # One group each: torch's fused SGD raises where some of a group have a momentum buffer and some have none yet.
        groups = [{"params": [parameter]} for parameter in twin.parameters() if parameter.requires_grad]
        store, plain = sr.ParamStore(model), optimizer(groups, **dataclasses.asdict(config))
        paths = list(store.parameters)
        for step in range(6):
            shown = {path: torch.randn(store.parameters[path].shape) for path in paths[: 2 + step] if path != "unused"}
            for one in (model, twin):
                push(one, shown)
            call(store, config, sr.Communicator.single())
            plain.step()
            plain.zero_grad()
            assert _differences(model, twin) == [], (kind, step)
        assert _state_differences(store, plain) == []


@pytest.mark.parametrize("form", ["mapping", "sequence"])
def test_given_gradients_are_used_and_pending_ones_stay(form: str) -> None:
    model = Vectors({"a": (3,), "b": (2,), "c": (4,), "f": (2,)}, value=1.0, dtype=_BF16)
    model.get_parameter("f").requires_grad_(False)
    model.get_parameter("b").grad_dtype = torch.float32
    push(model, {"a": torch.full((3,), 100.0), "b": torch.full((2,), 100.0)})
    pending = {path: parameter.grad for path, parameter in model.named_parameters()}
    before = snapshot(model)
    grads = {"a": torch.full((3,), 0.5, dtype=_BF16), "c": torch.full((4,), 0.25)}
    store = sr.ParamStore(model)
    assert list(store.parameters) == ["a", "b", "c"]
    given: Any = grads if form == "mapping" else [grads.get(path) for path in store.parameters]
    for step in range(1, 3):
        sr.step_sgd(store, sr.SGDConfig(lr=1.0), sr.Communicator.single(), given)
        assert model.get_parameter("a").tolist() == [1.0 - 0.5 * step] * 3
        assert model.get_parameter("c").tolist() == [1.0 - 0.25 * step] * 4
        assert model.get_parameter("b").tolist() == [1.0] * 2
        assert all(parameter.grad is pending[path] for path, parameter in model.named_parameters())
    changed = before.differences(snapshot(model))
    assert changed == ["parameter a", "parameter c"]
    assert grads["a"].tolist() == [0.5] * 3, "only read"
    sr.step_sgd(store, sr.SGDConfig(lr=1.0), sr.Communicator.single())
    assert model.get_parameter("b").tolist() == [-99.0] * 2
    assert model.get_parameter("b").grad_dtype == torch.float32, "what the user set for the next window"
    assert model.get_parameter("a").grad_dtype == _BF16


def test_a_store_covers_what_was_selected_and_a_tied_parameter_once() -> None:
    model = TiedNet()
    store = sr.ParamStore(model, exclude=["mid.bias"])
    assert list(store.parameters) == ["emb.weight", "mid.weight"]
    start = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    torch.autograd.backward(model(torch.arange(5)).sum())
    kept = model.get_parameter("mid.bias").grad
    grad = model.get_parameter("emb.weight").grad
    assert grad is not None
    grad = grad.clone()
    sr.step_sgd(store, sr.SGDConfig(lr=1.0), sr.Communicator.single())
    assert same_bits(model.get_parameter("emb.weight"), start["emb.weight"] - grad)
    assert same_bits(model.get_parameter("mid.bias"), start["mid.bias"])
    assert model.get_parameter("mid.bias").grad is kept
    empty = sr.ParamStore(model, include=[])
    sr.step_adamw(empty, sr.AdamWConfig(), sr.Communicator.single())
    assert empty.parameters == {}


def test_later_steps_may_bring_another_rate_and_other_options() -> None:
    model = seeded(3, OddNet)
    twin = copy.deepcopy(model)
    store, plain = sr.ParamStore(model), torch.optim.AdamW(twin.parameters(), lr=0.1)
    comm = sr.Communicator.single()
    for step in range(5):
        options = {"lr": 0.1 / (1 + step), "weight_decay": 0.1 * step, "betas": (0.9 - 0.1 * (step > 2), 0.99)}
        for one in (model, twin):
            torch.autograd.backward(_mean_loss(one, step))
        sr.step_adamw(store, sr.AdamWConfig(**options), comm)  # type: ignore[arg-type]
        for group in plain.param_groups:
            group.update(options)
        plain.step()
        plain.zero_grad()
        assert _differences(model, twin) == []


# what a second step may not bring -> words of the refusal
_CHANGES: dict[str, tuple[str, Config, list[str]]] = {
    "another optimizer": ("adam", sr.AdamConfig(), ["stepped by adamw", "this call is adam"]),
    "amsgrad": ("adamw", sr.AdamWConfig(amsgrad=True), ["amsgrad", "after steps without it"]),
    "betas": ("adamw", sr.AdamWConfig(betas=(1.5, 0.9)), ["beta", "1.5"]),
    "eps": ("adamw", sr.AdamWConfig(eps=-1.0), ["eps"]),
    "weight decay": ("adamw", sr.AdamWConfig(weight_decay=-1.0), ["weight_decay"]),
    "fused": ("adamw", sr.AdamWConfig(fused=True), ["fused was None", "True"]),
    "lr": ("adamw", sr.AdamWConfig(lr=-1.0), ["learning rate is -1.0"]),
    "lr nan": ("adamw", sr.AdamWConfig(lr=float("nan")), ["learning rate is nan"]),
}


def test_what_torch_would_stumble_over_in_a_later_step_is_refused_before_anything_changes() -> None:
    model = seeded(3, OddNet)
    twin = copy.deepcopy(model)
    store, straight = sr.ParamStore(model), sr.ParamStore(twin)
    comm = sr.Communicator.single()
    for step in range(2):
        for one in (model, twin):
            torch.autograd.backward(_mean_loss(one, step))
        for kind, config, words in _CHANGES.values() if step else ():
            before = snapshot_store(model, store)
            with pytest.raises(StepRefused) as caught:
                _STEPS[kind][0](store, config, comm)
            assert [word for word in words if word not in str(caught.value)] == [], caught.value
            assert before.differences(snapshot_store(model, store)) == []
        sr.step_adamw(store, sr.AdamWConfig(), comm)
        sr.step_adamw(straight, sr.AdamWConfig(), comm)
    assert _differences(model, twin) == []
    assert not comm.is_poisoned


def test_a_first_step_with_options_that_torch_does_not_take_is_refused_and_the_store_stays_free() -> None:
    model = Vectors({"a": (3,)}, value=1.0)
    store, comm = sr.ParamStore(model), sr.Communicator.single()
    push(model, {"a": torch.ones(3)})
    with pytest.raises(UsageError, match=r"(?i)nesterov"):
        sr.step_sgd(store, sr.SGDConfig(nesterov=True), comm)
    with pytest.raises(UsageError, match=r"(?i)learning rate"):
        sr.step_adam(store, sr.AdamConfig(lr=-0.1), comm)
    assert store.optimizer is None
    sr.step_sgd(store, sr.SGDConfig(lr=1.0), comm)
    assert model.get_parameter("a").tolist() == [0.0] * 3


def test_wrong_gradients_are_refused_by_name() -> None:
    model = Vectors({"a": (3,), "b": (2,)}, value=1.0)
    store, comm = sr.ParamStore(model), sr.Communicator.single()
    push(model, {"a": torch.ones(3), "b": torch.ones(2)})
    for words, grads in (
        ("grads has 1 gradients, this store 2 parameters", [torch.ones(3)]),
        (r"b: gradient of shape \(3,\)", {"b": torch.ones(3)}),
        (r"a: gradient of shape \(3,\) \(torch.sparse_coo\)", {"a": torch.ones(3).to_sparse()}),
    ):
        before = snapshot_store(model, store)
        with pytest.raises(StepRefused, match=words):
            sr.step_sgd(store, sr.SGDConfig(), comm, grads)
        assert before.differences(snapshot_store(model, store)) == []


# ---- DataParallel -------------------------------------------------------------------------------------------------


def test_data_parallel_of_one_rank_is_one_division_and_sends_nothing() -> None:
    sockets = _sockets()
    comm = sr.Communicator.open(sr.CommunicatorConfig(rank=0, world_size=1))
    model = seeded(1, OddNet)
    twin = copy.deepcopy(model)
    session = sr.DataParallel(comm, model)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01)
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        for number in range(2):
            for one in (model, twin):
                torch.autograd.backward(loss_sum(one, token_batch(10 * step + number, 3 + number)))
        result = session.reduce(local_weight=torch.tensor(7))
        assert result.global_weight == 7
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(7)
        for optimizer in (own, plain):
            optimizer.step()
            optimizer.zero_grad()
        assert _differences(model, twin) == []
    assert not torch.distributed.is_initialized()
    assert _sockets() == sockets


def test_gradients_pending_before_the_session_count_and_a_foreign_tensor_is_taken() -> None:
    model = Vectors({"a": (3,), "b": (2,)}, dtype=_BF16)
    push(model, {"a": torch.full((3,), 256.0)})
    session = sr.DataParallel(sr.Communicator.single(), model)
    push(model, {"a": torch.ones(3)})
    model.get_parameter("b").grad = torch.full((2,), 2.0**-20)
    result = session.reduce_fp32(local_weight=1)
    assert result.gradients["a"].tolist() == [257.0] * 3, "in FP32 from the session on"
    assert result.gradients["b"].tolist() == [2.0**-20] * 2


def test_a_window_is_refused_or_reduced_and_not_judged() -> None:
    model = Vectors({"a": (3,), "b": (2,)})
    session = sr.DataParallel(sr.Communicator.single(), model)
    push(model, {"a": torch.tensor([1.0, float("nan"), float("inf")])})
    before = snapshot(model)
    with pytest.raises(StepRefused, match="no rank has a gradient for b"):
        session.reduce(local_weight=2)
    with pytest.raises(EmptyWindowError, match="global weight is 0"):
        session.reduce(local_weight=0, missing="zero")
    assert before.differences(snapshot(model)) == []
    result = session.reduce(local_weight=2, missing="zero")
    assert (result.absent, list(result.gradients)) == (("b",), ["a"])
    assert str(result.gradients["a"].tolist()) == "[0.5, nan, inf]"
    assert model.get_parameter("b").grad is None


def test_a_tied_parameter_has_one_gradient_under_its_first_path() -> None:
    model = TiedNet()
    twin = copy.deepcopy(model)
    session = sr.DataParallel(sr.Communicator.single(), model)
    for one in (model, twin):
        torch.autograd.backward(one(torch.arange(5)).sum())
    result = session.sum(local_active=True)
    assert sorted(result.gradients) == ["emb.weight", "mid.bias", "mid.weight"]
    for path, grad in result.gradients.items():
        expected = twin.get_parameter(path).grad
        assert expected is not None
        assert same_bits(grad, expected), path
        assert model.get_parameter(path).grad is grad


def test_a_parameter_that_was_replaced_after_setup_is_refused_by_name() -> None:
    model = OddNet()
    session = sr.DataParallel(sr.Communicator.single(), model)
    model.up.weight = nn.Parameter(torch.zeros(15, 7))
    torch.autograd.backward(model(torch.ones(2, 7)).sum())
    with pytest.raises(StepRefused, match=r"up\.weight: the model holds another object"):
        session.reduce(local_weight=2, missing="zero")


def test_a_window_after_a_16_bit_reduction_meets_in_fp32_from_its_first_backward_on() -> None:
    model = Vectors({"w": (3,)}, dtype=torch.bfloat16)
    model.register_parameter("tied", model.get_parameter("w"))
    session = sr.DataParallel(sr.Communicator.single(), model)
    for _ in range(2):
        push(model, {"w": torch.ones(3), "tied": torch.full((3,), 2.0**-8)})  # two uses in one backward
        result = session.reduce(local_weight=1)
        (grad,) = result.gradients.values()
        assert grad is model.get_parameter("w").grad
        assert grad.dtype == torch.bfloat16
        torch.optim.SGD(model.parameters(), lr=0.5, fused=False).step()
        model.zero_grad()
    push(model, {"w": torch.ones(3), "tied": torch.full((3,), 2.0**-8)})
    (grad,) = session.reduce_fp32(local_weight=1).gradients.values()
    assert grad.tolist() == [1.00390625] * 3
    assert model.get_parameter("w").tolist() == [-1.0] * 3
