"""The reference itself: its formulas beside torch's optimizers in float64, its verdicts beside sums done by hand."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.support.reference
from tests.support.reference import (
    FORMULAS,
    Float64Twin,
    Part,
    PlainTorch,
    Share,
    exact_norm,
    joint_step,
    judge,
    newton_schulz,
    replicated_sum,
)

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
}
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    "adam": [
        {},
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
        {"amsgrad": True, "betas": (0.5, 0.6)},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True},
    ],
    "adamw": [
        {},
        {"betas": (0.8, 0.95), "weight_decay": 0.3, "maximize": True},
        {"amsgrad": True, "betas": (0.5, 0.6)},
    ],
    "nadam": [
        {},
        {"weight_decay": 0.1, "momentum_decay": 0.05, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.6)},
    ],
    # The rectification starts when the average has become long enough: after five steps with these betas.
    "radam": [
        {},
        {"weight_decay": 0.1, "betas": (0.5, 0.95), "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.99)},
    ],
    "adamax": [{}, {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}],
    "adagrad": [
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": True},
    ],
    "adadelta": [{}, {"rho": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}],
    "rmsprop": [
        {},
        {"alpha": 0.5, "momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "alpha": 0.9, "maximize": True},
        {"centered": True, "momentum": 0.5, "eps": 1e-3},
    ],
    "rprop": [{}, {"etas": (0.3, 1.7), "step_sizes": (0.004, 0.03), "maximize": True}],
    "asgd": [{}, {"lambd": 0.1, "alpha": 0.5, "t0": 3, "weight_decay": 0.1, "maximize": True}],
}
_SHAPES = {"w": (3, 5), "b": (7,), "temperature": ()}
_STEPS = 12


@pytest.fixture
def _float64() -> Iterator[None]:
    """torch keeps some per-parameter scalars (ASGD's eta, NAdam's mu_product) in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, generator=generator, dtype=torch.float64) for path, shape in shapes.items()}


def _torch_groups(parameters: dict[str, nn.Parameter], lr: float, groups: dict[str, dict[str, Any]]) -> list[Any]:
    own = {path: {k: v for k, v in groups.get(path, {}).items() if k != "lr_scale"} for path in parameters}
    return [
        {"params": [parameter], "lr": lr * groups.get(path, {}).get("lr_scale", 1.0), **own[path]}
        for path, parameter in parameters.items()
    ]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("rule", _OPTIONS)
def test_every_formula_is_that_of_torch_in_float64(rule: str) -> None:
    for options in _OPTIONS[rule]:
        decays = {"w": {"lr_scale": 0.25}} if rule == "rprop" else {"w": {"lr_scale": 0.25, "weight_decay": 0.2}}
        for groups in ({}, decays):
            start = _drawn(_SHAPES, 0)
            parameters = {path: nn.Parameter(value.clone()) for path, value in start.items()}
            optimizer = _CLASSES[rule](_torch_groups(parameters, 0.02, groups), **options)
            twin = Float64Twin(start, rule, 0.02, groups=groups, **options)
            for step in range(_STEPS):
                gradients = {path: grad for path, grad in _drawn(_SHAPES, 1 + step).items() if (path, step) != ("b", 4)}
                for path, parameter in parameters.items():
                    parameter.grad = gradients.get(path)
                optimizer.step()
                twin.update(gradients)
                for path, parameter in parameters.items():
                    assert torch.allclose(twin.parameters[path], parameter, rtol=1e-12, atol=1e-14), (options, step)
            assert twin.steps == {"w": _STEPS, "b": _STEPS - 1, "temperature": _STEPS}


def test_the_formulas_are_all_that_the_issue_lists_and_take_torchs_own_defaults() -> None:
    assert set(FORMULAS) == {*_OPTIONS, "muon"}
    ignored = {"lr", "maximize", "foreach", "capturable", "differentiable", "fused"}
    for rule, (_, ours) in FORMULAS.items():
        theirs = _CLASSES[rule]([torch.zeros(2, 2)]).defaults
        assert {k: v for k, v in theirs.items() if k not in ignored and k in ours} == {
            k: v for k, v in ours.items() if k in theirs
        }, rule
        assert set(theirs) - ignored <= set(ours), rule


@pytest.mark.parametrize("shape", [(5, 5), (3, 11), (15, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_muon_is_torchs_but_for_its_bfloat16(shape: tuple[int, int], options: dict[str, Any]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    parameter = nn.Parameter(start.clone())
    optimizer = _CLASSES["muon"]([parameter], lr=0.1, **options)
    twin = Float64Twin({"w": start}, "muon", 0.1, **options)
    for step in range(4):
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 + step))
        twin.update({"w": parameter.grad.double()})
        optimizer.step()
    moved = (parameter.detach() - start).double()
    ours = twin.parameters["w"] - start
    # An element of an orthogonal matrix is about 1 / sqrt(longer side); 8 bits of mantissa, five iterations.
    assert float((moved - ours).norm() / ours.norm()) < 0.03
    assert float(ours.norm()) > 0.1


def test_newton_schulz_leaves_the_singular_vectors_and_brings_the_values_near_one() -> None:
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = newton_schulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert result.shape == matrix.shape
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ result @ right.T
    values = torch.diagonal(inner)
    assert torch.allclose(inner, torch.diag(values), atol=1e-12)
    assert bool(((values > 0.6) & (values < 1.3)).all())
    assert newton_schulz(torch.zeros(2, 3), (3.4445, -4.775, 2.0315), 5, 1e-7).tolist() == [[0.0] * 3] * 2


def test_where_large_terms_cancelled_the_twin_says_so() -> None:
    twin = Float64Twin({"w": torch.ones(3)}, "sgd", 0.1, weight_decay=1.0)
    part = Part(
        ["w"],
        "mean",
        {0: Share(1, {"w": torch.tensor([1.0, 1.0, -1.0])}), 1: Share(1, {"w": torch.tensor([-1.0, 1.0, -1.0])})},
    )
    twin.note_magnitudes(part.magnitudes(), 2)
    twin.update(twin.reduced(part.sums(), 2))
    # 0 + 1 (decay) of terms 1 + 1; 1 + 1; -1 + 1 of terms 1 + 1.
    assert twin.fragile["w"].tolist() == [False, False, True]
    assert torch.allclose(twin.travelled["w"], torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64))


# ---- plain torch --------------------------------------------------------------------------------------------------


def test_plain_torch_is_the_ordinary_optimizer() -> None:
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    plain = PlainTorch({"w": ours}, torch.optim.AdamW, lr=0.1)
    optimizer = torch.optim.AdamW([theirs], lr=0.1)
    for step in range(3):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(step))
        norm = plain.step({"w": gradient * 3}, 3, max_grad_norm=0.5)
        theirs.grad = gradient * 3 / 3
        assert float(torch.nn.utils.clip_grad_norm_([theirs], 0.5)) == pytest.approx(norm, rel=1e-6)
        theirs.grad = gradient * 3 / 3 * (0.5 / (norm + 1e-6)) if norm > 0.5 else gradient * 3 / 3
        optimizer.step()
        assert torch.equal(ours, theirs)
    assert plain.state()["w"]["step"].item() == 3


def test_plain_torch_steps_masters_and_rounds_gradients_if_asked() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    kept, rounded = (
        PlainTorch({"w": parameter}, torch.optim.SGD, master_weights=True, round_gradients=rounds, lr=1.0)
        for rounds in (False, True)
    )
    sums: dict[str, Tensor | None] = {"w": torch.tensor([1.0 + 2**-12])}
    kept.step(sums, 1)
    assert kept.state()["w"]["master"].item() == -(2**-12)
    assert parameter.item() == -(2**-12)
    rounded.step(sums, 1)
    assert rounded.state()["w"]["master"].item() == 0.0


def test_without_trainable_parameters_there_is_nothing_to_step() -> None:
    plain = PlainTorch({"w": nn.Parameter(torch.ones(1), requires_grad=False)}, torch.optim.AdamW, lr=0.1)
    assert plain.step({}, 3, max_grad_norm=1.0) == 0.0
    assert plain.state() == {}


def test_sums_are_taken_in_rank_order_and_a_weight_of_zero_hides_anything() -> None:
    big, one = torch.tensor([1e8]), torch.tensor([1.0])
    held = [{"w": big}, {"w": one}, {"w": -big}, {"w": torch.tensor([math.nan])}]
    in_order = replicated_sum(held, [1, 1, 1, 0])["w"]
    assert in_order is not None
    assert in_order.item() == 0.0, "1e8 + 1 is 1e8 in float32"
    other = replicated_sum([held[0], held[2], held[1]], [1, 1, 1])["w"]
    assert other is not None
    assert other.item() == 1.0
    assert replicated_sum([{"w": one}, {"w": None}], [0, 5]) == {"w": None}


def test_the_norm_is_rounded_once() -> None:
    assert exact_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0
    assert exact_norm([torch.full((3,), 2.0**-70), torch.tensor([1.0])]) == 1.0
    assert exact_norm([]) == 0.0


# ---- verdicts -----------------------------------------------------------------------------------------------------


def _of(value: float) -> Tensor:
    return torch.tensor([value])


def test_rank_dependent_branches_are_means_over_all_or_refused_by_name() -> None:
    """Rank 0 uses only a (gradient 1), rank 1 only b (gradient 2): 0.5 and 1.0."""
    part = Part(["a", "b"], "mean", {0: Share(1, {"a": _of(1.0)}), 1: Share(1, {"b": _of(2.0)})})
    twin = Float64Twin({"a": _of(0.0), "b": _of(0.0)}, "sgd", 1.0)
    verdict = judge([part], "zero", 2)
    assert (verdict.refusal, verdict.absent, verdict.global_weights) == (None, ((),), (2,))
    assert joint_step([twin], [part.sums()], verdict.divisors) == pytest.approx(math.sqrt(0.25 + 1.0))
    assert {path: -value.item() for path, value in twin.parameters.items()} == {"a": 0.5, "b": 1.0}
    strict = judge([part], "error", 2)
    assert (strict.refusal, strict.blamed) == ("missing", ((0, "b"), (1, "a")))


def test_a_rank_of_weight_zero_neither_counts_nor_is_blamed() -> None:
    nan = _of(math.nan)
    part = Part(["a", "b"], "mean", {0: Share(3, {"a": _of(6.0), "b": None}), 1: Share(0, {"a": nan, "b": nan})})
    verdict = judge([part], "zero", 3)
    assert (verdict.refusal, verdict.absent, verdict.divisors) == (None, (("b",),), (3,))
    assert part.sums() == {"a": _of(6.0), "b": None}
    assert judge([part], "error", 3).blamed == ((0, "b"),)


@pytest.mark.parametrize("where", [0, 1])
def test_a_non_finite_gradient_is_blamed_on_who_has_it(where: int) -> None:
    shares = {rank: Share(1, {"a": _of(math.inf if rank == where else 1.0)}) for rank in (0, 1)}
    verdict = judge([Part(["a"], "mean", shares)], "error", 2)
    assert (verdict.refusal, verdict.blamed) == ("non-finite", ((where, "a"),))
    overflow = Part(["a"], "sum", {rank: Share(1, {"a": _of(3e38)}) for rank in (0, 1)})
    assert judge([overflow], "error", 2) == judge([overflow], "zero", 0)
    assert (judge([overflow], "error", 2).refusal, judge([overflow], "error", 2).blamed) == ("non-finite", ())


def test_an_empty_window_is_refused_for_a_mean_and_nothing_for_a_sum() -> None:
    idle = {rank: Share(0, {"a": _of(1.0)}) for rank in (0, 1)}
    assert judge([Part(["a"], "mean", idle)], "error", 0).refusal == "empty"
    verdict = judge([Part(["a"], "sum", idle)], "error", 0)
    assert (verdict.refusal, verdict.global_weights, verdict.divisors) == (None, (0,), (None,))
    assert verdict.absent == (("a",),)


def test_dense_and_experts_share_one_denominator_and_one_norm() -> None:
    """C045 and C046: four tokens, e0 sees 2, 6 and 8, e1 sees 4, the dense scalar all of them; experts on one rank."""
    dense = Part(["d"], "mean", {0: Share(2, {"d": _of(6.0)}), 1: Share(2, {"d": _of(14.0)})})
    layouts = [
        [
            Part(["e0", "e1"], "mean", {
                0: Share(2, {"e0": _of(2.0), "e1": _of(4.0)}),
                1: Share(2, {"e0": _of(14.0)}),
            })
        ],
        [Part(["e0"], "mean", {0: Share(2, {"e0": _of(16.0)})}), Part(["e1"], "mean", {1: Share(2, {"e1": _of(4.0)})})],
    ]  # fmt: skip
    for experts in layouts:
        parts = [dense, *experts]
        verdict = judge(parts, "zero", 4)
        assert (verdict.refusal, set(verdict.divisors)) == (None, {4})
        twins = [Float64Twin({path: _of(0.0) for path in part.paths}, "sgd", 1.0) for part in parts]
        norm = joint_step(twins, [part.sums() for part in parts], verdict.divisors, max_grad_norm=math.inf)
        assert norm == pytest.approx(math.sqrt(42.0))
        moved = {path: -value.item() for twin in twins for path, value in twin.parameters.items()}
        assert moved == {"d": 5.0, "e0": 4.0, "e1": 1.0}


def test_a_joint_norm_clips_every_session_alike() -> None:
    """C054: 12, 3 and 4 make 13."""
    twins = [Float64Twin({path: _of(0.0)}, "sgd", 1.0) for path in ("d", "e0", "e1")]
    sums = [{path: _of(value)} for path, value in (("d", 12.0), ("e0", 3.0), ("e1", 4.0))]
    assert joint_step(twins, sums, [None] * 3, max_grad_norm=1.0) == 13.0
    moved = [-value.item() for twin in twins for value in twin.parameters.values()]
    assert moved == pytest.approx([12 / 13, 3 / 13, 4 / 13], rel=1e-6)


def test_the_reference_owes_nothing_to_what_it_judges() -> None:
    tree = ast.parse(Path(tests.support.reference.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.split(".")[0] in ("shardrun", "tests")] == []
