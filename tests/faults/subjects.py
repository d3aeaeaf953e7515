"""What is stepped under faults: each strategy over the same parameters, behind one small surface."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import shardrun as sr
from tests.faults.unsafe import InPlaceGather, OwnerBroadcast
from tests.support.models import seeded
from tests.support.sessions import Photograph, make_zero1, make_zero2, snapshot

_SHAPES = {"a": (150_000,), "b": (77_777,), "c": (1, 9), "m": (96, 128), "n": (128, 64)}
_HALF = {"h": (64, 96)}
_BUCKET_BYTES = 256 << 10
_WINDOWS = 4  # so many different windows of gradients, over and over; each also depends on the parameters
_LR = 0.01


class Subject(ABC):
    """One strategy on one rank. `model` has six parameters, one of them bf16."""

    session: Any
    """What is stepped or reduced, where that is one session."""

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        self.comm = comm
        self.model = seeded(seed, _model)
        self.weight = 3 + comm.rank
        generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
        self._noise = [
            {path: torch.randn(p.shape, generator=generator).to(p.dtype) for path, p in self.model.named_parameters()}
            for _ in range(_WINDOWS)
        ]
        self.steps = 0
        """Steps that this rank knows to be committed."""

    def backward(self, poison: str = "") -> None:
        """The window's gradients; they depend on seed, rank, step and the parameters. NaN in that of `poison`."""
        held = dict(self.model.named_parameters())
        noise = self._noise[self.steps % _WINDOWS]
        gradients = [noise[path] + 0.1 * p.detach() for path, p in held.items()]
        if poison:
            gradients[list(held).index(poison)].view(-1)[-1] = float("nan")
        torch.autograd.backward(list(held.values()), gradients)

    def send(self, **asked: Any) -> None:  # noqa: B027 - most have nothing to send
        """What comes before the step itself and is collective, with the same arguments."""

    def drop(self) -> None:
        """Drop the pending gradients; local."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self, **asked: Any) -> None:
        """One step of all of it; collective. `asked` replaces the usual arguments."""
        self.send(**asked)
        self._step({"local_weight": self.weight, **asked})
        self.steps += 1

    def finish(self) -> None:
        """What is left to do when an interrupt came out of a step that was committed; local."""
        self.steps += 1

    @abstractmethod
    def _step(self, asked: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state and masters on this rank."""

    def look(self) -> Photograph:
        """Copies of all that a step may change on this rank; local."""
        return snapshot(self.model, self.state(), self.steps)


class _Reduced(Subject):
    """SelectedDataParallel.reduce, then an ordinary optimizer on every rank."""

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        self.session = sr.DataParallel(comm, self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LR)

    def _step(self, asked: Mapping[str, Any]) -> None:
        self.session.reduce(**asked)
        self._update()

    def finish(self) -> None:
        """The optimizer has not stepped yet."""
        self._update()
        super().finish()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> Mapping[str, Tensor]:
        return _numbered(self._optimizer)


class _Free(Subject):
    """step_adamw over a ParamStore."""

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        self._store = sr.ParamStore(self.model)

    def _step(self, asked: Mapping[str, Any]) -> None:
        sr.step_adamw(self._store, sr.AdamWConfig(lr=_LR, **_but_weight(asked)), self.comm)

    def state(self) -> Mapping[str, Tensor]:
        return {} if self._store.optimizer is None else _numbered(self._store.optimizer)


class _Sharded(Subject):
    """One sharded session over all parameters."""

    make: Callable[..., sr.SelectedZero1 | sr.SelectedZero2]

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        self.session = type(self).make(comm, self.model, lr=_LR, bucket_bytes=_BUCKET_BYTES)

    def _step(self, asked: Mapping[str, Any]) -> None:
        self.session.step(**{"max_grad_norm": 1.0, **asked})

    def state(self) -> Mapping[str, Tensor]:
        return _recorded(self.session)


class _Zero1(_Sharded):
    """Muon, and AdamW for what is not a matrix."""

    make = staticmethod(make_zero1)


class _Zero2(_Sharded):
    """AdamW in equal slices."""

    make = staticmethod(make_zero2)


class _StreamedZero2(_Zero2):
    """The same, but a step begins with its backward, which reduces the gradients; nothing is pending before."""

    make = staticmethod(partial(make_zero2, stream_gradients=True))

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        self._poison = ""
        self._is_sent = False

    def backward(self, poison: str = "") -> None:
        self._poison, self._is_sent = poison, False

    def send(self, **asked: Any) -> None:
        if self._is_sent:  # by a step that was refused, for the next one
            return
        with self.session.window(local_weight=asked.get("local_weight", self.weight)):
            super().backward(self._poison)
        self._is_sent = True

    def drop(self) -> None:
        self.session.discard_gradients()
        self._is_sent = False

    def _step(self, asked: Mapping[str, Any]) -> None:
        super()._step(asked)
        self._is_sent = False


class _Joint(Subject):
    """take_step: AdamW under ZeRO-2 on all ranks, and Muon under ZeRO-1 on subgroups of one or two ranks."""

    experts_of: ClassVar[Any] = staticmethod(make_zero1)

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        pairs = [range(first, min(first + 2, comm.world_size)) for first in range(0, comm.world_size, 2)]
        groups = [comm.subgroup(pair) for pair in pairs]
        (group,) = [one for one in groups if one is not None]
        experts = ["m", "n"]
        common: dict[str, Any] = {"lr": _LR, "bucket_bytes": _BUCKET_BYTES}
        self._sessions: list[sr.SelectedZero1 | sr.SelectedZero2] = [
            make_zero2(comm, self.model, exclude=experts, name="dense", **common),
            self.experts_of(group, self.model, include=experts, name="experts", **common),
        ]

    def _step(self, asked: Mapping[str, Any]) -> None:
        sr.take_step(self._sessions, **{"max_grad_norm": 1.0, **asked})

    def state(self) -> Mapping[str, Tensor]:
        return {
            f"{session.name}/{name}": tensor
            for session in self._sessions
            for name, tensor in _recorded(session).items()
        }


class _JointZero2(_Joint):
    """The same with AdamW under ZeRO-2 on the subgroups."""

    experts_of: ClassVar[Any] = staticmethod(make_zero2)


class _Unsafe(Subject):
    """In place, see unsafe.py."""

    cls: type[InPlaceGather | OwnerBroadcast]
    optimizer: type[torch.optim.Optimizer]

    def __init__(self, comm: sr.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        session = sr.DataParallel(comm, self.model)
        self.session = self.cls(session, self.optimizer, lr=_LR, bucket_bytes=_BUCKET_BYTES)

    def _step(self, asked: Mapping[str, Any]) -> None:
        self.session.unsafe_step(**{"max_grad_norm": 1.0, **asked})

    def state(self) -> Mapping[str, Tensor]:
        return _recorded(self.session)


class _UnsafeGather(_Unsafe):
    cls = InPlaceGather
    optimizer = torch.optim.AdamW


class _UnsafeBroadcast(_Unsafe):
    cls = OwnerBroadcast
    optimizer = torch.optim.Muon


SAFE: dict[str, type[Subject]] = {
    "data parallel": _Reduced,
    "free functions": _Free,
    "zero1": _Zero1,
    "zero2": _Zero2,
    "zero2 streamed": _StreamedZero2,
    "joint": _Joint,
    "joint zero2": _JointZero2,
}
UNSAFE: dict[str, type[Subject]] = {"in-place gather": _UnsafeGather, "owner broadcast": _UnsafeBroadcast}


def make_subject(name: str, comm: sr.Communicator, seed: int) -> Subject:
    """The strategy called `name` over a model made from `seed`; collective."""
    return {**SAFE, **UNSAFE}[name](comm, seed)


@dataclass(frozen=True)
class Digest:
    """What one rank holds, as hashes of all bits."""

    state: str
    """Parameters, buffers, optimizer state and masters."""
    pending: str
    """Pending gradients; which are missing too."""


def digest_of(seen: Photograph) -> Digest:
    """The hashes of a photograph."""
    return Digest(_hash({**seen.parameters, **{f"state {k}": v for k, v in seen.state.items()}}), _hash(seen.gradients))


NOTHING_PENDING = "no gradient"


def _hash(tensors: Mapping[str, Tensor | None]) -> str:
    if all(tensor is None for tensor in tensors.values()):
        return NOTHING_PENDING
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {'-' if tensor is None else (tensor.dtype, tuple(tensor.shape))}".encode())
        if tensor is not None:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _model() -> nn.Module:
    return nn.ParameterDict(
        {
            **{path: nn.Parameter(torch.randn(shape) * 0.1) for path, shape in _SHAPES.items()},
            **{path: nn.Parameter((torch.randn(shape) * 0.1).bfloat16()) for path, shape in _HALF.items()},
        }
    )


def _recorded(session: sr.SelectedZero1 | sr.SelectedZero2) -> dict[str, Tensor]:
    return {**session.to_record().tensors, "committed steps": torch.tensor(session.step_count)}


def _numbered(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    held = optimizer.state_dict()["state"]
    return {f"{number}/{key}": value for number, keys in held.items() for key, value in keys.items()}


def _but_weight(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asked.items() if key != "local_weight"}
