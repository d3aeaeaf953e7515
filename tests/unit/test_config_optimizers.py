"""The optimizer section: each optimizer with torch's own options and ranges, and what is refused, with the way out."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from shardrun.config.load import from_mapping, load, resolved_yaml
from shardrun.config.matrices import Factory
from shardrun.config.optimizers import OPTIMIZERS
from shardrun.config.rest import RESTS
from shardrun.config.schema import Config
from shardrun.errors import ConfigError

OURS = {"name", "strategy", "options", "rest"}
NOT_OFFERED = {"params", "foreach", "capturable", "differentiable", "maximize"}
# adamw says decoupled_weight_decay in its name; the optimizers beside muon have their own betas and so on.
NOT_OF = {"adam": {"decoupled_weight_decay"}}
CLASSES: dict[str, Any] = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if inspect.isclass(cls)}


def config(optimizer: Any) -> Config:
    train = {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1}
    return from_mapping({"recipe": "some.module", "optimizer": optimizer, "train": train})


def problems(optimizer: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(optimizer)
    return [problem.removeprefix("config: ") for problem in caught.value.problems]


def problem(optimizer: Any) -> str:
    (one,) = problems(optimizer)
    return one


def torch_options(name: str) -> dict[str, Any]:
    """What the constructor takes, with its defaults."""
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in {"self", *NOT_OFFERED, *NOT_OF.get(name, ())}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_and_defaults_are_those_of_torch(name: str) -> None:
    model, known = OPTIMIZERS[name], torch_options(name)
    assert {key for key in model.model_fields if key not in OURS} == known.keys()
    made = config({"name": name, "lr": known["lr"]}).parts["default"].optimizer.model_dump(exclude=OURS)
    assert made == known


@pytest.mark.parametrize("name", RESTS)
def test_what_steps_the_rest_has_the_options_of_torch(name: str) -> None:
    known = torch_options(name)
    made = config({"name": "muon", "lr": 1, "rest": {"name": name}}).parts["default"].optimizer.model_dump()["rest"]
    assert made == {**known, "name": name, "lr": None, "match": ()}


def test_all_optimizers_are_the_librarys() -> None:
    from shardrun.optim.kinds import ELEMENTWISE, MATRIX

    assert OPTIMIZERS.keys() == {*ELEMENTWISE, *MATRIX}
    assert RESTS.keys() == ELEMENTWISE.keys()


EDGES = [-1e-9, 0.0, 0.5, 0.999, 1.0, 1.5, 2, 99, 100]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranges_are_those_that_torch_checks(name: str) -> None:
    """What torch refuses is refused, and nothing that it takes but what no update can have meant."""
    stricter = {("sgd", "dampening"), ("adam", "betas"), ("rprop", "step_sizes"), ("muon", "eps"), ("muon", "ns_steps")}
    for key, default in torch_options(name).items():
        if isinstance(default, bool) or key in ("fused", "adjust_lr_fn"):
            continue
        for edge in EDGES:
            values = [edge] if not isinstance(default, tuple) else [(edge, *default[1:]), (*default[:-1], edge)]
            for value in values:
                options = {"lr": 1.0, key: list(value) if isinstance(value, tuple) else value}
                given = {"lr": 1.0, key: value}
                assert _takes(name, given) or not _allows(name, options), (key, value)
                if (name, key) not in stricter and key != "ns_coefficients":
                    assert _allows(name, options) or not _takes(name, given), (key, value)


def _takes(name: str, options: dict[str, Any]) -> bool:
    try:
        optimizer = CLASSES[name]([torch.ones(2, 2, requires_grad=True)], **options)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
        optimizer.step()
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, OverflowError):
        return False
    return True


def _allows(name: str, options: dict[str, Any]) -> bool:
    try:
        config({"name": name, **options})
    except ConfigError:
        return False
    return True


MUON = {"name": "muon", "lr": 0.02}
FACTORY = {"factory": "make", "kind": "matrix", "lr": 0.1}
CASES = [
    (5, "optimizer: needs a section (key: value), found 5"),
    ({"lr": 1}, "optimizer.name: required key is missing; one of adamw, adam, sgd, nadam, radam, adamax, adagrad, "
                "adadelta, rmsprop, rprop, asgd, muon; or factory, for one of the recipe"),
    ({"name": "moun", "lr": 1}, "did you mean muon?"),
    ({"name": "shampoo", "lr": 1}, "optimizer.name: shampoo is not in torch.optim; bring it in the recipe, and in pla"),
    ({"name": "SOAP", "lr": 1}, "write factory, kind: matrix and strategy: zero1"),
    ({"name": "adafactor", "lr": 1}, "averages of whole matrices; bring it in the recipe"),
    ({**MUON, "strategy": "zero2"}, "optimizer.strategy: muon updates whole matrices and cannot run under zero2, which "
                                    "cuts parameters anywhere; use strategy zero1"),
    ({**MUON, "strategy": "zero3"}, "optimizer.strategy: found text 'zero3'; allowed: zero1; did you mean zero1?"),
    ({**MUON, "ns_steps": 100}, "optimizer.ns_steps: 100 is out of range; allowed: below 100"),
    ({**MUON, "ns_coefficients": [1, 2]}, "optimizer.ns_coefficients[2]: required key is missing"),
    ({**MUON, "adjust_lr_fn": "orginal"}, "allowed: original, match_rms_adamw; did you mean original?"),
    ({**MUON, "betas": [0.9, 0.9]}, "optimizer.betas: unknown key (found a list); betas is a key of adamw, adam, nad"),
    ({**MUON, "rest": {"name": "muon"}}, "optimizer.rest.name: found text 'muon'; allowed: adamw, adam, sgd,"),
    ({**MUON, "rest": {"lr": 1}}, "optimizer.rest.name: required key is missing; one of adamw, adam, sgd, nadam, rad"),
    ({**MUON, "rest": 5}, "optimizer.rest: needs a section (key: value), found 5"),
    ({**MUON, "rest": {"name": "adamw", "lr": -1}}, "optimizer.rest.lr: -1 is out of range; allowed: at least 0"),
    ({**MUON, "rest": {"name": "adamw", "momentum": 1}}, "optimizer.rest.momentum: unknown key (found 1); momentum i"),
    ({**MUON, "rest": {"name": "adamw", "beta": 1}}, "optimizer.rest.beta: unknown key (found 1); did you mean "
                                                     "optimizer.rest.betas?"),
    ({**MUON, "rest": {"name": "adamw", "strategy": "zero2"}}, "did you mean optimizer.strategy? (strategy has its"),
    ({**MUON, "rest": {"name": "sgd", "nesterov": True}}, "optimizer.rest.nesterov: needs a momentum above 0"),
    ({**MUON, "lr": 0, "rest": {"name": "adamw", "lr": 1}}, "optimizer.lr: is 0, and rest.lr, which follows in propor"),
    ({**MUON, "kind": "matrix"}, "kind is a key of an optimizer of the recipe (factory), and optimizer.name is muon"),
    ({"name": "rprop", "lr": 1, "etas": [0.5, 0.9]}, "optimizer.etas[1]: 0.9 is out of range; allowed: above 1"),
    ({"name": "rprop", "lr": 1, "step_sizes": [5, 1]}, "optimizer.step_sizes: the smallest, 5, is above the largest,"),
    ({"name": "rprop", "lr": 1, "weight_decay": 1}, "optimizer.weight_decay: unknown key (found 1); weight_decay is a"),
    ({"name": "rprop", "lr": 1, "options": [{"match": ["*"], "weight_decay": 1}]}, "optimizer.options[0].weight_decay"),
    ({"name": "adadelta", "lr": 1, "rho": 1.5}, "optimizer.rho: 1.5 is out of range; allowed: at most 1"),
    ({"name": "nadam", "lr": 1, "fused": True}, "fused is a key of adamw, adam, sgd and adagrad, and optimizer.name i"),
    ({"name": "nadam", "lr": 1, "momentum_dacay": 1}, "did you mean optimizer.momentum_decay?"),
    ({"factory": "make", "lr": 1}, "optimizer.kind: required key is missing; write elementwise or matrix, which is wh"),
    ({**FACTORY, "kind": "whole"}, "optimizer.kind: found text 'whole'; allowed: elementwise, matrix"),
    ({**FACTORY, "factory": "torch.optim.X"}, "optimizer.factory: 'torch.optim.X' is no name of a function or class; "),
    ({**FACTORY, "factory": 5}, "optimizer.factory: needs text, found 5"),
    ({**FACTORY, "strategy": "zero2"}, "optimizer.strategy: make is declared as one that updates whole matrices and c"),
    ({**FACTORY, "name": "adamw"}, "optimizer.name: unknown key (found text 'adamw'); factory stands in the place of"),
    ({**FACTORY, "momentum": 1}, "momentum: unknown key (found 1); write momentum inside optimizer.factory_options if"),
    ({**FACTORY, "facotry_options": {}}, "did you mean optimizer.factory_options?"),
    ({**FACTORY, "factory_options": {"lr": 1}}, "optimizer.factory_options: lr has its place at optimizer.lr"),
    ({**FACTORY, "factory_options": {"a": float("nan")}}, "optimizer.factory_options: nan is not finite"),
    ({**FACTORY, "options": [{"match": ["*"], "factory_options": {"lr": 1}}]}, "options: lr in factory_options; write"),
    ({**FACTORY, "options": [{"match": ["*"], "weight_decay": 1}]}, "optimizer.options[0].weight_decay: unknown key"),
    ({**FACTORY, "rest": {"name": "sgd"}}, "optimizer.rest: has no effect, as the factory takes all; write rest.match"),
    ({**FACTORY, "kind": "elementwise", "rest": {"name": "sgd"}}, "optimizer.rest: is for what an optimizer of matric"),
    ({**FACTORY, "kind": "elementwise", "takes": "matrices"}, "optimizer.takes: matrices, and an elementwise optimize"),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "expected"), CASES)
def test_what_is_wrong_is_the_only_problem_and_names_the_way_out(optimizer: Any, expected: str) -> None:
    assert expected in problem(optimizer)


def test_all_that_is_wrong_in_a_rest_of_no_known_name_comes_at_once() -> None:
    found = problems({**MUON, "rest": {"name": "adan", "lr": "x", "betaz": 1}})
    assert [line.split(": ")[0].removeprefix("optimizer.rest.") for line in found] == ["name", "lr", "betaz"]


def test_a_problem_in_the_rest_is_placed_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("recipe: some.module\noptimizer:\n  name: muon\n  lr: 1\n  rest:\n    name: adamw\n    eps: -1\n"
                    "train: {steps: 1, micro_batch_size: 1, global_batch_size: 1}\n")  # fmt: skip
    with pytest.raises(ConfigError, match=r"c\.yaml:7:10: optimizer\.rest\.eps: -1 is out of range"):
        load(path)
    assert load(path, ["optimizer.rest.eps=1"]).parts["default"].optimizer.model_dump()["rest"]["eps"] == 1


def test_strategies_have_the_default_that_fits() -> None:
    assert config({"name": "adamw", "lr": 1}).parts["default"].optimizer.strategy == "zero2"
    assert config({"name": "adamw", "lr": 1, "strategy": "zero1"}).parts["default"].optimizer.strategy == "zero1"
    assert config(MUON).parts["default"].optimizer.strategy == "zero1"
    assert config(FACTORY).parts["default"].optimizer.strategy == "zero1"
    assert config({**FACTORY, "kind": "elementwise"}).parts["default"].optimizer.strategy == "zero2"


def test_a_config_of_before_means_what_it_meant() -> None:
    """The keys of a group's options are compared as a whole: a new one would refuse to go on with an old run."""
    group = {"match": ["*"], "weight_decay": 0}
    keys = {}
    for name in ("adamw", "adam", "sgd"):
        made = config({"name": name, "lr": 1, "options": [group]}).parts["default"].optimizer.model_dump(mode="json")
        keys[name] = ({*made}, {*made["options"][0]})
    adam = {"name", "strategy", "lr", "fused", "betas", "eps", "amsgrad", "options", "weight_decay"}
    assert keys["adamw"] == keys["adam"] == (adam, {"match", "weight_decay", "lr_scale", "betas", "eps"})
    sgd = {"name", "strategy", "lr", "fused", "weight_decay", "momentum", "dampening", "nesterov", "options"}
    assert keys["sgd"] == (sgd, {"match", "weight_decay", "lr_scale"})


def drawn(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Sections that this model allows, some keys given."""
    values: dict[str, st.SearchStrategy[Any]] = {
        "lr": st.floats(0.1, 2), "weight_decay": st.floats(0, 1), "fused": st.none() | st.booleans(),
        "betas": st.just([0.5, 0.75]), "etas": st.just([0.25, 2]), "step_sizes": st.just([1e-3, 2.0]),
        "options": st.just([{"match": ["*a"], "lr_scale": 0.5}]), "rho": st.floats(0, 1), "ns_steps": st.integers(0, 9),
        "adjust_lr_fn": st.none() | st.just("original"), "strategy": st.just("zero1"),
        "factory_options": st.just({"x": [1, {"y": None}]}),
    }  # fmt: skip
    if "rest" in model.model_fields and model is not Factory:
        values["rest"] = st.sampled_from([*RESTS]).flatmap(lambda name: section(name, RESTS[name]))
    given = {key: value for key, value in values.items() if key in model.model_fields}
    needed = {"lr": given.pop("lr")} if model not in RESTS.values() else {}
    return st.fixed_dictionaries(needed, optional=given)


def section(name: str, model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    return drawn(model).map(lambda given: {"name": name, **given})


def factory() -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["elementwise", "matrix"])
    return st.tuples(drawn(Factory), kinds).map(lambda t: {"factory": "make", "kind": t[1], **t[0]})


SECTIONS = st.sampled_from([*OPTIMIZERS]).flatmap(lambda name: section(name, OPTIMIZERS[name])) | factory()


@given(SECTIONS)
@settings(max_examples=150, deadline=None)
def test_a_resolved_section_is_read_again_to_an_equal_one(
    tmp_path_factory: pytest.TempPathFactory, optimizer: dict[str, Any]
) -> None:
    made = config(optimizer)
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(resolved_yaml(made))
    assert load(path).parts["default"].optimizer == made.optimizer
    assert from_mapping(json.loads(json.dumps(made.model_dump(mode="json")))) == made
