"""An example of what a step can meet, as plain data whose repr runs it again, and the model and micro-batches of it.

The ranks that run it and the reference that judges them share this, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

FUSED = ("sgd", "adam", "adamw", "adagrad")


@dataclass(frozen=True)
class Param:
    """One tensor of the model."""

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    session: str | None = "default"
    """Name of the session that selects it; None: nobody does."""
    trainable: bool = True
    turned: bool = False
    """Its memory is in the order of the transposed tensor."""
    tied: str | None = None
    """A second path of the same Parameter."""
    ragged: bool = False
    """An unselected one has another shape on every rank, one of a session another one in every group."""

    @property
    def names(self) -> tuple[str, ...]:
        """All its paths, sorted; the first one is what contracts and records know it by."""
        return tuple(sorted([self.path, *([] if self.tied is None else [self.tied])]))


@dataclass(frozen=True)
class Session:
    """How some of the parameters are trained."""

    optimizer: str
    options: Mapping[str, Any]
    option_groups: tuple[tuple[tuple[str, ...], Mapping[str, Any], float], ...] = ()
    """(paths, options, lr_scale)."""
    engine: str = "zero2"
    """zero2, zero1, reduce (data parallel and an ordinary optimizer after it) or free (step_sgd and its kin)."""
    mode: str = "mean"
    name: str = "default"
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that hold replicas of the same parameters; () is the whole world."""
    masters: bool = True
    fp32: bool = False
    """Gradients of 16-bit parameters are asked for in float32 (zero1, reduce)."""
    bucket_bytes: int | None = None
    chunk_numel: int | None = None
    streams: bool = False
    """zero2: gradients are reduced inside the last backward of a window."""
    owners: bool = False
    """zero1: owners are given, not balanced."""
    rest: str = "adamw"
    rest_options: Mapping[str, Any] = field(default_factory=dict)
    """zero1: what steps the parameters that muon does not take."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank: its weight, and the paths that it gives no gradient."""

    weight: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """What happens between two updates."""

    micro_batches: tuple[tuple[Micro, ...], ...]
    """By rank."""
    missing: str = "error"
    lr: float | Mapping[str, float] | None = None
    """Of all sessions, or by the name of a session."""
    max_grad_norm: float | None = None
    refused_first: bool = False
    """A step that asks for nonsense on one rank of each group comes before the real one."""
    bad: tuple[int, str, str] | None = None
    """Rank, path and what stands in one element of its gradient: nan or inf."""
    idle_nan: bool = False
    """Ranks of weight 0 have NaN gradients."""

    def weight(self, rank: int) -> int:
        return sum(micro.weight for micro in self.micro_batches[rank])

    def rate(self, session: str) -> float | None:
        return self.lr.get(session) if isinstance(self.lr, Mapping) else self.lr


@dataclass(frozen=True)
class Example:
    """Everything that is drawn. `seed` gives values of parameters and gradients, small binary fractions if `dyadic`."""

    world_size: int
    params: tuple[Param, ...]
    sessions: tuple[Session, ...]
    windows: tuple[Window, ...]
    together: bool = False
    """All sessions take each step together; otherwise there is one session, and each of its groups steps alone."""
    dyadic: bool = True
    other_order: bool = False
    """Odd ranks define the parameters, and name the sessions, in the opposite order."""
    seed: int = 0

    def groups(self, session: Session) -> tuple[tuple[int, ...], ...]:
        return session.groups or (tuple(range(self.world_size)),)

    def shape(self, param: Param, rank: int) -> tuple[int, ...]:
        """The shape that `param` has on `rank`."""
        if not param.ragged:
            return param.shape
        session = next((session for session in self.sessions if session.name == param.session), None)
        own = [k for k, group in enumerate(self.groups(session)) if rank in group] if session else [rank]
        return (*param.shape[:-1], param.shape[-1] + (own[0] if own else 0))


def build_model(example: Example, rank: int) -> nn.Module:
    """The model as `rank` defines it, with values of its own."""
    model = nn.Module()
    params = list(enumerate(example.params))
    for index, param in reversed(params) if example.other_order and rank % 2 else params:
        generator = torch.Generator().manual_seed(example.seed * 1000 + rank * 100 + index)
        shape = example.shape(param, rank)
        value = torch.randn(shape[::-1] if param.turned else shape, generator=generator)
        if param.turned:
            value = value.permute(*reversed(range(value.dim())))
        parameter = nn.Parameter(value.to(getattr(torch, param.dtype)), requires_grad=param.trainable)
        for path in (param.path, param.tied):
            if path is not None:
                _register(model, path, parameter)
    return model


def _register(model: nn.Module, path: str, parameter: nn.Parameter) -> None:
    *modules, name = path.split(".")
    for part in modules:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model.register_parameter(name, parameter)


def micro_batch(example: Example, number: int, rank: int, index: int) -> dict[str, Tensor]:
    """The gradients, by path, of micro-batch `index` of `rank` in window `number`."""
    window = example.windows[number]
    without = window.micro_batches[rank][index].without
    generator = torch.Generator().manual_seed(((example.seed * 10 + number) * 10 + rank) * 10 + index)
    gradients = {}
    for param in example.params:
        for path in param.names if param.trainable else ():
            shape = example.shape(param, rank)
            drawn = torch.randint(-8, 9, shape, generator=generator) / 4.0 if example.dyadic else None
            value = torch.randn(shape, generator=generator) if drawn is None else drawn
            if path not in without:
                gradients[path] = value
    if window.idle_nan and window.weight(rank) == 0:
        gradients = {path: value * math.nan for path, value in gradients.items()}
    if window.bad is not None and window.bad[0] == rank and window.bad[1] in gradients:
        gradients[window.bad[1]].view(-1)[-1] = float(window.bad[2])
    return gradients


def settled(optimizer: str, options: Mapping[str, Any], dtypes: set[torch.dtype]) -> dict[str, Any]:
    """Options as an ordinary optimizer over leaves of `dtypes` takes them: fused where torch has it, if left open.

    torch's fused SGD leaves most of a 16-bit leaf unchanged (pytorch issue 191763), so it does not count as had.
    """
    if optimizer not in FUSED or options.get("fused") is not None:
        return dict(options)
    return {**options, "fused": optimizer != "sgd" or dtypes <= {torch.float32}}


def options_by_path(session: Session, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Path -> what the first option group says that has any of its names."""
    found: dict[str, dict[str, Any]] = {}
    for path, all_names in names.items():
        for inside, own, scale in session.option_groups:
            if {*inside} & {*all_names}:
                found[path] = {**own, "lr_scale": scale}
                break
    return found
