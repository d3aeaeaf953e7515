"""SliceOptimizer: parameters cut by hand as ranks would hold them, and the bits of torch.optim on the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardrun.errors import UsageError
from shardrun.optim.elementwise import SliceOptimizer
from shardrun.optim.kinds import ELEMENTWISE, OptionGroup, elementwise, fused_is_sound
from shardrun.optim.stepper import Stepper
from tests.support.optim_cases import (
    CASE_IDS,
    CASES,
    FIRST,
    NUMELS,
    STEPS,
    PlainTorch,
    Ranks,
    drawn,
    group_of_path,
    present_in,
    rate_in,
    same,
)
from tests.support.sessions import same_bits

_SHAPES = {path: (numel,) for path, numel in NUMELS.items()}


def _require_equal(ranks: Ranks, plain: PlainTorch, where: str) -> None:
    for path, leaf in plain.leaves.items():
        assert same_bits(ranks.view(ranks.flat, path), leaf), f"{where}: {path}"


def _require_equal_state(ranks: Ranks, plain: PlainTorch) -> None:
    there = {name for stepper in ranks.steppers for name in stepper.state_tensors() if not name.startswith("never/")}
    held = {(path, key): value for path, key, value in plain.state() if path != "never"}
    assert there == {f"{path}/{key}" for path, key in held}
    for (path, key), value in held.items():
        assert same_bits(ranks.state(path, key), value), f"{path}/{key}"


def _plain(name: str, options: Mapping[str, Any], start: Mapping[str, Tensor]) -> PlainTorch:
    kind = ELEMENTWISE[name]
    given = dict(options)
    if kind.fused_op is not None and "fused" not in given:
        # Left open: used where torch has it, but for the fused SGD that leaves 16-bit leaves as they are.
        given["fused"] = fused_is_sound(kind, torch.device("cpu"), start["long"].dtype)
    return PlainTorch(kind.cls, given if given.get("fused") else {**given, "foreach": False}, start)


@pytest.mark.parametrize(("world_size", "chunk_numel"), [(1, 512), (3, 512), (3, None)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_cut_parameters_have_the_bits_of_whole_ones(
    name: str, options: dict[str, Any], world_size: int, chunk_numel: int | None
) -> None:
    """In several chunks, or all in one. And a proposal leaves no trace, can be made again, and is what the commit
    then does."""
    start = drawn(_SHAPES, 1)
    ranks = Ranks(ELEMENTWISE[name], options, start, world_size, chunk_numel=chunk_numel)
    plain = _plain(name, options, start)
    for step in range(STEPS):
        gradients, present, rate = drawn(_SHAPES, 100 + step), present_in(step), rate_in(step, plain.base)
        before = ranks.photograph()
        other = {path: not there for path, there in present.items() if path != "never"} | {"never": False}
        ranks.propose(drawn(_SHAPES, 900 + step), other, 3 * rate)
        ranks.propose(gradients, present, rate)
        proposed = ranks.proposed.clone()
        ranks.propose(gradients, present, rate)
        assert same(before, ranks.photograph()), f"step {step}: a proposal changed something"
        assert torch.equal(proposed, ranks.proposed)
        ranks.commit(present, rate)
        plain.step(gradients, present, rate)
        _require_equal(ranks, plain, f"step {step}")
        if world_size > 1:
            assert same_bits(ranks.proposed, ranks.flat)
    _require_equal_state(ranks, plain)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sixteen_bit_leaves_have_the_bits_of_whole_ones(name: str) -> None:
    options = {"momentum": 0.9} if name == "sgd" else {}
    start = drawn(_SHAPES, 1, torch.bfloat16)
    ranks, plain = Ranks(ELEMENTWISE[name], options, start, 2), _plain(name, options, start)
    for step in range(STEPS):
        gradients, present = drawn(_SHAPES, 100 + step, torch.bfloat16), present_in(step)
        ranks.propose(gradients, present, plain.base)
        ranks.commit(present, plain.base)
        plain.step(gradients, present, plain.base)
        _require_equal(ranks, plain, f"step {step}")
    _require_equal_state(ranks, plain)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_state_that_was_handed_out_and_in_goes_on_with_the_same_bits(name: str) -> None:
    options = {"sgd": {"momentum": 0.9}, "rmsprop": {"momentum": 0.9, "centered": True}}.get(name, {})
    start = drawn(_SHAPES, 1)
    straight = Ranks(ELEMENTWISE[name], options, start, 2)
    for step in range(STEPS):
        _step(straight, step)
    resumed = Ranks(ELEMENTWISE[name], options, start, 2)
    _step(resumed, 77)  # whatever it holds is replaced
    _hand_over(straight, resumed)
    assert same(straight.photograph(), resumed.photograph())
    for step in range(STEPS, 2 * STEPS):
        _step(straight, step)
        _step(resumed, step)
    assert same(straight.photograph(), resumed.photograph())


def _step(ranks: Ranks, step: int, rate: float = 0.05) -> None:
    present = present_in(step % STEPS)
    ranks.propose(drawn(_SHAPES, 100 + step), present, rate)
    ranks.commit(present, rate)


def _hand_over(one: Ranks, other: Ranks) -> None:
    other.flat.copy_(one.flat)
    for ours, theirs in zip(one.steppers, other.steppers, strict=True):
        record = ours.state_tensors()
        wanted = theirs.expected_tensors(record)
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in record.items()} == wanted
        theirs.load_state_tensors(record)


def test_a_proposal_of_before_a_record_was_loaded_is_forgotten() -> None:
    source, ranks = (Ranks(ELEMENTWISE["rprop"], {}, drawn(_SHAPES, 1), 1) for _ in range(2))
    for step in range(3):
        _step(source, step)
    ranks.propose(drawn(_SHAPES, 55), present_in(0), 0.5)  # a first update, not committed
    _hand_over(source, ranks)
    _step(source, 3)
    _step(ranks, 3)
    assert same(source.photograph(), ranks.photograph())


def test_a_record_lacks_nothing_but_what_a_first_update_makes() -> None:
    start = drawn(_SHAPES, 1)
    (adamw,), (sgd,) = (
        Ranks(ELEMENTWISE[name], {"momentum": 0.9} if name == "sgd" else {}, start, 1).steppers
        for name in ("adamw", "sgd")
    )
    assert adamw.expected_tensors({}).keys() == {f"{p}/{k}" for p in NUMELS for k in ("exp_avg", "exp_avg_sq", "step")}
    assert adamw.expected_tensors({}).keys() == adamw.state_tensors().keys()
    assert sgd.expected_tensors({}) == sgd.state_tensors() == {}


def test_a_record_with_half_of_a_first_updates_state_is_told_apart() -> None:
    ranks = Ranks(ELEMENTWISE["rprop"], {}, drawn(_SHAPES, 1), 1)
    _step(ranks, 0)
    (stepper,) = ranks.steppers
    record = stepper.state_tensors()
    assert sorted(record) == [f"{path}/{key}" for path in ("flat", "long") for key in ("prev", "step", "step_size")]
    del record["long/prev"]
    assert "long/prev" in stepper.expected_tensors(record)
    assert "late/prev" not in stepper.expected_tensors(record)


def test_state_that_depends_on_the_first_rate_takes_the_rate_of_its_own_first_step() -> None:
    ranks = Ranks(ELEMENTWISE["rprop"], {"etas": (0.5, 1.0001)}, drawn(_SHAPES, 1), 2)
    for step, rate in enumerate((0.5, 0.25)):
        present = {path: path == ("long", "flat")[step] for path in FIRST}
        ranks.propose(drawn(_SHAPES, step), present, rate)
        ranks.commit(present, rate)
    assert set(ranks.state("long", "step_size").tolist()) == {0.5}
    assert set(ranks.state("flat", "step_size").tolist()) == {0.25}


def test_option_groups_have_rates_and_decay_of_their_own() -> None:
    start = drawn(_SHAPES, 1)
    groups = (OptionGroup(frozenset({"flat", "late"}), {"weight_decay": 0.5}, lr_scale=0.25),)
    ranks = Ranks(ELEMENTWISE["nadam"], {"lr": 0.1}, start, 3, groups)
    plain = {
        group: _plain("nadam", {"lr": 0.1, "weight_decay": decay}, start) for group, decay in enumerate((0.0, 0.5))
    }
    for step in range(STEPS):
        gradients, present = drawn(_SHAPES, 100 + step), present_in(step)
        ranks.propose(gradients, present, None)
        ranks.commit(present, None)
        for group, twin in plain.items():
            twin.step(gradients, present, (0.1, 0.025)[group])
    for path in NUMELS:
        want = plain[group_of_path(path, groups)].leaves[path]
        assert same_bits(ranks.view(ranks.flat, path), want), path


def test_without_a_rate_the_class_has_its_own() -> None:
    for name, kind in ELEMENTWISE.items():
        ranks = Ranks(kind, {}, drawn(_SHAPES, 1), 1)
        made: Callable[..., torch.optim.Optimizer] = kind.cls
        own = made([torch.zeros(1)]).defaults["lr"]
        (stepper,) = ranks.steppers
        assert (stepper.rates(None), stepper.options[0]["lr"]) == ([own], own), name


def test_a_rank_that_holds_nothing_steps_along() -> None:
    stepper: Stepper = SliceOptimizer(ELEMENTWISE["asgd"], {"lr": 0.1}, [], [])
    stepper.propose({}, stepper.rates(None))
    stepper.commit({}, stepper.rates(None))
    assert (stepper.state_tensors(), stepper.expected_tensors({}), stepper.state_nbytes) == ({}, {}, 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_momentum_that_is_switched_on_later_is_refused_with_nothing_changed(world_size: int) -> None:
    ranks = Ranks(elementwise("sgd"), {"lr": 0.1}, drawn(_SHAPES, 1), world_size)
    _step(ranks, 0)
    before = ranks.photograph()
    for stepper in ranks.steppers:
        stepper.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(UsageError, match="momentum_buffer"):
        _step(ranks, 1)
    assert same(before, ranks.photograph())


def test_a_fused_kernel_that_leaves_sixteen_bit_leaves_alone_is_not_used() -> None:
    """torch 2.13's fused SGD on the CPU: a run without masters would train nothing, and nobody would be told."""
    start = drawn(_SHAPES, 1, torch.bfloat16)
    (stepper,) = Ranks(ELEMENTWISE["sgd"], {"lr": 0.1}, start, 1).steppers
    assert stepper.options[0]["fused"] == fused_is_sound(ELEMENTWISE["sgd"], torch.device("cpu"), torch.bfloat16)
    if not stepper.options[0]["fused"]:
        with pytest.raises(UsageError, match=r"bfloat16.*191763.*FP32 masters"):
            Ranks(ELEMENTWISE["sgd"], {"lr": 0.1, "fused": True}, start, 1)
    assert Ranks(ELEMENTWISE["sgd"], {"lr": 0.1}, drawn(_SHAPES, 1), 1).steppers[0].options[0]["fused"] is True


def test_the_scalars_of_torch_follow_its_default_dtype() -> None:
    """NAdam's mu_product is a product of hundreds of factors: float64 where a user made that the default."""
    torch.set_default_dtype(torch.float64)
    try:
        start = drawn(_SHAPES, 1, torch.float32)
        ranks, plain = Ranks(ELEMENTWISE["nadam"], {}, start, 2), _plain("nadam", {}, start)
        for step in range(STEPS):
            gradients, present = drawn(_SHAPES, 100 + step, torch.float32), present_in(step)
            ranks.propose(gradients, present, plain.base)
            ranks.commit(present, plain.base)
            plain.step(gradients, present, plain.base)
        _require_equal_state(ranks, plain)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_kernel_raises_is_found_in_the_proposal_while_nothing_is_staged() -> None:
    """The staging lies on the gradients: a kernel that cannot run must say so before any of it is written."""
    start = drawn(_SHAPES, 1)
    ranks = Ranks(ELEMENTWISE["adamw"], {}, start, 2)
    before = ranks.photograph()

    def refuse(optimizer: object, args: object, kwargs: object) -> None:
        raise MemoryError("no room for a temporary")

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        with pytest.raises(MemoryError):
            ranks.propose(drawn(_SHAPES, 100), present_in(0), 0.1)
    finally:
        hook.remove()
    assert same(before, ranks.photograph())
    assert not ranks.proposed.any()
