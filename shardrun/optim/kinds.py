"""Which optimizers may be cut, which are stepped whole, and which are refused, with the way out; and their options."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardrun.errors import UsageError
from shardrun.optim.declared import Declared, probe
from shardrun.optim.table import ELEMENTWISE, MATRIX, Elementwise, Kind, Matrix
from shardrun.shard.layout import ALIGN

__all__ = [
    "ELEMENTWISE",
    "MATRIX",
    "Declared",
    "Elementwise",
    "Kind",
    "Matrix",
    "OptionGroup",
    "any_kind",
    "check_options",
    "elementwise",
    "group_of",
    "probe",
    "resolve_fused",
    "takes",
    "update_cost",
]


_WHOLE = "and cannot run under zero2, which cuts parameters anywhere; use SelectedZero1 (strategy zero1)"
_DECLARE = "Declared(TheClass, kind='matrix', name='...')"
_NOT_CUT = {
    "muon": f"updates whole matrices {_WHOLE} for these parameters",
    "shampoo": f"updates whole matrices {_WHOLE} with {_DECLARE}",
    "soap": f"updates whole matrices {_WHOLE} with {_DECLARE}",
    "adafactor": f"keeps row and column averages of whole matrices {_WHOLE} with {_DECLARE}",
}
_NOWHERE = {
    "lbfgs": "needs a closure to evaluate the loss several times per update, and takes products over all parameters; "
    f"a step that is proposed before it is committed cannot do that. Use one of {', '.join(ELEMENTWISE)}",
    "sparseadam": "needs sparse gradients, and the ranks reduce dense ones; use adam",
}
# Options that torch reads in the constructor alone: a param group of its own would have them without a word.
_FOR_ALL_GROUPS = ("initial_accumulator_value",)


@dataclass(frozen=True)
class OptionGroup:
    """Parameters (by path) that are stepped with options of their own; `lr_scale` multiplies the base rate."""

    paths: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    lr_scale: float = 1.0


def elementwise(optimizer: Callable[..., torch.optim.Optimizer] | str | Declared) -> Elementwise:
    """The kind of a torch.optim class, its name, or a `Declared`, to be cut; UsageError with the way out."""
    kind = _listed(optimizer)
    if isinstance(kind, Elementwise):
        return kind
    if kind is not None and kind.declared is not None:
        raise UsageError(f"{kind.name} is declared as a matrix optimizer {_WHOLE} for these parameters")
    name = _name_of(optimizer)
    if why := _NOT_CUT.get(name) or _NOWHERE.get(name):
        raise UsageError(f"{name} {why}")
    raise UsageError(
        f"{name} is not on the list of elementwise optimizers ({', '.join(ELEMENTWISE)}); "
        f"if it is elementwise, say so: Declared({name}, kind='elementwise', name='...')"
    )


def any_kind(optimizer: Callable[..., torch.optim.Optimizer] | str | Declared) -> Kind:
    """The kind of what steps whole tensors: everything elementwise, muon, a `Declared`; UsageError with the way out."""
    kind = _listed(optimizer)
    if kind is not None:
        return kind
    name = _name_of(optimizer)
    if why := _NOWHERE.get(name):
        raise UsageError(f"{name} {why}")
    raise UsageError(
        f"{name} is not on the list of optimizers ({', '.join((*ELEMENTWISE, *MATRIX))}); declare it: "
        f"Declared({name}, kind='matrix', name='...')"
    )


def _listed(optimizer: Callable[..., torch.optim.Optimizer] | str | Declared) -> Kind | None:
    if isinstance(optimizer, Declared):
        if optimizer.name in ELEMENTWISE or optimizer.name in MATRIX:
            raise UsageError(f"Declared: the name {optimizer.name} is that of a torch.optim class; give it another one")
        made = Elementwise if optimizer.kind == "elementwise" else Matrix
        return made(optimizer.name, optimizer.make, declared=optimizer)
    for kind in (*ELEMENTWISE.values(), *MATRIX.values()):
        if optimizer in (kind.cls, kind.name):
            return kind
    return None


def _name_of(optimizer: object) -> str:
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{type(optimizer).__name__} is given as an object; give the class and its options")
    named = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))
    return named.lower() if named.lower() in (*_NOT_CUT, *_NOWHERE) else str(named)


def takes(kind: Kind, shape: Sequence[int]) -> bool:
    """Whether `kind` can step a tensor of `shape` (); muon takes matrices only."""
    if kind.declared is not None and kind.declared.takes is not None:
        return kind.declared.takes(tuple(shape))
    return kind.ndim is None or len(shape) == kind.ndim


def update_cost(kind: Kind, shape: Sequence[int], options: Mapping[str, Any] | None = None) -> int:
    """About what one update of a tensor of `shape` costs, to balance owners by; at least 1.

    Elementwise: elements. Muon: the multiply-adds of its Newton-Schulz iteration (torch.optim._muon): with m <= n, each
    of `ns_steps` has two products (m, m, n) and one (m, m, m). A declared matrix optimizer: elements times the least
    dimension, since nobody knows.
    """
    numel = math.prod(shape)
    if isinstance(kind, Elementwise) or len(shape) < 2:
        return max(numel, 1)
    m = min(shape)
    if kind.declared is not None:
        return max(numel * m, 1)
    n = numel // max(m, 1)
    return max(int((options or {}).get("ns_steps", 5)) * m * m * (2 * n + m), 1)


def group_of(path: str, groups: Sequence[OptionGroup]) -> int:
    """Index of the option group that holds `path`; 0 is the group of everything that no other names."""
    for index, group in enumerate(groups, start=1):
        if path in group.paths:
            return index
    return 0


def resolve_fused(
    fused: bool | None,
    options: Mapping[str, Any],
    device: torch.device,
    kind: Kind = ELEMENTWISE["adamw"],
    dtypes: Collection[torch.dtype] = (),
) -> bool:
    """Whether the fused kernel is used: as asked for, or wherever torch has one for this class, device and options.

    UsageError if it is asked for and torch has none, or one that does not update leaves of one of `dtypes`.
    """
    there = (
        kind.fused_op is not None
        and device.type in ("cpu", "cuda")
        and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kind.fused_op}", device.type.upper())
    )
    if fused and not there:
        raise UsageError(
            f"{kind.name}: fused is set, and torch has no fused {kind.name} on {device.type}; leave it out"
        )
    broken = [str(dtype) for dtype in dtypes if there and not fused_is_sound(kind, device, dtype)]
    if fused and broken:
        raise UsageError(
            f"{kind.name}: fused is set, and the fused kernel of torch {torch.__version__} on {device.type} leaves "
            f"{broken[0]} leaves as they are (pytorch issue 191763); leave it out, or keep FP32 masters"
        )
    if fused is not None:
        return fused
    return there and not broken and not any(options.get(key) for key in ("foreach", "capturable", "differentiable"))


@functools.cache
def fused_is_sound(kind: Kind, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernel does with 16-bit leaves what the plain one does, tried out on a few elements.

    torch 2.13's fused SGD on the CPU does not: it updates the elements behind the last full vector register only.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    leaves = [torch.ones(ALIGN, dtype=dtype, device=device) for _ in range(2)]
    for leaf, options in zip(leaves, ({"fused": True}, {"fused": False, "foreach": False}), strict=True):
        optimizer = kind.cls([leaf], lr=0.25, **options)
        leaf.grad = torch.ones_like(leaf)
        optimizer.step()
    return torch.allclose(leaves[0].float(), leaves[1].float(), rtol=0.05)


def check_options(
    kind: Kind, options: Mapping[str, Any], groups: Sequence[OptionGroup], trainable: Collection[str]
) -> None:
    """Refuse what torch would take without a word, or only stumble over in a step; UsageError names it. Local.

    torch checks the options of a constructor, but not those of a parameter group, so each group is constructed once. A
    declared optimizer is probed with each.
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
        for option in _FOR_ALL_GROUPS:
            if option in group.options:
                raise UsageError(f"{where}: {option} of its own; torch has one for all parameters, give it there")
        _check_values(kind, where, merged)


def _check_values(kind: Kind, where: str, merged: Mapping[str, Any]) -> None:
    for option in ("capturable", "differentiable"):
        if merged.get(option):
            raise UsageError(f"{where}: {option} is set; a slice is stepped outside of graphs, leave it out")
    try:
        json.dumps({key: value for key, value in merged.items() if key != "lr"})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: the options {merged} cannot be written into a record: {error}") from None
    if kind.declared is not None:
        probe(kind.declared, merged)
        return
    if merged.get("fused") and kind.fused_op is None:
        raise UsageError(f"{where}: fused is set, and torch has no fused {kind.name}; leave it out")
    if kind.fused_op is None:
        merged = {key: value for key, value in merged.items() if key != "fused"}
    try:
        kind.cls([torch.zeros((1,) * (kind.ndim or 1))], **merged)
    except (TypeError, ValueError, RuntimeError) as error:
        named = getattr(kind.cls, "__name__", kind.name)
        raise UsageError(f"{where}: torch.optim.{named} does not take {merged}: {error}") from None
    if merged.get("foreach"):
        raise UsageError(
            f"{where}: foreach is set; leaves are stepped one by one, because kernels over all of them would allocate "
            "in the commit; leave it out"
        )
