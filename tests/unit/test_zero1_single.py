"""SelectedZero1 in a world of one: who steps what at which rate, schedulers, refusals, a user's own optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import shardrun as sr
from shardrun.errors import StepFailed, StepRefused, UsageError
from tests.support.models import OddNet, TiedNet, Vectors, loss_sum, push, seeded, token_batch
from tests.support.sessions import make_zero1, make_zero2, same_bits, snapshot_zero1

_MUON, _ADAMW, _SGD = torch.optim.Muon, torch.optim.AdamW, torch.optim.SGD
_MATRICES = ["up.weight", "down.weight", "head.weight"]
_VECTORS = ["up.bias", "norm.weight", "norm.bias", "down.bias", "head.bias"]


def _backward(model: nn.Module, step: int) -> None:
    torch.autograd.backward(loss_sum(model, token_batch(step, 4)))


def _differences(one: nn.Module, other: nn.Module) -> list[str]:
    named = zip(one.named_parameters(), other.parameters(), strict=True)
    return [path for (path, ours), theirs in named if not same_bits(ours, theirs)]


def _moved(model: nn.Module, path: str, start: float = 0.0) -> float:
    """How far the equal elements of a parameter have come."""
    (value,) = set(model.get_parameter(path).flatten().tolist())
    return float(value) - start


# ---- who steps what -----------------------------------------------------------------------------------------------


def test_matrices_go_to_the_first_optimizer_and_what_it_does_not_take_to_the_rest() -> None:
    comm = sr.Communicator.single()
    assert make_zero1(comm, OddNet(), lr=0.02).split == {"muon": _MATRICES, "adamw": _VECTORS}
    assert make_zero1(comm, OddNet(), rest=_SGD, lr=0.02).split == {"muon": _MATRICES, "sgd": _VECTORS}
    everything = [path for path, _ in OddNet().named_parameters()]
    whole = make_zero1(comm, OddNet(), _ADAMW)
    assert whole.split == {"adamw": everything}, "the optimizer and the rest may be the same one"
    assert len(whole.optimizers) == 1
    assert make_zero1(comm, OddNet(), exclude=["*.weight"]).split == {
        "muon": [],
        "adamw": [path for path in _VECTORS if path != "norm.weight"],
    }
    both = make_zero1(comm, OddNet())
    assert [type(one) for one in both.optimizers] == [_MUON, _ADAMW]
    assert both.optimizer is both.optimizers[0]


def test_a_tied_matrix_is_owned_once_under_any_of_its_names() -> None:
    model = TiedNet()
    owners = {"head.weight": 0, "mid.weight": 0, "mid.bias": 0}
    zero1 = make_zero1(sr.Communicator.single(), model, owners=owners)
    assert zero1.split == {"muon": ["emb.weight", "mid.weight"], "adamw": ["mid.bias"]}
    assert zero1.owners == {"emb.weight": 0, "mid.weight": 0, "mid.bias": 0}
    torch.autograd.backward(model(torch.arange(5)).sum())
    zero1.step(local_weight=5)
    assert model.emb.weight is model.head.weight
    assert "emb.weight/momentum_buffer" in zero1.to_record().tensors


def test_matrices_may_be_left_to_the_rest_by_any_of_their_names() -> None:
    model = seeded(3, TiedNet)
    twin = copy.deepcopy(model)
    zero1 = make_zero1(
        sr.Communicator.single(), model, torch.optim.Muon, lr=0.02, rest_options={"lr": 0.1}, rest_paths=["head.weight"]
    )
    assert zero1.split == {"muon": ["mid.weight"], "adamw": ["emb.weight", "mid.bias"]}
    muon = torch.optim.Muon([twin.get_parameter("mid.weight")], lr=0.02)
    adamw = torch.optim.AdamW([twin.get_parameter("emb.weight"), twin.get_parameter("mid.bias")], lr=0.1, fused=True)
    for one in (model, twin):
        torch.autograd.backward(F.cross_entropy(one(torch.arange(5)), torch.arange(5), reduction="sum"))
    zero1.step(local_weight=1)
    muon.step()  # type: ignore[no-untyped-call]
    adamw.step()
    assert _differences(model, twin) == []
    with pytest.raises(UsageError, match=r"rest_paths: nowhere .1 in all. is no selected trainable parameter"):
        make_zero1(sr.Communicator.single(), seeded(3, TiedNet), torch.optim.Muon, rest_paths=["nowhere"])


def test_an_empty_selection_steps_nothing() -> None:
    model = seeded(1, OddNet)
    zero1 = make_zero1(sr.Communicator.single(), model, include=[])
    _backward(model, 0)
    result = zero1.step(local_weight=3, max_grad_norm=1.0)
    zero1.load_record(zero1.to_record())
    assert (result.global_weight, len(result.remaining_gradients), zero1.owners) == (3, 8, {})


def _sockets() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return sorted(link for link in links if link.startswith("socket:"))


def test_a_world_of_one_opens_no_socket_and_no_process_group() -> None:
    before = _sockets()
    model = seeded(1, OddNet)
    zero1 = make_zero1(sr.Communicator.open(sr.CommunicatorConfig(rank=0, world_size=1)), model)
    _backward(model, 0)
    zero1.step(local_weight=4, max_grad_norm=1.0)
    zero1.load_record(zero1.to_record())
    assert not torch.distributed.is_initialized()
    assert _sockets() == before


# ---- rates --------------------------------------------------------------------------------------------------------


def test_a_given_rate_is_the_first_optimizers_and_the_rest_keeps_its_proportion() -> None:
    """SGD for all, so that a parameter moves by its own rate: the matrix is declared, to be taken by the first."""
    matrix = sr.Declared(_SGD, "matrix", "plain", takes=lambda shape: len(shape) == 2)
    model = Vectors({"m": (2, 3), "m_half": (3, 2), "v": (4,), "v_half": (5,)})
    zero1 = make_zero1(
        sr.Communicator.single(),
        model,
        matrix,
        rest=_SGD,
        lr=0.5,
        rest_options={"lr": 4.0},
        rules={"*_half": {"lr_scale": 0.5}},
    )
    for lr, moved in ((None, 0.5), (0.25, 0.25), (0.0, 0.0)):
        start = {path: _moved(model, path) for path in ("m", "m_half", "v", "v_half")}
        push(model, {path: -torch.ones(p.shape) for path, p in model.named_parameters()})
        zero1.step(local_weight=1, lr=lr)
        for path, factor in {"m": 1.0, "m_half": 0.5, "v": 8.0, "v_half": 4.0}.items():
            assert _moved(model, path, start[path]) == moved * factor, (lr, path)
    rates = [group["lr"] for optimizer in zero1.optimizers for group in optimizer.param_groups]
    assert rates == [0.5, 0.25, 4.0, 2.0], "a rate of one step is that step's alone"


def test_the_rest_keeps_its_proportion_where_the_first_optimizer_has_nothing() -> None:
    model = Vectors({"v": (4,)})
    zero1 = make_zero1(sr.Communicator.single(), model, rest=_SGD, lr=0.5, rest_options={"lr": 4.0})
    assert zero1.split == {"muon": [], "sgd": ["v"]}
    for lr, moved in ((None, 4.0), (0.25, 2.0)):
        start = _moved(model, "v")
        push(model, {"v": -torch.ones(4)})
        zero1.step(local_weight=1, lr=lr)
        assert _moved(model, "v", start) == moved


def test_schedulers_of_torch_work_on_both_optimizers() -> None:
    model = seeded(3, OddNet)
    twin = copy.deepcopy(model)
    zero1 = make_zero1(sr.Communicator.single(), model, lr=0.02, weight_decay=0.3, rest_options={"lr": 0.004})
    named = dict(twin.named_parameters())
    plain = [
        _MUON([named[path] for path in _MATRICES], lr=0.02, weight_decay=0.3),
        _ADAMW([named[path] for path in _VECTORS], lr=0.004, fused=True),
    ]
    schedules: list[Callable[[int], float]] = [lambda k: 1.0 - k / 10, lambda k: 0.5**k]
    pairs = list(zip([zero1.optimizers, plain], [schedules, schedules], strict=True))
    schedulers = [LambdaLR(one, rule) for side, rules in pairs for one, rule in zip(side, rules, strict=True)]
    for step in range(6):
        for one in (model, twin):
            _backward(one, step)
        zero1.step(local_weight=4)
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:
            for group in (zero1.optimizer.param_groups[0], plain[0].param_groups[0]):
                group["momentum"] = 0.5
        for scheduler in schedulers:
            scheduler.step()
        assert _differences(model, twin) == [], step
    assert zero1.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * 0.4)


def test_an_option_group_may_have_options_that_only_one_of_the_optimizers_knows() -> None:
    model = seeded(3, OddNet)
    twin = copy.deepcopy(model)
    rules: dict[str, dict[str, Any]] = {
        "*.bias": {"betas": (0.5, 0.6), "weight_decay": 0.0},
        "up.weight": {"nesterov": False},
    }
    zero1 = make_zero1(sr.Communicator.single(), model, rules=rules, lr=0.02, rest_options={"lr": 0.01})
    named = dict(twin.named_parameters())
    biases = [path for path in _VECTORS if path.endswith("bias")]
    groups: list[list[dict[str, Any]]] = [
        [{"params": [named["up.weight"]], "nesterov": False}, {"params": [named[path] for path in _MATRICES[1:]]}],
        [{"params": [named[path] for path in biases], **rules["*.bias"]}, {"params": [named["norm.weight"]]}],
    ]
    plain = [_MUON(groups[0], lr=0.02), _ADAMW(groups[1], lr=0.01, fused=True)]
    for step in range(4):
        for one in (model, twin):
            _backward(one, step)
        zero1.step(local_weight=1)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
        assert _differences(model, twin) == [], step
    with pytest.raises(UsageError, match="betas"):
        make_zero1(sr.Communicator.single(), OddNet(), rules={"up.*": {"betas": (0.5, 0.6)}})


# ---- refused ------------------------------------------------------------------------------------------------------


def _misuses() -> dict[str, Callable[[], object]]:
    comm = sr.Communicator.single()
    made: dict[str, Callable[[], object]] = {
        r"muon updates whole matrices .* use SelectedZero1": lambda: make_zero2(comm, OddNet(), _MUON),
        r"lbfgs needs a closure": lambda: make_zero1(comm, OddNet(), torch.optim.LBFGS),
        r"sparseadam needs sparse gradients": lambda: make_zero1(comm, OddNet(), torch.optim.SparseAdam),
        r"(?i)adafactor is not on the list .*declared\(adafactor, kind='matrix'": lambda: make_zero1(
            comm, OddNet(), torch.optim.Adafactor
        ),
        r"lbfgs": lambda: make_zero1(comm, OddNet(), rest=torch.optim.LBFGS),
        r"up\.bias \(15,\): neither muon nor muon takes it": lambda: make_zero1(
            comm, OddNet(), include=["up.bias"], rest=_MUON
        ),
        r"momentun": lambda: make_zero1(comm, OddNet(), momentun=0.9),
        r"adamw.*learning rate": lambda: make_zero1(comm, OddNet(), rest_options={"lr": -1.0}),
        r"fused": lambda: make_zero1(comm, OddNet(), fused=True),
        r"owners: up\.bias is given to rank True": lambda: make_zero1(
            comm, OddNet(), include=["up.bias"], owners={"up.bias": True}
        ),
        r"float16": lambda: make_zero1(comm, Vectors({"a": (2, 2)}, dtype=torch.float16)),
    }
    return made


@pytest.mark.parametrize("words", _misuses())
def test_what_cannot_be_meant_is_refused_at_setup_with_the_way_out(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _misuses()[words]()


def test_a_parameter_that_was_written_to_is_refused_until_the_masters_are_refreshed() -> None:
    model = Vectors({"a": (2, 3)}, value=1.0, dtype=torch.bfloat16)
    zero1 = make_zero1(sr.Communicator.single(), model, _SGD, lr=1.0)
    with torch.no_grad():
        model.get_parameter("a").fill_(8.0)
    push(model, {"a": torch.ones(2, 3)})
    with pytest.raises(StepRefused, match="a: its value is not that of its FP32 master"):
        zero1.step(local_weight=1)
    zero1.refresh_masters()
    zero1.step(local_weight=1)
    assert _moved(model, "a") == 7.0


# ---- a user's own -------------------------------------------------------------------------------------------------


class Sign(torch.optim.Optimizer):
    """An elementwise optimizer of a user's. `FAULT` makes it raise when it has changed the first tensor already."""

    FAULT = False

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["sum"] = parameter.grad.abs() + state.get("sum", torch.zeros_like(parameter))
                state["count"] = state.get("count", 0) + 1
                update: Tensor = parameter.grad.sign() * state["sum"].sqrt() + group["decay"] * parameter
                parameter.sub_(update, alpha=group["lr"])
                if Sign.FAULT:
                    raise ZeroDivisionError("a fault in user code")


@pytest.mark.parametrize("kind", ["elementwise", "matrix"])
def test_a_declared_optimizer_is_stepped_as_it_is_and_may_raise(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = sr.Declared(Sign, kind, "sign")
    model, twin = seeded(3, OddNet), seeded(3, OddNet)
    comm = sr.Communicator.single()
    zero1 = make_zero1(comm, model, declared, lr=0.05, rules={"*.bias": {"decay": 0.2}})
    biases = [p for path, p in twin.named_parameters() if path.endswith("bias")]
    weights = [p for path, p in twin.named_parameters() if not path.endswith("bias")]
    plain = Sign([{"params": weights}, {"params": biases, "decay": 0.2}], lr=0.05)
    for step in range(5):
        for one in (model, twin):
            _backward(one, step)
        if step in (0, 2):  # before there is state, and when there is
            before = snapshot_zero1(zero1)
            monkeypatch.setattr(Sign, "FAULT", True)
            with pytest.raises(StepFailed, match="phase propose: ZeroDivisionError: a fault in user code") as caught:
                zero1.step(local_weight=2)
            monkeypatch.setattr(Sign, "FAULT", False)
            assert caught.value.gradients_kept
            assert before.differences(snapshot_zero1(zero1)) == []
            assert not comm.is_poisoned, "a world of one can try again"
        zero1.step(local_weight=2)
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        plain.step()
        plain.zero_grad()
        assert _differences(model, twin) == [], step
    record = zero1.to_record()
    assert record.tensors["up.bias/count:int"].item() == 5
    fresh = make_zero1(comm, seeded(3, OddNet), declared, lr=0.05, rules={"*.bias": {"decay": 0.2}})
    fresh.session.model.load_state_dict(model.state_dict())
    fresh.load_record(record)
    assert snapshot_zero1(fresh).differences(snapshot_zero1(zero1)) == []
