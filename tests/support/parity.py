"""The library's step beside plain torch, step by step, on one rank or several, compared bit for bit.

The reference (tests/support/reference.py) has its own model and its own backward. Its gradients are gathered raw from
all ranks and added up here; nothing that shardrun reduced ever reaches it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import MixedNet, OddNet, OddShapes, Vectors, loss_sum, push, seeded, token_batch
from tests.support.reference import PlainTorch, replicated_sum
from tests.support.sessions import gather, make_zero2, options_by_path, same_bits, whole_state


@dataclass(frozen=True)
class Scenario:
    """One comparison. Every rank has `micro_batches` per window; weights differ between ranks and steps."""

    optimizer: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    build: Callable[[], nn.Module] = OddNet
    dtype: torch.dtype | None = None
    masters: bool = True
    declared: bool = False
    """Whether the class comes as a user's own, declared elementwise."""
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bucket_bytes: int | None = None
    chunk_numel: int | None = None
    micro_batches: int = 2
    steps: int = 20
    max_grad_norm: float | None = 0.25
    lr_of: Callable[[int], float | None] = lambda step: None


def compare_with_plain_torch(comm: sr.Communicator, scenario: Scenario) -> list[str]:
    """Run both and return what differed (empty: every bit equal); collective."""
    model = seeded(3, scenario.build)
    if scenario.dtype is not None:
        model = model.to(scenario.dtype)
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    plain = PlainTorch(
        parameters,
        scenario.optimizer,
        options=options_by_path(list(parameters), scenario.rules),
        master_weights=scenario.masters,
        **scenario.options,
    )
    sizes: dict[str, Any] = {"bucket_bytes": scenario.bucket_bytes, "chunk_numel": scenario.chunk_numel}
    asked: Any = sr.Declared(scenario.optimizer, "elementwise", "own") if scenario.declared else scenario.optimizer
    zero2 = make_zero2(
        comm,
        model,
        asked,
        rules=scenario.rules,
        masters=scenario.masters,
        **{key: value for key, value in sizes.items() if value is not None},
        **scenario.options,
    )
    problems: list[str] = []
    for step in range(scenario.steps):
        problems += _one_step(comm, scenario, step, (model, zero2), (twin, plain))
        if problems:
            return [f"step {step}: {problem}" for problem in problems]
    return _state_problems(whole_state(comm, zero2), plain, list(zero2.trainable_parameters))


def _one_step(
    comm: sr.Communicator,
    scenario: Scenario,
    step: int,
    ours: tuple[nn.Module, sr.SelectedZero2],
    theirs: tuple[nn.Module, PlainTorch],
) -> list[str]:
    (model, zero2), (twin, plain) = ours, theirs
    weight = 0
    for number in range(scenario.micro_batches):
        weight += _backward(model, comm.rank, step, number)
        _backward(twin, comm.rank, step, number)
    result = zero2.step(
        local_weight=weight, lr=scenario.lr_of(step), missing="zero", max_grad_norm=scenario.max_grad_norm
    )
    raw, weights = zip(*gather(comm, (plain.take_gradients(), weight)), strict=True)
    total = replicated_sum(raw, weights)
    norm = plain.step(total, sum(weights), lr=scenario.lr_of(step), max_grad_norm=scenario.max_grad_norm)
    problems = []
    if result.global_weight != sum(weights):
        problems.append(f"global weight {result.global_weight}, expected {sum(weights)}")
    if scenario.max_grad_norm is not None:
        if not norm > scenario.max_grad_norm:
            problems.append(f"clipping was not active: norm {norm}")
        if result.grad_norm is None or abs(result.grad_norm - norm) > 1e-12 * norm:
            problems.append(f"norm {result.grad_norm}, expected {norm}")
    expected = dict(twin.named_parameters())
    for path, parameter in model.named_parameters():
        if not same_bits(parameter, expected[path]):
            problems.append(f"{path}: {_first_difference(parameter, expected[path])}")
        if parameter.grad is not None:
            problems.append(f"{path}: its gradient is still there after the step")
    return problems


def _backward(model: nn.Module, rank: int, step: int, number: int) -> int:
    """One micro-batch through `model`; returns its weight. The same for the same numbers, whatever the model object.

    Every fifth step, rank 1 has nothing to count and NaN gradients.
    """
    seed = 1000 * step + 100 * rank + number
    tokens = 1 + (step + 2 * rank + 3 * number) % 5
    masked = rank == 1 and step % 5 == 4
    if not isinstance(model, OddNet):
        gradients = _random_gradients(model, seed, rank, step, tokens)
        push(model, {path: grad * torch.nan for path, grad in gradients.items()} if masked else gradients)
    else:
        loss = loss_sum(model, token_batch(seed, tokens))
        torch.autograd.backward(loss * torch.nan if masked else loss)
    return 0 if masked else tokens


def _random_gradients(model: nn.Module, seed: int, rank: int, step: int, scale: int) -> dict[str, Tensor]:
    """A gradient for every trainable parameter but `unused`, and but one that changes with rank and step."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for path, parameter in model.named_parameters() if parameter.requires_grad and path != "unused"]
    left_out = paths[(rank + step) % len(paths)]
    shapes = {path: dict(model.named_parameters())[path].shape for path in paths}
    drawn = {path: torch.randn(shape, generator=generator) * scale for path, shape in shapes.items()}
    return {path: grad for path, grad in drawn.items() if path != left_out}


# What state is before a first update where torch makes it later than we do; the rest starts at zero.
_STARTS = {"mu_product": 1.0}


def _state_problems(ours: Mapping[str, Mapping[str, Tensor]], plain: PlainTorch, paths: list[str]) -> list[str]:
    theirs = plain.state()
    problems = [] if sorted(ours) == sorted(paths) == sorted(theirs) else [f"state of {sorted(ours)}"]
    for path, keys in ours.items():
        expected = theirs[path]
        problems += [f"{path}/{key} is missing" for key in expected if key not in keys]
        for key, value in keys.items():
            want = expected.get(key, torch.full_like(value, _STARTS.get(key, 0.0)))
            if not same_bits(value, want.reshape(value.shape)):
                problems.append(f"{path}/{key}: {_first_difference(value, want)}")
    return problems


def _first_difference(ours: Tensor, theirs: Tensor) -> str:
    if ours.dtype != theirs.dtype or ours.numel() != theirs.numel():
        return f"{ours.dtype} {tuple(ours.shape)}, expected {theirs.dtype} {tuple(theirs.shape)}"
    one, other = ours.detach().flatten(), theirs.detach().flatten()
    index = int((one != other).nonzero()[0]) if bool((one != other).any()) else 0
    return f"element {index} is {one[index].item()!r}, expected {other[index].item()!r}"


def _long() -> nn.Module:
    """Parameters that are cut in the middle by slices and by chunks."""
    generator = torch.Generator().manual_seed(11)
    model = Vectors({"long": (3000,), "flat": (3, 171), "one": (1,)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _shrinking(step: int) -> float:
    return 0.05 * (1.0 - step / 40.0)


_SGD, _ADAM, _ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
_BF16 = torch.bfloat16
_DECAY = {"*.bias": {"weight_decay": 0.0}, "head.*": {"weight_decay": 0.2, "lr_scale": 0.5}}
_ODD_DECAY = {"temperature": {"weight_decay": 0.0, "lr_scale": 2.0}, "*o*": {"weight_decay": 0.3}}

SCENARIOS: dict[str, Scenario] = {
    "sgd": Scenario(_SGD, {"lr": 0.05, "fused": False}),
    "sgd fused": Scenario(_SGD, {"lr": 0.05, "fused": True}),
    "sgd momentum": Scenario(_SGD, {"lr": 0.05, "momentum": 0.9, "fused": False, "weight_decay": 0.01}),
    "sgd momentum fused": Scenario(_SGD, {"lr": 0.05, "momentum": 0.9, "fused": True, "weight_decay": 0.01}),
    "sgd dampening": Scenario(_SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "fused": False}),
    "sgd nesterov": Scenario(_SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "fused": False}),
    "sgd nesterov fused": Scenario(_SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "fused": True}),
    "adam": Scenario(_ADAM, {"lr": 0.01, "weight_decay": 0.1, "fused": False}),
    "adam fused": Scenario(_ADAM, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "adam amsgrad": Scenario(_ADAM, {"lr": 0.01, "amsgrad": True, "fused": False}),
    "adam amsgrad fused": Scenario(_ADAM, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "adamw": Scenario(_ADAMW, {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": False}),
    "adamw fused": Scenario(_ADAMW, {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}),
    "adamw unclipped": Scenario(_ADAMW, {"lr": 0.01, "fused": True}, max_grad_norm=None),
    "adamw schedule": Scenario(_ADAMW, {"lr": 0.05, "fused": True}, lr_of=_shrinking, micro_batches=3),
    "adamw groups, small buckets": Scenario(
        _ADAMW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}, rules=_DECAY, bucket_bytes=512, chunk_numel=256
    ),
    "adamw bf16 masters": Scenario(_ADAMW, {"lr": 0.01, "fused": True}, dtype=torch.bfloat16),
    "adamw bf16 masters, not fused": Scenario(_ADAMW, {"lr": 0.01, "fused": False}, dtype=torch.bfloat16),
    "adamw bf16 alone": Scenario(_ADAMW, {"lr": 0.01, "fused": True}, dtype=torch.bfloat16, masters=False),
    "adamw bf16 alone, not fused": Scenario(
        _ADAMW, {"lr": 0.01, "fused": False}, dtype=torch.bfloat16, masters=False, bucket_bytes=512
    ),
    "sgd momentum bf16 masters": Scenario(
        _SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}, dtype=torch.bfloat16, bucket_bytes=512
    ),
    "adamw mixed dtypes, groups": Scenario(
        _ADAMW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}, build=MixedNet, rules=_DECAY, bucket_bytes=1024
    ),
    "adamw odd shapes": Scenario(
        _ADAMW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}, build=OddShapes, rules=_ODD_DECAY, bucket_bytes=1024
    ),
    "adamw long, cut in chunks": Scenario(
        _ADAMW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}, build=_long, chunk_numel=512
    ),
    "adam long, not fused": Scenario(_ADAM, {"lr": 0.01, "fused": False}, build=_long, chunk_numel=256, bucket_bytes=1),
    "sgd nesterov long bf16 masters": Scenario(
        _SGD,
        {"lr": 0.01, "momentum": 0.9, "nesterov": True, "fused": True},
        build=_long,
        dtype=torch.bfloat16,
        chunk_numel=512,
    ),
    "sgd momentum odd shapes": Scenario(
        _SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}, build=OddShapes, bucket_bytes=1024
    ),
    "adam odd shapes, not fused": Scenario(
        _ADAM, {"lr": 0.01, "weight_decay": 0.1, "fused": False}, build=OddShapes, chunk_numel=256
    ),
    "nadam": Scenario(torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "momentum_decay": 0.02}),
    "nadam odd shapes": Scenario(
        torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True}, build=OddShapes, rules=_ODD_DECAY
    ),
    "radam schedule": Scenario(torch.optim.RAdam, {"lr": 0.05, "betas": (0.6, 0.8)}, lr_of=_shrinking),
    "radam bf16 masters": Scenario(torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}, dtype=_BF16),
    "adamax groups": Scenario(torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}, rules=_DECAY, bucket_bytes=512),
    "adamax long bf16 alone": Scenario(
        torch.optim.Adamax, {"lr": 0.01}, build=_long, dtype=_BF16, masters=False, chunk_numel=512
    ),
    "adagrad": Scenario(
        torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "fused": False}
    ),
    "adagrad fused odd shapes": Scenario(
        torch.optim.Adagrad,
        {"lr": 0.05, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "fused": True},
        build=OddShapes,
        bucket_bytes=1024,
    ),
    "adadelta": Scenario(torch.optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
    "adadelta long": Scenario(torch.optim.Adadelta, {"lr": 1.0}, build=_long, chunk_numel=256),
    "rmsprop centered": Scenario(torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rmsprop mixed dtypes": Scenario(
        torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1}, build=MixedNet, rules=_DECAY
    ),
    "rprop schedule": Scenario(torch.optim.Rprop, {"lr": 0.05, "step_sizes": (1e-4, 0.2)}, lr_of=_shrinking),
    "rprop odd shapes": Scenario(torch.optim.Rprop, {"lr": 0.01, "etas": (0.4, 1.5)}, build=OddShapes),
    "asgd schedule": Scenario(torch.optim.ASGD, {"lr": 0.05, "lambd": 0.1, "t0": 2.0}, lr_of=_shrinking),
    "asgd odd shapes, groups": Scenario(
        torch.optim.ASGD, {"lr": 0.05, "t0": 0.0}, build=OddShapes, rules=_ODD_DECAY, bucket_bytes=1024
    ),
    "sgd maximize, momentum bf16 alone": Scenario(
        _SGD, {"lr": 0.05, "momentum": 0.9, "maximize": True, "fused": False}, dtype=_BF16, masters=False
    ),
    "declared nadam odd shapes": Scenario(
        torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}, build=OddShapes, rules=_ODD_DECAY, declared=True
    ),
    "declared sgd momentum fused, bf16 masters": Scenario(
        _SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}, dtype=_BF16, declared=True, bucket_bytes=512
    ),
}
