"""Making sessions in tests, and comparing what they hold to the last bit."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardrun as sr

Options = Mapping[str, Mapping[str, Any]]


def make_zero2(
    comm: sr.Communicator,
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    rules: Options | None = None,
    **options: Any,
) -> sr.SelectedZero2:
    """A SelectedZero2 over the selected part of `model`; `rules` maps a glob to the options of its group."""
    selection = sr.select_parameters(model, include=include, exclude=exclude, comm=comm)
    session = sr.SelectedDataParallel(comm, model, selection)
    groups = option_groups(session.order, rules or {})
    return sr.SelectedZero2(session, optimizer, option_groups=groups, **options)


def option_groups(paths: Sequence[str], rules: Options) -> list[sr.OptionGroup]:
    """One group per rule, holding the paths that its glob is the first to match."""
    groups = []
    left = set(paths)
    for glob, rule in rules.items():
        own = frozenset(path for path in left if fnmatch.fnmatchcase(path, glob))
        left -= own
        options = {key: value for key, value in rule.items() if key != "lr_scale"}
        groups.append(sr.OptionGroup(own, options, rule.get("lr_scale", 1.0)))
    return groups


def options_by_path(paths: Sequence[str], rules: Options) -> dict[str, dict[str, Any]]:
    """The same rules for the reference: path -> options of the first glob that matches."""
    found = {}
    for path in paths:
        rule = next((rule for glob, rule in rules.items() if fnmatch.fnmatchcase(path, glob)), {})
        found[path] = dict(rule)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit are equal (NaN equals itself, 0.0 does not equal -0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_raw(one), _raw(other))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def gather(comm: sr.Communicator, value: Any) -> list[Any]:
    """Every rank's picklable `value`, in rank order; collective, outside of shardrun's own way of sending."""
    if comm.world_size == 1:
        return [value]
    values: list[Any] = [None] * comm.world_size
    dist.all_gather_object(values, value)
    return values


def whole_state(comm: sr.Communicator, zero2: sr.SelectedZero2) -> dict[str, dict[str, Tensor]]:
    """Path -> key -> the whole state tensor (1-D) or scalar, put together from all ranks' records; collective."""
    pieces: dict[str, dict[str, list[tuple[int, Tensor]]]] = {path: {} for path in zero2.trainable_parameters}
    record = zero2.to_record()
    for tensors, fragments in gather(comm, (record.tensors, record.meta["fragments"])):
        for name, tensor in tensors.items():
            path, _, key = name.rpartition("/")
            pieces[path].setdefault(key, []).append((fragments[path][0], tensor))
    return {path: {key: _joined(held) for key, held in keys.items()} for path, keys in pieces.items()}


def _joined(held: list[tuple[int, Tensor]]) -> Tensor:
    tensors = [tensor for _, tensor in sorted(held, key=lambda part: part[0])]
    if tensors[0].dim() == 0:
        assert all(same_bits(tensors[0], tensor) for tensor in tensors), "a per-parameter scalar differs between ranks"
        return tensors[0]
    return torch.cat(tensors)


@dataclass(frozen=True)
class Photograph:
    """Copies of everything a step may change on this rank: parameters, buffers, state, counters, pending gradients."""

    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    step_count: int

    def differences(self, later: Photograph, *, gradients: bool = True) -> list[str]:
        """What is not bit-identical in `later`, by name; empty when nothing changed."""
        found = [f"parameter {name}" for name in _unequal(self.parameters, later.parameters)]
        found += [f"state {name}" for name in _unequal(self.state, later.state)]
        if gradients:
            found += [f"gradient {name}" for name in _unequal(self.gradients, later.gradients)]
        if self.step_count != later.step_count:
            found.append(f"step count {self.step_count} -> {later.step_count}")
        return found


def _unequal(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> list[str]:
    return [name for name in sorted({*one, *other}) if not _alike(one.get(name), other.get(name))]


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one, other)


def photograph(zero2: sr.SelectedZero2) -> Photograph:
    """Copy this rank's side of a session; local, works after a failure too."""
    model = zero2.session.model
    named = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in named.items()}
    values |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()}
    state = {name: tensor.clone() for name, tensor in zero2.to_record().tensors.items()}
    return Photograph(values, state, gradients, zero2.step_count)


def told(error: BaseException) -> tuple[str, str]:
    """An exception as it travels back from a rank: its class and its message."""
    return type(error).__name__, str(error)
