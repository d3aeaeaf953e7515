"""Runs examples on real ranks that stay alive.

`Worlds.run` sends an `Example` to the ranks of its world, which build the model, make the sessions, step, and tell what
they saw (`RankReport`). Nothing is judged here: tests/ranks/test_matrix.py holds the reports to the reference.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.matrix_example import Example, Session, Window, build_model, micro_batch, options_by_path, settled
from tests.support.models import push
from tests.support.rank_process import mark
from tests.support.ranks import RankFailed, RanksHung, RunningRanks, start_ranks
from tests.support.reference import CLASSES, PlainTorch

Bits = tuple[str, tuple[int, ...], bytes]
"""A tensor on its way to another process: dtype, shape, and its elements in logical order."""


def bits(tensor: Tensor) -> Bits:
    """`tensor` as plain data; equal when every bit is."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def tensor_of(held: Bits) -> Tensor:
    """The tensor again."""
    dtype, shape, raw = held
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


@dataclass(frozen=True)
class Refusal:
    """One call that was refused: the class of the error, its message, and what was not as before afterwards."""

    kind: str
    message: str
    changed: tuple[str, ...]


@dataclass
class Told:
    """What one rank saw in one window."""

    refusals: list[Refusal] = field(default_factory=list)
    results: dict[str, tuple[int, float | None, tuple[str, ...]]] | None = None
    """Session -> (global weight, norm, absent in order of paths), unless every attempt was refused."""
    gradients: dict[str, Bits] = field(default_factory=dict)
    """Reduced gradients, of the engine that hands them out."""
    parameters: dict[str, Bits] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass
class RankReport:
    """What one rank tells about one example."""

    windows: list[Told] = field(default_factory=list)
    state: dict[str, tuple[dict[str, list[int]], dict[str, Bits]]] = field(default_factory=dict)
    """Session -> (fragments by path, tensors) of this rank's record."""
    error: str | None = None
    """The traceback of an error that was nobody's refusal."""


@dataclass(frozen=True)
class _Terms:
    """What one attempt asks for."""

    weight: int
    missing: str
    lr: float | None
    max_grad_norm: float | None
    nonsense: bool

    def counted(self, mode: str) -> dict[str, Any]:
        """The weight, as an int or a 0-dim tensor, or whether this rank is active."""
        if mode == "mean":
            weight = torch.tensor(self.weight) if self.weight % 2 else self.weight
            return {"local_weight": -1 if self.nonsense else weight}
        return {"local_active": "nonsense" if self.nonsense else self.weight > 0}


@dataclass(frozen=True)
class _Seen:
    """What a step returned."""

    global_weight: int
    grad_norm: float | None
    absent: tuple[str, ...]
    remaining: Mapping[str, Tensor] | None = None
    gradients: Mapping[str, Bits] = field(default_factory=dict)


class _Engine(Protocol):
    """One session on one rank, whichever way it steps."""

    def step(self, terms: _Terms) -> _Seen: ...

    def state(self) -> tuple[dict[str, list[int]], dict[str, Bits]] | None: ...


class _Sharded:
    """SelectedZero1 or SelectedZero2."""

    def __init__(self, held: sr.SelectedDataParallel, session: Session) -> None:
        self.session = session
        groups = [sr.OptionGroup(frozenset(paths), own, scale) for paths, own, scale in session.option_groups]
        sizes = {"bucket_bytes": session.bucket_bytes, "chunk_numel": session.chunk_numel}
        options: dict[str, Any] = {
            "option_groups": groups,
            "masters": session.masters,
            "name": session.name,
            **{key: value for key, value in sizes.items() if value is not None},
            **session.options,
        }
        self.optimizer: sr.SelectedZero1 | sr.SelectedZero2
        if session.engine == "zero2":
            self.optimizer = sr.SelectedZero2(
                held, CLASSES[session.optimizer], stream_gradients=session.streams, **options
            )
            return
        if session.owners:
            size = held.comm.world_size
            options["owners"] = {path: (3 * index + 1) % size for index, path in enumerate(held.order)}
        self.optimizer = sr.SelectedZero1(
            held,
            CLASSES[session.optimizer],
            rest=CLASSES[session.rest],
            rest_options=session.rest_options,
            **options,
        )
        assert self.optimizer.owners == options.get("owners", self.optimizer.owners)

    def step(self, terms: _Terms) -> _Seen:
        name = {"mean": "step", "sum": "step_sum"}[self.session.mode] + ("_fp32" if self.session.fp32 else "")
        asked = {"missing": terms.missing, "lr": terms.lr, "max_grad_norm": terms.max_grad_norm}
        return seen(getattr(self.optimizer, name)(**terms.counted(self.session.mode), **asked))

    def state(self) -> tuple[dict[str, list[int]], dict[str, Bits]]:
        record = self.optimizer.to_record()
        return record.meta["fragments"], {key: bits(tensor) for key, tensor in record.tensors.items()}


def seen(result: sr.StepResult) -> _Seen:
    return _Seen(result.global_weight, result.grad_norm, tuple(result.absent), result.remaining_gradients)


class _Reduced:
    """Data parallel, and then the ordinary optimizer on every rank."""

    def __init__(self, held: sr.SelectedDataParallel, session: Session) -> None:
        self.session = session
        self.held = held
        first = {path: held.parameters[path] for path in held.order}
        names = {path: [n for n, p in held.parameters.items() if p is first[path]] for path in first}
        leaves = {torch.float32 if session.masters else p.dtype for p in first.values()}
        self.plain = PlainTorch(
            # Parameters of its own on the same memory: what it asks of autograd is not to help the session.
            {path: nn.Parameter(parameter.detach()) for path, parameter in first.items()},
            CLASSES[session.optimizer],
            options=options_by_path(session, names),
            master_weights=session.masters,
            **settled(session.optimizer, session.options, leaves),
        )

    def step(self, terms: _Terms) -> _Seen:
        name = {"mean": "reduce", "sum": "sum"}[self.session.mode] + ("_fp32" if self.session.fp32 else "")
        result = getattr(self.held, name)(**terms.counted(self.session.mode), missing=terms.missing)
        given = {path: self.held.parameters[path].grad for path in self.held.order}
        handed = {path: bits(grad) for path, grad in result.gradients.items()}
        assert handed == {path: bits(grad) for path, grad in given.items() if grad is not None}, "not what .grad became"
        norm = self.plain.step(given, None, lr=terms.lr, max_grad_norm=terms.max_grad_norm)
        for path in self.held.order:
            self.held.parameters[path].grad = None
        told = None if terms.max_grad_norm is None else norm
        return _Seen(result.global_weight, told, tuple(result.absent), result.remaining_gradients, handed)

    def state(self) -> None:
        return None


class _Free:
    """step_sgd, step_adam or step_adamw over a store."""

    def __init__(self, comm: sr.Communicator, model: nn.Module, include: Sequence[str], session: Session) -> None:
        self.session = session
        self.comm = comm
        self.store = sr.ParamStore(model, include=include)

    def step(self, terms: _Terms) -> _Seen:
        config = {"sgd": sr.SGDConfig, "adam": sr.AdamConfig, "adamw": sr.AdamWConfig}[self.session.optimizer]
        call = {"sgd": sr.step_sgd, "adam": sr.step_adam, "adamw": sr.step_adamw}[self.session.optimizer]
        options = {**self.session.options, **({} if terms.lr is None else {"lr": terms.lr})}
        if terms.nonsense:
            options["lr"] = -1.0
        present = {path for path, parameter in self.store.parameters.items() if parameter.grad is not None}
        call(self.store, config(**options), self.comm)  # type: ignore[operator]
        absent = tuple(path for path in self.store.parameters if path not in present)
        return _Seen(self.comm.world_size, None, absent)

    def state(self) -> tuple[dict[str, list[int]], dict[str, Bits]] | None:
        optimizer = self.store.optimizer
        if optimizer is None:
            return None
        held = {
            f"{path}/{key}": bits(value)
            for path, parameter in self.store.parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        return {path: [0, parameter.numel()] for path, parameter in self.store.parameters.items()}, held


class _Rank:
    """One rank's side of one example."""

    def __init__(self, world: _World, example: Example) -> None:
        self.rank = world.comm.rank
        self.example = example
        self.model = build_model(example, self.rank)
        self.named = dict(self.model.named_parameters(remove_duplicate=False))
        self.engines: dict[str, _Engine] = {}
        selected: set[str] = set()
        for session in example.sessions:
            for group in example.groups(session):
                comm = world.subgroup(group)
                if comm is not None:
                    self.engines[session.name] = self._make(comm, session)
                    selected |= {path for p in example.params if p.session == session.name for path in p.names}
        self.unselected = {path: p for path, p in self.named.items() if path not in selected}

    def _make(self, comm: sr.Communicator, session: Session) -> _Engine:
        include = [param.path for param in self.example.params if param.session == session.name]
        if session.engine == "free":
            root = dict(build_model(self.example, 0).named_parameters(remove_duplicate=False))
            for param in self.example.params:  # a store broadcasts nothing
                if param.session is not None:
                    self.named[param.path].data.copy_(root[param.path])
            return _Free(comm, self.model, include, session)
        if session.engine == "reduce" and all(param.session == session.name for param in self.example.params):
            return _Reduced(sr.DataParallel(comm, self.model), session)
        selection = sr.select_parameters(self.model, include=include, comm=comm)
        held = sr.SelectedDataParallel(comm, self.model, selection)
        return _Reduced(held, session) if session.engine == "reduce" else _Sharded(held, session)

    def run(self) -> RankReport:
        """All windows, then the state."""
        report = RankReport()
        for number in range(len(self.example.windows)):
            report.windows.append(self._window(number))
        for name, engine in self.engines.items():
            state = engine.state()
            if state is not None:
                report.state[name] = state
        return report

    def _window(self, number: int) -> Told:
        window = self.example.windows[number]
        self._backward(number)
        told = Told()
        if self.engines:
            if window.refused_first:
                self._attempt(told, window, window.missing, nonsense=self._is_first())
            self._attempt(told, window, window.missing)
            if told.results is None and told.refusals[-1].kind == "StepRefused" and window.missing == "error":
                self._attempt(told, window, "zero")
        self.model.zero_grad(set_to_none=True)
        for streamed in self._streamed():
            streamed.discard_gradients()
        told.parameters = {path: bits(parameter) for path, parameter in self.named.items()}
        return told

    def _backward(self, number: int) -> None:
        """All micro-batches of this rank; streamed gradients leave in the last one, or without any."""
        window, count = self.example.windows[number], len(self.example.windows[number].micro_batches[self.rank])
        for index in range(count - 1):
            push(self.model, micro_batch(self.example, number, self.rank, index))
        weight = _Terms(window.weight(self.rank), window.missing, None, None, nonsense=False).counted("mean")
        with contextlib.ExitStack() as stack:
            for streamed in self._streamed():
                stack.enter_context(streamed.window(**weight))
            if count:
                push(self.model, micro_batch(self.example, number, self.rank, count - 1))

    def _streamed(self) -> list[sr.SelectedZero2]:
        optimizers = [engine.optimizer for engine in self.engines.values() if isinstance(engine, _Sharded)]
        return [one for one in optimizers if isinstance(one, sr.SelectedZero2) and one.streams]

    def _is_first(self) -> bool:
        """Whether this rank is the first of those that step together."""
        if self.example.together:
            return self.rank == 0
        (session,) = self.example.sessions
        return any(group[0] == self.rank for group in self.example.groups(session))

    def _attempt(self, told: Told, window: Window, missing: str, *, nonsense: bool = False) -> None:
        before = self._photograph()
        left = {path: parameter.grad for path, parameter in self.unselected.items() if parameter.grad is not None}
        terms = _Terms(window.weight(self.rank), missing, None, window.max_grad_norm, nonsense)
        try:
            results = self._step(window, terms)
        except (sr.errors.StepRefused, sr.errors.UsageError) as error:
            after = self._photograph()
            changed = tuple(name for name in before if before[name] != after[name])
            told.refusals.append(Refusal(type(error).__name__, str(error), changed))
            return
        told.results = {name: (r.global_weight, r.grad_norm, tuple(sorted(r.absent))) for name, r in results.items()}
        for result in results.values():
            told.gradients |= result.gradients
            if result.remaining is not None:
                told.problems += self._remaining(result.remaining, left)
        told.problems += [f"{path}: the gradient of an unselected parameter was changed" for path in left
                          if bits(left[path]) != before[f"gradient {path}"]]  # fmt: skip
        told.problems += [f"{path}: its consumed gradient is still there" for path, p in self.named.items()
                          if path not in self.unselected and p.grad is not None]  # fmt: skip

    def _step(self, window: Window, terms: _Terms) -> dict[str, _Seen]:
        if not self.example.together:
            ((name, engine),) = self.engines.items()
            return {name: engine.step(replace(terms, lr=window.rate(name)))}
        sessions = {session.name: session for session in self.example.sessions if session.name in self.engines}
        names = list(sessions)[::-1] if self.example.other_order and self.rank % 2 else list(sessions)
        optimizers = [engine.optimizer for engine in map(self.engines.get, names) if isinstance(engine, _Sharded)]
        summed = {name: terms.counted("sum")["local_active"] for name in names if sessions[name].mode == "sum"}
        rates = window.lr
        if isinstance(rates, Mapping):
            rates = {name: rate for name, rate in rates.items() if name in names}
        results = sr.take_step(
            optimizers,
            **terms.counted("mean"),
            local_active=summed or None,
            lr=rates,
            missing=terms.missing,
            max_grad_norm=terms.max_grad_norm,
        )
        return {name: seen(result) for name, result in results.items()}

    def _remaining(self, remaining: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> list[str]:
        ours = {path: grad for path, grad in remaining.items() if path in self.unselected}
        if sorted(ours) != sorted(left):
            return [f"remaining gradients {sorted(ours)}, expected {sorted(left)}"]
        return [f"{path}: its remaining gradient is another object" for path in ours if ours[path] is not left[path]]

    def _photograph(self) -> dict[str, Bits | None]:
        values: dict[str, Bits | None] = {f"parameter {path}": bits(p) for path, p in self.named.items()}
        for path, parameter in self.named.items():
            values[f"gradient {path}"] = None if parameter.grad is None else bits(parameter.grad)
        return values


class _World:
    """A communicator and the subgroups that examples asked for; each is made once, by all ranks."""

    def __init__(self, comm: sr.Communicator) -> None:
        self.comm = comm
        self._subgroups: dict[tuple[int, ...], sr.Communicator | None] = {}

    def subgroup(self, ranks: tuple[int, ...]) -> sr.Communicator | None:
        """This rank's side of the group of `ranks`, None outside of it; the whole world is the communicator itself."""
        if ranks == tuple(range(self.comm.world_size)):
            return self.comm
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self.comm.subgroup(ranks)
        return self._subgroups[ranks]


def serve(comm: sr.Communicator, folder: str) -> int:
    """The body of a rank that runs examples until it is told to stop; returns how many. Ends after an error."""
    world = _World(comm)
    # torch says so once per process where the gradient of a non-contiguous parameter is contiguous; it is right to be.
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    with connection.Client(str(Path(folder) / str(comm.rank)), family="AF_UNIX") as pipe:
        mark("connected")
        done = 0
        while order := pipe.recv_bytes():
            try:
                report = _Rank(world, pickle.loads(order)).run()
            except Exception:
                report = RankReport(error=traceback.format_exc())
            pipe.send_bytes(pickle.dumps(report))
            done += 1
            if report.error is not None:
                break
    return done


class Worlds:
    """Ranks of each world size, started when first needed and kept; after an unexpected error they are started anew."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._alive: dict[int, tuple[contextlib.ExitStack, RunningRanks, list[connection.Connection]]] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        for world_size in list(self._alive):
            self._end(world_size)

    def run(self, example: Example) -> list[RankReport]:
        """What every rank tells about `example`, in rank order; RanksHung or RankFailed if one does not answer."""
        if example.world_size not in self._alive:
            self._start(example.world_size)
        _, ranks, pipes = self._alive[example.world_size]
        try:
            for pipe in pipes:
                pipe.send_bytes(pickle.dumps(example))
            reports = [self._answer(ranks, rank, pipe) for rank, pipe in enumerate(pipes)]
        except BaseException:
            self._end(example.world_size)
            raise
        if any(report.error is not None for report in reports):
            self._end(example.world_size)
        return reports

    def _answer(self, ranks: RunningRanks, rank: int, pipe: connection.Connection) -> RankReport:
        if not pipe.poll(self._timeout_s):
            raise RanksHung(self._timeout_s, ranks.stacks())
        try:
            report: RankReport = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            (outcome,) = ranks.collect(5.0, [rank])
            raise RankFailed(rank, outcome.error or f"left with exit code {outcome.exit_code}") from None
        return report

    def _start(self, world_size: int) -> None:
        stack = contextlib.ExitStack()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix-"))
        listeners = [
            stack.enter_context(connection.Listener(str(Path(folder) / str(rank)), family="AF_UNIX"))
            for rank in range(world_size)
        ]
        ranks = stack.enter_context(start_ranks(world_size, serve, folder, comm_timeout_s=15.0, debug="OFF"))
        pipes = []
        for rank, listener in enumerate(listeners):
            ranks.wait_for_mark(rank, "connected")
            pipes.append(stack.enter_context(listener.accept()))
        self._alive[world_size] = (stack, ranks, pipes)

    def _end(self, world_size: int) -> None:
        stack, _, pipes = self._alive.pop(world_size)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        stack.close()
