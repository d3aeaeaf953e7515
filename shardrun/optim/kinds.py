"""Which optimizers may be cut into slices, what state they keep, and which are refused, with the way out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardrun.errors import UsageError


@dataclass(frozen=True)
class Elementwise:
    """An optimizer whose update of an element depends on that element's own gradient and state only.

    `zeros` are state tensors that start at zero, `lazy` ones that torch makes from the first gradient (with the option
    that switches them on), `scalars` per-parameter counters.
    """

    name: str
    cls: type[torch.optim.Optimizer]
    zeros: tuple[str, ...] = ()
    lazy: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()
    scalars: tuple[str, ...] = ()

    def keys(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """State tensors that exist under `options` once a parameter was stepped."""
        return (
            self.zeros
            + tuple(key for key, option in self.optional if options.get(option))
            + tuple(key for key, option in self.lazy if options.get(option))
        )

    def lazy_keys(self) -> tuple[str, ...]:
        """State tensors that do not exist before the first gradient."""
        return tuple(key for key, _ in self.lazy)


_ADAM = {"zeros": ("exp_avg", "exp_avg_sq"), "optional": (("max_exp_avg_sq", "amsgrad"),), "scalars": ("step",)}
ELEMENTWISE = {
    "sgd": Elementwise("sgd", torch.optim.SGD, lazy=(("momentum_buffer", "momentum"),)),
    "adam": Elementwise("adam", torch.optim.Adam, **_ADAM),  # type: ignore[arg-type]
    "adamw": Elementwise("adamw", torch.optim.AdamW, **_ADAM),  # type: ignore[arg-type]
}
_REFUSED = {
    "muon": "updates whole matrices",
    "shampoo": "updates whole matrices",
    "soap": "updates whole matrices",
    "adafactor": "keeps row and column statistics of whole matrices",
    "lbfgs": "needs a closure and the whole gradient",
    "sparseadam": "needs sparse gradients",
}


@dataclass(frozen=True)
class OptionGroup:
    """Parameters (by path) that are stepped with options of their own; `lr_scale` multiplies the base rate."""

    paths: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    lr_scale: float = 1.0


def elementwise(optimizer: type[torch.optim.Optimizer] | str) -> Elementwise:
    """The allow-list's entry for a torch.optim class or its name; anything else is refused with the reason."""
    for kind in ELEMENTWISE.values():
        if optimizer in (kind.cls, kind.name):
            return kind
    name = (optimizer if isinstance(optimizer, str) else optimizer.__name__).lower()
    if name in _REFUSED:
        raise UsageError(
            f"{name} {_REFUSED[name]} and cannot run under zero2, which cuts parameters anywhere; "
            f"use one of {', '.join(ELEMENTWISE)} for these parameters"
        )
    raise UsageError(f"{name} is not on the list of elementwise optimizers ({', '.join(ELEMENTWISE)})")


def check_options(
    kind: Elementwise, options: Mapping[str, Any], groups: Sequence[OptionGroup], trainable: Collection[str]
) -> None:
    """Refuse what torch would take without a word, or only stumble over in a step; UsageError names it.

    torch checks the options of a constructor, but not those of a parameter group, so each group is constructed once.
    """
    for index, group in enumerate((OptionGroup(frozenset()), *groups)):
        where = f"{kind.name}: option group {index}" if index else kind.name
        merged = {**options, **group.options}
        if "lr" in group.options:
            raise UsageError(
                f"{where}: lr of its own is {group.options['lr']}; give lr_scale, a factor of the base rate"
            )
        if not 0.0 <= group.lr_scale < math.inf:
            raise UsageError(f"{where}: lr_scale is {group.lr_scale}; it must be finite and not negative")
        if unknown := sorted(group.paths - set(trainable)):
            raise UsageError(f"{where}: {unknown[0]} ({len(unknown)} in all) is no selected trainable parameter")
        for option in ("capturable", "differentiable"):
            if merged.get(option):
                raise UsageError(f"{where}: {option} is set; a slice is stepped outside of graphs, leave it out")
        try:
            kind.cls([torch.zeros(1)], **merged)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{where}: torch.optim.{kind.cls.__name__} does not take {merged}: {error}") from None


def group_of(path: str, groups: Sequence[OptionGroup]) -> int:
    """Index of the option group that holds `path`; 0 is the group of everything that no other names."""
    for index, group in enumerate(groups, start=1):
        if path in group.paths:
            return index
    return 0


def resolve_fused(fused: bool | None, options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether the fused kernel is used: as asked for, or wherever torch has one for this device and these options."""
    if fused is not None:
        return fused
    return device.type in ("cpu", "cuda") and not any(
        options.get(k) for k in ("foreach", "capturable", "differentiable")
    )
