"""TensorOptimizer: whole tensors proposed in a shadow, and the bits of torch.optim on the same tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardrun.errors import UsageError
from shardrun.optim.kinds import ELEMENTWISE, Declared, Kind, OptionGroup, any_kind
from shardrun.optim.matrix import TensorOptimizer, WholeTensor
from shardrun.optim.stepper import Stepper
from tests.support.optim_cases import CASE_IDS, CASES, FIRST, STEPS, PlainTorch, drawn, present_in, rate_in, same
from tests.support.sessions import same_bits

_MATRICES = {"long": (17, 3), "flat": (3, 17), "one": (1, 1), "late": (16, 24), "never": (2, 2)}
_SHAPES = {"long": (37, 31), "flat": (300,), "one": (), "late": (7, 5, 3), "never": (2, 2)}


class _Owner:
    """A TensorOptimizer over tensors of its own."""

    def __init__(
        self,
        kind: Kind,
        options: Mapping[str, Any],
        start: Mapping[str, Tensor],
        groups: tuple[OptionGroup, ...] = (),
        proposes: bool = True,
    ) -> None:
        self.leaves = {path: value.clone() for path, value in start.items()}
        self.grads = {path: torch.zeros_like(value) for path, value in start.items()}
        self.proposed = {path: torch.zeros_like(value) for path, value in start.items()}
        group = {path: next((n for n, g in enumerate(groups, 1) if path in g.paths), 0) for path in start}
        tensors = [
            WholeTensor(path, group[path], leaf, self.grads[path], self.proposed[path] if proposes else None)
            for path, leaf in self.leaves.items()
        ]
        self.stepper = TensorOptimizer(kind, options, groups, tensors)

    def propose(self, gradients: Mapping[str, Tensor], present: Mapping[str, bool], rate: float | None) -> None:
        for path, grad in gradients.items():
            self.grads[path].copy_(grad)
        self.stepper.propose(present, self.stepper.rates(rate))
        self.stepper.stage(present)
        for path, grad in gradients.items():
            assert same_bits(self.grads[path], grad), f"the gradient of {path} was written to"

    def commit(self, present: Mapping[str, bool], rate: float | None) -> None:
        self.stepper.commit(present, self.stepper.rates(rate))

    def step(self, number: int, rate: float | None = 0.02, dtype: torch.dtype = torch.float32) -> None:
        shapes = {path: tuple(leaf.shape) for path, leaf in self.leaves.items()}
        self.propose(drawn(shapes, 100 + number, dtype), present_in(number % STEPS), rate)
        self.commit(present_in(number % STEPS), rate)

    def photograph(self) -> dict[str, Tensor]:
        leaves = {f"leaf {path}": leaf.clone() for path, leaf in self.leaves.items()}
        return {**leaves, **self.stepper.state_tensors()}


def _compare(owner: _Owner, plain: PlainTorch, dtype: torch.dtype = torch.float32) -> None:
    shapes = {path: tuple(leaf.shape) for path, leaf in owner.leaves.items()}
    for step in range(STEPS):
        gradients, present = drawn(shapes, 100 + step, dtype), present_in(step)
        rate = rate_in(step, plain.base)
        before = owner.photograph()
        owner.propose(drawn(shapes, 900 + step, dtype), {path: path != "never" for path in present}, 3 * rate)
        owner.propose(gradients, present, rate)
        assert same(before, owner.photograph()), f"step {step}: a proposal changed something"
        owner.commit(present, rate)
        plain.step(gradients, present, rate)
        for path, leaf in plain.leaves.items():
            assert same_bits(owner.leaves[path], leaf), f"step {step}: {path}"
            assert same_bits(owner.proposed[path], leaf), f"step {step}: the proposal of {path}"
    state = {name: t for name, t in owner.stepper.state_tensors().items() if not name.startswith("never/")}
    held = {f"{path}/{key}": value for path, key, value in plain.state() if path != "never"}
    assert same(state, held)


_MUON: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "weight_decay": 0.3},
    {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", _MUON)
def test_muon_has_the_bits_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    start = drawn(_MATRICES, 1, dtype)
    _compare(_Owner(any_kind("muon"), options, start), PlainTorch(torch.optim.Muon, options, start), dtype)


@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_every_elementwise_class_has_the_bits_of_torch(name: str, options: dict[str, Any]) -> None:
    start = drawn(_SHAPES, 1)
    owner = _Owner(ELEMENTWISE[name], options, start)
    settled = {key: value for key, value in owner.stepper.options[0].items() if key != "lr"}
    if ELEMENTWISE[name].fused_op is None:
        del settled["fused"]
    _compare(owner, PlainTorch(ELEMENTWISE[name].cls, {**settled, **options}, start))


class _Odd(torch.optim.Optimizer):
    """Keeps a number, a flag and a matrix of another shape; replaces its tensors; makes one of them late."""

    def __init__(self, params: Any, lr: float = 0.1, late: int = 2) -> None:
        super().__init__(params, {"lr": lr, "late": late})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is None:
                    continue
                state = self.state[leaf]
                matrix = leaf.grad.reshape(leaf.shape[0], -1)
                if not state:
                    state.update(count=0, share=0.5, even=True, gram=torch.eye(leaf.shape[0], dtype=torch.float64))
                state["count"] += 1
                state["share"] *= 0.75
                state["even"] = state["count"] % 2 == 0
                state["gram"] = state["gram"] * state["share"] + (matrix @ matrix.T).double()
                if state["count"] == group["late"]:
                    state["late"] = leaf.grad.clone()
                scaled = torch.linalg.solve(state["gram"], matrix.double()).reshape(leaf.shape)
                leaf.sub_(group["lr"] * (2 if state["even"] else 1) * scaled.to(leaf.dtype))
                if "late" in state:
                    leaf.add_(state["late"], alpha=1e-3)


class _KeepsGradient(torch.optim.SGD):
    """Puts the very gradient tensor into its state, which the session writes to in the next step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for leaf in self.param_groups[0]["params"]:
            if leaf.grad is not None:
                before = self.state[leaf].get("previous")
                leaf.sub_(leaf.grad if before is None else leaf.grad - before * 0.5, alpha=self.param_groups[0]["lr"])
                self.state[leaf]["previous"] = leaf.grad


_ODD = Declared(_Odd, "matrix", "odd")
_ODD_SHAPES = {"long": (5, 3), "flat": (3,), "one": (1, 1), "late": (4, 2, 2), "never": (2, 2)}


class _Numbers(PlainTorch):
    """Plain torch whose numbers in the state are shown as a record has them."""

    def state(self) -> Any:
        dtypes = {int: torch.int64, float: torch.float64, bool: torch.bool}
        for path, key, value in super().state():
            if isinstance(value, Tensor):
                yield path, key, value
            else:
                yield path, f"{key}:{type(value).__name__}", torch.tensor(value, dtype=dtypes[type(value)])


def test_a_users_matrix_optimizer_has_the_bits_of_itself() -> None:
    start = drawn(_ODD_SHAPES, 1)
    _compare(_Owner(any_kind(_ODD), {}, start), _Numbers(_Odd, {}, start))


def test_a_gradient_that_is_kept_in_the_state_is_a_copy_there() -> None:
    start = drawn(_ODD_SHAPES, 1)
    kind = any_kind(Declared(_KeepsGradient, "matrix", "keeps"))
    _compare(_Owner(kind, {}, start), PlainTorch(_KeepsGradient, {}, start))


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.AdamW, torch.optim.SGD])
def test_classes_of_torch_can_be_declared(cls: type[torch.optim.Optimizer]) -> None:
    start = drawn(_SHAPES, 1)
    options = {"momentum": 0.9, "fused": True} if cls is torch.optim.SGD else {}
    kind = "matrix" if cls is torch.optim.Adafactor else "elementwise"
    declared = Declared(cls, kind, "mine")  # type: ignore[arg-type]
    _compare(_Owner(any_kind(declared), options, start), PlainTorch(cls, options, start))


@pytest.mark.parametrize(
    ("optimizer", "options", "shapes"),
    [
        ("muon", {}, _MATRICES),
        ("rprop", {}, _SHAPES),
        ("adagrad", {"initial_accumulator_value": 0.5}, _SHAPES),
        ("sgd", {"momentum": 0.9}, _SHAPES),
        ("asgd", {}, _SHAPES),
        (_ODD, {}, _ODD_SHAPES),
        (Declared(torch.optim.Adafactor, "matrix", "rows"), {}, _SHAPES),
    ],
)
def test_state_that_was_handed_out_and_in_goes_on_with_the_same_bits(
    optimizer: Any, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Tensors keep their own shapes, and numbers come back as numbers."""
    start = drawn(shapes, 1)
    straight, resumed = (_Owner(any_kind(optimizer), options, start) for _ in range(2))
    for step in range(STEPS):
        straight.step(step)
    record = straight.stepper.state_tensors()
    for other in (3, None):  # over state that is replaced, and over none
        if other is not None:
            resumed.step(other)
        record["long/master"] = torch.zeros(1)  # is not the optimizer's
        expected = resumed.stepper.expected_tensors({n: t for n, t in record.items() if n != "long/master"})
        del record["long/master"]
        assert expected == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in record.items()}
        resumed.stepper.load_state_tensors({**record, "long/master": torch.zeros(1)})
        for path, leaf in straight.leaves.items():
            resumed.leaves[path].copy_(leaf)
        assert same(straight.photograph(), resumed.photograph())
    for step in range(STEPS, 2 * STEPS):
        straight.step(step)
        resumed.step(step)
    assert same(straight.photograph(), resumed.photograph())


def test_numbers_stand_in_a_record_as_tensors_of_64_bits() -> None:
    owner = _Owner(any_kind(_ODD), {}, drawn(_ODD_SHAPES, 1))
    owner.step(0)
    record = owner.stepper.state_tensors()
    assert {name: (t.item(), t.dtype) for name, t in record.items() if name.startswith("long/") and not t.dim()} == {
        "long/count:int": (1, torch.int64),
        "long/share:float": (0.375, torch.float64),
        "long/even:bool": (False, torch.bool),
    }
    owner.stepper.load_state_tensors(record)
    state = owner.stepper.optimizer.state[owner.leaves["long"]]
    assert {key: type(value) for key, value in state.items()} == {
        "count": int,
        "share": float,
        "even": bool,
        "gram": torch.Tensor,
    }


class _Explodes(_Odd):
    """Raises in the middle of the step that `late` names."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        if any(state["count"] == self.param_groups[0]["late"] for state in self.state.values()):
            raise RuntimeError("the user's own")


def test_an_exception_of_a_users_optimizer_leaves_everything_as_it_was() -> None:
    owner = _Owner(any_kind(Declared(_Explodes, "matrix", "explodes")), {"late": 3}, drawn(_ODD_SHAPES, 1))
    everything = {path: path != "never" for path in FIRST}
    gradients = drawn(_ODD_SHAPES, 5)
    for _ in range(2):
        owner.propose(gradients, everything, 0.1)
        owner.commit(everything, 0.1)
    before = owner.photograph()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the user's own"):
            owner.propose(gradients, everything, 0.1)
        assert same(before, owner.photograph())
    one = {path: path == "never" for path in FIRST}
    owner.propose(gradients, one, 0.1)
    owner.commit(one, 0.1)
    after = owner.photograph()
    assert all(same_bits(after[name], tensor) for name, tensor in before.items() if "never" not in name)
    assert not same_bits(after["leaf never"], before["leaf never"])


class _Bag(_Odd):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["history"] = [1, 2]


def test_state_that_no_record_could_hold_is_refused_in_the_proposal() -> None:
    owner = _Owner(any_kind(Declared(_Bag, "matrix", "bag")), {}, drawn(_ODD_SHAPES, 1))
    before = owner.photograph()
    with pytest.raises(UsageError, match=r"the state of long has 'history', a list"):
        owner.step(0)
    assert same(before, owner.photograph())


def test_a_commit_runs_no_kernel_and_allocates_no_tensor() -> None:
    owner = _Owner(any_kind("muon"), {}, drawn(_MATRICES, 1))
    for step in range(3):
        owner.step(step)
    present = present_in(3)
    owner.propose(drawn(_MATRICES, 103), present, 0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        owner.commit(present, 0.1)
    events = {event.key for event in profile.key_averages()}
    assert events <= {"aten::_foreach_copy_", "aten::copy_", "[memory]"}, events
    assert all(event.self_cpu_memory_usage <= 0 for event in profile.events() if event.key != "[memory]")


def test_bytes_of_state_and_shadow_are_told() -> None:
    owner = _Owner(any_kind("muon"), {}, drawn(_MATRICES, 1))
    numel = sum(leaf.numel() for leaf in owner.leaves.values())
    assert (owner.stepper.state_nbytes, owner.stepper.shadow_nbytes) == (4 * numel, 8 * numel)
    owner.step(0)
    assert (owner.stepper.state_nbytes, owner.stepper.shadow_nbytes) == (4 * numel, 8 * numel)


def test_a_rank_that_owns_nothing_steps_along() -> None:
    stepper: Stepper = TensorOptimizer(any_kind("muon"), {"lr": 0.1}, [], [])
    stepper.propose({}, stepper.rates(None))
    stepper.commit({}, stepper.rates(None))
    assert (stepper.state_tensors(), stepper.expected_tensors({}), stepper.state_nbytes) == ({}, {}, 0)


def test_schedulers_of_torch_work_without_a_warning_and_without_a_proposal_to_write_to() -> None:
    start = drawn(_MATRICES, 1)
    groups = (OptionGroup(frozenset({"flat"}), {"weight_decay": 0.5}, lr_scale=0.5),)
    owner = _Owner(any_kind("muon"), {"lr": 0.1}, start, groups, proposes=False)
    plain = [PlainTorch(torch.optim.Muon, {"weight_decay": decay}, start) for decay in (0.1, 0.5)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(owner.stepper.optimizer, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            owner.step(step, None)
            for twin, rate in zip(plain, (0.1, 0.05), strict=True):
                twin.step(drawn(_MATRICES, 100 + step), present_in(step), rate * 0.5**step)
            scheduler.step()
    assert all(same_bits(owner.leaves[path], plain[path == "flat"].leaves[path]) for path in _MATRICES)
    assert all(not value.any() for value in owner.proposed.values())
