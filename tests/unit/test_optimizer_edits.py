"""What a user does to `.optimizer` between two steps: what works on, and what is told before the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import shardrun as sr
from shardrun.errors import ContractError, StepRefused, UsageError
from shardrun.optim.elementwise import SliceOptimizer
from shardrun.optim.kinds import ELEMENTWISE, Declared, any_kind
from shardrun.optim.matrix import TensorOptimizer, WholeTensor
from shardrun.optim.stepper import Stepper
from shardrun.step.owned import OwnedOptimizer
from tests.support.models import Vectors, push
from tests.support.optim_cases import CASE_IDS, CASES, NUMELS, Ranks, drawn, present_in
from tests.support.sessions import make_zero1, make_zero2, same_bits

_SGD, _ADAM, _ADAMW, _MUON = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon
_SHAPES = {"a": (600,), "b": (8, 8)}
_ENGINES = ("zero2", "zero1")


def _model() -> Vectors:
    return Vectors(_SHAPES, value=1.0)


def _session(engine: str, model: Vectors, optimizer: Any, **options: Any) -> sr.SelectedZero1 | sr.SelectedZero2:
    make = make_zero2 if engine == "zero2" else make_zero1
    return make(sr.Communicator.single(), model, optimizer, **options)


def _gradients(model: Vectors, size: float) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {path: torch.linspace(-1, 1, p.numel()).view(p.shape) * size for path, p in named}


def _step(session: sr.SelectedZero1 | sr.SelectedZero2, model: Vectors, size: float = 1.0) -> None:
    push(model, _gradients(model, size))
    session.step(local_weight=1)


# ---- state --------------------------------------------------------------------------------------------------------


def _load_own_copy(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _swap_one(optimizer: torch.optim.Optimizer) -> None:
    (state,) = list(optimizer.state.values())[:1]
    state["exp_avg"] = state["exp_avg"].clone()


def _add_a_key(optimizer: torch.optim.Optimizer) -> None:
    list(optimizer.state.values())[-1]["mine"] = torch.zeros(3)


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("edit", [_load_own_copy, _clear, _swap_one, _add_a_key])
def test_state_that_is_not_the_session_s_own_is_refused_until_a_record_is_loaded(
    engine: str, edit: Callable[[torch.optim.Optimizer], None]
) -> None:
    model, twin = _model(), _model()
    session, straight = _session(engine, model, _ADAMW, lr=0.1), _session(engine, twin, _ADAMW, lr=0.1)
    for size in (1.0, -2.0):
        _step(session, model, size)
        _step(straight, twin, size)
    record = session.to_record()
    edit(session.optimizer)
    before = [p.clone() for p in model.parameters()]
    (problem,) = session.stepper.problems()
    assert "adamw: the state of " in problem
    assert "load_record" in problem
    with pytest.raises(StepRefused, match="load_record"):
        _step(session, model)
    assert all(map(same_bits, before, model.parameters()))
    with pytest.raises(UsageError, match="load_record"):
        session.to_record()
    session.discard_gradients()
    session.load_record(record)
    _step(session, model, 3.0)
    _step(straight, twin, 3.0)
    assert all(map(same_bits, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("engine", _ENGINES)
def test_loading_a_state_dict_of_the_very_same_tensors_changes_nothing(engine: str) -> None:
    model, twin = _model(), _model()
    session, straight = _session(engine, model, _ADAMW, lr=0.1), _session(engine, twin, _ADAMW, lr=0.1)
    for size in (1.0, -2.0, 3.0):
        session.optimizer.load_state_dict(session.optimizer.state_dict())
        _step(session, model, size)
        _step(straight, twin, size)
    assert all(map(same_bits, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_steps_by_themselves_are_no_problem(name: str, options: dict[str, Any], world_size: int) -> None:
    """Whatever state torch makes, keeps or replaces: no optimizer's own step is taken for a user's doing."""
    shapes = {path: (numel,) for path, numel in NUMELS.items()}
    ranks = Ranks(ELEMENTWISE[name], options, drawn(shapes, 1), world_size)
    start = drawn(_SHAPES, 2)
    whole = [WholeTensor(path, 0, leaf, torch.ones_like(leaf), None) for path, leaf in start.items()]
    owner = TensorOptimizer(ELEMENTWISE[name], options, (), whole)
    steppers: list[Stepper] = [*ranks.steppers, owner]
    for step in range(4):
        here = {"a": step != 2, "b": step > 0}
        ranks.propose(drawn(shapes, 100 + step), present_in(step), 0.01)
        ranks.commit(present_in(step), 0.01)
        owner.propose(here, [0.01])
        owner.commit(here, [0.01])
        if step == 2:
            for stepper in steppers:
                stepper.load_state_tensors(stepper.state_tensors())
        assert [stepper.problems() for stepper in steppers] == [[]] * (world_size + 1)


# ---- param groups and leaves ----------------------------------------------------------------------------------------


def _add_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [torch.zeros(5)]})


def _drop_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.pop()


def _drop_leaf(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def _swap_leaf(optimizer: torch.optim.Optimizer) -> None:
    leaves = optimizer.param_groups[0]["params"]
    leaves[0] = leaves[0].clone()


def _no_params(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"]


def _no_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0] = None  # type: ignore[call-overload]


def _no_groups(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = None  # type: ignore[assignment]


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("edit", [_add_group, _drop_group, _drop_leaf, _swap_leaf, _no_params, _no_group, _no_groups])
def test_other_groups_or_leaves_than_at_set_up_are_refused(
    engine: str, edit: Callable[[torch.optim.Optimizer], None]
) -> None:
    model = _model()
    session = _session(engine, model, _SGD, lr=0.1)
    edit(session.optimizer)
    assert session.stepper.problems()
    with pytest.raises(StepRefused, match=r"param group|params|optimizer cannot be read any more"):
        _step(session, model)
    assert all(bool((p == 1.0).all()) for p in model.parameters())


# ---- options --------------------------------------------------------------------------------------------------------

_REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (_ADAMW, {}, {"amsgrad": True}, "max_exp_avg_sq"),
    (_SGD, {}, {"momentum": 0.9}, "momentum_buffer"),
    (torch.optim.RMSprop, {}, {"centered": True}, "grad_avg"),
    (_ADAMW, {}, {"betas": (1.5, 0.9)}, "beta"),
    (_ADAMW, {}, {"betas": (0.9,)}, "betas"),
    (_ADAMW, {}, {"betas": "no"}, "betas"),
    (_ADAMW, {}, {"eps": -1.0}, "eps"),
    (_ADAMW, {}, {"weight_decay": "0.1"}, "weight_decay"),
    (_SGD, {}, {"nesterov": True}, "[Nn]esterov"),
    (_SGD, {"momentum": 0.9}, {"nesterov": True, "dampening": 0.5}, "[Nn]esterov"),
    (_SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}, "[Nn]esterov"),
    (_ADAMW, {"fused": False}, {"fused": True}, "fused"),
    (_ADAMW, {"fused": False}, {"foreach": True}, "foreach"),
    (_ADAMW, {}, {"capturable": True}, "capturable"),
    (_SGD, {}, {"lr": "fast"}, "learning rate"),
    (_SGD, {}, {"lr": None}, "learning rate"),
    (_SGD, {}, {"lr": -1.0}, "learning rate"),
]


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize(("optimizer", "options", "edit", "word"), _REFUSED)
def test_an_option_that_cannot_be_is_refused_and_works_again_once_it_is_set_back(
    engine: str, optimizer: Any, options: dict[str, Any], edit: dict[str, Any], word: str
) -> None:
    model = _model()
    session = _session(engine, model, optimizer, **{"lr": 0.1, **options})
    _step(session, model)
    before = [p.clone() for p in model.parameters()]
    group = session.optimizer.param_groups[0]
    kept = {key: group[key] for key in edit}
    group.update(edit)
    for _ in range(2):
        with pytest.raises(StepRefused, match=word):
            _step(session, model)
        session.discard_gradients()
    assert all(map(same_bits, before, model.parameters()))
    group.update(kept)
    _step(session, model)
    assert not any(map(same_bits, before, model.parameters()))


def test_an_option_that_is_gone_is_refused() -> None:
    session = _session("zero2", _model(), _ADAMW, lr=0.1)
    del session.optimizer.param_groups[0]["eps"]
    assert session.stepper.problems() == ["adamw: param group 0 of optimizer has no eps any more; put it back"]


def test_muon_s_options_are_tried_out_on_a_matrix() -> None:
    model = _model()
    session = _session("zero1", model, _MUON, lr=0.1)
    session.optimizer.param_groups[0].update(momentum=0.5, ns_steps=3, weight_decay=0.0)
    assert session.stepper.problems() == []
    _step(session, model)
    session.optimizer.param_groups[0].update(adjust_lr_fn="nothing like it")
    assert "adjust_lr_fn" in session.stepper.problems()[0]
    assert isinstance(session, sr.SelectedZero1)
    session.optimizers[1].param_groups[0]["betas"] = (2.0, 0.9)
    assert len(session.stepper.problems()) == 2, "both optimizers of a session are looked at"


_WORKS: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = [
    (_ADAMW, {}, [{"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"maximize": True}]),
    (_ADAM, {"amsgrad": True}, [{"weight_decay": 0.3}, {"betas": [0.5, 0.9]}]),
    (_SGD, {"momentum": 0.9}, [{"momentum": 0.5}, {"nesterov": True}, {"nesterov": False, "dampening": 0.1}]),
    (_SGD, {}, [{"weight_decay": 0.1}, {"mine": object()}]),
    (torch.optim.Adagrad, {}, [{"lr_decay": 0.1}]),
]


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize(("optimizer", "options", "edits"), _WORKS)
def test_what_torch_takes_keeps_working(
    engine: str, optimizer: Any, options: dict[str, Any], edits: list[dict[str, Any]]
) -> None:
    model, twin = _model(), _model()
    session = _session(engine, model, optimizer, lr=0.1, **options)
    settled = {key: value for key, value in session.stepper.options[0].items() if key in ("fused", "foreach")}
    plain = optimizer(twin.parameters(), lr=0.1, **options, **settled)
    for step, edit in enumerate([{}, *edits]):
        session.optimizer.param_groups[0].update(edit)
        plain.param_groups[0].update(edit)
        push(twin, _gradients(twin, step + 1))
        _step(session, model, step + 1)
        plain.step()
        plain.zero_grad()
        assert all(map(same_bits, model.parameters(), twin.parameters())), edit


@pytest.mark.parametrize("engine", _ENGINES)
def test_schedulers_of_rate_and_momentum_work_where_there_is_a_momentum(engine: str) -> None:
    makers: list[tuple[Any, dict[str, Any], Callable[[torch.optim.Optimizer], Any]]] = [
        (_ADAMW, {}, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=9)),
        (_SGD, {"momentum": 0.9}, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=9)),
        (_SGD, {"momentum": 0.9}, lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2)),
        (_SGD, {}, lambda o: OneCycleLR(o, max_lr=0.1, total_steps=9, cycle_momentum=False)),
        (_SGD, {}, lambda o: LambdaLR(o, lambda epoch: 0.5**epoch)),
    ]
    for optimizer, options, make in makers:
        model, twin = _model(), _model()
        session = _session(engine, model, optimizer, lr=0.1, **options)
        settled = {key: value for key, value in session.stepper.options[0].items() if key in ("fused", "foreach")}
        plain = optimizer(twin.parameters(), lr=0.1, **options, **settled)
        ours, theirs = make(session.optimizer), make(plain)
        for _ in range(5):
            _step(session, model)
            push(twin, _gradients(twin, 1.0))
            plain.step()
            plain.zero_grad()
            ours.step()
            theirs.step()
        assert all(map(same_bits, model.parameters(), twin.parameters()))


def test_one_cycle_on_sgd_without_momentum_is_told_before_the_step() -> None:
    model = _model()
    session = _session("zero2", model, _SGD, lr=0.1)
    OneCycleLR(session.optimizer, max_lr=0.1, total_steps=9)
    with pytest.raises(StepRefused, match="momentum_buffer"):
        _step(session, model)


# ---- an optimizer of the user's own ---------------------------------------------------------------------------------


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, counts: bool = False) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta {beta}")
        super().__init__(params, {"lr": lr, "beta": beta, "counts": counts, "late": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    if group["counts"]:
                        state["count"] = 0
                state["mean"].mul_(group["beta"]).add_(p.grad)
                p.sub_(state["mean"], alpha=group["lr"] * group["late"])


@pytest.mark.parametrize("engine", _ENGINES)
def test_options_of_a_declared_optimizer_are_tried_out_too(engine: str) -> None:
    model = _model()
    session = _session(engine, model, Declared(_Own, "elementwise", "own"), lr=0.1, beta=0.9)
    _step(session, model)
    group = session.optimizer.param_groups[0]
    group.update(beta=0.5, late=0.5)
    _step(session, model)
    group["beta"] = 2.0
    with pytest.raises(StepRefused, match=r"own: param group 0 .*beta 2.0"):
        _step(session, model)
    group.update(beta=0.5, late="now")
    with pytest.raises(StepRefused, match="late"):
        _step(session, model)
    session.discard_gradients()
    group.update(late=0.5)
    _step(session, model)


def test_an_option_that_gives_a_cut_declared_optimizer_other_state_is_refused() -> None:
    model = _model()
    session = _session("zero2", model, Declared(_Own, "elementwise", "own"), lr=0.1)
    _step(session, model)
    session.optimizer.param_groups[0]["counts"] = True
    assert "its state has count" in session.stepper.problems()[0]


def test_trying_out_draws_no_random_numbers() -> None:
    class Drawing(_Own):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            torch.rand(1)
            super().step()

    session = _session("zero1", _model(), Declared(Drawing, "matrix", "drawing"), lr=0.1)
    session.optimizer.param_groups[0]["beta"] = 0.1
    torch.manual_seed(3)
    assert session.stepper.problems() == []
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", _ENGINES)
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_step_hook_is_refused_until_it_is_removed(engine: str, when: str) -> None:
    model = _model()
    session = _session(engine, model, _ADAMW, lr=0.1)

    def noted(*_: Any) -> None:
        raise AssertionError("a hook ran")

    handle = getattr(session.optimizer, f"register_step_{when}_hook")(noted)
    with pytest.raises(StepRefused, match=r"noted.* is registered on optimizer; it would run in the commit"):
        _step(session, model)
    session.discard_gradients()
    handle.remove()
    _step(session, model)


def test_a_hook_that_an_optimizer_brings_along_is_its_own() -> None:
    class Hooked(_Own):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            self.register_step_post_hook(lambda *_: None)

    model = _model()
    session = _session("zero1", model, Declared(Hooked, "matrix", "hooked"), lr=0.1)
    assert session.stepper.problems() == []
    _step(session, model)


def test_both_engines_and_an_owner_have_the_surface() -> None:
    leaf, grad = torch.ones(300), torch.ones(300)
    steppers: list[Stepper] = [
        SliceOptimizer(ELEMENTWISE["sgd"], {"lr": 0.1}, (), []),
        TensorOptimizer(any_kind("sgd"), {"lr": 0.1}, (), [WholeTensor("a", 0, leaf, grad, None)]),
    ]
    owned = _session("zero1", _model(), _MUON, lr=0.1).stepper
    assert isinstance(owned, OwnedOptimizer)
    for stepper in (*steppers, owned):
        assert stepper.problems() == []
        stepper.optimizer.add_param_group({"params": [torch.zeros(1)]})
        assert len(stepper.problems()) == 1


# ---- records that are not whole -------------------------------------------------------------------------------------


def _lose_all(record: sr.Zero1Record | sr.Zero2Record) -> None:
    record.tensors.clear()


def _lose_one(record: sr.Zero1Record | sr.Zero2Record) -> None:
    del record.tensors[sorted(record.tensors)[0]]


def _without_values(record: sr.Zero1Record | sr.Zero2Record) -> None:
    name = sorted(record.tensors)[-1]
    record.tensors[name] = record.tensors[name].to("meta")


def _sparse(record: sr.Zero1Record | sr.Zero2Record) -> None:
    name = sorted(record.tensors)[-1]
    record.tensors[name] = record.tensors[name].to_sparse()


def _other_shape(record: sr.Zero1Record | sr.Zero2Record) -> None:
    name = sorted(record.tensors)[0]
    record.tensors[name] = torch.ones(3, 5)


_OWN = Declared(_Own, "matrix", "own")
_BROKEN: list[tuple[str, Any, dict[str, Any], Any, str]] = [
    ("zero2", _SGD, {"momentum": 0.9}, _lose_all, "a/momentum_buffer: listed by the record, not in it"),
    ("zero1", _SGD, {"momentum": 0.9}, _lose_all, "a/momentum_buffer: listed by the record, not in it"),
    ("zero2", _SGD, {"momentum": 0.9}, _lose_one, "a/momentum_buffer: listed by the record, not in it"),
    ("zero1", _OWN, {"counts": True}, _lose_all, "a/count:int: listed by the record, not in it"),
    ("zero1", _OWN, {"counts": True}, _lose_one, "a/count:int: "),
    ("zero1", _OWN, {}, _other_shape, r"a/mean: saved \(3, 5\) torch.float32, expected \(600,\)"),
    ("zero2", _ADAMW, {}, _without_values, "meta|malformed tensors"),
    ("zero1", _SGD, {"momentum": 0.9}, _without_values, "b/momentum_buffer: saved a tensor without values"),
    ("zero2", _SGD, {"momentum": 0.9}, _sparse, "b/momentum_buffer: saved a tensor of torch.sparse_coo"),
]


@pytest.mark.parametrize(("engine", "optimizer", "options", "damage", "told"), _BROKEN)
def test_a_record_that_is_not_whole_is_refused_and_nothing_changes(
    engine: str, optimizer: Any, options: dict[str, Any], damage: Callable[[Any], None], told: str
) -> None:
    model = _model()
    session = _session(engine, model, optimizer, lr=0.1, **options)
    _step(session, model)
    before, record = session.to_record(), session.to_record()
    damage(record)
    with pytest.raises(ContractError, match=told):
        session.load_record(record)
    after = session.to_record()
    assert after.meta == before.meta
    assert all(same_bits(after.tensors[name], before.tensors[name]) for name in before.tensors)
    session.load_record(before)


@pytest.mark.parametrize(("engine", "options"), [("zero2", {"momentum": 0.9}), ("zero1", {"momentum": 0.9})])
def test_a_record_of_before_the_list_still_loads(engine: str, options: dict[str, Any]) -> None:
    model, twin = _model(), _model()
    session, other = (_session(engine, one, _SGD, lr=0.1, **options) for one in (model, twin))
    unstepped = other.to_record()
    assert unstepped.meta["state"] == {"a": [], "b": []}
    _step(session, model)
    record = session.to_record()
    assert record.meta.pop("state") == {"a": ["momentum_buffer"], "b": ["momentum_buffer"]}
    other.load_record(record)
    twin.load_state_dict(model.state_dict())
    for one, moved in ((session, model), (other, twin)):
        _step(one, moved, 2.0)
    assert all(map(same_bits, model.parameters(), twin.parameters()))


def test_optimizers_with_all_state_from_the_start_list_none() -> None:
    for engine, optimizer in (("zero2", _ADAMW), ("zero2", _SGD), ("zero1", _ADAMW), ("zero1", _MUON)):
        assert "state" not in _session(engine, _model(), optimizer, lr=0.1).to_record().meta


def test_state_of_a_declared_optimizer_loads_into_a_new_session_and_over_an_unstepped_record() -> None:
    model = _model()
    session, fresh = (_session("zero1", one, _OWN, lr=0.1, counts=True) for one in (model, _model()))
    never = fresh.to_record()
    _step(session, model)
    fresh.load_record(session.to_record())
    session.load_record(never)
    assert session.to_record().tensors == {}
    assert sorted(fresh.to_record().tensors) == ["a/count:int", "a/mean", "b/count:int", "b/mean"]
