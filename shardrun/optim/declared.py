"""A user's own optimizer, and a check of what its declaration claims.

[Note: what the check is worth] `probe` steps a few small tensors for a few steps and compares bits. It finds out the
usual false claims (a norm over the whole tensor, state kept outside of `optimizer.state`, a touched gradient), but it
is a check, not a proof: what happens only later, or only in large tensors, it cannot see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from shardrun.errors import UsageError
from shardrun.optim.state import Scalar, StateSpec, require_recordable
from shardrun.shard.layout import ALIGN

_STEPS = 6
_NUMEL = 4 * ALIGN + 37
_CUTS = (0, ALIGN, 3 * ALIGN, _NUMEL)
PROBED_SHAPES = ((16, 8), (16,), (16, 8, 4), (16, 8, 3, 3))
"""A matrix optimizer is tried out on the first of them that it takes."""


@dataclass(frozen=True)
class Declared:
    """An optimizer that is not on the list, with what its author claims; `probe` checks it when a session is made.

    `make(param_groups, **options)` returns a `torch.optim.Optimizer`; a class fits. `name` stands in the records, so it
    names one algorithm for ever. All per-parameter state is in `optimizer.state`: dense tensors and plain numbers. With
    ZeRO-2 the first update of a parameter makes all of it, tensors of the leaf's own shape or of one element. A
    gradient that is None leaves the parameter alone. `takes(shape)`: which shapes it can step; None: all.
    """

    make: Callable[..., torch.optim.Optimizer]
    kind: Literal["elementwise", "matrix"]
    """elementwise: an element's update depends on its own gradient and state only. matrix: on the whole tensor's."""
    name: str
    takes: Callable[[tuple[int, ...]], bool] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("elementwise", "matrix"):
            raise UsageError(f"Declared: kind is {self.kind!r}; it is 'elementwise' or 'matrix'")
        if not callable(self.make) or not isinstance(self.name, str) or not self.name.strip():
            raise UsageError(f"Declared: make is {self.make!r} and name {self.name!r}; give a callable and a name")


def probe(declared: Declared, options: Mapping[str, Any]) -> None:
    """Check the claim on small float32 tensors; UsageError tells what is not so. Local, draws no random numbers.

    Both kinds: state that a record can hold and nowhere else, gradients only read, absent ones skipped, no tensor moved
    by another. Elementwise: a vector cut at multiples of 256 has the bits of the whole one, and equal scalars in all
    parts. See [Note: what the check is worth].
    """
    with torch.random.fork_rng(devices=[]):
        try:
            if declared.kind == "elementwise":
                _check_manners(declared, options, (_NUMEL,))
                _check_cuts(declared, options)
            elif shapes := [shape for shape in PROBED_SHAPES if declared.takes is None or declared.takes(shape)]:
                _check_manners(declared, options, shapes[0])
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{declared.name}: an update of small tensors with the options {dict(options)} raised "
                f"{type(error).__name__}: {error}"
            ) from error


def learn(declared: Declared, options: Mapping[str, Any], leaf: Tensor) -> StateSpec:
    """What the state of an elementwise optimizer consists of, by one update of a vector like `leaf` (dtype, device)."""
    with torch.random.fork_rng(devices=[]):
        trial = _Trial(declared, options, [torch.ones(_NUMEL, dtype=leaf.dtype, device=leaf.device)])
        eager = bool(trial.optimizer.state.get(trial.leaves[0]))
        trial.step([torch.ones_like(trial.leaves[0])])
    state = trial.state(0)
    require_recordable(declared.name, "a vector", state)
    elements, scalars, numbers = {}, {}, {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            numbers[key] = type(value)
        elif value.shape == trial.leaves[0].shape:
            elements[key] = value.dtype
        elif value.numel() == 1:
            scalars[key] = Scalar(tuple(value.shape), value.dtype, value.device)
        else:
            raise UsageError(
                f"{declared.name}: its state {key} has the shape {tuple(value.shape)} for a vector of {_NUMEL}; "
                "an elementwise optimizer keeps one element per element, or one per parameter"
            )
    return StateSpec(elements, scalars, numbers, eager=eager)


class _Trial:
    """The declared optimizer over a few leaves of its own."""

    def __init__(self, declared: Declared, options: Mapping[str, Any], leaves: Sequence[Tensor]) -> None:
        self.name = declared.name
        self.leaves = [leaf.clone() for leaf in leaves]
        made = declared.make([{"params": self.leaves}], **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"{self.name}: make returned a {type(made).__name__}, not a torch.optim.Optimizer")
        self.optimizer = made
        (group,) = made.param_groups
        if not isinstance(group.get("lr"), int | float) or not group["lr"] >= 0 or math.isinf(group["lr"]):
            raise UsageError(f"{self.name}: the lr of its param group is {group.get('lr')!r}, not a rate")
        self._base = float(group["lr"]) or 1e-2

    def step(self, gradients: Sequence[Tensor | None], factor: float = 1.0) -> None:
        before = [None if grad is None else grad.clone() for grad in gradients]
        (group,) = self.optimizer.param_groups
        for leaf, grad in zip(self.leaves, gradients, strict=True):
            leaf.grad = grad
        group["lr"] = self._base * factor
        outside = self._outside()
        self.optimizer.step()
        for leaf, grad in zip(self.leaves, before, strict=True):
            if grad is not None and (leaf.grad is None or not torch.equal(leaf.grad, grad)):
                raise UsageError(f"{self.name}: step() writes to the gradients, which are needed again; work on a copy")
            leaf.grad = None
        after = self._outside()
        if changed := sorted(key for key in after if key not in outside or outside[key] != after[key]):
            raise UsageError(
                f"{self.name}: step() changes {', '.join(changed)} outside of optimizer.state, which no record holds; "
                "keep what belongs to a parameter in its state"
            )

    def state(self, index: int) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.leaves[index], {}))

    def _outside(self) -> dict[str, str]:
        """What the optimizer keeps in its param group, in itself or in another one; torch's bookkeeping left out."""
        (group,) = self.optimizer.param_groups
        found = {f"param_groups[...][{key!r}]": repr(value) for key, value in group.items() if key != "params"}
        for key, value in vars(self.optimizer).items():
            if isinstance(value, torch.optim.Optimizer) and value.state is not self.optimizer.state:
                found[key] = f"the state of {len(value.state)} parameters"
            elif key not in _BOOKKEEPING and isinstance(value, bool | int | float | Tensor | list | dict):
                found[key] = repr(value)
        return found


_BOOKKEEPING = {
    *vars(torch.optim.SGD([torch.zeros(1)])),
    "_need_device_dtype_check_for_fused",
    "_opt_called",
    "_warned_capturable_if_run_uncaptured",
}


def _check_manners(declared: Declared, options: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Two tensors side by side, of which one misses gradients, against the second one alone."""
    start, gradients = _drawn(shape, 2)
    both = _Trial(declared, options, start)
    alone = _Trial(declared, options, start[1:])
    for step, (first, second) in enumerate(gradients):
        skipped = step % 3 == 1
        before = [both.leaves[0].clone(), *(v.clone() for v in both.state(0).values() if isinstance(v, Tensor))]
        both.step([None if skipped else first, second], 1.0 - step / 10)
        alone.step([second], 1.0 - step / 10)
        after = [both.leaves[0], *(value for value in both.state(0).values() if isinstance(value, Tensor))]
        if skipped and not (len(before) == len(after) and all(map(_same, before, after))):
            raise UsageError(f"{declared.name}: step() changes a parameter whose gradient is None, or its state")
        require_recordable(declared.name, f"a parameter of shape {shape}", both.state(0))
    _compare(f"{declared.name}: a tensor beside another one is stepped otherwise than alone", both, 1, alone, 0)


def _check_cuts(declared: Declared, options: Mapping[str, Any]) -> None:
    """One vector whole, and the same one in three parts that two ranks would hold."""
    (start,), gradients = _drawn((_NUMEL,), 1)
    cut = [slice(low, high) for low, high in pairwise(_CUTS)]
    whole = _Trial(declared, options, [start])
    ranks = [(_Trial(declared, options, [start[part] for part in parts]), parts) for parts in (cut[:1], cut[1:])]
    for step, (gradient,) in enumerate(gradients):
        factor = 1.0 - step / 10
        absent = step == 3
        whole.step([None if absent else gradient], factor)
        for trial, parts in ranks:
            trial.step([None if absent else gradient[part].clone() for part in parts], factor)
    told = f"{declared.name} is declared elementwise, but a vector cut at multiples of {ALIGN} is stepped otherwise"
    spec = learn(declared, options, start)
    for trial, parts in ranks:
        for index, part in enumerate(parts):
            view = _Trial(declared, options, [whole.leaves[0][part]])
            view.optimizer.state[view.leaves[0]] = {
                key: value[part] if key in spec.elements else value for key, value in whole.state(0).items()
            }
            _compare(told, trial, index, view, 0)


def _compare(told: str, one: _Trial, index: int, other: _Trial, at: int) -> None:
    """UsageError if two leaves or their states differ in a bit."""
    ours, theirs = one.state(index), other.state(at)
    if ours.keys() != theirs.keys():
        raise UsageError(f"{told}: state {sorted(ours)} and {sorted(theirs)}")
    pairs = {"parameter": (one.leaves[index], other.leaves[at]), **{key: (ours[key], theirs[key]) for key in ours}}
    for key, (left, right) in pairs.items():
        same = _same(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else left == right
        if not same:
            raise UsageError(f"{told}: its {key} differs after {_STEPS} steps; it is not what was declared")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _drawn(shape: tuple[int, ...], count: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Start values, and gradients per step whose size differs between the parts of a tensor."""
    generator = torch.Generator().manual_seed(20260)
    numel = math.prod(shape)
    scale = torch.logspace(-1, 1, numel).reshape(shape)
    start = [torch.randn(shape, generator=generator) for _ in range(count)]
    return start, [[torch.randn(shape, generator=generator) * scale for _ in range(count)] for _ in range(_STEPS)]
