"""Making sessions in tests, and comparing what they hold to the last bit."""

from __future__ import annotations

import fnmatch
import os
import signal
from collections.abc import Callable, Mapping, Sequence
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


# ---- other sessions -----------------------------------------------------------------------------------------------


def make_zero1(
    comm: sr.Communicator,
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] | str | sr.Declared = torch.optim.Muon,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    rules: Options | None = None,
    **options: Any,
) -> sr.SelectedZero1:
    """A SelectedZero1 over the selected part of `model`; `rules` as for make_zero2."""
    selection = sr.select_parameters(model, include=include, exclude=exclude, comm=comm)
    session = sr.SelectedDataParallel(comm, model, selection)
    return sr.SelectedZero1(session, optimizer, option_groups=option_groups(session.order, rules or {}), **options)


def snapshot(model: nn.Module, state: Mapping[str, Tensor] | None = None, step_count: int = 0) -> Photograph:
    """Copies of a model's parameters, buffers and pending gradients, and of the `state` that belongs to them; local."""
    named = dict(model.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in named.items()}
    values |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()}
    return Photograph(values, {name: t.detach().clone() for name, t in (state or {}).items()}, gradients, step_count)


def snapshot_zero1(zero1: sr.SelectedZero1) -> Photograph:
    """`photograph` for a SelectedZero1."""
    return snapshot(zero1.session.model, zero1.to_record().tensors, zero1.step_count)


def snapshot_store(model: nn.Module, store: sr.ParamStore) -> Photograph:
    """`photograph` for a ParamStore: its optimizer's state by the parameter's number."""
    held = {} if store.optimizer is None else store.optimizer.state_dict()["state"]
    return snapshot(model, {f"{number}/{key}": value for number, keys in held.items() for key, value in keys.items()})


@dataclass(frozen=True)
class Refusal:
    """What became of an attempt that must not succeed, on this rank."""

    kind: str
    """Class of the error; empty if there was none."""
    message: str
    changed: list[str]
    poisoned: bool
    gradients_kept: bool | None = None


def attempt(comm: sr.Communicator, call: Callable[[], object], look: Callable[[], Photograph]) -> Refusal:
    """Make `call` and tell its error, and what of `look` it changed."""
    before = look()
    kind, message, kept = "", "", None
    try:
        call()
    except sr.errors.ShardrunError as error:
        kind, message = told(error)
        kept = error.gradients_kept if isinstance(error, sr.errors.StepFailed) else None
    return Refusal(kind, message, before.differences(look()), comm.is_poisoned, kept)


@dataclass
class Strike:
    """An observer that does `act` when it is called for the `nth` time in `phase` (0: the phase's beginning)."""

    phase: str
    nth: int
    act: Callable[[], object]
    calls: int = 0

    def __call__(self, phase: str, collective: int) -> None:
        """The communicator's observer."""
        if phase == self.phase:
            if self.calls == self.nth:
                self.act()
            self.calls += 1


def kill_this_rank() -> None:
    """SIGKILL to the own process."""
    os.kill(os.getpid(), signal.SIGKILL)
