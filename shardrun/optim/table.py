"""The classes of torch.optim as their sources have them: what state they keep, and whether they may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.declared import Declared, learn
from shardrun.optim.state import Scalar, StateKey, StateSpec, scalar_dtype


@dataclass(frozen=True)
class Kind:
    """A class of torch.optim as its source has it, or what a user declared. `Elementwise` and `Matrix` say which."""

    name: str
    cls: Callable[..., torch.optim.Optimizer]
    state: tuple[StateKey, ...] = ()
    fused_op: str | None = None
    """torch's fused kernel, where the class has one."""
    scalars_follow: bool = False
    """Whether 0-dim state is on the leaf's device also without a fused kernel."""
    ndim: int | None = None
    """The number of dimensions of every tensor that it takes; None: any."""
    declared: Declared | None = None

    def keys(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """State tensors that exist under `options` once a parameter was stepped, per-parameter scalars left out."""
        if self.declared is not None:
            return tuple(learn(self.declared, options, torch.zeros(1)).elements)
        return tuple(entry.key for entry in self._entries(options) if not entry.scalar)

    def spec(self, options: Mapping[str, Any], leaf: Tensor) -> StateSpec:
        """What the state of one leaf of this dtype and device consists of; `options` are settled."""
        if self.declared is not None:
            return learn(self.declared, options, leaf)
        entries = self._entries(options)
        fused = bool(options.get("fused"))
        beside = leaf.device if fused or self.scalars_follow else torch.device("cpu")
        starts = {e.key: options.get(e.start, 0.0) if isinstance(e.start, str) else e.start for e in entries}
        return StateSpec(
            elements={entry.key: leaf.dtype for entry in entries if not entry.scalar},
            scalars={entry.key: Scalar((), scalar_dtype(fused), beside) for entry in entries if entry.scalar},
            eager=all(start is not None for start in starts.values()),
            starts={key: float(start) for key, start in starts.items() if start is not None},
        )

    def _entries(self, options: Mapping[str, Any]) -> list[StateKey]:
        return [entry for entry in self.state if entry.when is None or options.get(entry.when)]


class Elementwise(Kind):
    """An optimizer whose update of an element depends on that element's own gradient and state only."""


class Matrix(Kind):
    """An optimizer whose update needs the whole tensor."""


def _keys(*names: str) -> tuple[StateKey, ...]:
    return tuple(StateKey(name) for name in names)


_STEP = StateKey("step", scalar=True)
_MOMENTUM = StateKey("momentum_buffer", when="momentum")
_MOMENTS = (*_keys("exp_avg", "exp_avg_sq"), _STEP)
_ADAM = (*_MOMENTS, StateKey("max_exp_avg_sq", when="amsgrad"))
_OF_TORCH = (
    Elementwise("sgd", torch.optim.SGD, (StateKey("momentum_buffer", None, when="momentum"),), "_fused_sgd_"),
    Elementwise("adam", torch.optim.Adam, _ADAM, "_fused_adam_"),
    Elementwise("adamw", torch.optim.AdamW, _ADAM, "_fused_adamw_"),
    Elementwise("nadam", torch.optim.NAdam, (*_MOMENTS, StateKey("mu_product", 1.0, scalar=True))),
    Elementwise("radam", torch.optim.RAdam, _MOMENTS),
    Elementwise("adamax", torch.optim.Adamax, (*_keys("exp_avg", "exp_inf"), _STEP)),
    Elementwise(
        "adagrad", torch.optim.Adagrad, (StateKey("sum", "initial_accumulator_value"), _STEP), "_fused_adagrad_"
    ),
    Elementwise("adadelta", torch.optim.Adadelta, (*_keys("square_avg", "acc_delta"), _STEP)),
    Elementwise(
        "rmsprop",
        torch.optim.RMSprop,
        (*_keys("square_avg"), _MOMENTUM, StateKey("grad_avg", when="centered"), _STEP),
    ),
    Elementwise("rprop", torch.optim.Rprop, (*_keys("prev"), StateKey("step_size", None), _STEP)),
    Elementwise(
        "asgd",
        torch.optim.ASGD,
        (*_keys("ax"), _STEP, StateKey("eta", None, scalar=True), StateKey("mu", 1.0, scalar=True)),
        scalars_follow=True,
    ),
)
ELEMENTWISE: dict[str, Elementwise] = {kind.name: kind for kind in _OF_TORCH}
"""Every elementwise class of torch.optim by name."""
MATRIX: dict[str, Matrix] = {"muon": Matrix("muon", torch.optim.Muon, _keys("momentum_buffer"), ndim=2)}
"""The classes of torch.optim that need whole tensors and can be stepped by their owners, by name."""
