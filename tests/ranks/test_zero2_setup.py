"""Making a session on several ranks: what has to agree, what may differ, and what it costs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import MixedNet, OddNet, OddShapes, Scalars, TiedNet, Vectors, push, seeded
from tests.support.ranks import run_ranks
from tests.support.sessions import gather, make_zero2, same_bits, told, whole_state

_SHAPES: dict[str, tuple[int, ...]] = {"a": (3,), "b": (4, 6), "c": (5,)}


def _vectors(**changed: tuple[int, ...]) -> nn.Module:
    return Vectors({**_SHAPES, **changed})


def _extra() -> nn.Module:
    return Vectors({**_SHAPES, "d": (2,)})


def _fewer() -> nn.Module:
    return Vectors({"a": (3,), "c": (5,)})


def _frozen(path: str) -> nn.Module:
    model = _vectors()
    model.get_parameter(path).requires_grad_(False)
    return model


def _half(path: str) -> nn.Module:
    model = _vectors()
    model.get_parameter(path).data = model.get_parameter(path).data.bfloat16()
    return model


def _tied() -> nn.Module:
    model = Vectors({"a": (3,), "b": (4, 6)})
    model.register_parameter("c", nn.Parameter(torch.zeros(5)))
    model.register_parameter("e", model.get_parameter("c"))
    return model


def _untied() -> nn.Module:
    return Vectors({**_SHAPES, "e": (5,)})


# what rank 0 builds, what rank 1 (and up) builds, words that every rank's message must hold
_MISFITS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "another shape of the same size": (_vectors, functools.partial(_vectors, b=(6, 4)), ["b", "(4, 6)", "(6, 4)"]),
    "another size": (_vectors, functools.partial(_vectors, c=(6,)), ["c", "(5,)", "(6,)"]),
    "one parameter more on rank 1": (_vectors, _extra, ["d", "rank 0", "rank 1"]),
    "one parameter less on rank 1": (_vectors, _fewer, ["b", "rank 0", "rank 1"]),
    "frozen on rank 1": (_vectors, functools.partial(_frozen, "b"), ["b", "trainable", "frozen"]),
    "another one frozen": (functools.partial(_frozen, "a"), functools.partial(_frozen, "c"), ["a", "frozen"]),
    "another dtype": (_vectors, functools.partial(_half, "a"), ["a", "float32", "bfloat16"]),
    "tied on rank 1 only": (_untied, _tied, ["e", "same tensor as c"]),
}


def _misfits(comm: sr.Communicator) -> dict[str, tuple[str, str]]:
    """Every misfit on one communicator: a refusal must leave it usable for the next try."""
    found = {}
    for name, (on_root, elsewhere, _) in _MISFITS.items():
        model = (on_root if comm.rank == 0 else elsewhere)()
        before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
        try:
            sr.SelectedDataParallel(comm, model, sr.select_parameters(model))
        except sr.errors.ContractError as error:
            found[name] = told(error)
        assert all(same_bits(before[path], parameter) for path, parameter in model.named_parameters())
    assert not comm.is_poisoned
    make_zero2(comm, seeded(0, OddNet))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_contract_differences_are_refused_on_every_rank_naming_path_and_both_sides(world_size: int) -> None:
    by_rank = run_ranks(world_size, _misfits)
    for found in by_rank:
        assert sorted(found) == sorted(_MISFITS)
        for name, (_, _, words) in _MISFITS.items():
            assert [word for word in words if word not in found[name][1]] == [], (name, found[name])
    assert all(found == by_rank[0] for found in by_rank)


_OPTION_MISFITS: dict[str, list[dict[str, Any]]] = {
    "lr": [{"lr": 0.1}, {"lr": 0.2}],
    "weight decay": [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5}],
    "optimizer": [{"lr": 0.1, "optimizer": torch.optim.SGD}, {"lr": 0.1}],
    "option groups": [{"lr": 0.1, "rules": {"a": {"lr_scale": 0.5}}}, {"lr": 0.1, "rules": {"b": {"lr_scale": 0.5}}}],
    "bucket size": [{"lr": 0.1, "bucket_bytes": 1024}, {"lr": 0.1, "bucket_bytes": 2048}],
    "masters": [{"lr": 0.1, "masters": True}, {"lr": 0.1, "masters": False}],
}


def _option_misfits(comm: sr.Communicator) -> dict[str, tuple[str, str]]:
    found = {}
    for name, choices in _OPTION_MISFITS.items():
        try:
            make_zero2(comm, _vectors(), **choices[min(comm.rank, 1)])
        except sr.errors.UsageError as error:
            found[name] = told(error)
    make_zero2(comm, _vectors())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_options_that_differ_between_ranks_are_refused_on_every_rank(world_size: int) -> None:
    for found in run_ranks(world_size, _option_misfits):
        assert sorted(found) == sorted(_OPTION_MISFITS)


def _pattern_without_a_match(comm: sr.Communicator) -> tuple[str, str, float]:
    """Rank 1's model lacks what the pattern names; its process goes on afterwards."""
    model = _extra() if comm.rank == 0 else _vectors()
    started = time.monotonic()
    kind, message = "nothing", ""
    try:
        make_zero2(comm, model, include=["a", "d"])
    except Exception as error:
        kind, message = told(error)
    seconds = time.monotonic() - started
    comm.agree("still here", None if comm.is_poisoned else comm.rank)
    return kind, message, seconds


def test_a_pattern_that_matches_nothing_on_one_rank_is_refused_on_all_together() -> None:
    for kind, message, seconds in run_ranks(2, _pattern_without_a_match, comm_timeout_s=10):
        assert kind == "SelectionError"
        assert "rank 1" in message
        assert "'d' matches none of 3 parameters" in message
        assert seconds < 5


# ---- what may differ ----------------------------------------------------------------------------------------------


class _Local(nn.Module):
    """A shared part in an order of the rank's own, and a part that differs between ranks in every way."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        names = ["first", "second"] if rank == 0 else ["second", "first"]
        for name in names:
            generator = torch.Generator().manual_seed(10 * rank + len(name))
            self.register_parameter(name, nn.Parameter(torch.randn(7, 3, generator=generator)))
        self.expert = nn.Parameter(torch.full((3 + rank,), float(rank)))
        self.elsewhere = nn.Parameter(torch.empty(2 + rank, device="meta"))
        self.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=rank == 0)


def _local_parts(comm: sr.Communicator) -> dict[str, Any]:
    model = _Local(comm.rank)
    expert_before = model.expert
    storage_before = model.expert.data_ptr()
    zero2 = make_zero2(comm, model, torch.optim.SGD, include=["first", "second"], lr=1.0)
    start = {path: model.get_parameter(path).detach().clone() for path in ("first", "second")}
    push(model, {"first": torch.full((7, 3), 1.0 + comm.rank), "second": torch.full((7, 3), 10.0)})
    torch.autograd.backward((model.expert * (1.0 + comm.rank)).sum())
    gradient = model.expert.grad
    assert gradient is not None
    grad_before = gradient.clone()
    result = zero2.step(local_weight=1)
    return {
        "start": start,
        "moved": {path: (start[path] - model.get_parameter(path)).detach() for path in start},
        "same object": result.remaining_gradients["expert"] is gradient and model.expert.grad is gradient,
        "gradient unchanged": same_bits(grad_before, gradient),
        "only": list(result.remaining_gradients),
        "parameter untouched": model.expert is expert_before and model.expert.data_ptr() == storage_before,
        "expert": model.expert.detach().clone(),
        "order": zero2.trainable_parameters,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_order_and_unselected_parameters_may_differ_and_stay_untouched(world_size: int) -> None:
    by_rank = run_ranks(world_size, _local_parts)
    for rank, facts in enumerate(by_rank):
        for path in ("first", "second"):
            assert same_bits(facts["start"][path], by_rank[0]["start"][path]), "the root's values, by path"
        mean = sum(1.0 + r for r in range(world_size)) / world_size
        assert torch.allclose(facts["moved"]["first"], torch.full((7, 3), mean))
        assert torch.allclose(facts["moved"]["second"], torch.full((7, 3), 10.0))
        assert facts["same object"]
        assert facts["gradient unchanged"]
        assert facts["only"] == ["expert"]
        assert facts["parameter untouched"]
        assert facts["expert"].tolist() == [float(rank)] * (3 + rank)
        assert facts["order"] == ["first", "second"], "the root's order decides on every rank"


def _unselected_twin(comm: sr.Communicator) -> dict[str, Tensor]:
    """The unselected part gets its gradient beside a step; it must be that of a model that nobody stepped."""
    models = [seeded(1, OddNet), seeded(1, OddNet)]
    zero2 = make_zero2(comm, models[0], include=["head.*"])
    for model in models:
        torch.autograd.backward(model(torch.ones(2, 7) * (comm.rank + 1)).sum())
    result = zero2.step(local_weight=2, max_grad_norm=0.01)
    want = {path: p.grad for path, p in models[1].named_parameters() if not path.startswith("head.")}
    assert sorted(result.remaining_gradients) == sorted(want)
    for path, grad in result.remaining_gradients.items():
        expected = want[path]
        assert expected is not None
        assert same_bits(grad, expected), path
    return {path: parameter.detach() for path, parameter in models[0].named_parameters()}


def test_gradients_of_the_rest_are_neither_scaled_nor_clipped_nor_reduced() -> None:
    run_ranks(2, _unselected_twin)


# ---- layout and cost ----------------------------------------------------------------------------------------------


def _costs(comm: sr.Communicator) -> dict[str, int]:
    big = Vectors({"a": (64, 128), "b": (1000,), "c": (3,)})
    adamw = make_zero2(comm, big)
    masters = make_zero2(comm, Vectors({"a": (64, 128), "b": (512,)}, dtype=torch.bfloat16))
    part = make_zero2(comm, Vectors({"a": (64, 128), "b": (512,)}), include=["b"])
    none = make_zero2(comm, Vectors({"a": (64, 128)}), include=[])
    sgd = make_zero2(comm, Vectors({"a": (64, 128)}), torch.optim.SGD, lr=0.1)
    sessions = {"adamw": adamw, "masters": masters, "part": part, "none": none, "sgd": sgd}
    held = {name: session.state_nbytes for name, session in sessions.items()}
    record = adamw.to_record()
    elements = sum(tensor.numel() for name, tensor in record.tensors.items() if name.endswith("/exp_avg"))
    return {**held, "elements": elements, "paths": adamw.state_parameter_count}


def test_optimizer_state_at_two_ranks_is_half_of_one_rank() -> None:
    (alone,) = run_ranks(1, _costs)
    halves = run_ranks(2, _costs)
    padding = 2 * 4 * 256  # two moments of at most one slice of padding
    for half in halves:
        assert abs(half["adamw"] - alone["adamw"] / 2) <= padding
        assert half["masters"] == alone["masters"] / 2 == 3 * 4 * (64 * 128 + 512) / 2
        assert half["part"] == alone["part"] / 2 == 2 * 4 * 512 / 2, "no state for what is not selected"
        assert half["none"] == half["sgd"] == 0
    assert sum(half["elements"] for half in halves) == alone["elements"] == 64 * 128 + 1000 + 3
    assert alone["paths"] == 3


def _empty(comm: sr.Communicator) -> tuple[int, list[str], list[str], int]:
    model = seeded(1, OddNet)
    zero2 = make_zero2(comm, model, include=[])
    torch.autograd.backward(model(torch.ones(2, 7)).sum())
    result = zero2.step(local_weight=3, max_grad_norm=1.0)
    zero2.load_record(zero2.to_record())
    return result.global_weight, sorted(result.remaining_gradients), zero2.trainable_parameters, zero2.step_count


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_empty_selection_steps_nothing_and_keeps_every_gradient(world_size: int) -> None:
    paths = sorted(path for path, _ in OddNet().named_parameters())
    assert run_ranks(world_size, _empty) == [(3 * world_size, paths, [], 0)] * world_size


def _buckets(comm: sr.Communicator) -> list[dict[str, Tensor]]:
    """The same three steps with one bucket, and with a bucket per parameter."""
    results = []
    for bucket_bytes in (16 << 20, 1):
        torch.manual_seed(comm.rank)
        model = seeded(2, MixedNet)
        zero2 = make_zero2(comm, model, rules={"*.bias": {"weight_decay": 0.0}}, bucket_bytes=bucket_bytes)
        for step in range(3):
            grads = {path: torch.randn(p.shape) for path, p in model.named_parameters()}
            push(model, grads if step == 0 else {path: grads[path] for path in list(grads)[::2]})
            zero2.step(local_weight=1 + comm.rank, missing="zero", max_grad_norm=0.1)
        state = {f"{p}/{k}": v for p, keys in whole_state(comm, zero2).items() for k, v in keys.items()}
        results.append(state | {path: p.detach().clone() for path, p in model.named_parameters()})
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_do_not_depend_on_bucket_sizes(world_size: int) -> None:
    for one, other in run_ranks(world_size, _buckets):
        assert sorted(one) == sorted(other)
        assert [name for name in one if not same_bits(one[name], other[name])] == []


def _odd_record(comm: sr.Communicator) -> list[tuple[dict[str, list[int]], dict[str, tuple[int, ...]]]]:
    zero2 = make_zero2(comm, seeded(0, OddShapes), bucket_bytes=1)
    record = zero2.to_record()
    return gather(comm, (record.meta["fragments"], {name: tuple(t.shape) for name, t in record.tensors.items()}))


def test_fragments_of_all_ranks_cover_every_element_once_and_no_padding_is_recorded() -> None:
    sizes = {path: p.numel() for path, p in OddShapes().named_parameters() if p.requires_grad}
    (records, *_) = run_ranks(3, _odd_record)
    covered: dict[str, list[list[int]]] = {path: [] for path in sizes}
    for fragments, shapes in records:
        for path, (start, stop) in fragments.items():
            covered[path].append([start, stop])
            assert shapes[f"{path}/exp_avg"] == (stop - start,)
    for path, numel in sizes.items():
        parts = sorted(covered[path])
        assert parts[0][0] == 0
        assert parts[-1][1] == numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts)), (path, parts)


# ---- what is refused by one rank alone ----------------------------------------------------------------------------


def _refused_locally() -> Mapping[str, Callable[[], object]]:
    base = torch.zeros(10)
    shared = Vectors({"a": (1,)})
    shared.register_parameter("x", nn.Parameter(base[:6]))
    shared.register_parameter("y", nn.Parameter(base[4:]))
    comm = sr.Communicator.single()
    return {
        "'blcks.*' matches none of 3": lambda: sr.select_parameters(_vectors(), include=["blcks.*"]),
        "nearest: emb.weight": lambda: sr.select_parameters(TiedNet(), include=["emb.weigth"]),
        "head.weight is selected and emb.weight is excluded": lambda: sr.select_parameters(
            TiedNet(), include=["*"], exclude=["emb.*"]
        ),
        "w is float64": lambda: sr.select_parameters(Scalars("w", dtype=torch.float64)),
        "w is trainable and has no elements": lambda: sr.select_parameters(Vectors({"w": (0, 4), "v": (2,)})),
        "x and y are different tensors on the same stretch of memory": lambda: sr.select_parameters(shared),
        "float16": lambda: make_zero2(comm, Scalars("w", dtype=torch.float16)),
        "lbfgs needs a closure": lambda: make_zero2(comm, _vectors(), torch.optim.LBFGS),
    }


def test_what_cannot_be_selected_or_cut_is_refused_by_name() -> None:
    for words, build in _refused_locally().items():
        with pytest.raises(sr.errors.UsageError) as caught:
            build()
        assert words in str(caught.value)


def test_frozen_parameters_without_elements_or_of_another_dtype_are_fine() -> None:
    model = Vectors({"w": (5,)})
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4), requires_grad=False))
    model.register_parameter("ids", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("wide", nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False))
    zero2 = make_zero2(sr.Communicator.single(), model)
    assert zero2.trainable_parameters == ["w"]
    assert sorted(zero2.parameters) == ["empty", "ids", "w", "wide"]
