"""One step on several ranks: weights, missing and non-finite gradients, refusals, and what a retry gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from shardrun.errors import EmptyWindowError, NonFiniteError, StepRefused
from tests.support.models import OddNet, OddShapes, Vectors, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import make_zero2, photograph, same_bits, told, whole_state


def _refusal(zero2: sr.SelectedZero2, attempt: Callable[[], object]) -> dict[str, Any]:
    """Try what must be refused; what it said, and whether anything on this rank is not as before."""
    before = photograph(zero2)
    kind, message = "nothing", ""
    try:
        attempt()
    except sr.errors.ShardrunError as error:
        kind, message = told(error)
    return {
        "kind": kind,
        "message": message,
        "changed": before.differences(photograph(zero2)),
        "poisoned": zero2.comm.is_poisoned,
    }


def _backward(model: nn.Module, step: int, rank: int) -> None:
    torch.autograd.backward(loss_sum(model, token_batch(10 * step + rank, 4 + rank)))


# ---- refused, on every rank alike, with nothing changed -----------------------------------------------------------

# name -> (arguments of rank 0, arguments of the others, error class, words in every rank's message)
_NAN = float("nan")
_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], list[str]]] = {
    "other lr": ({"lr": 0.1}, {"lr": 0.2}, StepRefused, ["lr", "rank 0", "rank 1"]),
    "lr one bit off": ({"lr": 0.1}, {"lr": 0.1 + 2**-56}, StepRefused, ["lr"]),
    "lr negative": ({"lr": -0.1}, {"lr": -0.1}, StepRefused, ["learning rate", "-0.1"]),
    "lr nan on one rank": ({"lr": 0.1}, {"lr": _NAN}, StepRefused, ["rank 1", "learning rate", "nan"]),
    "lr infinite": ({"lr": float("inf")}, {"lr": float("inf")}, StepRefused, ["learning rate", "inf"]),
    "other norm": ({"max_grad_norm": 1.0}, {"max_grad_norm": 2.0}, StepRefused, ["max_grad_norm"]),
    "norm on one rank only": ({"max_grad_norm": 1.0}, {}, StepRefused, ["max_grad_norm"]),
    "norm zero": ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.0}, StepRefused, ["max_grad_norm"]),
    "norm nan": ({"max_grad_norm": _NAN}, {"max_grad_norm": _NAN}, StepRefused, ["max_grad_norm"]),
    "other policy": ({"missing": "zero"}, {"missing": "error"}, StepRefused, ["zero", "error"]),
    "lr a string on one rank": ({"lr": 0.1}, {"lr": "0.1"}, StepRefused, ["rank 1", "learning rate", "'0.1'"]),
    "norm a string on one rank": ({"max_grad_norm": 1.0}, {"max_grad_norm": "1"}, StepRefused, ["rank 1", "'1'"]),
    "policy unknown on one rank": ({"missing": "zero"}, {"missing": "skip"}, StepRefused, ["rank 1", "'skip'"]),
    "weight negative": ({}, {"local_weight": -1}, StepRefused, ["rank 1", "-1"]),
    "weight a float": ({}, {"local_weight": 2.0}, StepRefused, ["rank 1", "2.0"]),
    "weight a float tensor": ({}, {"local_weight": torch.tensor(2.0)}, StepRefused, ["rank 1", "weight"]),
    "weight a vector": ({}, {"local_weight": torch.tensor([2])}, StepRefused, ["rank 1", "weight"]),
    "weight zero everywhere": ({"local_weight": 0}, {"local_weight": 0}, EmptyWindowError, ["global weight is 0"]),
}


def _all_refusals(comm: sr.Communicator) -> tuple[dict[str, dict[str, Any]], bool]:
    """All of them at the same pending gradients; then the step itself, beside a twin that was never refused."""
    model, twin = seeded(1, OddNet), seeded(1, OddNet)
    zero2, straight = make_zero2(comm, model, lr=0.01), make_zero2(comm, twin, lr=0.01)
    found: dict[str, dict[str, Any]] = {}
    for step in range(3):
        _backward(model, step, comm.rank)
        _backward(twin, step, comm.rank)
        if step == 1:
            for name, (on_root, elsewhere, _, _) in _REFUSALS.items():
                terms = {"local_weight": 4 + comm.rank, **(on_root if comm.rank == 0 else elsewhere)}
                found[name] = _refusal(zero2, lambda terms=terms: zero2.step(**terms))  # type: ignore[misc]
        for session in (zero2, straight):
            session.step(local_weight=4 + comm.rank, max_grad_norm=0.5)
    equal = not photograph(zero2).differences(photograph(straight))
    return found, equal


@pytest.mark.parametrize("world_size", [2, 3])
def test_refusals_are_raised_by_all_change_nothing_and_a_retry_equals_never_refused(world_size: int) -> None:
    for found, equal in run_ranks(world_size, _all_refusals, comm_timeout_s=10):
        for name, (_, _, kind, words) in _REFUSALS.items():
            got = found[name]
            assert got["kind"] == kind.__name__, (name, got)
            assert got["changed"] == [], name
            assert not got["poisoned"], name
            assert [word for word in words if word not in got["message"]] == [], (name, got["message"])
            assert "step 2 of default refused before the update" in got["message"], name
        assert equal


def _different_operations(comm: sr.Communicator) -> list[dict[str, Any]]:
    model = seeded(1, OddNet)
    zero2 = make_zero2(comm, model)
    _backward(model, 0, comm.rank)
    pairs: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: zero2.step(local_weight=1), lambda: zero2.step_sum(local_active=True)),
        (lambda: zero2.step(local_weight=1), lambda: zero2.load_record(zero2.to_record())),
        (lambda: zero2.step(local_weight=1), lambda: comm.agree("something else", 1)),
    ]
    found = [_refusal(zero2, pair[min(comm.rank, 1)]) for pair in pairs]
    zero2.step(local_weight=1)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_in_different_operations_are_told_so_before_anything_is_sent(world_size: int) -> None:
    for sum_mode, record, other in run_ranks(world_size, _different_operations):
        assert sum_mode["kind"] == "StepRefused"
        assert "mean" in sum_mode["message"]
        assert "sum" in sum_mode["message"]
        assert record["kind"] == other["kind"] == "CallMismatch"
        assert "something else" in other["message"]
        for found in (sum_mode, record, other):
            assert found["changed"] == []
            assert not found["poisoned"]


# ---- missing gradients --------------------------------------------------------------------------------------------


def _missing(comm: sr.Communicator) -> dict[str, Any]:
    """Gradients: a on every rank, b on rank 0 only, c on none; rank 2 (if any) has weight 0 and none at all."""
    model = Vectors({"a": (3,), "b": (5,), "c": (2,)}, value=1.0)
    zero2 = make_zero2(comm, model, lr=0.1, weight_decay=0.1)
    weight = 0 if comm.rank == 2 else 2
    grads = {"a": torch.full((3,), 1.0), "b": torch.full((5,), 4.0)}
    push(model, {} if comm.rank == 2 else grads if comm.rank == 0 else {"a": grads["a"]})
    strict = _refusal(zero2, lambda: zero2.step(local_weight=weight))
    result = zero2.step(local_weight=weight, missing="zero", max_grad_norm=100.0)
    state = whole_state(comm, zero2)
    return {
        "strict": strict,
        "absent": result.absent,
        "norm": result.grad_norm,
        "c": model.get_parameter("c").detach().clone(),
        "steps": {path: int(keys["step"]) for path, keys in state.items()},
        "exp_avg": {path: keys["exp_avg"] for path, keys in state.items()},
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_missing_gradients_are_refused_by_name_or_count_as_zeros(world_size: int) -> None:
    for facts in run_ranks(world_size, _missing):
        assert facts["strict"]["kind"] == "StepRefused"
        assert facts["strict"]["changed"] == []
        assert "no gradient for" in facts["strict"]["message"]
        assert "missing_gradients: error" in facts["strict"]["message"]
        assert facts["absent"] == ("c",)
        assert facts["c"].tolist() == [1.0, 1.0], "no decay without a gradient"
        assert facts["steps"] == {"a": 1, "b": 1, "c": 0}
        assert torch.allclose(facts["exp_avg"]["a"], torch.full((3,), 0.1 * 2.0 / 4.0))
        assert torch.allclose(facts["exp_avg"]["b"], torch.full((5,), 0.1 * 4.0 / 4.0))
        assert facts["exp_avg"]["c"].tolist() == [0.0, 0.0]
        assert facts["norm"] == pytest.approx((3 * 0.5**2 + 5 * 1.0) ** 0.5)


def _strict_names_the_rank(comm: sr.Communicator) -> str:
    model = Vectors({"a": (3,), "b": (5,)})
    zero2 = make_zero2(comm, model)
    push(model, {"a": torch.ones(3)} if comm.rank == 1 else {"a": torch.ones(3), "b": torch.ones(5)})
    message = str(_refusal(zero2, lambda: zero2.step(local_weight=1))["message"])
    model.zero_grad()
    push(model, {} if comm.rank == 1 else {"a": torch.ones(3), "b": torch.ones(5)})
    zero2.step(local_weight=0 if comm.rank == 1 else 1)  # a rank of weight 0 may miss any
    return message


def test_the_strict_policy_names_rank_and_path_and_spares_ranks_of_weight_zero() -> None:
    for message in run_ranks(2, _strict_names_the_rank):
        assert "rank 1 has no gradient for b" in message
        assert "rank 0" not in message


# ---- non-finite ---------------------------------------------------------------------------------------------------

_BAD: dict[str, tuple[int, float]] = {
    "nan on rank 0": (0, _NAN),
    "nan on rank 1": (1, _NAN),
    "inf on rank 1": (1, float("inf")),
}


def _non_finite(comm: sr.Communicator, max_grad_norm: float | None) -> tuple[dict[str, dict[str, Any]], bool]:
    model, twin = seeded(2, OddShapes), seeded(2, OddShapes)
    # Buckets of one parameter each: the bad element falls into a slice of one rank only.
    sessions = [make_zero2(comm, m, bucket_bytes=1) for m in (model, twin)]
    good = {path: torch.full(p.shape, 0.5) for path, p in model.named_parameters() if p.requires_grad}
    for m, session in zip((model, twin), sessions, strict=True):
        push(m, good)
        session.step(local_weight=1, max_grad_norm=max_grad_norm)
    found = {}
    cases = {**_BAD, "overflow of the sum": (-1, 3e38)}
    for name, (rank, value) in cases.items():
        bad = dict(good)
        if rank in (comm.rank, -1):
            bad["long"] = good["long"].clone()
            bad["long"][-1] = value
        push(model, bad)
        found[name] = _refusal(sessions[0], lambda: sessions[0].step(local_weight=1, max_grad_norm=max_grad_norm))
        model.zero_grad()
    for m, session in zip((model, twin), sessions, strict=True):
        push(m, good)
        session.step(local_weight=1, max_grad_norm=max_grad_norm)
    return found, not photograph(sessions[0]).differences(photograph(sessions[1]))


@pytest.mark.parametrize(("world_size", "max_grad_norm"), [(2, None), (2, 1.0), (3, 1.0)])
def test_non_finite_gradients_stop_every_rank_and_name_the_one(world_size: int, max_grad_norm: float | None) -> None:
    for found, equal in run_ranks(world_size, _non_finite, max_grad_norm):
        for name, (rank, _) in _BAD.items():
            got = found[name]
            assert got["kind"] == NonFiniteError.__name__, (name, got)
            assert "step 2 of default" in got["message"]
            assert f"rank {rank} has a non-finite gradient for long" in got["message"]
            assert f"rank {1 - rank}" not in got["message"]
            assert got["changed"] == []
            assert not got["poisoned"]
        assert found["overflow of the sum"]["kind"] == NonFiniteError.__name__
        assert "overflow" in found["overflow of the sum"]["message"]
        assert equal, "after the refusals the next step is that of a session that saw none of them"


def _masked_rank_is_not_blamed(comm: sr.Communicator) -> dict[str, Any]:
    model = Vectors({"a": (3,)})
    zero2 = make_zero2(comm, model)
    push(model, {"a": torch.full((3,), _NAN)})
    return _refusal(zero2, lambda: zero2.step(local_weight=0 if comm.rank == 1 else 1))


def test_a_rank_of_weight_zero_is_not_blamed_for_its_nan() -> None:
    for found in run_ranks(3, _masked_rank_is_not_blamed):
        assert found["kind"] == "NonFiniteError"
        assert "rank 0 has" in found["message"]
        assert "rank 2 has" in found["message"]
        assert "rank 1 has" not in found["message"]


# ---- weights, sums, clearing --------------------------------------------------------------------------------------


def _sums(comm: sr.Communicator) -> dict[str, Any]:
    model = Vectors({"a": (3,), "b": (700,)}, value=1.0)
    zero2 = make_zero2(comm, model, torch.optim.SGD, lr=1.0)
    grads = {"a": torch.full((3,), 1.0 + comm.rank), "b": torch.full((700,), 0.25)}
    push(model, grads)
    before = photograph(zero2)
    idle = zero2.step_sum(local_active=False)
    unchanged = before.differences(photograph(zero2), gradients=False)
    push(model, grads)
    both = zero2.step_sum(local_active=True)
    after_both = model.get_parameter("a").detach().clone()
    push(model, {path: grad * _NAN if comm.rank == 1 else grad for path, grad in grads.items()})
    one = zero2.step_sum(local_active=comm.rank != 1, max_grad_norm=1e9)
    return {
        "idle": (idle.global_weight, idle.absent, unchanged),
        "both": (both.global_weight, after_both),
        "one": (one.global_weight, model.get_parameter("a").detach().clone(), one.grad_norm),
        "b": model.get_parameter("b").detach().clone(),
    }


def test_sum_mode_divides_by_nothing_and_counts_active_ranks() -> None:
    for facts in run_ranks(2, _sums):
        assert facts["idle"] == (0, ("a", "b"), [])
        assert facts["both"][0] == 2
        assert facts["both"][1].tolist() == [1.0 - 3.0] * 3
        assert facts["one"][0] == 1
        assert facts["one"][1].tolist() == [-2.0 - 1.0] * 3
        assert facts["one"][2] == pytest.approx((3 * 1.0 + 700 * 0.0625) ** 0.5)
        assert facts["b"].tolist() == [1.0 - 0.5 - 0.25] * 700


def _weights(comm: sr.Communicator) -> dict[str, Any]:
    model = Vectors({"a": (3,)})
    zero2 = make_zero2(comm, model, torch.optim.SGD, lr=1.0)
    push(model, {"a": torch.full((3,), 3.0)})
    tensor = zero2.step(local_weight=torch.tensor(1 + comm.rank))
    first = model.get_parameter("a").detach().clone()
    push(model, {"a": torch.full((3,), 3.0)})
    huge = zero2.step(local_weight=(1 << 52) + comm.rank)
    push(model, {"a": torch.full((3,), 3.0)})
    free = zero2.step(local_weight=1, lr=0.0, max_grad_norm=float("inf"))
    return {"tensor": tensor.global_weight, "first": first, "huge": huge.global_weight, "norm": free.grad_norm}


def test_weights_are_exact_integers_of_any_kind() -> None:
    for facts in run_ranks(2, _weights):
        assert facts["tensor"] == 3
        assert type(facts["tensor"]) is int
        assert facts["first"].tolist() == [-2.0] * 3
        assert facts["huge"] == (1 << 53) + 1, "a sum that no float64 holds"
        assert facts["norm"] == pytest.approx(27.0**0.5)


def _clearing(comm: sr.Communicator) -> dict[str, Any]:
    """zero_grad both ways, a gradient put there by hand, a second window, and stale references to the storage."""
    model, twin = seeded(6, OddNet), seeded(6, OddNet)
    zero2, straight = make_zero2(comm, model), make_zero2(comm, twin)
    held = model.state_dict()
    for step in range(4):
        _backward(model, 50 + step, comm.rank)
        # Set to None: the junk is gone. Zeros in place: they count as a gradient of zeros, and the next adds to them.
        model.zero_grad(set_to_none=step % 2 == 0)
        _backward(model, step, comm.rank)
        if step == 3:  # foreign tensors in the place of ours, as torch.autograd.grad users assign them
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()
        _backward(twin, step, comm.rank)
        for session in (zero2, straight):
            session.step(local_weight=4 + comm.rank, max_grad_norm=0.5)
    return {
        "equal": photograph(zero2).differences(photograph(straight)),
        "cleared": all(parameter.grad is None for parameter in model.parameters()),
        "state_dict follows": all(same_bits(held[path], p) for path, p in model.named_parameters()),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_clearing_and_replacing_gradients_means_what_it_means_in_torch(world_size: int) -> None:
    for facts in run_ranks(world_size, _clearing):
        assert facts == {"equal": [], "cleared": True, "state_dict follows": True}


def _changed_after_setup(comm: sr.Communicator) -> dict[str, dict[str, Any]]:
    """What a user may do to a parameter after set-up, on rank 1 only; every rank must refuse, naming it."""
    found = {}
    changes: dict[str, Callable[[nn.Module], object]] = {
        "frozen": lambda m: m.get_parameter("a").requires_grad_(False),
        "unfrozen": lambda m: m.get_parameter("f").requires_grad_(True),
        "moved": lambda m: setattr(m.get_parameter("a"), "data", m.get_parameter("a").data.clone()),
    }
    for name, change in changes.items():
        model = Vectors({"a": (3,), "b": (5,), "f": (2,)})
        model.get_parameter("f").requires_grad_(False)
        zero2 = make_zero2(comm, model)
        push(model, {"a": torch.ones(3), "b": torch.ones(5)})
        if comm.rank == comm.world_size - 1:
            change(model)
        found[name] = _refusal(zero2, lambda zero2=zero2: zero2.step(local_weight=1))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_frozen_unfrozen_or_moved_after_setup_is_refused_by_name(world_size: int) -> None:
    names = {"frozen": "a", "unfrozen": "f", "moved": "a"}
    for found in run_ranks(world_size, _changed_after_setup):
        for name, path in names.items():
            assert found[name]["kind"] in ("StepRefused", "ContractError"), (name, found[name])
            assert f"{path}:" in found[name]["message"], (name, found[name])
            assert not found[name]["poisoned"]


def _twice(comm: sr.Communicator) -> dict[str, Tensor]:
    model = seeded(8, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in range(4):
        _backward(model, step, comm.rank)
        zero2.step(local_weight=4 + comm.rank, max_grad_norm=0.5)
    return {**copy.deepcopy(dict(model.state_dict())), **zero2.to_record().tensors}


def test_two_runs_of_the_same_ranks_give_the_same_bits() -> None:
    first, second = run_ranks(3, _twice), run_ranks(3, _twice)
    for one, other in zip(first, second, strict=True):
        assert sorted(one) == sorted(other)
        assert all(same_bits(one[name], other[name]) for name in one)
