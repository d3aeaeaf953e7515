"""Public bug reports of comparable tools, held against the step: precision, flat layout, option groups."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from torch import nn

import shardrun as sr
from tests.support.models import MixedNet, OddNet, Scalars, Vectors, feed, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.reference import PlainTorch, replicated_sum
from tests.support.sessions import gather, make_zero2, photograph, same_bits, whole_state

_SGD = torch.optim.SGD


_C067 = {"a": (7,), "b": (5,), "c": (3,), "d": (1,), "e": (11,)}


def _small_buckets(comm: sr.Communicator) -> list[str]:
    model, twin = Vectors(_C067, value=1.0), Vectors(_C067, value=1.0)
    zero2 = make_zero2(comm, model, lr=0.01, bucket_bytes=2048)
    plain = PlainTorch(dict(twin.named_parameters()), torch.optim.AdamW, lr=0.01, fused=True)
    assert sum(len(space.buckets) for space in zero2.layout.spaces) > 1
    torch.manual_seed(comm.rank)
    for _ in range(3):
        gradients = {path: torch.randn(p.shape) for path, p in model.named_parameters()}
        push(model, gradients)
        zero2.step(local_weight=2)
        plain.step(replicated_sum(gather(comm, gradients), [2, 2]), 4)
    live = plain.state()
    return [
        f"{path}/{key}"
        for path, keys in whole_state(comm, zero2).items()
        for key, value in keys.items()
        if not same_bits(value, live[path][key].reshape(value.shape))
    ]


def test_c067_records_hold_every_element_and_no_padding() -> None:
    assert run_ranks(2, _small_buckets) == [[], []]


def _bf16_masters(comm: sr.Communicator, resume: bool) -> tuple[float, float]:
    model = Scalars("w", value=1.0, dtype=torch.bfloat16)
    zero2 = make_zero2(comm, model, _SGD, lr=1e-3)
    for step in range(10):
        if step == 5 and resume:
            record, weights = zero2.to_record(), copy.deepcopy(model.state_dict())
            model = Scalars("w", dtype=torch.bfloat16)
            model.load_state_dict(weights)
            zero2 = make_zero2(comm, model, _SGD, lr=1e-3)
            zero2.load_record(record)
        push(model, {"w": torch.ones(1)})
        zero2.step(local_weight=1)
    return whole_state(comm, zero2)["w"]["master"].item(), model.get_parameter("w").item()


def test_c087_masters_keep_their_low_bits_over_a_resume() -> None:
    straight, resumed = run_ranks(2, _bf16_masters, False), run_ranks(2, _bf16_masters, True)
    assert straight == resumed
    for master, parameter in straight:
        assert master == pytest.approx(0.99000013, abs=5e-9)
        assert parameter == 0.98828125


def _tiny_gradients(comm: sr.Communicator) -> float:
    model = Scalars("w", dtype=torch.bfloat16)
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    weight = feed(model, "w", [[1.0]] + [[2.0**-9]] * 64)
    zero2.step(local_weight=weight)
    return -whole_state(comm, zero2)["w"]["master"].item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_c088_gradients_of_bf16_parameters_accumulate_in_float32(world_size: int) -> None:
    for mean in run_ranks(world_size, _tiny_gradients):
        assert mean == pytest.approx(0.01730769, rel=1e-6)


def _mixed(comm: sr.Communicator) -> tuple[list[str], dict[str, str]]:
    model = seeded(7, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in range(3):
        torch.autograd.backward(loss_sum(model, token_batch(10 * step + comm.rank, 3)))
        zero2.step(local_weight=3)
    fresh_model = seeded(8, MixedNet)
    fresh = make_zero2(comm, fresh_model, lr=0.01)
    fresh_model.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_record(zero2.to_record())
    for session in (zero2, fresh):
        torch.autograd.backward(loss_sum(session.session.model, token_batch(comm.rank, 3)))
        session.step(local_weight=3)
    dtypes = {spec.path: spec.dtype for spec in zero2.session.contract.specs}
    return photograph(zero2).differences(photograph(fresh)), dtypes


def test_c089_mixed_dtypes_are_sharded_and_resumed_each_in_its_own() -> None:
    for differences, dtypes in run_ranks(2, _mixed):
        assert differences == []
        assert dtypes["up.weight"] == "bfloat16"
        assert dtypes["norm.weight"] == "float32"


def _dtypes_on_gloo(comm: sr.Communicator) -> tuple[float, dict[str, str], float]:
    model = Scalars("w", dtype=torch.bfloat16)
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    push(model, {"w": torch.tensor([256.0 if comm.rank == 0 else 1.0])})
    zero2.step_sum(local_active=True)
    messages = {}
    for dtype in (torch.float64, torch.float16):
        try:
            make_zero2(comm, Scalars("wide", dtype=dtype))
        except sr.errors.SelectionError as error:
            messages[str(dtype)] = str(error)
    half = Scalars("h", value=float(1 + comm.rank), dtype=torch.float16)
    half.get_parameter("h").requires_grad_(False)
    make_zero2(comm, half)
    return whole_state(comm, zero2)["w"]["master"].item(), messages, half.get_parameter("h").item()


def test_c092_sixteen_bit_gradients_are_reduced_in_float32_and_other_dtypes_named() -> None:
    for master, messages, half in run_ranks(2, _dtypes_on_gloo):
        assert master == -257.0, "bfloat16 would say 256"
        assert "wide is float64" in messages["torch.float64"]
        assert "wide is float16" in messages["torch.float16"]
        assert half == 1.0, "a frozen float16 parameter is broadcast from the root"


def _with_empty(comm: sr.Communicator) -> tuple[str, list[float], list[int]]:
    message = ""
    try:
        sr.select_parameters(Vectors({"none": (0, 4), "w": (3,)}))
    except sr.errors.SelectionError as error:
        message = str(error)
    model = Vectors({"none": (0, 4), "w": (3,)})
    model.get_parameter("none").requires_grad_(False)
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    for _ in range(2):
        push(model, {"w": torch.ones(3)})
        zero2.step(local_weight=1)
    zero2.load_record(zero2.to_record())
    shapes = {spec.path: spec.shape for spec in zero2.session.contract.specs}
    return message, model.get_parameter("w").tolist(), list(shapes["none"])


def test_c093_an_empty_trainable_parameter_is_refused_by_name_and_a_frozen_one_works() -> None:
    for message, weights, shape in run_ranks(2, _with_empty):
        assert "none is trainable and has no elements, shape (0, 4): exclude or freeze it" in message
        assert weights == [-2.0] * 3
        assert shape == [0, 4]


class _WithTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.w = nn.Parameter(torch.ones(3))


def _scalar(comm: sr.Communicator) -> tuple[tuple[int, ...], list[str]]:
    models = [_WithTemperature(), _WithTemperature()]
    straight = make_zero2(comm, models[0], lr=0.1)
    for step in range(2):
        push(models[0], {"temperature": torch.tensor(1.0 + step + comm.rank), "w": torch.ones(3)})
        straight.step(local_weight=1)
    resumed = make_zero2(comm, models[1], lr=0.1)
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    resumed.load_record(straight.to_record())
    for model, session in zip(models, (straight, resumed), strict=True):
        push(model, {"temperature": torch.tensor(0.5), "w": torch.ones(3)})
        session.step(local_weight=1)
    return tuple(models[1].temperature.shape), photograph(straight).differences(photograph(resumed))


def test_c094_a_scalar_parameter_trains_and_resumes() -> None:
    assert run_ranks(2, _scalar) == [((), []), ((), [])]


class _Turned(nn.Module):
    def __init__(self, rank: int, *, contiguous: bool) -> None:
        super().__init__()
        turned = torch.arange(6.0).reshape(2, 3).add(100.0 * rank).t()
        self.weight = nn.Parameter(turned.contiguous() if contiguous else turned)


def _non_contiguous(comm: sr.Communicator) -> tuple[list[list[float]], bool, bool]:
    turned, twin = _Turned(comm.rank, contiguous=False), _Turned(comm.rank, contiguous=True)
    assert not turned.weight.is_contiguous()
    sessions = [make_zero2(comm, model, lr=0.1) for model in (turned, twin)]
    start: list[list[float]] = turned.weight.tolist()
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for model, session in zip((turned, twin), sessions, strict=True):
        push(model, {"weight": gradient})
        session.step(local_weight=1)
    moments = whole_state(comm, sessions[0])["weight"]["exp_avg"]
    logical = torch.allclose(moments, 0.1 * gradient.flatten())
    return start, same_bits(turned.weight, twin.weight), logical


def test_c095_a_non_contiguous_parameter_keeps_its_logical_values() -> None:
    for start, equal, logical in run_ranks(2, _non_contiguous):
        assert start == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], "rank 0's values on every rank"
        assert equal
        assert logical


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for path, parameter in model.named_parameters():
        digest.update(path.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _seeded_by_rank(comm: sr.Communicator) -> list[str]:
    model = seeded(comm.rank, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    digests = [_digest(model)]
    for step in range(5):
        torch.autograd.backward(loss_sum(model, token_batch(10 * step + comm.rank, 3)))
        zero2.step(local_weight=3)
    return [*digests, _digest(model)]


def test_c096_a_model_seeded_by_rank_starts_and_stays_as_the_roots() -> None:
    first, second = run_ranks(2, _seeded_by_rank)
    assert first == second
    assert first[0] != first[1]


def _other_sets(comm: sr.Communicator) -> list[str]:
    messages = []
    shapes: dict[str, tuple[int, ...]] = {"a": (3,), "b": (5,)}
    for attempt in ("extra", "frozen"):
        model = Vectors({**shapes, "z": (2,)} if attempt == "extra" and comm.rank == 1 else shapes)
        if attempt == "frozen":
            model.get_parameter("a" if comm.rank == 0 else "b").requires_grad_(False)
        try:
            make_zero2(comm, model)
        except sr.errors.ContractError as error:
            messages.append(str(error))
    return messages


def test_c097_other_parameter_sets_are_refused_on_all_ranks_by_name() -> None:
    for extra, frozen in run_ranks(2, _other_sets, timeout_s=20):
        assert "z:" in extra
        assert "a:" in frozen
        for message in (extra, frozen):
            assert "rank 0" in message
            assert "rank 1" in message


def _other_order(comm: sr.Communicator) -> tuple[dict[str, list[float]], str]:
    names = ["one", "two"] if comm.rank == 0 else ["two", "one"]
    model = Vectors(dict.fromkeys(names, (4,)))
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    push(model, {"one": torch.full((4,), 1.0), "two": torch.full((4,), 2.0)})
    zero2.step(local_weight=1)
    message = ""
    try:
        make_zero2(comm, Vectors({"w": (4, 6) if comm.rank == 0 else (6, 4)}))
    except sr.errors.ContractError as error:
        message = str(error)
    return {name: model.get_parameter(name).tolist() for name in ("one", "two")}, message


def test_c102_another_order_is_matched_by_name_and_another_shape_refused_on_all_ranks() -> None:
    for values, message in run_ranks(2, _other_order, timeout_s=30):
        assert values == {"one": [-1.0] * 4, "two": [-2.0] * 4}
        assert "w: rank 0 has shape (4, 6)" in message
        assert "rank 1 has shape (6, 4)" in message


def _two_groups(comm: sr.Communicator) -> dict[str, float]:
    rules = {"b.*": {"lr_scale": 0.1}, "*.bias": {"weight_decay": 0.0}}
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("a", "b", "c")})
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.fill_(1.0 if path.startswith("c.") else 0.0)
    zero2 = make_zero2(comm, model, _SGD, rules=rules, lr=0.1, weight_decay=0.5)
    push(model, {path: torch.ones(p.shape) for path, p in model.named_parameters()})
    zero2.step(local_weight=1)
    return {path: p.flatten()[-1].item() for path, p in model.named_parameters()}


def test_c103_groups_keep_their_own_rate_and_decay_under_sharding() -> None:
    for values in run_ranks(2, _two_groups):
        assert values["a.weight"] == values["a.bias"] == pytest.approx(-0.1)
        assert values["b.weight"] == values["b.bias"] == pytest.approx(-0.01)
        assert values["c.weight"] == pytest.approx(1.0 - 0.1 * (1.0 + 0.5 * 1.0))
        assert values["c.bias"] == pytest.approx(1.0 - 0.1 * 1.0), "no decay for biases"
