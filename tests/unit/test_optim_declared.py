"""A user's own optimizer: an honest declaration gives the bits of the whole one, a false one is found out at set-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardrun.errors import UsageError
from shardrun.optim.declared import Declared, learn, probe
from shardrun.optim.elementwise import SliceOptimizer
from shardrun.optim.kinds import OptionGroup, check_options, elementwise
from tests.support.optim_cases import NUMELS, STEPS, PlainTorch, Ranks, drawn, present_in, rate_in, same
from tests.support.sessions import same_bits

_SHAPES = {path: (numel,) for path, numel in NUMELS.items()}


class _Own(torch.optim.Optimizer):
    """What the ones below do to each leaf that has a gradient is their `update`."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is not None:
                    self.update(leaf, leaf.grad, self.state[leaf], group)

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        leaf.add_(grad, alpha=-group["lr"])


class _Honest(_Own):
    """Lion with a step that is a number, one that is a tensor, and an average in float64 that is replaced each time."""

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, steps=torch.zeros(1), average=torch.zeros_like(leaf, dtype=torch.float64))
        state["count"] += 1
        state["steps"] += 1
        share = group["decay"] / state["count"]
        state["average"] = state["average"] * share + grad.double() * (1 - share)
        leaf.sub_(state["average"].sign().to(leaf.dtype) * grad.abs(), alpha=group["lr"] / state["steps"].item())


class _KeepsGradient(_Own):
    """Puts the very gradient tensor into its state, which the session writes to in the next step."""

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("previous")
        leaf.sub_(grad if before is None else grad - before * 0.5, alpha=group["lr"])
        state["previous"] = grad


class _NormOfAll(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        leaf.sub_(grad / (grad.norm() + 1e-6), alpha=group["lr"])


class _SmallestOfAll(_Own):
    """Differs from an elementwise one in few elements only."""

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        leaf.sub_(torch.where(grad == grad.max(), 2 * grad, grad), alpha=group["lr"])


class _NormOverLeaves(_Own):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        leaves = [leaf for leaf in self.param_groups[0]["params"] if leaf.grad is not None]
        norm = torch.stack([leaf.grad.abs().max() for leaf in leaves] or [torch.zeros(())]).max()
        for leaf in leaves:
            leaf.sub_(leaf.grad / norm, alpha=self.param_groups[0]["lr"])


class _WritesGradients(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        leaf.sub_(grad.add_(leaf, alpha=0.1), alpha=group["lr"])


class _CountsInGroup(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        leaf.sub_(grad, alpha=group["lr"] / group["k"])


class _CountsInItself(_Own):
    count = 0

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count = self.count + 1
        leaf.sub_(grad, alpha=group["lr"])


class _Wraps(_Own):
    """Keeps the state of another optimizer to itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


class _DecaysAbsent(_Own):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for leaf in self.param_groups[0]["params"]:
            leaf.mul_(0.99)
            if leaf.grad is not None:
                leaf.sub_(leaf.grad, alpha=self.param_groups[0]["lr"])


class _Draws(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        leaf.sub_(grad * torch.rand_like(grad), alpha=group["lr"])


class _RowState(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["pair"] = torch.zeros(2)
        leaf.sub_(grad, alpha=group["lr"])


class _ListState(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["seen"] = [1]
        leaf.sub_(grad, alpha=group["lr"])


class _TakesMasters(_Own):
    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["master"] = grad.clone()
        leaf.sub_(grad, alpha=group["lr"])


class _NeedsClosure(_Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class _NoRate(_Own):
    def __init__(self, params: Any, decay: float = 0.9) -> None:
        torch.optim.Optimizer.__init__(self, params, {"decay": decay})


_LIES: list[tuple[Any, str]] = [
    (_NormOfAll, "declared elementwise, but a vector cut at multiples of 256 is stepped otherwise"),
    (_SmallestOfAll, "its parameter differs"),
    (_NormOverLeaves, "a tensor beside another one is stepped otherwise than alone"),
    (_WritesGradients, "writes to the gradients"),
    (_CountsInGroup, r"changes param_groups\[\.\.\.\]\['k'\] outside of optimizer\.state"),
    (_CountsInItself, r"changes count outside of optimizer\.state"),
    (_Wraps, r"changes inner outside of optimizer\.state"),
    (_DecaysAbsent, "changes a parameter whose gradient is None"),
    (_Draws, "stepped otherwise"),
    (_RowState, r"its state pair has the shape \(2,\)"),
    (_ListState, "the state of .* has 'seen', a list"),
    (_TakesMasters, "'master'"),
    (_NeedsClosure, "raised TypeError.*closure"),
    (_NoRate, "the lr of its param group is None"),
    (torch.optim.Muon, "Muon only supports 2D"),
    (lambda groups, **options: "nothing", "make returned a str"),
]


@pytest.mark.parametrize(("make", "told"), _LIES)
def test_a_false_declaration_is_found_out_at_set_up(make: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_options(elementwise(Declared(make, "elementwise", "claimed")), {}, [], [])


_MATRIX_LIES = [_NormOverLeaves, _WritesGradients, _CountsInGroup, _CountsInItself, _Wraps, _DecaysAbsent, _ListState]


@pytest.mark.parametrize("make", _MATRIX_LIES)
def test_whole_tensors_have_manners_too(make: Any) -> None:
    with pytest.raises(UsageError, match="claimed"):
        probe(Declared(make, "matrix", "claimed"), {})


@pytest.mark.parametrize("make", [_NormOfAll, torch.optim.Muon, torch.optim.Adafactor, torch.optim.AdamW, _Honest])
def test_an_honest_matrix_optimizer_passes(make: Any) -> None:
    probe(Declared(make, "matrix", "honest"), {})


def test_a_declaration_has_to_make_sense() -> None:
    with pytest.raises(UsageError, match="kind is 'diagonal'"):
        Declared(_Honest, "diagonal", "mine")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give a callable and a name"):
        Declared(_Honest, "elementwise", " ")


def test_options_of_a_declared_optimizer_are_probed_for_every_group() -> None:
    kind = elementwise(Declared(_Honest, "elementwise", "lion"))
    check_options(kind, {"lr": 0.1}, [OptionGroup(frozenset({"a"}), {"decay": 0.5})], ["a"])
    with pytest.raises(UsageError, match=r"raised TypeError.*deacy"):
        check_options(kind, {"lr": 0.1, "deacy": 0.5}, [], ["a"])
    with pytest.raises(UsageError, match=r"option group 1.*written into a record"):
        check_options(kind, {}, [OptionGroup(frozenset({"a"}), {"decay": print})], ["a"])


def test_the_probe_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    probe(Declared(_Honest, "elementwise", "lion"), {})
    with pytest.raises(UsageError):
        probe(Declared(_Draws, "elementwise", "draws"), {})
    assert torch.equal(before, torch.get_rng_state())


def test_what_the_state_consists_of_is_learnt_from_one_update() -> None:
    spec = learn(Declared(_Honest, "elementwise", "lion"), {}, torch.zeros(1, dtype=torch.bfloat16))
    assert (spec.elements, spec.numbers, spec.eager) == ({"average": torch.float64}, {"count": int}, False)
    assert spec.scalars["steps"].shape == (1,)
    assert elementwise(Declared(_Honest, "elementwise", "lion")).keys({}) == ("average",)


# ---- stepped in slices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make", [_Honest, _KeepsGradient, torch.optim.Adagrad, torch.optim.Rprop, torch.optim.NAdam])
def test_cut_parameters_have_the_bits_of_whole_ones(make: Any, world_size: int, dtype: torch.dtype) -> None:
    start = drawn(_SHAPES, 1, dtype)
    kind = elementwise(Declared(make, "elementwise", "mine"))
    options = {"initial_accumulator_value": 0.5} if make is torch.optim.Adagrad else {}
    ranks, plain = Ranks(kind, options, start, world_size), PlainTorch(make, options, start)
    for step in range(STEPS):
        gradients, present, rate = drawn(_SHAPES, 100 + step, dtype), present_in(step), rate_in(step, plain.base)
        before = ranks.photograph()
        ranks.propose(drawn(_SHAPES, 900 + step, dtype), {path: path != "never" for path in present}, 3 * rate)
        ranks.propose(gradients, present, rate)
        assert same(before, ranks.photograph()), f"step {step}: a proposal changed something"
        ranks.commit(present, rate)
        plain.step(gradients, present, rate)
        for path, leaf in plain.leaves.items():
            assert same_bits(ranks.view(ranks.flat, path), leaf), f"step {step}: {path}"
        if world_size > 1:
            assert same_bits(ranks.proposed, ranks.flat)
    for path, key, value in plain.state():
        if path != "never":
            name = key if isinstance(value, Tensor) else f"{key}:{type(value).__name__}"
            want = value if isinstance(value, Tensor) else torch.tensor(value)
            held = ranks.state(path, name)
            assert same_bits(held, want.reshape(held.shape)), f"{path}/{key}"


def test_state_that_was_handed_out_and_in_goes_on_with_the_same_bits() -> None:
    start = drawn(_SHAPES, 1)
    kind = elementwise(Declared(_Honest, "elementwise", "lion"))
    straight, resumed = Ranks(kind, {}, start, 2), Ranks(kind, {}, start, 2)
    for step in range(STEPS):
        _step(straight, step)
    _step(resumed, 3)
    resumed.flat.copy_(straight.flat)
    for ours, theirs in zip(straight.steppers, resumed.steppers, strict=True):
        record = ours.state_tensors()
        assert theirs.expected_tensors(record) == {n: (tuple(t.shape), t.dtype) for n, t in record.items()}
        theirs.load_state_tensors(record)
        assert {type(state["count"]) for state in theirs.optimizer.state.values() if state} == {int}
    assert same(straight.photograph(), resumed.photograph())
    for step in range(STEPS, 2 * STEPS):
        _step(straight, step)
        _step(resumed, step)
    assert same(straight.photograph(), resumed.photograph())


def _step(ranks: Ranks, step: int) -> None:
    present = present_in(step % STEPS)
    ranks.propose(drawn(_SHAPES, 100 + step), present, 0.05)
    ranks.commit(present, 0.05)


class _LateFaults(_Honest):
    """Goes wrong in its fourth update of a parameter, long after what the probe looked at with `decay` 0.9."""

    def update(self, leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(leaf, grad, state, group)
        fault = group["decay"] if state["count"] == 3 else 0.0
        if fault == 0.1:
            raise RuntimeError("the user's own")
        if fault == 0.2:
            state["more"] = grad.clone()
        if fault == 0.3:
            state["average"] = state["average"].float()
        if fault == 0.4:
            del state["steps"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("fault", "told"),
    [(0.1, "the user's own"), (0.2, "its state has more"), (0.3, "average, a torch.float32"), (0.4, "has no steps")],
)
def test_what_goes_wrong_later_is_raised_by_the_proposal_with_nothing_changed(
    fault: float, told: str, world_size: int
) -> None:
    """In a world of one as well: there the proposal is made for this alone."""
    ranks = Ranks(elementwise(Declared(_LateFaults, "elementwise", "late")), {}, drawn(_SHAPES, 1), world_size)
    present = {path: path != "never" for path in NUMELS}
    for step in range(2):
        ranks.propose(drawn(_SHAPES, step), present, 0.1)
        ranks.commit(present, 0.1)
    before = ranks.photograph()
    for stepper in ranks.steppers:
        stepper.optimizer.param_groups[0]["decay"] = fault
    for _ in range(2):
        with pytest.raises((RuntimeError, UsageError), match=told):
            ranks.propose(drawn(_SHAPES, 2), present, 0.1)
        assert same(before, ranks.photograph())
    for stepper in ranks.steppers:
        stepper.optimizer.param_groups[0]["decay"] = 0.9
    ranks.propose(drawn(_SHAPES, 2), present, 0.1)
    ranks.commit(present, 0.1)
    assert not same(before, ranks.photograph())


def test_a_users_code_never_runs_in_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(elementwise(Declared(_Honest, "elementwise", "lion")), {}, drawn(_SHAPES, 1), 1)
    (stepper,) = ranks.steppers
    assert isinstance(stepper, SliceOptimizer)
    for step in range(3):
        ranks.propose(drawn(_SHAPES, step), present_in(step), 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(_Honest, "update", None)
            ranks.commit(present_in(step), 0.1)
    assert ranks.state("long", "count:int").item() == 3 - sum(not present_in(step)["long"] for step in range(3))
