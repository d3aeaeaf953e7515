"""What both engines share: torch.optim's param groups, one per option group, and their rates and terms."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import UsageError
from shardrun.optim.guard import Guard
from shardrun.optim.kinds import OptionGroup, resolve_fused
from shardrun.optim.state import StateSpec
from shardrun.optim.table import Elementwise, Kind


class GroupedOptimizer:
    """The options and rates of an engine; see `Stepper`. Local.

    `device` and `dtypes` are those of the leaves on every rank, so that all ranks settle open options alike.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        kind: Kind,
        options: Mapping[str, Any],
        option_groups: Sequence[OptionGroup],
        device: torch.device,
        dtypes: Collection[torch.dtype],
    ) -> None:
        self.kind = kind
        self.lr_scales = [1.0, *(group.lr_scale for group in option_groups)]
        self.options = [_settled(kind, one, device, dtypes) for one in merged_options(options, option_groups)]

    def _start(self, leaves: Sequence[Iterable[Tensor]]) -> None:
        """Make `optimizer` over the live leaves, and settle the base rate: the one given, or the class's own."""
        self.optimizer = self._make(leaves)
        base = float(self.options[0].get("lr", self.optimizer.defaults.get("lr", 0.0)))
        for group, options, scale in zip(self.optimizer.param_groups, self.options, self.lr_scales, strict=True):
            options["lr"] = base
            group["lr"] = base * scale

    def _watch(self, paths: Sequence[Sequence[str]]) -> None:
        """From here on `problems` tells what was done to `optimizer`; `paths` has its leaves' names, by param group."""
        given = [self._given(options) for options in self.options]
        self._guard = Guard(self.kind, self.optimizer, given, paths, self._spec_of)

    def _spec_of(self, group: int) -> StateSpec | None:
        """What the state of a declared optimizer has to be in this param group; None: whatever it makes."""
        return None

    def problems(self) -> list[str]:
        """What was done to `optimizer` that the next step cannot go on with; see `Stepper`."""
        return self._guard.problems()

    def _make(self, leaves: Sequence[Iterable[Tensor]]) -> torch.optim.Optimizer:
        # Options go to the constructor as well: Adagrad's first accumulator, for one, is read nowhere else.
        given = [self._given(options) for options in self.options]
        groups = [{"params": list(group), **options} for group, options in zip(leaves, given, strict=True)]
        return self.kind.cls(groups, **given[0])

    def _given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Without `fused` for a class of torch that does not know the word."""
        knows = self.kind.declared is not None or self.kind.fused_op is not None
        return {key: value for key, value in options.items() if knows or key != "fused"}

    def rates(self, lr: float | None) -> list[float]:
        """Learning rate per param group: `lr` times the group's `lr_scale`; None: as the param groups have it."""
        if lr is None:
            return [_as_rate(group.get("lr")) for group in self.optimizer.param_groups]
        return [lr * scale for scale in self.lr_scales]

    def terms(self) -> str:
        """The options that count in the next step, but for the rates; equal on all ranks, or the step is refused."""
        return repr([{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups])

    def described(self) -> list[dict[str, Any]]:
        """Options per param group as plain JSON, the base rate left out: schedules change it."""
        groups = [
            {**{key: value for key, value in options.items() if key != "lr"}, "lr_scale": scale}
            for options, scale in zip(self.options, self.lr_scales, strict=True)
        ]
        plain: list[dict[str, Any]] = json.loads(json.dumps(groups))
        return plain

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _live_options(self, group: int) -> dict[str, Any]:
        return {key: value for key, value in self.optimizer.param_groups[group].items() if key != "params"}

    def _require_same_state(self) -> None:
        """Refuse an option that was switched on in a param group after set-up and would need other state."""
        for number in range(len(self.options)):
            if more := self._guard.more_state(number):
                raise UsageError(more)

    def _require_own_state(self) -> None:
        """Refuse to hand out state that a user put there: UsageError."""
        if foreign := self._guard.foreign_state():
            raise UsageError(foreign)

    def _mark_stepped(self) -> None:
        # What torch's schedulers look for before they warn that they were stepped ahead of the optimizer.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]


def merged_options(options: Mapping[str, Any], option_groups: Sequence[OptionGroup]) -> list[Mapping[str, Any]]:
    """The options of each param group: those of everything that no option group names, then the option groups'."""
    return [options, *({**options, **group.options} for group in option_groups)]


def _as_rate(value: object) -> float:
    """A param group's rate; NaN, which no step takes, if a user put something there that is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _settled(
    kind: Kind, options: Mapping[str, Any], device: torch.device, dtypes: Collection[torch.dtype]
) -> dict[str, Any]:
    """The options with `fused` and `foreach` decided, where torch leaves these open."""
    if kind.declared is not None:
        return dict(options)
    if not isinstance(kind, Elementwise):
        return {key: value for key, value in options.items() if key not in ("fused", "foreach")}
    fused = resolve_fused(options.get("fused"), options, device, kind, dtypes)
    settled = {**options, "fused": fused}
    if not fused:
        # torch's multi-tensor kernels would allocate temporaries for all leaves at once, in commit too.
        settled["foreach"] = False
    return settled
