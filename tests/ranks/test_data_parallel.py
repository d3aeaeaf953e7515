"""Data parallel on several ranks: exact means and sums as `.grad`, refusals, failures, and ZeRO-2's bits."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import OddNet, OddShapes, Scalars, Vectors, feed, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks, start_ranks
from tests.support.reference import clip_coefficient, exact_norm
from tests.support.sessions import (
    Refusal,
    Strike,
    attempt,
    gather,
    kill_this_rank,
    make_zero2,
    same_bits,
    snapshot,
    told,
)

_BF16 = torch.bfloat16
_NAN = float("nan")


def _values(tensor: Tensor) -> list[float]:
    """The different values in it."""
    return sorted(set(tensor.flatten().tolist()))


# ---- means and sums -----------------------------------------------------------------------------------------------


def _means(comm: sr.Communicator) -> dict[str, Any]:
    """TOY: the gradient is the plain mean over the tokens of all ranks. Every case in both forms of a mean."""
    found: dict[str, Any] = {}
    first = comm.rank == 0
    cases: dict[str, tuple[list[list[float]], int]] = {
        "C001": ([[6.0]] if first else [[1.0, 2.0, 3.0]], 1 if first else 3),
        "C003": ([[1.0], [2.0], [4.0]], 3),
        "C004": ([[4.0, 2.0]] if first else [[_NAN]], 2 if first else 0),
    }
    for name, (tokens, weight) in cases.items():
        for call in ("reduce", "reduce_fp32"):
            model = Scalars("w", value=1.0)
            session = sr.DataParallel(comm, model)
            for window in range(2):
                feed(model, "w", tokens)
                result = getattr(session, call)(local_weight=weight)
                grad = model.get_parameter("w").grad
                assert grad is not None
                assert grad is result.gradients["w"]
                found[f"{name} {call} window {window}"] = (grad.item(), result.global_weight, grad.dtype)
                model.zero_grad(set_to_none=window == 0)
            assert model.get_parameter("w").item() == 1.0
    return found


def test_gradients_are_means_over_the_weights_of_all_ranks_in_every_window() -> None:
    expected = {"C001": (3.0, 4), "C003": (7 / 3, 6), "C004": (3.0, 2)}
    for found in run_ranks(2, _means):
        assert len(found) == 12
        for name, (value, weight, dtype) in found.items():
            want, total = expected[name[:4]]
            assert value == torch.tensor(want).item(), name
            assert (weight, type(weight), dtype) == (total, int, torch.float32), name


def _sixteen_bits(comm: sr.Communicator) -> dict[str, Any]:
    """C088, and 256 + 1: sums that bf16 cannot hold."""
    found: dict[str, Any] = {}
    model = Scalars("w", dtype=_BF16)
    session = sr.DataParallel(comm, model)
    parameter = model.get_parameter("w")
    # C088: 65 micro-batches whose small gradients vanish in a bf16 sum; in the first window and in later ones.
    for window, call in enumerate(("reduce_fp32", "reduce", "reduce_fp32", "reduce_fp32")):
        seen = set()
        for number in range(65):
            feed(model, "w", [[1.0 if number == 0 else 2.0**-9]])
            assert parameter.grad is not None
            seen.add(parameter.grad.dtype)
        reduced: Tensor = getattr(session, call)(local_weight=65).gradients["w"]
        assert reduced is parameter.grad
        found[f"C088 {window}"] = (reduced.item(), reduced.dtype)
        found[f"seen {window}"] = seen
        model.zero_grad(set_to_none=window != 2)
    # 256 + 1 over the weights 200 + 57: exactly 1.0 if summed and divided in FP32, 0.99609375 if rounded in between.
    for call in ("reduce", "reduce_fp32", "sum", "sum_fp32"):
        feed(model, "w", [[256.0 if comm.rank == 0 else 1.0]])
        terms = {"local_active": True} if "sum" in call else {"local_weight": 200 if comm.rank == 0 else 57}
        result: sr.ReduceResult = getattr(session, call)(**terms)
        reduced = result.gradients["w"]
        assert reduced is parameter.grad
        found[call] = (reduced.item(), reduced.dtype, result.global_weight)
        model.zero_grad()
    return found


def test_sixteen_bit_gradients_are_added_and_divided_in_fp32_and_cast_once() -> None:
    for found in run_ranks(2, _sixteen_bits):
        mean = torch.tensor(1.125 / 65)
        for window in (0, 2, 3):
            assert found[f"C088 {window}"] == (mean.item(), torch.float32)
        assert found["C088 1"] == (mean.to(_BF16).item(), _BF16)
        assert all(found[f"seen {window}"] == {torch.float32} for window in range(4)), "FP32 from the first micro-batch"
        assert found["reduce"] == (1.0, _BF16, 257)
        assert found["reduce_fp32"] == (1.0, torch.float32, 257)
        assert found["sum"] == (256.0, _BF16, 2), "257 rounded to bf16, once"
        assert found["sum_fp32"] == (257.0, torch.float32, 2)


def _sums(comm: sr.Communicator) -> dict[str, Any]:
    model = Vectors({"a": (3,), "b": (700,)}, value=1.0)
    session = sr.DataParallel(comm, model)
    grads = {"a": torch.full((3,), 1.0 + comm.rank), "b": torch.full((700,), 0.25)}
    found: dict[str, Any] = {}
    push(model, grads)
    both = session.sum(local_active=True)
    held = {path: grad.clone() for path, grad in both.gradients.items()}
    found["both"] = (both.global_weight, held["a"].tolist(), _values(held["b"]))
    model.zero_grad()
    push(model, {path: grad * _NAN if comm.rank == 1 else grad for path, grad in grads.items()})
    one = session.sum(local_active=comm.rank != 1)
    found["one"] = (one.global_weight, one.gradients["a"].tolist(), _values(one.gradients["b"]))
    found["kept"] = all(same_bits(held[path], grad) for path, grad in both.gradients.items())
    model.zero_grad()
    push(model, grads)
    idle = session.sum_fp32(local_active=False)
    found["idle"] = (idle.global_weight, idle.absent, idle.gradients, [p.grad for p in model.parameters()])
    push(model, grads)
    found["after"] = session.sum(local_active=True).gradients["a"].tolist()
    return found


def test_sums_count_active_ranks_and_divide_by_nothing() -> None:
    for found in run_ranks(3, _sums):
        assert found["both"] == (3, [6.0] * 3, [0.75])
        assert found["one"] == (2, [4.0] * 3, [0.5]), "a rank that is not active counts as zeros, though it holds NaN"
        assert found["kept"], "a later reduction does not write into what an earlier one handed out"
        assert found["idle"] == (0, ("a", "b"), {}, [None, None])
        assert found["after"] == [6.0] * 3


# ---- policies and refusals ----------------------------------------------------------------------------------------


def _policies(comm: sr.Communicator) -> dict[str, Any]:
    """Gradients: a on every rank, b on rank 0 only, c on none."""
    model = Vectors({"a": (3,), "b": (5,), "c": (2,)}, value=1.0)
    session = sr.DataParallel(comm, model)
    grads = {"a": torch.full((3,), 1.0), "b": torch.full((5,), 4.0)}
    shown = grads if comm.rank == 0 else {"a": grads["a"]}
    on_root = comm.rank == 0
    attempts: dict[str, Callable[[], object]] = {
        "missing": lambda: session.reduce(local_weight=2),
        "empty": lambda: session.reduce(local_weight=0, missing="zero"),
        "float weight": lambda: session.reduce(local_weight=2 if on_root else 2.0, missing="zero"),  # type: ignore[arg-type]
        "negative": lambda: session.reduce(local_weight=2 if on_root else -2, missing="zero"),
        "no flag": lambda: session.sum(local_active=1, missing="zero"),  # type: ignore[arg-type]
        "policies differ": lambda: session.reduce(local_weight=2, missing="zero" if on_root else "error"),
        "dtypes differ": lambda: (session.reduce if on_root else session.reduce_fp32)(local_weight=2, missing="zero"),
        "modes differ": lambda: (
            session.reduce(local_weight=2, missing="zero")
            if on_root
            else session.sum(local_active=True, missing="zero")
        ),
        "other call": lambda: session.reduce(local_weight=2, missing="zero") if on_root else comm.agree("else", 1),
    }
    push(model, {path: torch.full(p.shape, 7.0) for path, p in model.named_parameters()})
    session.sum(local_active=True)  # what it leaves behind must not pass for a later window's gradient
    model.zero_grad()
    push(model, shown)
    refused = {name: attempt(comm, call, lambda: snapshot(model)) for name, call in attempts.items()}
    result = session.reduce(local_weight=2, missing=sr.MissingGradientPolicy.ZERO)
    model.zero_grad()
    push(model, {} if on_root else {path: torch.ones(p.shape) for path, p in model.named_parameters()})
    spared = session.reduce(local_weight=0 if on_root else 1)  # a rank of weight 0 may miss any
    return {
        "refused": refused,
        "gradients": {path: grad.tolist() for path, grad in result.gradients.items()},
        "absent": result.absent,
        "spared": (spared.global_weight, spared.gradients["c"].tolist()),
    }


def test_missing_gradients_and_bad_calls_are_refused_by_all_and_change_nothing() -> None:
    words = {
        "missing": ("StepRefused", ["has no gradient for c", "missing_gradients: error"]),
        "empty": ("EmptyWindowError", ["global weight is 0"]),
        "float weight": ("StepRefused", ["rank 1", "2.0"]),
        "negative": ("StepRefused", ["rank 1", "-2"]),
        "no flag": ("StepRefused", ["rank 0", "rank 1", "True or False"]),
        "policies differ": ("StepRefused", ["rank 0", "rank 1", "zero", "error"]),
        "dtypes differ": ("StepRefused", ["rank 0", "rank 1", "fp32 False", "fp32 True"]),
        "modes differ": ("StepRefused", ["rank 0", "rank 1", "mean", "sum"]),
        "other call": ("CallMismatch", ["rank 0 in reduction 2", "rank 1 in agree: else"]),
    }
    for found in run_ranks(2, _policies):
        assert sorted(found["refused"]) == sorted(words)
        for name, (kind, said) in words.items():
            got: Refusal = found["refused"][name]
            assert got.kind == kind, (name, got)
            assert [word for word in said if word not in got.message] == [], (name, got)
            assert (got.changed, got.poisoned) == ([], False), name
        assert found["gradients"] == {"a": [0.5] * 3, "b": [1.0] * 5}, "the window is the one that was refused"
        assert found["absent"] == ("c",)
        assert found["spared"] == (1, [1.0] * 2)


# ---- what is not selected, buffers --------------------------------------------------------------------------------


class _Local(nn.Module):
    """A shared part in an order of the rank's own, and a part that differs between ranks in every way."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name in ["first", "second"] if rank == 0 else ["second", "first"]:
            generator = torch.Generator().manual_seed(10 * rank + len(name))
            self.register_parameter(name, nn.Parameter(torch.randn(7, 3, generator=generator)))
        self.expert = nn.Parameter(torch.full((3 + rank,), float(rank)))
        self.elsewhere = nn.Parameter(torch.empty(2 + rank, device="meta"))
        self.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=rank == 0)


def _unselected(comm: sr.Communicator) -> dict[str, Any]:
    model = _Local(comm.rank)
    kept, address = model.expert, model.expert.data_ptr()
    selection = sr.select_parameters(model, include=["first", "second"], comm=comm)
    session = sr.SelectedDataParallel(comm, model, selection)
    start = {path: model.get_parameter(path).detach().clone() for path in ("first", "second")}
    push(model, {"first": torch.full((7, 3), 1.0 + comm.rank), "second": torch.full((7, 3), 10.0)})
    torch.autograd.backward((model.expert * (1.0 + comm.rank)).sum())
    gradient = model.expert.grad
    assert gradient is not None
    before = gradient.clone()
    result = session.reduce(local_weight=1)
    return {
        "start": start,
        "mean": {path: _values(grad) for path, grad in result.gradients.items()},
        "remaining": list(result.remaining_gradients),
        "same objects": result.remaining_gradients["expert"] is gradient is model.expert.grad,
        "untouched": same_bits(before, gradient) and model.expert is kept and model.expert.data_ptr() == address,
        "meta": model.elsewhere.is_meta and tuple(model.elsewhere.shape) == (2 + comm.rank,),
    }


def test_what_is_not_selected_may_differ_and_keeps_its_own_gradients() -> None:
    by_rank = run_ranks(3, _unselected)
    for facts in by_rank:
        assert all(same_bits(facts["start"][path], by_rank[0]["start"][path]) for path in ("first", "second"))
        assert facts["mean"] == {"first": [2.0], "second": [10.0]}
        assert facts["remaining"] == ["expert"]
        assert facts["same objects"]
        assert facts["untouched"]
        assert facts["meta"]


class _Buffered(nn.Module):
    """Buffers of several dtypes, the same one under two names, with values that differ between ranks."""

    def __init__(self, rank: int, size: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(rank)))
        self.register_buffer("count", torch.tensor(10 + rank))
        self.register_buffer("mask", torch.arange(size) % 2 == rank % 2)
        self.register_buffer("mean", torch.full((size, 2), 0.5 + rank, dtype=torch.float64))
        self.register_buffer("turned", torch.full((2, 3), 1.0 + rank, dtype=_BF16).t())
        self.register_buffer("again", self.get_buffer("mean"))
        self.register_buffer("none", None)


def _buffers(comm: sr.Communicator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, wanted in (("left", False), ("sent", True)):
        model = _Buffered(comm.rank)
        sr.DataParallel(comm, model, broadcast_buffers=wanted)
        found[name] = {path: buffer.clone() for path, buffer in model.named_buffers()}
        found[f"{name} w"] = model.w.tolist()
    for name in ("shape", "dtype"):
        other: nn.Module = _Buffered(comm.rank, size=3 + (comm.rank if name == "shape" else 0))
        if name == "dtype" and comm.rank == 1:
            other.float()
        selection = sr.select_parameters(other, include=[])
        found[name] = attempt(
            comm,
            lambda other=other, selection=selection: sr.SelectedDataParallel(  # type: ignore[misc]
                comm, other, selection, broadcast_buffers=True
            ),
            lambda other=other: snapshot(other),  # type: ignore[misc]
        )
        sr.SelectedDataParallel(comm, other, selection)  # not broadcast: nothing to refuse
    return found


def test_buffers_of_every_dtype_are_broadcast_if_asked_for_and_have_to_be_of_one_form() -> None:
    by_rank = run_ranks(2, _buffers)
    root = {path: buffer.clone() for path, buffer in _Buffered(0).named_buffers()}
    assert len(root) == 4
    for rank, found in enumerate(by_rank):
        own = {path: buffer.clone() for path, buffer in _Buffered(rank).named_buffers()}
        assert all(same_bits(found["sent"][path], buffer) for path, buffer in root.items())
        assert all(same_bits(found["left"][path], buffer) for path, buffer in own.items())
        assert found["sent w"] == found["left w"] == [0.0, 0.0], "parameters are the root's in any case"
        shape, dtype = found["shape"], found["dtype"]
        assert shape.kind == dtype.kind == "ContractError"
        assert "again: rank 0 has torch.float64 (3, 2); rank 1 has torch.float64 (4, 2)" in shape.message
        assert "again: rank 0 has torch.float64 (3, 2); rank 1 has torch.float32 (3, 2)" in dtype.message
        assert shape.changed == dtype.changed == []
        assert not shape.poisoned


def _taken(comm: sr.Communicator) -> list[Refusal]:
    found = []
    for make in (sr.SelectedZero2, sr.SelectedZero1):
        model = Vectors({"a": (4, 6), "b": (5,)})
        session = sr.DataParallel(comm, model)
        sharded = make(session, torch.optim.SGD, lr=1.0, name="dense")
        push(model, {"a": torch.ones(4, 6), "b": torch.ones(5)})
        for call in (lambda: session.reduce(local_weight=1), lambda: session.sum_fp32(local_active=True)):  # noqa: B023
            found.append(attempt(comm, call, lambda: snapshot(model)))  # noqa: B023
        sharded.step(local_weight=1)
        assert _values(model.get_parameter("a")) == [-1.0]
    return found


def test_a_session_that_an_optimizer_has_taken_reduces_nothing_itself() -> None:
    for found in run_ranks(2, _taken):
        assert len(found) == 4
        for refusal, name in zip(found, ["SelectedZero2"] * 2 + ["SelectedZero1"] * 2, strict=True):
            assert refusal.kind == "UsageError"
            assert f"{name} dense" in refusal.message
            assert (refusal.changed, refusal.poisoned) == ([], False)


# ---- ZeRO-2 is data parallel --------------------------------------------------------------------------------------

_TWINS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], torch.dtype]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, torch.float32),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, torch.float32),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, torch.float32),
    "adamw bf16": (torch.optim.AdamW, {"lr": 0.01}, _BF16),
}


def _weight(rank: int, step: int) -> int:
    return 0 if rank == 1 and step % 5 == 4 else 1 + (step + 2 * rank) % 5


def _backward(model: nn.Module, rank: int, step: int) -> int:
    """Two micro-batches; rank 1 has nothing to count in every fifth window, and NaN."""
    weight = _weight(rank, step)
    for number in range(2):
        loss = loss_sum(model, token_batch(1000 * step + 10 * rank + number, max(weight, 1)))
        torch.autograd.backward(loss if weight else loss * _NAN)
    return 2 * weight


def _beside_zero2(comm: sr.Communicator) -> dict[str, list[str]]:
    """Ten windows, clipped: ZeRO-2, and the same model reduced whole and stepped by torch's own fused optimizer."""
    problems = {}
    for name, (optimizer, options, dtype) in _TWINS.items():
        model = seeded(3, OddNet).to(dtype)
        twin = copy.deepcopy(model)
        zero2 = make_zero2(comm, model, optimizer, masters=False, fused=True, bucket_bytes=1024, **options)
        session = sr.DataParallel(comm, twin)
        plain = optimizer(twin.parameters(), fused=True, **options)  # type: ignore[call-arg]
        clipped = 0
        found: list[str] = []
        for step in range(10):
            weight = _backward(model, comm.rank, step)
            assert _backward(twin, comm.rank, step) == weight
            zero2.step(local_weight=weight, max_grad_norm=0.25)
            reduced = session.reduce(local_weight=weight).gradients
            coefficient = clip_coefficient(exact_norm(reduced.values()), 0.25)
            clipped += coefficient < 1.0
            for grad in reduced.values():
                grad.mul_(coefficient)
            plain.step()
            plain.zero_grad()
            named = zip(model.named_parameters(), twin.parameters(), strict=True)
            found += [f"step {step}: {path}" for (path, ours), theirs in named if not same_bits(ours, theirs)]
        problems[name] = found if clipped == 10 else [*found, f"clipped in {clipped} of 10 steps"]
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_zero2_has_the_bits_of_data_parallel_and_an_ordinary_fused_optimizer(world_size: int) -> None:
    for problems in run_ranks(world_size, _beside_zero2):
        assert problems == {name: [] for name in _TWINS}


def _memory_order(comm: sr.Communicator) -> list[str]:
    """A fused kernel walks raw memory: a gradient has to lie as its parameter does, channels last for example."""
    generator = torch.Generator().manual_seed(comm.rank)
    model = seeded(0, OddShapes)
    model.register_parameter("nhwc", nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)))
    session = sr.DataParallel(comm, model)
    twin = copy.deepcopy(model)
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
    theirs = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.1, fused=True)
    for _ in range(3):
        drawn = {path: torch.randn(p.shape, generator=generator) for path, p in model.named_parameters()}
        drawn = {path: grad for path, grad in drawn.items() if path not in ("frozen", "unused")}
        push(model, drawn)
        session.reduce(local_weight=1, missing="zero")
        everyone = gather(comm, drawn)
        push(twin, {path: sum(held[path] for held in everyone) / len(everyone) for path in drawn})
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    named = zip(model.named_parameters(), twin.parameters(), strict=True)
    return [path for (path, one), other in named if not same_bits(one, other)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_reduced_gradients_lie_in_memory_as_their_parameters_do(world_size: int) -> None:
    assert run_ranks(world_size, _memory_order) == [[]] * world_size


# ---- failures -----------------------------------------------------------------------------------------------------


def _reduce_with_fault(comm: sr.Communicator, phase: str) -> tuple[Refusal, Refusal, str]:
    model = seeded(4, OddNet).to(_BF16)
    session = sr.DataParallel(comm, model)
    for step in range(2):
        weight = _backward(model, comm.rank, step)
        if step == 0:
            session.reduce(local_weight=weight)
            model.zero_grad()
    if comm.rank == 1:
        comm.observer = Strike(phase, 1, kill_this_rank)
    failed = attempt(comm, lambda: session.reduce(local_weight=weight), lambda: snapshot(model))
    later = attempt(comm, lambda: session.reduce(local_weight=weight), lambda: snapshot(model))
    grad = model.get_parameter("up.weight").grad
    return failed, later, str(None if grad is None else grad.dtype)


@pytest.mark.parametrize(("phase", "world_size"), [("reduce", 2), ("gather", 3), ("vote", 2)])
def test_a_rank_killed_in_a_reduction_leaves_the_others_their_pending_gradients(phase: str, world_size: int) -> None:
    with start_ranks(world_size, _reduce_with_fault, phase, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[1].killed_by == signal.SIGKILL
    for outcome in itertools.chain(outcomes[:1], outcomes[2:]):
        assert outcome.ok, outcome.error
        failed, later, dtype = outcome.value
        assert failed.kind == "StepFailed"
        assert failed.message.startswith("reduction 2 failed in phase ")
        assert (failed.changed, failed.gradients_kept, failed.poisoned) == ([], True, True)
        assert dtype == "torch.float32", "the pending ones, still in FP32"
        assert later.kind == "CommunicatorError"
        assert later.message.startswith("communicator is closed since its first failure")
        assert later.changed == []


def _misfits(comm: sr.Communicator) -> tuple[str, str]:
    model = Vectors({"a": (3,), "b": (5 + comm.rank,)})
    try:
        sr.DataParallel(comm, model)
    except sr.errors.ContractError as error:
        return told(error)
    return "", ""


def test_models_that_differ_between_ranks_are_refused_on_all_naming_both() -> None:
    first, second = run_ranks(2, _misfits)
    assert first == second
    assert first[0] == "ContractError"
    assert "b: rank 0 has shape (5,), float32, trainable; rank 1 has shape (6,), float32, trainable" in first[1]
