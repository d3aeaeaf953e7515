"""What users of torch do around a step: schedulers, changed options, writes to parameters, signals, new sessions."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import MixedNet, OddNet, TiedNet, seeded
from tests.support.ranks import run_ranks
from tests.support.sessions import gather, make_zero2, same_bits


def _backward(model: nn.Module, rank: int = 0) -> None:
    for index, parameter in enumerate(model.parameters()):
        torch.autograd.backward((parameter.float() * (0.5 + index + rank)).sum())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {path: parameter.detach().clone() for path, parameter in model.named_parameters()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(same_bits(one[path], other[path]) for path in one)


def _scheduled(comm: sr.Communicator, way: str) -> dict[str, Tensor]:
    """Three steps with changing options: by torch's own scheduler, by param_groups, or by arguments."""
    model = seeded(3, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.1, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(zero2.optimizer, 0.5) if way == "scheduler" else None
    for step in range(3):
        _backward(model, comm.rank)
        if way == "groups":
            for group in zero2.optimizer.param_groups:
                group["lr"] = 0.1 * 0.5**step
        zero2.step(local_weight=2, lr=0.1 * 0.5**step if way == "argument" else None, missing="zero")
        if scheduler is not None:
            scheduler.step()
    for group in zero2.optimizer.param_groups:
        group["weight_decay"] = 0.7
    _backward(model, comm.rank)
    zero2.step(local_weight=2, lr=0.05, missing="zero")
    assert {group["lr"] for group in zero2.optimizer.param_groups} != {0.05}  # lr= is for that step alone
    return _weights(model)


def _scheduled_and_decayed(comm: sr.Communicator) -> list[dict[str, Tensor]]:
    return [_scheduled(comm, way) for way in ("argument", "scheduler", "groups")]


def test_schedulers_and_changed_options_count_at_every_world_size() -> None:
    for world_size in (1, 2):
        by_argument, by_scheduler, by_groups = run_ranks(world_size, _scheduled_and_decayed)[0]
        assert _same(by_argument, by_scheduler)
        assert _same(by_argument, by_groups)


def _options_differ(comm: sr.Communicator) -> str:
    zero2 = make_zero2(comm, model := seeded(1, OddNet), lr=0.1)
    if comm.rank == 1:
        zero2.optimizer.param_groups[0]["weight_decay"] = 0.5
    before = _weights(model)
    _backward(model)
    with pytest.raises(sr.errors.StepRefused) as refused:
        zero2.step(local_weight=1)
    assert _same(before, _weights(model))
    return str(refused.value)


def test_options_that_differ_between_ranks_refuse_the_step() -> None:
    for message in run_ranks(2, _options_differ):
        assert "'weight_decay': 0.5" in message


def _written_to(comm: sr.Communicator) -> None:
    model = seeded(1, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.0, weight_decay=0.0)
    _backward(model)
    zero2.step(local_weight=1, missing="zero")
    fives = {path: torch.full_like(value, 5.0) for path, value in model.state_dict().items()}
    model.load_state_dict(fives)
    _backward(model)
    with pytest.raises(sr.errors.StepRefused, match=r"refresh_masters\(\)"):
        zero2.step(local_weight=1, missing="zero")
    zero2.refresh_masters()
    zero2.step(local_weight=1, missing="zero")
    assert all(bool((parameter == 5.0).all()) for parameter in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_written_behind_their_masters_are_not_silently_undone(world_size: int) -> None:
    run_ranks(world_size, _written_to)


def _fails_in(comm: sr.Communicator, where: str) -> tuple[str, Any, Any, bool]:
    """Rank 1 fails at one place of the third step; what every rank says and holds then."""
    model = seeded(2, OddNet)
    zero2 = make_zero2(comm, model, torch.optim.SGD, lr=0.1, momentum=0.9)
    _backward(model)
    zero2.step(local_weight=1)
    before = _weights(model)
    _backward(model)
    if comm.rank == 1:
        if where == "commit":
            zero2.slice_optimizer.optimizer.step = _out_of_memory  # type: ignore[method-assign, assignment]
        elif where == "gather":
            comm.begin_gather = _out_of_memory  # type: ignore[method-assign, assignment]
        else:
            signal.signal(signal.SIGUSR1, lambda number, frame: _leave())
            comm.observer = lambda phase, collective: os.kill(os.getpid(), signal.SIGUSR1) if phase == where else None
    try:
        zero2.step(local_weight=1)
        return "", zero2.step_count, _same(before, _weights(model)), True
    except sr.errors.StepFailed as failed:
        grads = [parameter.grad is not None for parameter in model.parameters()]
        told = (failed.phase, failed.in_doubt, failed.gradients_kept, any(grads))
        with pytest.raises((sr.errors.StepFailed, sr.errors.CommunicatorError)):
            zero2.step(local_weight=1)
        whole = True
        try:
            zero2.to_record()
        except sr.errors.StepFailed:
            whole = False
        return str(failed), told, _same(before, _weights(model)), whole


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


def _leave() -> None:
    raise sr.errors.Interrupted("a handler of the user raises one of our own errors")


def test_a_fault_inside_the_commit_says_that_this_state_is_torn() -> None:
    other, torn = run_ranks(2, _fails_in, "commit")
    assert other[:2] == ("", 2)
    assert torn[1] == ("commit", True, False, False)
    assert "must not be used or saved" in torn[0]
    assert not torn[3]


def test_gathered_parameters_are_never_left_as_gradients() -> None:
    for message, told, unchanged, whole in run_ranks(2, _fails_in, "gather"):
        assert told == ("gather", False, False, False), message
        assert unchanged
        assert whole


def test_an_error_of_ours_that_only_one_rank_raises_frees_the_others() -> None:
    for message, told, unchanged, _ in run_ranks(2, _fails_in, "propose", timeout_s=20):
        assert told[0] in ("propose", "decide", "gather"), message
        assert unchanged


def _any_signal_waits(comm: sr.Communicator) -> list[str]:
    """SIGALRM and SIGTERM arrive during the vote; their handlers run when the step is whole, both of them."""
    model = seeded(2, OddNet)
    zero2 = make_zero2(comm, model, lr=0.1)
    before = _weights(model)
    _backward(model)
    seen: list[str] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(f"{signal.Signals(number).name} at step {zero2.step_count}")
        raise KeyboardInterrupt

    def strike(phase: str, collective: int) -> None:
        if phase == "vote":
            os.kill(os.getpid(), signal.SIGALRM)
            os.kill(os.getpid(), signal.SIGTERM)

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, handler)
    comm.observer = strike
    with pytest.raises(KeyboardInterrupt):
        zero2.step(local_weight=1)
    assert not _same(before, _weights(model))
    comm.observer = None
    _backward(model)
    assert zero2.step(local_weight=1).global_weight == comm.world_size  # the session is whole and goes on
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_signal_waits_for_the_commit(world_size: int) -> None:
    for seen in run_ranks(world_size, _any_signal_waits):
        assert sorted(seen) == ["SIGALRM at step 1", "SIGTERM at step 1"]


def _alias_options(comm: sr.Communicator) -> float:
    model = seeded(1, TiedNet)
    selection = sr.select_parameters(model, comm=comm)
    session = sr.SelectedDataParallel(comm, model, selection)
    last = max(path for path, alias in session.contract.aliases().items())
    group = sr.OptionGroup(frozenset({last}), {}, lr_scale=0.0)
    zero2 = sr.SelectedZero2(session, torch.optim.SGD, option_groups=[group], lr=1.0)
    tied = session.parameters[last]
    before = tied.detach().clone()
    _backward(model)
    zero2.step(local_weight=1)
    return float((tied.detach() - before).abs().max())


def test_an_option_group_may_use_any_name_of_a_tied_parameter() -> None:
    assert run_ranks(1, _alias_options) == [0.0]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
def test_a_graph_of_gradients_and_a_second_session() -> None:
    model = seeded(1, OddNet)
    comm = sr.Communicator.single()
    first = make_zero2(comm, model, lr=0.1)
    for _ in range(2):
        for parameter in model.parameters():
            torch.autograd.backward(parameter.square().sum(), create_graph=True)
    first.step(local_weight=1)
    second = make_zero2(comm, model, lr=0.1)
    _backward(model)
    _backward(model)
    inside = {bucket.grad.untyped_storage().data_ptr() for bucket in second.flat.buckets}
    assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() in inside for p in model.parameters())
    second.step(local_weight=1)


def test_memory_that_another_tensor_uses_is_found_however_far_away() -> None:
    base = torch.arange(100.0)
    model = nn.Module()
    model.wide = nn.Parameter(base[0:100], requires_grad=False)
    model.short = nn.Parameter(base[10:20], requires_grad=False)
    model.chosen = nn.Parameter(base[50:60])
    with pytest.raises(sr.errors.SelectionError, match="wide and chosen are different tensors"):
        sr.select_parameters(model, include=["chosen"])
    other = nn.Module()
    other.weight = nn.Parameter(torch.ones(4))
    other.register_buffer("view", other.weight.data[:2])
    with pytest.raises(sr.errors.SelectionError, match="view"):
        sr.select_parameters(other)


def test_only_whole_components_of_a_path_are_a_wrapper() -> None:
    model = nn.Module()
    model.add_module("a_orig_mod", nn.Linear(2, 2))
    wrapped = nn.Module()  # as torch.compile wraps a module
    wrapped.add_module("_orig_mod", nn.Linear(2, 2))
    model.add_module("b", wrapped)
    assert sorted(sr.select_parameters(model).parameters) == [
        "a_orig_mod.bias",
        "a_orig_mod.weight",
        "b.bias",
        "b.weight",
    ]


def _values(comm: sr.Communicator) -> list[Any]:
    with pytest.raises(TypeError):
        comm.agree("what JSON cannot hold", {1, 2})
    return gather(comm, comm.agree("the next one", comm.rank))


def test_a_value_that_cannot_travel_leaves_nobody_waiting() -> None:
    assert run_ranks(2, _values) == [[[0, 1], [0, 1]]] * 2
