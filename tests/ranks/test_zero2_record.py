"""Records: what goes out comes in bit for bit, and what does not fit is refused by all before anything is replaced."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardrun as sr
from tests.support.models import MixedNet, OddNet, OddShapes, TiedNet, Vectors, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import gather, make_zero2, photograph, same_bits, told

_SGD, _ADAM, _ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
_KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": _ADAMW, "lr": 0.01, "rules": {"*.bias": {"weight_decay": 0.0}}},
    "adamw, not fused": {"optimizer": _ADAMW, "lr": 0.01, "fused": False, "bucket_bytes": 1},
    "amsgrad": {"optimizer": _ADAM, "lr": 0.01, "amsgrad": True},
    "sgd": {"optimizer": _SGD, "lr": 0.05},
    "sgd momentum": {"optimizer": _SGD, "lr": 0.05, "momentum": 0.9, "nesterov": True, "bucket_bytes": 1},
    "no masters": {"optimizer": _ADAMW, "lr": 0.01, "masters": False},
}


def _round_trips(comm: sr.Communicator) -> dict[str, list[str]]:
    """Three steps, a record, two more; and: the same model and record in a fresh session, two more."""
    return {name: _round_trip(comm, dict(options)) for name, options in _KINDS.items()}


def _round_trip(comm: sr.Communicator, options: dict[str, Any]) -> list[str]:
    model = seeded(1, MixedNet)
    straight = make_zero2(comm, model, **options)
    for step in range(3):
        _train(straight, step, only_head=step == 0)
    record = pickle.loads(pickle.dumps(straight.to_record()))
    weights = copy.deepcopy(model.state_dict())
    resumed_model = seeded(99, MixedNet)
    resumed = make_zero2(comm, resumed_model, **options)
    _train(resumed, 77, only_head=False)  # whatever state it had is replaced
    resumed_model.load_state_dict(weights)
    resumed.load_record(record)
    problems = [f"after load: {line}" for line in photograph(straight).differences(photograph(resumed))]
    for step in range(3, 5):
        _train(straight, step, only_head=False)
        _train(resumed, step, only_head=False)
    return problems + [f"later: {line}" for line in photograph(straight).differences(photograph(resumed))]


def _train(zero2: sr.SelectedZero2, step: int, *, only_head: bool) -> None:
    model = zero2.session.model
    torch.autograd.backward(loss_sum(model, token_batch(10 * step + zero2.rank, 3)))
    if only_head:  # so that some parameters have state and others have none yet
        for path, parameter in model.named_parameters():
            parameter.grad = parameter.grad if path.startswith("head.") else None
    zero2.step(local_weight=3, missing="zero", max_grad_norm=0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loaded_record_goes_on_with_the_bits_of_never_having_stopped(world_size: int) -> None:
    for problems in run_ranks(world_size, _round_trips):
        assert problems == {name: [] for name in _KINDS}


# ---- what a record says -------------------------------------------------------------------------------------------


def _tell_all(comm: sr.Communicator) -> list[Any]:
    """C067's sizes and more in small buckets: every rank's record, and the live values it was made from."""
    torch.manual_seed(comm.rank)
    model = Vectors({"a": (7,), "b": (5,), "c": (3,), "d": (1,), "e": (11,), "f": (600,)})
    zero2 = make_zero2(comm, model, bucket_bytes=64)
    for _ in range(2):
        push(model, {path: torch.randn(p.shape) for path, p in model.named_parameters()})
        zero2.step(local_weight=1)
    record = zero2.to_record()
    kept = {name: tensor.clone() for name, tensor in record.tensors.items()}
    push(model, {path: torch.ones(p.shape) for path, p in model.named_parameters()})
    zero2.step(local_weight=1)
    assert all(same_bits(kept[name], tensor) for name, tensor in record.tensors.items()), "a record is a copy"
    return gather(comm, (record.meta, record.tensors))


def test_a_record_holds_the_valid_elements_of_its_fragments_and_says_what_it_is() -> None:
    (records, *_) = run_ranks(2, _tell_all)
    sizes = {"a": 7, "b": 5, "c": 3, "d": 1, "e": 11, "f": 600}
    for rank, (meta, tensors) in enumerate(records):
        assert (meta["rank"], meta["world_size"], meta["step_count"]) == (rank, 2, 2)
        assert [spec["path"] for spec in meta["contract"]] == sorted(sizes)
        assert meta["optimizer"]["name"] == "adamw"
        for name, tensor in tensors.items():
            path, _, key = name.rpartition("/")
            start, stop = meta["fragments"][path]
            assert tensor.shape == (() if key == "step" else (stop - start,))
            if key == "step":
                assert tensor.item() == 2.0
            elif key == "exp_avg_sq":
                assert bool((tensor > 0).all()), "no padding inside"
    for path, numel in sizes.items():
        held = [tensors[f"{path}/exp_avg"].numel() for _, tensors in records if f"{path}/exp_avg" in tensors]
        assert sum(held) == numel


def _tied(comm: sr.Communicator) -> list[Any]:
    zero2 = make_zero2(comm, seeded(0, TiedNet))
    return gather(comm, sorted(zero2.to_record().tensors))


def test_a_tied_parameter_has_one_record() -> None:
    (names, *_) = run_ranks(2, _tied)
    together = sorted({name for own in names for name in own if name.endswith("/exp_avg")})
    assert together == ["emb.weight/exp_avg", "mid.bias/exp_avg", "mid.weight/exp_avg"]


# ---- what does not fit --------------------------------------------------------------------------------------------

Spoil = Callable[[sr.Zero2Record], sr.Zero2Record]


def _with_meta(**changes: Any) -> Spoil:
    return lambda record: dataclasses.replace(record, meta={**record.meta, **changes})


def _without_meta(key: str) -> Spoil:
    return lambda record: dataclasses.replace(record, meta={k: v for k, v in record.meta.items() if k != key})


def _with_tensor(change: Callable[[torch.Tensor], torch.Tensor], ending: str) -> Spoil:
    def spoil(record: sr.Zero2Record) -> sr.Zero2Record:
        name = sorted(name for name in record.tensors if name.endswith(ending))[0]
        return dataclasses.replace(record, tensors={**record.tensors, name: change(record.tensors[name])})

    return spoil


def _without_tensor(ending: str) -> Spoil:
    def spoil(record: sr.Zero2Record) -> sr.Zero2Record:
        name = sorted(name for name in record.tensors if name.endswith(ending))[0]
        return dataclasses.replace(record, tensors={k: v for k, v in record.tensors.items() if k != name})

    return spoil


def _edited_contract(**changes: Any) -> Spoil:
    def spoil(record: sr.Zero2Record) -> sr.Zero2Record:
        contract = [{**spec, **changes} if spec["path"] == "up.weight" else spec for spec in record.meta["contract"]]
        return dataclasses.replace(record, meta={**record.meta, "contract": contract})

    return spoil


# name -> (how rank 1's record is spoilt, words that every rank's message must hold)
_MISFITS: dict[str, tuple[Spoil, list[str]]] = {
    "version": (_with_meta(version=99), ["version", "99"]),
    "group": (_with_meta(group="experts"), ["group", "experts", "default"]),
    "world size": (_with_meta(world_size=4), ["world size", "4"]),
    "rank": (_with_meta(rank=0), ["rank 0", "rank 1"]),
    "shape": (_edited_contract(shape=[7, 15]), ["up.weight", "[7, 15]", "[15, 7]"]),
    "dtype": (_edited_contract(dtype="float16"), ["up.weight", "float16", "bfloat16"]),
    "frozen": (_edited_contract(trainable=False), ["up.weight", "frozen", "trainable"]),
    "path": (_edited_contract(path="upper.weight"), ["up.weight", "upper.weight"]),
    "alias": (_edited_contract(alias=0), ["up.weight", "tied"]),
    "optimizer": (_with_meta(optimizer={"name": "sgd"}), ["optimizer", "sgd"]),
    "numerics": (_with_meta(numerics={"seam": "other"}), ["seam", "other"]),
    "fragments": (_with_meta(fragments={}), ["fragments"]),
    "no contract": (_without_meta("contract"), ["up.weight"]),
    "no step count": (_without_meta("step_count"), ["step_count"]),
    "step count not a number": (_with_meta(step_count="three"), ["step_count", "three"]),
    "step count of another step": (_with_meta(step_count=7), ["step", "7"]),
    "missing tensor": (_without_tensor("/exp_avg_sq"), ["/exp_avg_sq"]),
    "missing master": (_without_tensor("/master"), ["/master"]),
    "missing step": (_without_tensor("/step"), ["/step"]),
    "extra tensor": (
        lambda r: dataclasses.replace(r, tensors={**r.tensors, "up.weight/nonsense": torch.zeros(3)}),
        ["up.weight/nonsense"],
    ),
    "shorter tensor": (_with_tensor(lambda t: t[:-1], "/exp_avg"), ["/exp_avg"]),
    "2-D tensor": (_with_tensor(lambda t: t[None], "/exp_avg"), ["/exp_avg"]),
    "tensor dtype": (_with_tensor(lambda t: t.double(), "/exp_avg"), ["/exp_avg", "float64"]),
    "master dtype": (_with_tensor(lambda t: t.bfloat16(), "/master"), ["/master", "bfloat16"]),
    "broken contract": (_with_meta(contract=[{"path": "up.weight"}]), ["contract"]),
    "contract of another kind": (_with_meta(contract="up.weight"), ["contract"]),
}


def _refusals(comm: sr.Communicator) -> dict[str, tuple[str, str, list[str]]]:
    """Load one misfit after another, rank 1's record spoilt only; then the good record."""
    model = seeded(1, MixedNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    for step in range(2):
        _train(zero2, step, only_head=False)
    good = zero2.to_record()
    _train(zero2, 2, only_head=False)
    found = {}
    for name, (spoil, _) in _MISFITS.items():
        before = photograph(zero2)
        record = copy.deepcopy(good)
        if comm.rank == 1:
            record = spoil(record)
        kind, message = "nothing", ""
        try:
            zero2.load_record(record)
        except Exception as error:
            kind, message = told(error)
        found[name] = (kind, message, before.differences(photograph(zero2)))
        if comm.is_poisoned:
            break
    if not comm.is_poisoned:
        zero2.load_record(good)
        assert zero2.step_count == 2
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str, list[str]]]]:
    """One start of the ranks serves all misfits."""
    return run_ranks(2, _refusals, comm_timeout_s=10)


@pytest.mark.parametrize("name", _MISFITS)
def test_a_record_that_does_not_fit_is_refused_by_all_before_anything_is_replaced(
    name: str, refusals: list[dict[str, tuple[str, str, list[str]]]]
) -> None:
    for found in refusals:
        kind, message, changed = found[name]
        assert changed == []
        assert kind in ("ContractError", "CheckpointError"), (kind, message)
        assert "rank 1" in message
        assert [word for word in _MISFITS[name][1] if word not in message] == [], message


def _swapped(comm: sr.Communicator) -> list[tuple[str, str]]:
    """Records of the other rank; of a session over another optimizer, another selection; of other model parts."""
    zero2 = make_zero2(comm, seeded(1, OddNet), lr=0.01)
    record = zero2.to_record()
    others = {
        "swapped": gather(comm, record)[1 - comm.rank],
        "sgd": make_zero2(comm, seeded(1, OddNet), _SGD, lr=0.01).to_record(),
        "subset": make_zero2(comm, seeded(1, OddNet), include=["head.*"], lr=0.01).to_record(),
        "decay": make_zero2(comm, seeded(1, OddNet), lr=0.01, weight_decay=0.3).to_record(),
        "groups": make_zero2(comm, seeded(1, OddNet), rules={"*.bias": {"weight_decay": 0.0}}, lr=0.01).to_record(),
        "buckets": make_zero2(comm, seeded(1, OddNet), bucket_bytes=1, lr=0.01).to_record(),
        "odd": make_zero2(comm, seeded(1, OddShapes), lr=0.01).to_record(),
    }
    found = []
    before = photograph(zero2)
    for name, other in others.items():
        try:
            zero2.load_record(other)
        except sr.errors.ShardrunError as error:
            found.append((name, type(error).__name__))
    assert not before.differences(photograph(zero2))
    return found


def test_records_of_another_session_are_refused() -> None:
    names = ["swapped", "sgd", "subset", "decay", "groups", "buckets", "odd"]
    for found in run_ranks(2, _swapped):
        assert [name for name, _ in found] == names
        assert {kind for _, kind in found} <= {"ContractError", "CheckpointError"}


def _mixed_steps(comm: sr.Communicator) -> tuple[str, list[str]]:
    """Rank 0 brings the record of step 1, rank 1 that of step 2; both fit by themselves."""
    model = seeded(1, OddNet)
    zero2 = make_zero2(comm, model, lr=0.01)
    records = []
    for step in range(3):
        _train(zero2, step, only_head=False)
        records.append(zero2.to_record())
    before = photograph(zero2)
    try:
        zero2.load_record(records[comm.rank])
    except sr.errors.ShardrunError as error:
        return str(error), before.differences(photograph(zero2))
    return "nothing", before.differences(photograph(zero2))


def test_records_of_different_steps_do_not_make_one_state() -> None:
    for message, changed in run_ranks(2, _mixed_steps):
        assert "step" in message
        assert message != "nothing"
        assert changed == []


def _split_holders(comm: sr.Communicator) -> tuple[str, list[str]]:
    """Both ranks hold a part of w; rank 1's record says that its part was stepped once more."""
    model = Vectors({"w": (600,)})
    zero2 = make_zero2(comm, model, lr=0.01)
    push(model, {"w": torch.ones(600)})
    zero2.step(local_weight=1)
    record = zero2.to_record()
    assert record.tensors["w/step"].item() == 1.0
    if comm.rank == 1:
        record.tensors["w/step"] += 1
    before = photograph(zero2)
    try:
        zero2.load_record(record)
    except sr.errors.ShardrunError as error:
        return str(error), before.differences(photograph(zero2))
    return "nothing", before.differences(photograph(zero2))


def test_holders_of_one_parameter_must_agree_on_its_step() -> None:
    for message, changed in run_ranks(2, _split_holders):
        assert "w" in message
        assert "step" in message
        assert changed == []


def _lost_momentum(comm: sr.Communicator, listed: bool) -> tuple[str, list[str]]:
    """Both ranks hold a part of w; rank 1's record has lost the momentum, which a first update makes.

    `listed`: whether the records list such state, as those of earlier days do not.
    """
    model = Vectors({"w": (600,)})
    zero2 = make_zero2(comm, model, _SGD, lr=0.01, momentum=0.9)
    push(model, {"w": torch.ones(600)})
    zero2.step(local_weight=1)
    record = zero2.to_record()
    if not listed:
        del record.meta["state"]
    if comm.rank == 1:
        del record.tensors["w/momentum_buffer"]
    before = photograph(zero2)
    try:
        zero2.load_record(record)
    except sr.errors.ShardrunError as error:
        return str(error), before.differences(photograph(zero2))
    return "nothing", before.differences(photograph(zero2))


@pytest.mark.parametrize(
    ("listed", "line"),
    [
        (True, "rank 1: record of default does not fit: w/momentum_buffer: listed by the record, not in it"),
        (False, "w: its holders have state of different kinds: rank 0 momentum_buffer, rank 1 none"),
    ],
)
def test_holders_of_one_parameter_must_hold_the_same_kinds_of_state(listed: bool, line: str) -> None:
    for message, changed in run_ranks(2, _lost_momentum, listed):
        assert line in message
        assert changed == []
