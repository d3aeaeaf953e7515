"""The lists of optimizers: what torch really keeps for each, and what is refused, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardrun.errors import UsageError
from shardrun.optim.declared import Declared, learn
from shardrun.optim.kinds import (
    ELEMENTWISE,
    MATRIX,
    OptionGroup,
    any_kind,
    check_options,
    elementwise,
    resolve_fused,
    takes,
    update_cost,
)
from tests.support.optim_cases import CASE_IDS, CASES

_CPU = torch.device("cpu")
_NOT_ELEMENTWISE = {"Optimizer", "LBFGS", "SparseAdam", "Adafactor", "Muon"}


def test_every_optimizer_of_torch_is_on_a_list_or_refused() -> None:
    named = {name for name, one in vars(torch.optim).items() if isinstance(one, type) and name not in _NOT_ELEMENTWISE}
    assert {kind.cls.__name__ for kind in ELEMENTWISE.values() if isinstance(kind.cls, type)} == named


@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_the_table_says_what_torch_makes(name: str, options: dict[str, Any]) -> None:
    """One update in torch itself against the table: keys, dtypes, scalars, and what is there before it."""
    kind = ELEMENTWISE[name]
    settled = {**options, **({"fused": True} if kind.fused_op and "fused" not in options else {})}
    ours = kind.spec(settled, torch.zeros(1))
    torchs = learn(Declared(kind.cls, "elementwise", "mine"), settled, torch.zeros(1))
    assert (ours.elements, ours.scalars, ours.numbers) == (torchs.elements, torchs.scalars, torchs.numbers)
    assert set(kind.keys(settled)) == set(ours.elements)
    if torchs.eager and ours.keys():
        assert ours.eager


def test_a_class_and_its_name_are_the_same_kind() -> None:
    for name, kind in ELEMENTWISE.items():
        assert elementwise(name) is elementwise(kind.cls) is any_kind(kind.cls) is kind
    assert any_kind(torch.optim.Muon) is any_kind("muon") is MATRIX["muon"]


_REFUSED: list[tuple[Any, Any, str]] = [
    (elementwise, "muon", r"muon updates whole matrices and cannot run under zero2.*use SelectedZero1"),
    (elementwise, torch.optim.Muon, r"muon updates whole matrices"),
    (elementwise, "soap", r"soap updates whole matrices.*SelectedZero1.*Declared"),
    (elementwise, "shampoo", r"shampoo updates whole matrices"),
    (elementwise, torch.optim.Adafactor, r"adafactor keeps row and column averages.*SelectedZero1.*Declared"),
    (elementwise, torch.optim.LBFGS, r"lbfgs needs a closure"),
    (elementwise, torch.optim.SparseAdam, r"sparseadam needs sparse gradients.*use adam"),
    (any_kind, torch.optim.LBFGS, r"lbfgs needs a closure"),
    (any_kind, "sparseadam", r"sparseadam needs sparse gradients"),
    (any_kind, torch.optim.Adafactor, r"adafactor is not on the list.*Declared\(.*kind='matrix'"),
    (elementwise, "lion", r"lion is not on the list of elementwise optimizers.*Declared"),
    (elementwise, Declared(torch.optim.Muon, "matrix", "my_muon"), r"my_muon is declared as a matrix.*SelectedZero1"),
    (
        elementwise,
        Declared(torch.optim.AdamW, "elementwise", "adamw"),
        r"the name adamw is that of a torch.optim class",
    ),
    (any_kind, torch.optim.SGD([torch.zeros(1)]), r"SGD is given as an object; give the class"),
]


@pytest.mark.parametrize(("look", "optimizer", "told"), _REFUSED)
def test_what_cannot_run_is_refused_with_the_reason_and_the_way_out(
    look: Callable[[Any], object], optimizer: Any, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        look(optimizer)


_BAD_OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("nadam", {"fused": True}, {}, "fused is set, and torch has no fused nadam"),
    ("muon", {"fused": True}, {}, "fused is set, and torch has no fused muon"),
    ("rprop", {}, {"fused": True}, "option group 1: fused is set"),
    ("adam", {"foreach": True}, {}, "foreach is set"),
    ("asgd", {"capturable": True}, {}, "capturable is set"),
    ("adadelta", {"differentiable": True}, {}, "differentiable is set"),
    ("rmsprop", {"centred": True}, {}, "does not take.*centred"),
    ("rprop", {"etas": (1.5, 1.2)}, {}, "eta"),
    ("muon", {"ns_step": 3}, {}, "ns_step"),
    ("adagrad", {}, {"initial_accumulator_value": 0.1}, "initial_accumulator_value of its own"),
    ("adagrad", {}, {"lr": 0.1}, "give lr_scale"),
    ("adam", {"weight_decay": torch.tensor(0.1)}, {}, "cannot be written into a record"),
]


@pytest.mark.parametrize(("name", "options", "own", "told"), _BAD_OPTIONS)
def test_options_that_do_not_fit_are_refused_by_name(
    name: str, options: dict[str, Any], own: dict[str, Any], told: str
) -> None:
    groups = [OptionGroup(frozenset({"a"}), own)] if own else []
    with pytest.raises(UsageError, match=told):
        check_options(any_kind(name), options, groups, ["a"])


@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_options_that_fit_are_taken(name: str, options: dict[str, Any]) -> None:
    own = {key: value for key, value in options.items() if key not in ("lr", "initial_accumulator_value")}
    check_options(ELEMENTWISE[name], options, [OptionGroup(frozenset({"a"}), own, 0.5)], ["a"])


def test_fused_is_used_where_torch_has_it() -> None:
    fused = {name for name, kind in ELEMENTWISE.items() if resolve_fused(None, {}, _CPU, kind)}
    assert fused == {"sgd", "adam", "adamw", "adagrad"}
    assert not resolve_fused(None, {"foreach": True}, _CPU, ELEMENTWISE["adam"])
    assert not resolve_fused(None, {}, torch.device("meta"), ELEMENTWISE["adam"])
    with pytest.raises(UsageError, match="no fused adam on meta"):
        resolve_fused(True, {}, torch.device("meta"), ELEMENTWISE["adam"])


def test_muon_takes_matrices_only() -> None:
    muon = any_kind("muon")
    assert [takes(muon, shape) for shape in ((3, 4), (3,), (), (2, 3, 4))] == [True, False, False, False]
    assert takes(any_kind("adamw"), ())
    rows = any_kind(Declared(torch.optim.Muon, "matrix", "mine", takes=lambda shape: shape[0] > 4))
    assert (takes(rows, (5, 1)), takes(rows, (4, 1))) == (True, False)


def test_the_cost_of_an_update_is_elements_or_the_products_of_newton_schulz() -> None:
    muon = any_kind("muon")
    assert update_cost(any_kind("adamw"), (30, 40)) == 1200
    # Per iteration X X^T (30, 30, 40), G G (30, 30, 30) and U X (30, 30, 40).
    assert update_cost(muon, (40, 30)) == update_cost(muon, (30, 40)) == 5 * (30 * 30 * 40 + 30**3 + 30 * 30 * 40)
    assert update_cost(muon, (30, 40), {"ns_steps": 10}) == 2 * update_cost(muon, (30, 40))
    assert update_cost(any_kind("adamw"), ()) == 1
    assert update_cost(any_kind(Declared(torch.optim.Muon, "matrix", "mine")), (30, 40)) == 30 * 1200
