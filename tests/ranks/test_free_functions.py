"""step_sgd, step_adam and step_adamw on several ranks: torch on averaged gradients, or nothing at all."""

from __future__ import annotations

import copy
import dataclasses
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from shardrun.errors import StepFailed
from tests.support.models import MixedNet, OddNet, OddShapes, Vectors, push, seeded
from tests.support.ranks import run_ranks, start_ranks
from tests.support.sessions import Refusal, Strike, attempt, kill_this_rank, same_bits, snapshot_store

Config = sr.SGDConfig | sr.AdamConfig
_STEPS: dict[str, tuple[Callable[..., None], type[torch.optim.Optimizer]]] = {
    "sgd": (sr.step_sgd, torch.optim.SGD),
    "adam": (sr.step_adam, torch.optim.Adam),
    "adamw": (sr.step_adamw, torch.optim.AdamW),
}
_CASES: dict[str, tuple[str, Config, Callable[[], nn.Module], str]] = {
    "sgd": ("sgd", sr.SGDConfig(lr=0.05, momentum=0.9, nesterov=True), OddNet, "pending"),
    "sgd fused": ("sgd", sr.SGDConfig(lr=0.05, weight_decay=0.1, fused=True), OddShapes, "mapping"),
    "adam": ("adam", sr.AdamConfig(lr=0.01, amsgrad=True), OddShapes, "sequence"),
    "adamw fused": ("adamw", sr.AdamWConfig(lr=0.01, fused=True), OddShapes, "pending"),
    "adamw mixed dtypes": ("adamw", sr.AdamWConfig(lr=0.01), MixedNet, "mapping"),
    "adamw bf16 fused": ("adamw", sr.AdamWConfig(lr=0.01, fused=True), lambda: OddNet().bfloat16(), "pending"),
}


def _drawn(model: nn.Module, rank: int, step: int) -> dict[str, Tensor]:
    """Gradients of one rank in the parameters' dtypes; all ranks miss `unused` and one more, another in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    named = {path: p for path, p in model.named_parameters() if p.requires_grad and path != "unused"}
    left_out = list(named)[step % len(named)]
    drawn = {path: torch.randn(p.shape, generator=generator).to(p.dtype) for path, p in named.items()}
    return {path: grad for path, grad in drawn.items() if path != left_out}


def _average(by_rank: list[dict[str, Tensor]], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Summed in FP32 in the order of ranks, divided by their number, cast once; in the parameter's memory order."""
    averaged = {}
    for path in by_rank[0]:
        total = by_rank[0][path].float()
        for held in by_rank[1:]:
            total = total + held[path].float()
        averaged[path] = torch.empty_like(parameters[path]).copy_(total / len(by_rank))
    return averaged


def _beside_torch(comm: sr.Communicator) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for name, (kind, config, build, form) in _CASES.items():
        call, optimizer = _STEPS[kind]
        model = seeded(1, build)
        twin = copy.deepcopy(model)
        named = dict(twin.named_parameters())
        store = sr.ParamStore(model)
        # torch's fused kernels take one dtype per group.
        groups = [{"params": [parameter]} for parameter in twin.parameters() if parameter.requires_grad]
        plain = optimizer(groups, **dataclasses.asdict(config))
        found = problems[name] = []
        for step in range(6):
            by_rank = [_drawn(model, rank, step) for rank in range(comm.world_size)]
            own = by_rank[comm.rank]
            if form == "pending":
                push(model, own)
            given: Any = {"mapping": own, "sequence": [own.get(path) for path in store.parameters]}.get(form)
            call(store, config, comm, given)
            for path, grad in _average(by_rank, named).items():
                named[path].grad = grad
            plain.step()
            plain.zero_grad()
            found += [f"step {step}: {path}" for path, p in model.named_parameters() if not same_bits(p, named[path])]
            found += [f"step {step}: {path}.grad" for path, p in model.named_parameters() if p.grad is not None]
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_torch_on_averaged_gradients_bit_for_bit(world_size: int) -> None:
    for problems in run_ranks(world_size, _beside_torch, debug="DETAIL" if world_size == 2 else "OFF"):
        assert problems == {name: [] for name in _CASES}


# ---- refused, on every rank alike, with nothing changed -----------------------------------------------------------


def _model() -> nn.Module:
    return Vectors({"a": (3,), "b": (5,), "c": (2,)}, value=1.0)


_ADAMW = sr.AdamWConfig(lr=0.1)
_GRADS = {"a": torch.full((3,), 0.5), "b": torch.full((5,), 0.5), "c": torch.full((2,), 0.5)}
_Call = Callable[[sr.ParamStore, sr.Communicator], None]


def _adamw(grads: Any = None, **options: Any) -> _Call:
    return lambda store, comm: sr.step_adamw(store, dataclasses.replace(_ADAMW, **options), comm, grads)


def _elsewhere(store: sr.ParamStore, comm: sr.Communicator) -> None:
    other = comm.subgroup(range(comm.world_size))
    assert other is not None
    sr.step_adamw(store, _ADAMW, other)


# name -> (what rank 0 calls, what the others call, error class, words in every rank's message)
_REFUSALS: dict[str, tuple[_Call, _Call, str, list[str]]] = {
    "lr": (_adamw(lr=0.1), _adamw(lr=0.2), "StepRefused", ["rank 0", "rank 1", "'lr': 0.1", "'lr': 0.2"]),
    "weight decay": (_adamw(), _adamw(weight_decay=0.5), "StepRefused", ["rank 0", "rank 1", "0.01", "0.5"]),
    "eps one bit off": (_adamw(eps=1e-8), _adamw(eps=1.0000000000000002e-8), "StepRefused", ["rank 0", "rank 1"]),
    "lr negative on one": (_adamw(), _adamw(lr=-0.1), "StepRefused", ["rank 1", "learning rate is -0.1"]),
    "one gradient less": (
        _adamw(_GRADS),
        _adamw({"a": _GRADS["a"], "c": _GRADS["c"]}),
        "StepRefused",
        ["rank 1 has no gradient for b", "others have one"],
    ),
    "no gradient on the root": (_adamw({}), _adamw(_GRADS), "StepRefused", ["rank 0 has no gradient for a and 2 more"]),
    "unknown gradient": (_adamw(_GRADS), _adamw({"z": torch.ones(1)}), "StepRefused", ["rank 1", "grads has z"]),
    "too few": (_adamw(), _adamw([torch.ones(3)]), "StepRefused", ["rank 1", "1 gradients", "3 parameters"]),
    "another shape": (_adamw(), _adamw({**_GRADS, "b": torch.ones(6)}), "StepRefused", ["rank 1", "b:", "(6,)"]),
    "another function": (
        _adamw(),
        lambda store, comm: sr.step_sgd(store, sr.SGDConfig(), comm),
        "CallMismatch",
        ["rank 0 in step 2 of adamw", "rank 1 in step 2 of sgd"],
    ),
    "another function everywhere": (
        lambda store, comm: sr.step_adam(store, sr.AdamConfig(), comm),
        lambda store, comm: sr.step_adam(store, sr.AdamConfig(), comm),
        "StepRefused",
        ["stepped by adamw", "this call is adam"],
    ),
    "another communicator": (_elsewhere, _elsewhere, "StepRefused", ["communicator of its first step"]),
    "another call": (
        _adamw(),
        lambda store, comm: comm.broadcast_(torch.zeros(3), "something"),
        "CallMismatch",
        ["rank 0 in step 2 of adamw", "rank 1 in broadcast: something"],
    ),
}


def _all_refusals(comm: sr.Communicator) -> tuple[dict[str, Refusal], list[str]]:
    """All of them at the same pending gradients; then the step itself, beside a twin that was never refused."""
    model, twin = _model(), _model()
    store, straight = sr.ParamStore(model), sr.ParamStore(twin)
    found = {}
    for step in range(3):
        for one in (model, twin):
            push(one, {path: grad * (1 + step + comm.rank) for path, grad in _GRADS.items()})
        for name, (on_root, elsewhere, _, _) in _REFUSALS.items() if step == 1 else ():
            call = on_root if comm.rank == 0 else elsewhere
            found[name] = attempt(comm, lambda call=call: call(store, comm), lambda: snapshot_store(model, store))  # type: ignore[misc]
        for each in (store, straight):
            sr.step_adamw(each, _ADAMW, comm)
    return found, snapshot_store(model, store).differences(snapshot_store(twin, straight))


@pytest.mark.parametrize("world_size", [2, 3])
def test_differences_are_refused_by_all_naming_both_sides_and_a_retry_equals_never_refused(world_size: int) -> None:
    by_rank = run_ranks(world_size, _all_refusals, comm_timeout_s=10)
    for found, differences in by_rank:
        assert sorted(found) == sorted(_REFUSALS)
        for name, (_, _, kind, words) in _REFUSALS.items():
            got: Refusal = found[name]
            assert got.kind == kind, (name, got)
            assert [word for word in words if word not in got.message] == [], (name, got)
            assert (got.changed, got.poisoned) == ([], False), name
            assert got.message == by_rank[0][0][name].message, "the same words on every rank"
        assert differences == []


# name -> (model of rank 0, model of the others, words in every rank's message)
_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "element count": (_model, lambda: Vectors({"a": (3,), "b": (6,), "c": (2,)}), ["b: rank 0", "(5,)", "(6,)"]),
    "shape": (_model, lambda: Vectors({"a": (3,), "b": (5, 1), "c": (2,)}), ["b: rank 0", "(5,)", "(5, 1)"]),
    "one more": (_model, lambda: Vectors({"a": (3,), "b": (5,), "c": (2,), "d": (1,)}), ["d: rank 0", "not there"]),
    "dtype": (_model, lambda: _model().bfloat16(), ["a: rank 0", "float32", "rank 1", "bfloat16"]),
    "frozen": (_model, lambda: _frozen("c"), ["c: rank 0", "trainable", "frozen"]),
    "order": (
        _model,
        lambda: Vectors({"a": (3,), "c": (2,), "b": (5,)}),
        ["different orders", "as number 2 rank 0 has b; rank 1 has c"],
    ),
}


def _frozen(path: str) -> nn.Module:
    model = _model()
    model.get_parameter(path).requires_grad_(False)
    return model


def _first_steps(comm: sr.Communicator) -> dict[str, Refusal]:
    found = {}
    for name, (on_root, elsewhere, _) in _MODELS.items():
        model = (on_root if comm.rank == 0 else elsewhere)()
        store = sr.ParamStore(model)
        push(model, {path: torch.ones(p.shape) for path, p in model.named_parameters() if p.requires_grad})
        found[name] = attempt(
            comm,
            lambda store=store: sr.step_adamw(store, _ADAMW, comm),  # type: ignore[misc]
            lambda model=model, store=store: snapshot_store(model, store),  # type: ignore[misc]
        )
    model = _model()
    store = sr.ParamStore(model)
    push(model, _GRADS)
    bad = dataclasses.replace(_ADAMW, eps=-1.0) if comm.rank else _ADAMW
    found["bad option"] = attempt(comm, lambda: sr.step_adamw(store, bad, comm), lambda: snapshot_store(model, store))
    found["other kind"] = attempt(
        comm,
        lambda: sr.step_sgd(store, sr.SGDConfig(), comm) if comm.rank else sr.step_adamw(store, _ADAMW, comm),
        lambda: snapshot_store(model, store),
    )
    sr.step_sgd(store, sr.SGDConfig(lr=1.0), comm)  # the refused calls have not bound the store
    assert model.get_parameter("a").tolist() == [0.5] * 3
    return found


def test_parameters_that_differ_between_ranks_are_refused_in_the_first_step() -> None:
    for found in run_ranks(2, _first_steps, comm_timeout_s=10):
        for name, (_, _, words) in _MODELS.items():
            assert found[name].kind == "ContractError", (name, found[name])
            assert [word for word in words if word not in found[name].message] == [], (name, found[name])
        assert found["bad option"].kind == "UsageError"
        assert "rank 1" in found["bad option"].message
        assert "eps" in found["bad option"].message
        assert found["other kind"].kind == "CallMismatch"
        assert "under adamw" in found["other kind"].message
        assert "under sgd" in found["other kind"].message
        assert all((got.changed, got.poisoned) == ([], False) for got in found.values())


# ---- failures -----------------------------------------------------------------------------------------------------


def _step_with_fault(comm: sr.Communicator, phase: str, nth: int) -> tuple[Refusal, list[Refusal]]:
    model = seeded(4, MixedNet)
    store = sr.ParamStore(model)
    for step in range(3):
        push(model, _drawn(model, comm.rank, step))
        if step < 2:
            sr.step_adamw(store, _ADAMW, comm)
    if comm.rank == 1:
        comm.observer = Strike(phase, nth, kill_this_rank)
    failed, *later = [
        attempt(comm, lambda: sr.step_adamw(store, _ADAMW, comm), lambda: snapshot_store(model, store))
        for _ in range(3)
    ]
    return failed, later


@pytest.mark.parametrize(("phase", "nth", "world_size"), [("reduce", 1, 2), ("reduce", 2, 3), ("gather", 1, 2)])
def test_a_rank_killed_in_the_all_reduce_leaves_everything_as_it_was(phase: str, nth: int, world_size: int) -> None:
    with start_ranks(world_size, _step_with_fault, phase, nth, comm_timeout_s=20, debug="OFF") as ranks:
        outcomes = ranks.collect(timeout_s=30)
    assert outcomes[1].killed_by == signal.SIGKILL
    for outcome in [outcomes[0], *outcomes[2:]]:
        assert outcome.ok, outcome.error
        failed, later = outcome.value
        assert failed.kind == "StepFailed"
        assert failed.message.startswith("step 3 failed in phase ")
        assert "Parameters and optimizer state are those of step 2" in failed.message
        assert (failed.changed, failed.gradients_kept, failed.poisoned) == ([], True, True)
        for again in later:
            assert again.kind == "CommunicatorError"
            assert again.message.startswith("communicator is closed since its first failure")
            assert again.message == later[0].message
            assert again.changed == []


# ---- first state is made before the commit ---------------------------------------------------------------------------


def _first_state_out_of_memory(comm: sr.Communicator) -> dict[str, Any]:
    """The last rank runs out of memory wherever a first state is allocated; what that leaves, in two kinds of step."""
    model = Vectors({"a": (600,), "b": (3,)}, value=1.0)
    store = sr.ParamStore(model)
    push(model, {"a": torch.ones(600), "b": torch.ones(3)})
    real = torch.empty_like

    def no_room(*args: Any, **options: Any) -> Tensor:
        if isinstance(args[0], nn.Parameter) and comm.rank == comm.world_size - 1:
            raise torch.OutOfMemoryError("simulated")
        return real(*args, **options)

    torch.empty_like = no_room
    try:
        sr.step_adamw(store, sr.AdamWConfig(lr=0.1), comm)
    except StepFailed as error:
        failed: Any = (error.phase, error.in_doubt)
    else:
        failed = None
    finally:
        torch.empty_like = real
    state = {} if store.optimizer is None else store.optimizer.state
    return {
        "failed": failed,
        "a": model.get_parameter("a")[0].item(),
        "kept": model.get_parameter("a").grad is not None,
        "state": len(state),
    }


def test_no_room_for_first_state_leaves_everything_as_it_was() -> None:
    for held in run_ranks(2, _first_state_out_of_memory):
        phase, in_doubt = held["failed"]
        assert phase in ("propose", "gather", "vote")
        assert not in_doubt
        assert {**held, "failed": None} == {"failed": None, "a": 1.0, "kept": True, "state": 0}


def _torch_allocates_no_state(comm: sr.Communicator) -> list[str]:
    """torch's own first allocation fails on every rank: it is not reached, and the bits are torch's."""
    found = []
    for build, config in ((MixedNet, sr.AdamWConfig(amsgrad=True)), (OddNet, sr.AdamWConfig(fused=True))):
        model = seeded(1, build)
        twin = copy.deepcopy(model)
        gradients = {path: torch.ones_like(p) for path, p in model.named_parameters()}
        store = sr.ParamStore(model)
        push(model, gradients)
        real = torch.zeros_like

        def no_room(*args: Any, real: Any = real, **options: Any) -> Tensor:
            if isinstance(args[0], nn.Parameter):
                raise torch.OutOfMemoryError("simulated")
            return real(*args, **options)  # type: ignore[no-any-return]

        torch.zeros_like = no_room
        try:
            sr.step_adamw(store, config, comm)
        finally:
            torch.zeros_like = real
        groups = [{"params": [parameter]} for parameter in twin.parameters()]
        plain = torch.optim.AdamW(groups, **dataclasses.asdict(config))
        push(twin, gradients)
        plain.step()
        found += [path for path, p in model.named_parameters() if not same_bits(p, twin.get_parameter(path))]
        assert store.optimizer is not None
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            ours, theirs = store.optimizer.state[parameter], plain.state[other]
            if ours.keys() != theirs.keys() or not all(same_bits(ours[key], theirs[key]) for key in ours):
                found.append(f"state {sorted(ours)} {sorted(theirs)}")
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_finds_its_first_state_made(world_size: int) -> None:
    assert run_ranks(world_size, _torch_allocates_no_state) == [[]] * world_size
