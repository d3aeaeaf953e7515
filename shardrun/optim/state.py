"""The state that torch.optim keeps for one leaf: what it consists of, how it starts, and how a record holds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import UsageError

MASTER = "master"
"""The name under which a record holds FP32 masters beside the state; no optimizer may have it for a key."""

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_NUMBER_NAMES = {kind.__name__: kind for kind in _NUMBERS}


@dataclass(frozen=True)
class StateKey:
    """One entry of the state that a torch.optim class keeps per parameter."""

    key: str
    start: float | str | None = 0.0
    """Its first value, or the option that holds it; None: it follows from the first update's gradient or rate."""
    when: str | None = None
    """The option that switches it on."""
    scalar: bool = False
    """One 0-dim tensor per parameter, not one element per element."""


@dataclass(frozen=True)
class Scalar:
    """A tensor of one element per parameter, however large the parameter is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class StateSpec:
    """Everything that the state of one leaf consists of under given options; nothing at all for a plain SGD."""

    elements: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Tensors of the leaf's own shape."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    numbers: Mapping[str, type] = field(default_factory=dict)
    """Plain Python numbers: bool, int or float."""
    eager: bool = True
    """Whether it is there before the first update; if not, the first update makes all of it."""
    starts: Mapping[str, float] = field(default_factory=dict)
    """First value by key, of what is eager and does not start at zero."""

    def keys(self) -> set[str]:
        """All keys of a leaf's state once it was stepped."""
        return {*self.elements, *self.scalars, *self.numbers}

    def misfit(self, state: Mapping[str, Any], leaf: Tensor) -> str | None:
        """What in the `state` of a stepped `leaf` is not as it says here, or None."""
        for key in sorted({*state, *self.keys()}):
            value = state.get(key)
            if isinstance(value, Tensor):
                scalar = self.scalars.get(key)
                dtype, shape = self.elements.get(key), tuple(leaf.shape)
                if scalar is not None:
                    dtype, shape = scalar.dtype, scalar.shape
                if (value.dtype, tuple(value.shape)) != (dtype, shape):
                    return f"its state has {key}, a {value.dtype} tensor of shape {tuple(value.shape)}"
            elif key not in state:
                return f"its state has no {key}"
            elif type(value) is not self.numbers.get(key):
                return f"its state has {key} = {value!r}"
        return None

    def nbytes(self, numel: int) -> int:
        """Bytes of the tensors of the leaf's shape, for a leaf of `numel` elements."""
        return numel * sum(dtype.itemsize for dtype in self.elements.values())

    def recorded(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name in a record -> (shape, dtype), for a leaf or fragment of `shape`."""
        return {
            **{key: (shape, dtype) for key, dtype in self.elements.items()},
            **{key: ((), scalar.dtype) for key, scalar in self.scalars.items()},
            **{number_name(key, kind): ((), _NUMBERS[kind]) for key, kind in self.numbers.items()},
        }

    def initial(self, elements: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state of a leaf that was not stepped yet, in the memory of `elements` (overwritten); {} if not eager."""
        if not self.eager:
            return {}
        state: dict[str, Any] = {key: view.fill_(self.starts.get(key, 0.0)) for key, view in elements.items()}
        for key, scalar in self.scalars.items():
            start = self.starts.get(key, 0.0)
            state[key] = torch.full(scalar.shape, start, dtype=scalar.dtype, device=scalar.device)
        return state


def number_name(key: str, kind: type) -> str:
    """The name in a record of a plain Python number in the state."""
    return f"{key}:{kind.__name__}"


def to_record(key: str, value: Tensor | float, *, copy: bool = True) -> tuple[str, Tensor]:
    """A state entry's name in a record, and its value there: a copy, or of a tensor the live one. A number becomes a
    0-dim tensor of 64 bits."""
    if isinstance(value, Tensor):
        return key, value.detach().clone() if copy else value.detach()
    return number_name(key, type(value)), torch.tensor(value, dtype=_NUMBERS[type(value)])


def forms_of(state: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name in a record -> (shape, dtype) of every entry of a leaf's state, as `to_record` would give it."""
    return {
        (key if isinstance(value, Tensor) else number_name(key, type(value))): (
            (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), _NUMBERS[type(value)])
        )
        for key, value in state.items()
    }


def from_record(name: str, tensor: Tensor) -> tuple[str, Tensor | bool | int | float]:
    """The inverse of `to_record`; a tensor is copied."""
    key, _, kind = name.partition(":")
    return (key, tensor.clone()) if not kind else (key, _NUMBER_NAMES[kind](tensor.item()))


def scalar_dtype(fused: bool) -> torch.dtype:
    """The dtype of torch.optim's per-parameter scalars: float32, or float64 if that is torch's default dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32


def require_recordable(name: str, path: str, state: Mapping[Any, Any], banned: Collection[str] = (MASTER,)) -> None:
    """Refuse state that a record could not hold: UsageError naming `path`, the key and what it holds."""
    for key, value in state.items():
        told = f"{name}: the state of {path} has {key!r}"
        if not isinstance(key, str) or ":" in key or "/" in key or key in banned:
            raise UsageError(f"{told}; a key of the state is a string without ':' or '/', other than {MASTER!r}")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_quantized:
                raise UsageError(f"{told}, a tensor of layout {value.layout}; a record holds dense tensors")
        elif type(value) not in _NUMBERS:
            raise UsageError(f"{told}, a {type(value).__name__}; a record holds tensors and plain numbers")
        elif type(value) is int and not -(2**63) <= value < 2**63:
            raise UsageError(f"{told}, the number {value}, which does not fit 64 bits")
