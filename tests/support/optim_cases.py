"""Every elementwise class of torch.optim with a sweep of its options: whole in plain torch, and cut by hand as ranks.

`PlainTorch` is what is compared with; it knows nothing of shardrun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.elementwise import SliceOptimizer, SliceTensors
from shardrun.optim.kinds import OptionGroup
from shardrun.shard.layout import ALIGN, Fragment, align
from tests.support.sessions import same_bits

Options = dict[str, Any]

_DECAY: Options = {"weight_decay": 0.1}
_MAX: Options = {"maximize": True}
_BETAS: Options = {"betas": (0.7, 0.95), "eps": 1e-4}

SWEEP: dict[str, list[Options]] = {
    "sgd": [
        {"fused": False},
        {"fused": False, "momentum": 0.9, **_DECAY},
        {"fused": False, "momentum": 0.8, "dampening": 0.3, **_MAX},
        {"fused": False, "momentum": 0.9, "nesterov": True},
        {"fused": True, "momentum": 0.9, "nesterov": True, **_DECAY},
        {"fused": True, "momentum": 0.8, "dampening": 0.3, **_MAX},
        {"lr": 0.3},
    ],
    "adam": [
        {"fused": False, **_DECAY},
        {"fused": False, "amsgrad": True, **_BETAS},
        {"fused": True, "amsgrad": True, **_MAX},
        {"decoupled_weight_decay": True, **_DECAY},
        {},
    ],
    "adamw": [{"fused": False}, {"fused": False, "amsgrad": True, **_MAX}, {"fused": True, **_DECAY, **_BETAS}],
    "nadam": [{}, {**_DECAY, **_BETAS}, {"momentum_decay": 0.02, "decoupled_weight_decay": True, **_DECAY}, _MAX],
    "radam": [{}, {"lr": 0.1, "betas": (0.6, 0.8)}, {"decoupled_weight_decay": True, **_DECAY}, {**_DECAY, **_MAX}],
    "adamax": [{}, {**_DECAY, **_BETAS}, _MAX],
    "adagrad": [
        {"fused": False},
        {"fused": False, "lr_decay": 0.1, "initial_accumulator_value": 0.5, **_DECAY},
        {"fused": True, "lr_decay": 0.1, "initial_accumulator_value": 0.5, **_DECAY},
        {"fused": True, "eps": 1e-3, **_MAX},
    ],
    "adadelta": [{}, {"rho": 0.5, "eps": 1e-3, **_DECAY}, {"lr": 0.2, **_MAX}],
    "rmsprop": [
        {},
        {"alpha": 0.9, "eps": 1e-4, **_DECAY},
        {"momentum": 0.9, "centered": True, **_MAX},
        {"centered": True},
        {"momentum": 0.5, **_DECAY},
    ],
    "rprop": [{}, {"etas": (0.3, 1.7), "step_sizes": (1e-3, 0.5)}, _MAX],
    "asgd": [{}, {"lambd": 0.1, "alpha": 0.5, "t0": 2.0}, {"lr": 0.3, "t0": 0.0, **_DECAY}, _MAX],
}
CASES = [(name, options) for name, sweep in SWEEP.items() for options in sweep]
CASE_IDS = [f"{name} {number}" for name, sweep in SWEEP.items() for number in range(len(sweep))]

STEPS = 7
# A parameter's first update comes in the step of its number; after that it misses one in three.
FIRST = {"long": 0, "flat": 0, "one": 1, "late": 3, "never": STEPS}


def present_in(step: int) -> dict[str, bool]:
    """Which parameters have a gradient in `step`: first updates beside later ones, absent ones, one that never has."""
    return {
        path: step == first or (step > first and (step + index) % 3 != 0)
        for index, (path, first) in enumerate(FIRST.items())
    }


def rate_in(step: int, base: float) -> float:
    """A learning rate that changes with every step."""
    return base * (1.0 - step / 11)


class PlainTorch:
    """torch.optim on whole parameters, one object for each: what is compared with, and what tells the base rate.

    Its first rate counts: Rprop and ASGD keep it in their state.
    """

    def __init__(self, make: Any, options: Mapping[str, Any], start: Mapping[str, Tensor]) -> None:
        self.leaves = {path: value.clone() for path, value in start.items()}
        self.optimizers = {path: make([leaf], **options) for path, leaf in self.leaves.items()}
        first = next(iter(self.optimizers.values()))
        self.base = float(first.defaults["lr"])

    def step(self, gradients: Mapping[str, Tensor], present: Mapping[str, bool], rate: float) -> None:
        """One update of everything that is present."""
        for path, optimizer in self.optimizers.items():
            self.leaves[path].grad = gradients[path].clone() if present[path] else None
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """(path, key, value) of all state there is."""
        for path, optimizer in self.optimizers.items():
            for key, value in optimizer.state.get(self.leaves[path], {}).items():
                yield path, key, value


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random tensor for each path, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in shapes.items()}


NUMELS = {"long": 1400, "flat": 300, "one": 1, "late": 700, "never": 5}
_OFFSETS = {path: sum(align(n) for n in list(NUMELS.values())[:i]) for i, path in enumerate(NUMELS)}
_TOTAL = sum(align(numel) for numel in NUMELS.values())


class Ranks:
    """One SliceOptimizer per rank over equal slices of one flat buffer, in one process."""

    def __init__(
        self,
        kind: Any,
        options: Mapping[str, Any],
        start: Mapping[str, Tensor],
        world_size: int,
        groups: tuple[OptionGroup, ...] = (),
        chunk_numel: int | None = 2 * ALIGN,
    ) -> None:
        numel = align(-(-_TOTAL // world_size))
        dtype = next(iter(start.values())).dtype
        self.flat, self.grad, self.proposed = (torch.zeros(numel * world_size, dtype=dtype) for _ in range(3))
        for path, value in start.items():
            self.view(self.flat, path).copy_(value)
        self.steppers: list[SliceOptimizer] = []
        for rank in range(world_size):
            low = rank * numel
            part = slice(low, low + numel)
            slices = [
                SliceTensors(
                    group,
                    self.flat[part],
                    self.grad[part],
                    self.proposed[part] if world_size > 1 else None,
                    tuple(self._fragments(low, numel, [p for p in NUMELS if group_of_path(p, groups) == group])),
                )
                for group in range(1 + len(groups))
            ]
            self.steppers.append(SliceOptimizer(kind, options, groups, slices, chunk_numel))

    @staticmethod
    def _fragments(low: int, numel: int, paths: list[str]) -> list[Fragment]:
        found = []
        for path in paths:
            start = max(low, _OFFSETS[path])
            stop = min(low + numel, _OFFSETS[path] + NUMELS[path])
            if start < stop:
                found.append(Fragment(path, start - _OFFSETS[path], stop - _OFFSETS[path], start - low))
        return found

    def view(self, flat: Tensor, path: str) -> Tensor:
        """The parameter's elements in a flat buffer (numel,)."""
        return flat[_OFFSETS[path] : _OFFSETS[path] + NUMELS[path]]

    def propose(self, gradients: Mapping[str, Tensor], present: Mapping[str, bool], rate: float | None) -> None:
        """Put the gradients into the flat buffer, propose on all ranks and stage."""
        for path, grad in gradients.items():
            self.view(self.grad, path).copy_(grad)
        for stepper in self.steppers:
            stepper.propose(present, stepper.rates(rate))
        for stepper in self.steppers if len(self.steppers) > 1 else ():
            stepper.stage(present)

    def commit(self, present: Mapping[str, bool], rate: float | None) -> None:
        """Commit on all ranks."""
        for stepper in self.steppers:
            stepper.commit(present, stepper.rates(rate))

    def photograph(self) -> dict[str, Tensor]:
        """All that is live, by rank and name."""
        found = {"flat": self.flat.clone()}
        for rank, stepper in enumerate(self.steppers):
            found |= {f"{rank}: {name}": tensor for name, tensor in stepper.state_tensors().items()}
        return found

    def state(self, path: str, key: str) -> Tensor:
        """The whole of a parameter's state, put together from the ranks' pieces."""
        parts = [s.state_tensors()[f"{path}/{key}"] for s in self.steppers if f"{path}/{key}" in s.state_tensors()]
        if parts[0].dim():
            return torch.cat(parts)
        assert all(same_bits(part, parts[0]) for part in parts)
        return parts[0]


def group_of_path(path: str, groups: tuple[OptionGroup, ...]) -> int:
    """0, or the number of the first group that names `path`."""
    return next((number for number, group in enumerate(groups, 1) if path in group.paths), 0)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both hold the same names, and the same bits under each."""
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
