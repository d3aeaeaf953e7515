"""ZeRO-1 on one to three ranks: tensors with owners, plain torch's bits, records, refusals, a user's optimizer."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import OddNet, Vectors, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks, start_ranks
from tests.support.reference import PlainTorch, joint_step, replicated_sum
from tests.support.sessions import (
    Refusal,
    Strike,
    attempt,
    gather,
    kill_this_rank,
    make_zero1,
    make_zero2,
    options_by_path,
    photograph,
    same_bits,
    snapshot_zero1,
    told,
)

_BF16, _NAN = torch.bfloat16, float("nan")
_MUON, _ADAMW, _SGD = torch.optim.Muon, torch.optim.AdamW, torch.optim.SGD

# ---- plain torch, bit for bit -------------------------------------------------------------------------------------

_SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (33, 5),
    "bias": (7,),
    "wide": (4, 70),
    "cube": (2, 3, 4),
    "square": (16, 16),
    "temperature": (),
    "row": (1, 300),
    "unused": (3, 2),
}
_HALVES = ("tall", "bias", "square")


def _matrices(dtype: str = "float32") -> nn.Module:
    """Parameters of 0 to 3 dimensions; `dtype` mixed: some of them bf16."""
    model = Vectors(_SHAPES)
    generator = torch.Generator().manual_seed(5)
    for path, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
        if dtype == "bfloat16" or (dtype == "mixed" and path in _HALVES):
            parameter.data = parameter.data.bfloat16()
    return model


def _weight(rank: int, step: int, number: int) -> int:
    """Tokens of a micro-batch; rank 1 has nothing to count in every fifth step, and NaN."""
    return 0 if rank == 1 and step % 5 == 4 else 1 + (step + 2 * rank + 3 * number) % 5


def _drawn(model: nn.Module, rank: int, step: int, number: int) -> dict[str, Tensor]:
    """One micro-batch's gradients in the parameters' dtypes; `unused` never has one, others miss some."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    scale = _weight(rank, step, number) or _NAN
    paths = [path for path in _SHAPES if path != "unused"]
    left_out = {paths[(rank + step) % len(paths)], paths[step % len(paths)] if step > 4 else "cube"}
    drawn = {path: torch.randn(_SHAPES[path], generator=generator) * scale for path in paths}
    return {path: grad.to(model.get_parameter(path).dtype) for path, grad in drawn.items() if path not in left_out}


def _window(model: nn.Module, rank: int, step: int) -> tuple[dict[str, Tensor | None], int]:
    """What two micro-batches add up to in FP32, and their weight."""
    total: dict[str, Tensor | None] = {}
    for number in range(2):
        for path, grad in _drawn(model, rank, step, number).items():
            before = total.get(path)
            total[path] = grad.float() if before is None else before + grad.float()
    return total, sum(_weight(rank, step, number) for number in range(2))


@dataclass(frozen=True)
class Case:
    """One comparison with plain torch. `rest_factor`: the rest's rate over the first optimizer's."""

    optimizer: type[torch.optim.Optimizer] = _MUON
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.02})
    dtype: str = "float32"
    masters: bool = True
    call: str = "step"
    rest_factor: float = 0.125
    rest_options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bucket_bytes: int = 16 << 20
    owner: int | None = None
    """The rank that owns everything; None: balanced."""
    lr_of: Callable[[int], float | None] = lambda step: None


_RULES = {"*a*": {"weight_decay": 0.3, "lr_scale": 0.5}, "bias": {"weight_decay": 0.0, "lr_scale": 2.0}}
_CASES: dict[str, Case] = {
    "muon": Case(),
    "muon, other options": Case(options={"lr": 0.02, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0}),
    "muon, adjusted": Case(options={"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, bucket_bytes=1),
    "muon, groups and a schedule": Case(rules=_RULES, lr_of=lambda step: 0.05 / (1 + step), bucket_bytes=1024),
    "muon, one owner": Case(owner=0, rest_options={"betas": (0.8, 0.9), "weight_decay": 0.2}),
    "muon bf16, masters": Case(dtype="bfloat16"),
    "muon bf16, masters, fp32": Case(dtype="bfloat16", call="step_fp32", bucket_bytes=1),
    "muon bf16 alone": Case(dtype="bfloat16", masters=False),
    "muon mixed dtypes, fp32": Case(dtype="mixed", call="step_fp32", rules=_RULES),
    "muon mixed dtypes alone": Case(dtype="mixed", masters=False, bucket_bytes=1),
    "muon sum": Case(call="step_sum"),
    "muon mixed dtypes, sum": Case(dtype="mixed", call="step_sum", rules=_RULES),
    "muon mixed dtypes, sum in fp32": Case(dtype="mixed", call="step_sum_fp32"),
    "adamw": Case(_ADAMW, {"lr": 0.02, "betas": (0.9, 0.95)}, rules=_RULES),
    "adam amsgrad bf16": Case(torch.optim.Adam, {"lr": 0.02, "amsgrad": True, "fused": False}, dtype="bfloat16"),
    "sgd momentum": Case(_SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, bucket_bytes=1),
    "rmsprop": Case(torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.5, "centered": True}),
}
_STEPS, _MAX_NORM = 10, 0.25


def _twins(case: Case, twin: nn.Module) -> list[PlainTorch]:
    """One plain optimizer for what the first takes, one for the rest."""
    named = dict(twin.named_parameters())
    takes = {path for path in named if case.optimizer is not _MUON or named[path].dim() == 2}
    own = options_by_path(list(named), case.rules)
    both = {"master_weights": case.masters}
    fused = {} if case.optimizer in (_MUON, torch.optim.RMSprop) else {"fused": True}
    first = PlainTorch(
        {path: named[path] for path in takes}, case.optimizer, options=own, **both, **{**fused, **case.options}
    )
    # The rest's base rate, as a factor of the first one's: a power of two, so that both ways give the same bits.
    scaled = {path: {**own[path], "lr_scale": case.rest_factor * own[path].get("lr_scale", 1.0)} for path in own}
    rest = {path: named[path] for path in named if path not in takes}
    options = {"lr": case.options["lr"], "fused": True, **case.rest_options}
    return [first, PlainTorch(rest, _ADAMW, options=scaled, **both, **options)]


def _compare(comm: sr.Communicator, case: Case) -> list[str]:
    """What differs from plain torch (empty: every bit equal)."""
    model = _matrices(case.dtype)
    twin = copy.deepcopy(model)
    plain = _twins(case, twin)
    zero1 = make_zero1(
        comm,
        model,
        case.optimizer,
        rules=case.rules,
        masters=case.masters,
        bucket_bytes=case.bucket_bytes,
        owners=None if case.owner is None else dict.fromkeys(_SHAPES, case.owner),
        rest_options={"lr": case.options["lr"] * case.rest_factor, **case.rest_options},
        **case.options,
    )
    expected = dict(twin.named_parameters())
    problems: list[str] = []
    for step in range(_STEPS):
        for number in range(2):
            push(model, _drawn(model, comm.rank, step, number))
        raw, weights = zip(*(_window(twin, rank, step) for rank in range(comm.world_size)), strict=True)
        mean = "sum" not in case.call
        own = {"local_weight": weights[comm.rank]} if mean else {"local_active": weights[comm.rank] > 0}
        terms = {"lr": case.lr_of(step), "missing": "zero", "max_grad_norm": _MAX_NORM}
        result: sr.StepResult = getattr(zero1, case.call)(**own, **terms)
        total = replicated_sum(raw, weights)
        divisor = sum(weights) if mean else None
        norm = joint_step(plain, [total] * 2, [divisor] * 2, lr=case.lr_of(step), max_grad_norm=_MAX_NORM)
        if norm <= _MAX_NORM or result.grad_norm is None or abs(result.grad_norm - norm) > 1e-12 * norm:
            problems.append(f"step {step}: norm {result.grad_norm}, expected {norm}, above {_MAX_NORM}")
        if result.global_weight != (sum(weights) if mean else sum(weight > 0 for weight in weights)):
            problems.append(f"step {step}: global weight {result.global_weight} of {weights}")
        if sorted(result.absent) != sorted(path for path in _SHAPES if total.get(path) is None):
            problems.append(f"step {step}: absent {result.absent}")
        problems += [f"step {step}: {path}" for path, p in model.named_parameters() if not same_bits(p, expected[path])]
        problems += [f"step {step}: {path}.grad is there" for path, p in model.named_parameters() if p.grad is not None]
    return problems + _state_problems(comm, zero1, plain)


def _state_problems(comm: sr.Communicator, zero1: sr.SelectedZero1, plain: list[PlainTorch]) -> list[str]:
    """Every state tensor stands on one rank, its parameter's owner, and has the bits of plain torch."""
    theirs = {
        f"{path}/{key}": value for twin in plain for path, held in twin.state().items() for key, value in held.items()
    }
    found: list[str] = []
    held_by: dict[str, Tensor] = {}
    for rank, tensors in enumerate(gather(comm, zero1.to_record().tensors)):
        for name, tensor in tensors.items():
            path = name.rpartition("/")[0]
            found += [f"{name} is on rank {rank}"] if zero1.owners[path] != rank or name in held_by else []
            held_by[name] = tensor
    for name, tensor in held_by.items():  # state that is there before a first update
        want = theirs.pop(name, torch.zeros_like(tensor))
        found += [] if same_bits(tensor, want.reshape(tensor.shape)) else [f"{name} differs"]
    return [*found, *(f"{name} is missing" for name in theirs)]


def _all_cases(comm: sr.Communicator) -> dict[str, list[str]]:
    return {name: _compare(comm, case) for name, case in _CASES.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_single_process_torch_bit_for_bit(world_size: int) -> None:
    for problems in run_ranks(world_size, _all_cases, debug="OFF"):
        assert problems == {name: [] for name in _CASES}


_ELEMENTWISE: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": _SGD, "lr": 0.05, "momentum": 0.9},
    "adamw": {"optimizer": _ADAMW, "lr": 0.01, "rules": _RULES},
    "adamw bf16": {"optimizer": _ADAMW, "lr": 0.01, "masters": False, "dtype": "bfloat16"},
    "adamw masters": {"optimizer": _ADAMW, "lr": 0.01, "dtype": "mixed"},
    "adagrad": {"optimizer": torch.optim.Adagrad, "initial_accumulator_value": 0.1},
    "nadam": {"optimizer": torch.optim.NAdam, "momentum_decay": 0.01},
    "rprop": {"optimizer": torch.optim.Rprop},
    "asgd": {"optimizer": torch.optim.ASGD, "t0": 2.0},
    "adadelta": {"optimizer": torch.optim.Adadelta, "weight_decay": 0.1},
}


def _beside_zero2(comm: sr.Communicator) -> dict[str, list[str]]:
    """Parameters, norms and whole state of ZeRO-1 and ZeRO-2 after the same windows."""
    problems: dict[str, list[str]] = {}
    for name, given in _ELEMENTWISE.items():
        options = dict(given)
        models = [_matrices(options.get("dtype", "float32")) for _ in range(2)]
        options.pop("dtype", None)
        zero1, zero2 = make_zero1(comm, models[0], **options), make_zero2(comm, models[1], **options)
        found = problems[name] = []
        for step in range(10):
            for model in models:
                for number in range(2):
                    push(model, _drawn(model, comm.rank, step, number))
            weight = _window(models[0], comm.rank, step)[1]
            terms: dict[str, Any] = {"local_weight": weight, "missing": "zero", "max_grad_norm": _MAX_NORM}
            step_of = zero1.step_fp32 if zero1.masters else zero1.step
            one, other = step_of(**terms), zero2.step(**terms)
            if (one.grad_norm, sorted(one.absent)) != (other.grad_norm, sorted(other.absent)):
                found.append(f"step {step}: {one} and {other}")
            named = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
            found += [f"step {step}: {path}" for (path, ours), theirs in named if not same_bits(ours, theirs)]
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_elementwise_optimizers_have_the_bits_of_zero2(world_size: int) -> None:
    for problems in run_ranks(world_size, _beside_zero2, debug="OFF"):
        assert problems == {name: [] for name in _ELEMENTWISE}


# ---- owners -------------------------------------------------------------------------------------------------------


def _cost(path: str) -> int:
    """Multiply-adds of Newton-Schulz for a matrix: five steps of (m, m, n) twice and (m, m, m); else elements."""
    shape = _SHAPES[path]
    if len(shape) != 2:
        return math.prod(shape)
    m, n = sorted(shape)
    return 5 * m * m * (2 * n + m)


def _owners(comm: sr.Communicator) -> dict[str, Any]:
    zero1 = make_zero1(comm, _matrices("mixed"), lr=0.02)
    record = zero1.to_record()
    given = {path: (number + 1) % comm.world_size for number, path in enumerate(_SHAPES)}
    explicit = make_zero1(comm, _matrices(), lr=0.02, owners=given)
    nothing = make_zero1(comm, _matrices(), lr=0.02, owners=dict.fromkeys(_SHAPES, 0))
    few = Vectors({"a": (4, 6), "b": (3,)})
    thin = make_zero1(comm, few, _SGD, lr=1.0)
    push(few, {"a": torch.ones(4, 6), "b": torch.full((3,), 2.0)})
    thin.step(local_weight=1, max_grad_norm=100.0)
    return {
        "owners": zero1.owners,
        "split": zero1.split,
        "paths": zero1.state_parameter_count,
        "nbytes": zero1.state_nbytes,
        "held": sorted({name.rpartition("/")[0] for name in record.tensors}),
        "explicit": explicit.owners == given,
        "nothing": (nothing.state_parameter_count, nothing.state_nbytes, len(nothing.to_record().tensors)),
        "thin": (sorted(thin.owners.values()), few.get_parameter("a").sum().item(), few.get_parameter("b").tolist()),
    }


def _padded(path: str) -> int:
    return -(-math.prod(_SHAPES[path]) // 256) * 256


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_are_dealt_out_by_cost_and_state_is_with_the_owner_alone(world_size: int) -> None:
    by_rank = run_ranks(world_size, _owners)
    owners = by_rank[0]["owners"]
    loads = [sum(_cost(path) for path in _SHAPES if owners[path] == rank) for rank in range(world_size)]
    assert max(loads) - sum(loads) / world_size <= max(map(_cost, _SHAPES))
    assert len(set(owners.values())) == world_size, "nobody idles"
    two = [path for path, shape in _SHAPES.items() if len(shape) == 2]
    for rank, facts in enumerate(by_rank):
        assert facts["owners"] == owners
        assert facts["split"] == {"muon": two, "adamw": [path for path in _SHAPES if path not in two]}
        own = [path for path in _SHAPES if owners[path] == rank]
        assert facts["paths"] == len(own)
        assert set(facts["held"]) == set(own)
        momentum = sum(4 * math.prod(_SHAPES[path]) for path in own if path in two)
        moments = sum(8 * _padded(path) for path in own if path not in two)
        masters = sum(4 * _padded(path) for path in own if path in _HALVES)
        assert facts["nbytes"] == momentum + moments + masters
        assert facts["explicit"]
        assert (facts["nothing"] == (0, 0, 0)) == (rank > 0)
        assert facts["thin"] == ([0, 1], -24.0, [-2.0] * 3)


# ---- set-up that is refused by all --------------------------------------------------------------------------------

_ALL = dict.fromkeys(_SHAPES, 0)
# name -> (what rank 0 gives, what the others give, words in every rank's message)
_SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "owner missing": ({}, {"owners": {path: 0 for path in _SHAPES if path != "wide"}}, ["rank 1", "wide"]),
    "owner of nothing": ({}, {"owners": {**_ALL, "nowhere": 0}}, ["rank 1", "nowhere"]),
    "owner too high": ({"owners": {**_ALL, "wide": 9}}, {"owners": {**_ALL, "wide": 9}}, ["wide", "rank 9", "0 to"]),
    "owner negative": ({"owners": _ALL}, {"owners": {**_ALL, "bias": -1}}, ["rank 1", "bias", "-1"]),
    "owner no number": ({"owners": _ALL}, {"owners": {**_ALL, "bias": "0"}}, ["rank 1", "bias", "'0'"]),
    "owners differ": ({"owners": _ALL}, {"owners": {**_ALL, "bias": 1}}, ["rank 0", "rank 1", "('bias', 1)"]),
    "owners on one rank": ({"owners": _ALL}, {}, ["rank 0", "rank 1", "None"]),
    "optimizers differ": ({}, {"optimizer": _SGD}, ["rank 0: muon", "rank 1: sgd"]),
    "rests differ": ({}, {"rest": _SGD}, ["rank 0: muon", "adamw", "sgd"]),
    "rest options differ": ({}, {"rest_options": {"eps": 1e-3}}, ["rank 0", "rank 1", "eps"]),
    "lbfgs on one": ({}, {"optimizer": torch.optim.LBFGS}, ["rank 1", "lbfgs"]),
    "rest takes no vectors": ({"rest": _MUON}, {"rest": _MUON}, ["bias (7,)", "neither muon nor muon"]),
    "unknown option": ({}, {"momentun": 0.9}, ["rank 1", "momentun"]),
    "unknown rest option": ({}, {"rest_options": {"betta": 1}}, ["rank 1", "betta"]),
    "masters differ": ({}, {"masters": False}, ["rank 0", "rank 1", "True", "False"]),
}


def _setups(comm: sr.Communicator) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (on_root, elsewhere, _) in _SETUPS.items():
        options = {"lr": 0.02, **(on_root if comm.rank == 0 else elsewhere)}
        try:
            make_zero1(comm, _matrices(), **options)
        except Exception as error:
            found[name] = told(error)
        assert not comm.is_poisoned, name
    try:
        make_zero2(comm, _matrices(), _MUON if comm.rank else _ADAMW, lr=0.02)
    except Exception as error:
        found["muon under zero2"] = told(error)
    make_zero1(comm, _matrices(), lr=0.02)
    return found


def test_set_up_that_cannot_be_meant_is_refused_by_all_together() -> None:
    for found in run_ranks(2, _setups, comm_timeout_s=10):
        for name, (_, _, words) in _SETUPS.items():
            kind, message = found[name]
            assert kind == "UsageError", (name, kind, message)
            assert [word for word in words if word not in message] == [], (name, message)
        kind, message = found["muon under zero2"]
        assert kind == "UsageError"
        assert "rank 1: muon updates whole matrices" in message
        assert "use SelectedZero1" in message


# ---- dtypes, sums, refusals ---------------------------------------------------------------------------------------


def _rounding(comm: sr.Communicator) -> dict[str, Any]:
    """A mean of 1 + 2**-9, which bf16 cannot hold; SGD of rate 1, so that the (master) weight shows the gradient."""
    found: dict[str, Any] = {}
    grads = {"a": torch.full((2, 3), 1.0 + (2.0**-8) * comm.rank), "b": torch.full((5,), 1.0 + (2.0**-8) * comm.rank)}
    for call in ("step", "step_fp32", "step_sum", "step_sum_fp32"):
        for masters in (True, False):
            model = Vectors({"a": (2, 3), "b": (5,)}, dtype=_BF16)
            zero1 = make_zero1(comm, model, _SGD, lr=1.0, masters=masters)
            for parameter in model.parameters():  # as gradients in FP32 come from a window of micro-batches
                parameter.grad = None
            for path, grad in grads.items():
                model.get_parameter(path).grad_dtype = torch.float32
                model.get_parameter(path).grad = grad.clone()
            terms: dict[str, Any] = {"local_active": True} if "sum" in call else {"local_weight": 1}
            refusal = attempt(comm, lambda: getattr(zero1, call)(**terms), lambda: snapshot_zero1(zero1))  # noqa: B023
            held = {name: tensor.flatten()[0].item() for name, tensor in zero1.to_record().tensors.items()}
            found[f"{call} {masters}"] = (refusal, gather(comm, held), model.get_parameter("a")[0, 0].item())
            if refusal.kind == "StepRefused":
                zero1.step(local_weight=1)
                found[f"{call} then step"] = model.get_parameter("a")[0, 0].item()
    return found


def test_masters_see_fp32_gradients_and_step_fp32_is_refused_without_masters() -> None:
    for found in run_ranks(2, _rounding):
        mean, total = -1.0 - 2**-9, -2.0 - 2**-8
        moved = {"step": mean, "step_fp32": mean, "step_sum": total, "step_sum_fp32": total}
        for call, value in moved.items():
            refusal, held, parameter = found[f"{call} True"]
            assert refusal.kind == ""
            assert {name: own for rank in held for name, own in rank.items()} == {"a/master": value, "b/master": value}
            assert parameter == torch.tensor(value).to(_BF16).item()
            refusal, _, parameter = found[f"{call} False"]
            if "fp32" in call:
                assert refusal.kind == "StepRefused"
                assert "rank 0" in refusal.message
                assert "rank 1" in refusal.message
                assert "FP32 masters, and this session has none" in refusal.message
                assert (refusal.changed, refusal.poisoned) == ([], False)
                assert found[f"{call} then step"] == -1.0, "the same window, by the call that fits"
            else:
                assert (refusal.kind, parameter) == ("", float(round(value)))  # the gradient itself is rounded to bf16


def _windows(comm: sr.Communicator) -> dict[str, Any]:
    """Refusals at the same pending gradients, and then a step beside a twin that was never refused."""
    model, twin = _matrices(), _matrices()
    zero1, straight = make_zero1(comm, model, lr=0.02), make_zero1(comm, twin, lr=0.02)
    on_root = comm.rank == 0
    calls: dict[str, Callable[[], object]] = {
        "missing": lambda: zero1.step(local_weight=1),
        "empty": lambda: zero1.step(local_weight=0, missing="zero"),
        "lr": lambda: zero1.step(local_weight=1, missing="zero", lr=0.1 if on_root else 0.2),
        "call": lambda: (zero1.step if on_root else zero1.step_fp32)(local_weight=1, missing="zero"),
        "norm": lambda: zero1.step(local_weight=1, missing="zero", max_grad_norm=1.0 if on_root else None),
        "mode": lambda: (
            zero1.step(local_weight=1, missing="zero") if on_root else zero1.step_sum(local_active=True, missing="zero")
        ),
        "options": lambda: _with_decay(zero1, 0.1 if on_root else 0.3),
        "nan": lambda: _with_nan(zero1, "wide", on_root),
    }
    found: dict[str, Any] = {}
    for step in range(3):
        for one in (model, twin):
            push(one, _drawn(one, 0, step, comm.rank))
        for name, call in calls.items() if step == 1 else ():
            found[name] = attempt(comm, call, lambda: snapshot_zero1(zero1))
        for session in (zero1, straight):
            session.step(local_weight=3 + comm.rank, missing="zero", max_grad_norm=0.5)
    found["equal"] = snapshot_zero1(zero1).differences(snapshot_zero1(straight))
    for one in (model, twin):
        push(one, _drawn(one, 0, 3, comm.rank))
    before = snapshot_zero1(zero1)
    idle = zero1.step_sum(local_active=False, max_grad_norm=1.0)
    found["idle"] = (
        idle.global_weight,
        sorted(idle.absent),
        before.differences(snapshot_zero1(zero1), gradients=False),
    )
    return found


def _with_decay(zero1: sr.SelectedZero1, decay: float) -> None:
    (group,) = zero1.optimizer.param_groups
    before = group["weight_decay"]
    group["weight_decay"] = decay
    try:
        zero1.step(local_weight=1, missing="zero")
    finally:
        group["weight_decay"] = before


def _with_nan(zero1: sr.SelectedZero1, path: str, here: bool) -> None:
    grad = zero1.session.model.get_parameter(path).grad
    assert grad is not None
    kept = grad.clone()
    if here:
        grad[-1, -1] = _NAN
    try:
        zero1.step(local_weight=1, missing="zero")
    finally:
        grad.copy_(kept)


def test_refusals_change_nothing_and_a_retry_equals_never_refused() -> None:
    words = {
        "missing": ("StepRefused", ["no rank has a gradient for", "missing_gradients: error"]),
        "empty": ("EmptyWindowError", ["global weight is 0"]),
        "lr": ("StepRefused", ["rank 0", "rank 1", "lr"]),
        "call": ("StepRefused", ["all in float32: True", "all in float32: False"]),
        "norm": ("StepRefused", ["max_grad_norm"]),
        "mode": ("StepRefused", ["mean", "sum"]),
        "options": ("StepRefused", ["'weight_decay': 0.1", "'weight_decay': 0.3"]),
        "nan": ("NonFiniteError", ["step 2 of default", "rank 0 has a non-finite gradient for wide"]),
    }
    for found in run_ranks(3, _windows, comm_timeout_s=10):
        for name, (kind, said) in words.items():
            got: Refusal = found[name]
            assert got.kind == kind, (name, got)
            assert [word for word in said if word not in got.message] == [], (name, got)
            assert (got.changed, got.poisoned) == ([], False), name
        assert found["equal"] == []
        assert found["idle"] == (0, sorted(_SHAPES), [])


def _unselected(comm: sr.Communicator) -> dict[str, Any]:
    model = _matrices()
    zero1 = make_zero1(comm, model, include=["wide", "bias", "tall"], lr=0.02)
    push(model, {path: torch.randn(_SHAPES[path]) for path in _SHAPES})
    pending = {path: p.grad for path, p in model.named_parameters()}
    before = {path: (parameter.detach().clone(), parameter.data_ptr()) for path, parameter in model.named_parameters()}
    result = zero1.step(local_weight=2, max_grad_norm=0.1)
    rest = [path for path in _SHAPES if path not in ("wide", "bias", "tall")]
    return {
        "same": [path for path in rest if result.remaining_gradients[path] is pending[path]] == rest,
        "only": sorted(result.remaining_gradients) == sorted(rest),
        "values": all(
            same_bits(model.get_parameter(path), before[path][0])
            and model.get_parameter(path).data_ptr() == before[path][1]
            for path in rest
        ),
        "owners": sorted(zero1.owners),
    }


def test_what_is_not_selected_keeps_its_very_gradients() -> None:
    for facts in run_ranks(2, _unselected):
        assert facts == {"same": True, "only": True, "values": True, "owners": ["bias", "tall", "wide"]}


# ---- records ------------------------------------------------------------------------------------------------------

_RECORDED: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02, "rules": _RULES},
    "muon, sgd": {"lr": 0.02, "rest": _SGD, "rest_options": {"momentum": 0.9}, "bucket_bytes": 1},
    "muon alone": {"lr": 0.02, "masters": False},
    "adam amsgrad": {"optimizer": torch.optim.Adam, "lr": 0.01, "amsgrad": True},
    "rprop": {"optimizer": torch.optim.Rprop, "owners": dict.fromkeys(_SHAPES, 0)},
}


def _train(zero1: sr.SelectedZero1 | sr.SelectedZero2, step: int) -> None:
    push(zero1.session.model, _drawn(zero1.session.model, 2 + zero1.rank, step, 0))
    zero1.step(local_weight=3, missing="zero", max_grad_norm=0.5)


def _round_trips(comm: sr.Communicator) -> dict[str, list[str]]:
    """Three steps, a record, three more; and: the same model and record in a fresh session, three more."""
    problems = {}
    for name, options in _RECORDED.items():
        model = _matrices("mixed")
        straight = make_zero1(comm, model, **options)
        for step in range(3):
            _train(straight, step)
        record = pickle.loads(pickle.dumps(straight.to_record()))
        weights = copy.deepcopy(model.state_dict())
        resumed_model = _matrices("mixed")
        resumed = make_zero1(comm, resumed_model, **options)
        _train(resumed, 77)
        resumed_model.load_state_dict(weights)
        resumed.load_record(record)
        found = [f"after load: {line}" for line in snapshot_zero1(straight).differences(snapshot_zero1(resumed))]
        for step in range(3, 6):
            _train(straight, step)
            _train(resumed, step)
        found += [f"later: {line}" for line in snapshot_zero1(straight).differences(snapshot_zero1(resumed))]
        problems[name] = [*found, *(["step count"] if resumed.step_count != 6 else [])]
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loaded_record_goes_on_with_the_bits_of_never_having_stopped(world_size: int) -> None:
    for problems in run_ranks(world_size, _round_trips, debug="OFF"):
        assert problems == {name: [] for name in _RECORDED}


Spoil = Callable[[sr.Zero1Record], sr.Zero1Record]


def _meta(**changes: Any) -> Spoil:
    return lambda record: dataclasses.replace(record, meta={**record.meta, **changes})


def _tensor(ending: str, change: Callable[[Tensor], Tensor] | None) -> Spoil:
    """The first tensor of that key changed, or taken out."""

    def spoil(record: sr.Zero1Record) -> sr.Zero1Record:
        name = min(name for name in record.tensors if name.endswith(ending))
        changed = {} if change is None else {name: change(record.tensors[name])}
        kept = {key: tensor for key, tensor in record.tensors.items() if key != name}
        return dataclasses.replace(record, tensors={**kept, **changed})

    return spoil


# name -> (how rank 1's record is spoilt, words that every rank's message must hold)
_SPOILT: dict[str, tuple[Spoil, list[str]]] = {
    "world size": (_meta(world_size=4), ["world size", "4"]),
    "rank": (_meta(rank=0), ["rank 0", "rank 1"]),
    "step": (_meta(step_count=7), ["step", "7"]),
    "fragments": (_meta(fragments={}), ["fragments"]),
    "momentum missing": (_tensor("/momentum_buffer", None), ["/momentum_buffer"]),
    "momentum shape": (_tensor("/momentum_buffer", lambda t: t.t()), ["/momentum_buffer"]),
    "momentum flat": (_tensor("/momentum_buffer", lambda t: t.flatten()), ["/momentum_buffer"]),
    "master dtype": (_tensor("/master", lambda t: t.bfloat16()), ["/master", "bfloat16"]),
    "extra": (lambda r: dataclasses.replace(r, tensors={**r.tensors, "tall/odd": torch.ones(1)}), ["tall/odd"]),
}
# name -> (how the other session is made, words)
_FOREIGN: dict[str, tuple[Callable[[sr.Communicator], Any], list[str]]] = {
    "other owners": (lambda comm: make_zero1(comm, _matrices("mixed"), lr=0.02, owners=_ALL), ["owners"]),
    "other optimizer": (lambda comm: make_zero1(comm, _matrices("mixed"), _ADAMW, lr=0.02), ["muon", "adamw"]),
    "other rest": (lambda comm: make_zero1(comm, _matrices("mixed"), lr=0.02, rest=_SGD), ["adamw", "sgd"]),
    "other decay": (lambda comm: make_zero1(comm, _matrices("mixed"), lr=0.02, weight_decay=0.3), ["weight_decay"]),
    "other dtypes": (lambda comm: make_zero1(comm, _matrices(), lr=0.02), ["tall", "float32", "bfloat16"]),
    "no masters": (lambda comm: make_zero1(comm, _matrices("mixed"), lr=0.02, masters=False), ["masters"]),
    "zero2": (lambda comm: make_zero2(comm, _matrices("mixed"), _ADAMW, lr=0.02), ["strategy"]),
}


def _unfit(comm: sr.Communicator) -> dict[str, Refusal]:
    zero1 = make_zero1(comm, _matrices("mixed"), lr=0.02)
    for step in range(2):
        _train(zero1, step)
    good = zero1.to_record()
    _train(zero1, 2)
    found = {}
    for name, (spoil, _) in _SPOILT.items():
        record = spoil(copy.deepcopy(good)) if comm.rank == 1 else good
        found[name] = attempt(comm, lambda record=record: zero1.load_record(record), lambda: snapshot_zero1(zero1))  # type: ignore[misc]
    for name, (make, _) in _FOREIGN.items():
        other = make(comm)
        _train(other, 0)
        record = other.to_record()
        found[name] = attempt(comm, lambda record=record: zero1.load_record(record), lambda: snapshot_zero1(zero1))  # type: ignore[misc]
    zero2 = make_zero2(comm, _matrices("mixed"), _ADAMW, lr=0.02)
    found["in zero2"] = attempt(comm, lambda: zero2.load_record(good), lambda: photograph(zero2))
    swapped = gather(comm, good)[1 - comm.rank]
    found["swapped"] = attempt(comm, lambda: zero1.load_record(swapped), lambda: snapshot_zero1(zero1))
    zero1.load_record(good)
    assert zero1.step_count == 2
    return found


def test_a_record_that_does_not_fit_is_refused_by_all_before_anything_is_replaced() -> None:
    words = {name: said for name, (_, said) in [*_SPOILT.items(), *_FOREIGN.items()]}
    words |= {"in zero2": ["strategy"], "swapped": ["rank 0", "rank 1"]}
    for found in run_ranks(2, _unfit, comm_timeout_s=10):
        assert sorted(found) == sorted(words)
        for name, got in found.items():
            assert got.kind == "ContractError", (name, got)
            assert [word for word in words[name] if word not in got.message] == [], (name, got)
            assert "rank 1" in got.message, (name, got)
            assert (got.changed, got.poisoned) == ([], False), name


def _one_rank_more(comm: sr.Communicator, records: list[sr.Zero1Record]) -> Refusal:
    zero1 = make_zero1(comm, seeded(1, OddNet), lr=0.02)
    record = records[min(comm.rank, len(records) - 1)]
    return attempt(comm, lambda: zero1.load_record(record), lambda: snapshot_zero1(zero1))


def _record(comm: sr.Communicator) -> sr.Zero1Record:
    model = seeded(1, OddNet)
    zero1 = make_zero1(comm, model, lr=0.02)
    torch.autograd.backward(loss_sum(model, token_batch(comm.rank, 4)))
    zero1.step(local_weight=4)
    return zero1.to_record()


def test_a_record_of_another_world_size_is_refused() -> None:
    for got in run_ranks(3, _one_rank_more, run_ranks(2, _record)):
        assert got.kind == "ContractError"
        assert "world size saved 2, this run 3" in got.message
        assert (got.changed, got.poisoned) == ([], False)


# ---- failures -----------------------------------------------------------------------------------------------------


class Centred(torch.optim.Optimizer):
    """A user's matrix optimizer: takes the mean off the gradient. Raises half way when `FAULT` says so."""

    FAULT = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
                    state["last"] = parameter.grad - parameter.grad.mean()
                    parameter.sub_(state["last"], alpha=group["lr"])
                    if Centred.FAULT:
                        raise ZeroDivisionError("a fault in user code")


CENTRED = sr.Declared(Centred, "matrix", "centred", takes=lambda shape: len(shape) == 2)


def _user_fault(comm: sr.Communicator) -> tuple[Refusal, Refusal, list[str]]:
    model, twin = _matrices("mixed"), _matrices("mixed")
    owners = {path: number % 2 for number, path in enumerate(_SHAPES)}
    owners["wide"] = 1
    zero1, straight = (make_zero1(comm, one, CENTRED, owners=owners, lr=0.05) for one in (model, twin))
    for step in range(3):
        for one in (model, twin):
            push(one, _drawn(one, comm.rank, step, 0))
        if step < 2:
            for session in (zero1, straight):
                session.step(local_weight=2, missing="zero", max_grad_norm=0.5)
    same = snapshot_zero1(zero1).differences(snapshot_zero1(straight))
    Centred.FAULT = comm.rank == 1
    failed, later = (
        attempt(comm, lambda: zero1.step(local_weight=2, missing="zero"), lambda: snapshot_zero1(zero1))
        for _ in range(2)
    )
    return failed, later, same


def test_a_users_optimizer_that_raises_changes_nothing_anywhere() -> None:
    with start_ranks(3, _user_fault, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=15)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.error
        failed, later, same = outcome.value
        assert same == []
        assert failed.kind == "StepFailed"
        assert failed.message.startswith("step 3 failed in phase ")
        assert ("step 3 failed in phase propose: ZeroDivisionError: a fault in user code" in failed.message) == (
            rank == 1
        )
        assert (failed.changed if failed.gradients_kept else _but_gradients(failed)) == []
        assert failed.poisoned
        assert later.kind == "CommunicatorError"
        assert _but_gradients(later) == []
    assert outcomes[1].value[0].gradients_kept, "the rank that raised had not gathered anything"


def _but_gradients(refusal: Refusal) -> list[str]:
    return [name for name in refusal.changed if not name.startswith("gradient ")]


def _killed(comm: sr.Communicator, phase: str) -> tuple[Refusal, Refusal]:
    zero1 = make_zero1(comm, _matrices("mixed"), lr=0.02, bucket_bytes=1)
    for step in range(2):
        _train(zero1, step)
    push(zero1.session.model, _drawn(zero1.session.model, comm.rank, 2, 0))
    if comm.rank == 1:
        comm.observer = Strike(phase, 3, kill_this_rank)
    failed, later = (
        attempt(comm, lambda: zero1.step(local_weight=2, missing="zero"), lambda: snapshot_zero1(zero1))
        for _ in range(2)
    )
    return failed, later


@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_a_killed_rank_leaves_the_others_as_before_the_step(phase: str) -> None:
    with start_ranks(3, _killed, phase, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[1].killed_by == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        failed, later = outcome.value
        assert failed.kind == "StepFailed"
        assert failed.gradients_kept or phase == "gather"
        assert (failed.changed if failed.gradients_kept else _but_gradients(failed)) == []
        assert later.kind == "CommunicatorError"
        assert later.message.startswith("communicator is closed since its first failure")
        assert later.changed == []


# ---- what a user does to the optimizer between two steps -------------------------------------------------------------

_EDITS: dict[str, tuple[Callable[[torch.optim.Optimizer], None], str]] = {
    "load_state_dict": (lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())), "load_record"),
    "state cleared": (lambda o: o.state.clear(), "load_record"),
    "group added": (lambda o: o.add_param_group({"params": [torch.zeros(5)]}), "param groups"),
    "amsgrad": (lambda o: o.param_groups[0].update(amsgrad=True), "max_exp_avg_sq"),
    "betas": (lambda o: o.param_groups[0].update(betas=(0.9,)), "betas"),
    "hook": (lambda o: setattr(o, "handle", o.register_step_post_hook(lambda *_: None)), "step hook"),
}


def _edited_on_the_last_rank(comm: sr.Communicator, strategy: str, edit: str) -> dict[str, Any]:
    """Two steps, the edit on one rank, a step that all refuse, another one after a fresh set-up: bits as without it."""
    make = make_zero2 if strategy == "zero2" else make_zero1
    model = Vectors({"a": (600,), "b": (16, 16), "c": (7,)}, value=1.0)

    def step(session: Any, number: int) -> None:
        push(model, {path: torch.full(p.shape, 1.0 + number) for path, p in model.named_parameters()})
        session.step(local_weight=1)

    session = make(comm, model, _ADAMW, lr=0.1)
    for number in range(2):
        step(session, number)
    record, before = session.to_record(), [p.clone() for p in model.parameters()]
    if comm.rank == comm.world_size - 1:
        _EDITS[edit][0](session.optimizer)
    try:
        step(session, 2)
    except sr.errors.ShardrunError as error:
        refused = told(error)
    else:
        refused = ("", "")
    unchanged = all(map(same_bits, before, model.parameters()))
    fresh = make(comm, model, _ADAMW, lr=0.1)
    fresh.load_record(record)
    step(fresh, 2)
    return {
        "refused": refused,
        "unchanged": unchanged,
        "poisoned": comm.is_poisoned,
        "moved": not any(map(same_bits, before, model.parameters())),
    }


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("edit", _EDITS)
def test_an_edit_of_one_rank_s_optimizer_is_refused_by_all_and_the_communicator_stays_open(
    strategy: str, edit: str
) -> None:
    for held in run_ranks(2, _edited_on_the_last_rank, strategy, edit):
        kind, message = held["refused"]
        assert kind == "StepRefused", message
        assert _EDITS[edit][1] in message
        assert "rank 1: " in message
        assert (held["unchanged"], held["poisoned"], held["moved"]) == (True, False, True)
