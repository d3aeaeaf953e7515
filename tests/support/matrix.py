"""Drawn examples of everything a step can meet, run on real ranks that stay alive, and held to the reference.

`examples` draws an `Example`: parameters, sessions, windows and a world size, as plain data whose repr runs it again.
`Worlds.run` sends it to the ranks of that world, which build the model, make the sessions and step; `differences` holds
what they told (`Told`) to tests/support/reference.py. The reference runs in the test's own process, on the gradients of
all ranks; it shares with the ranks only how a model and a micro-batch follow from the example's numbers.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import push
from tests.support.rank_process import mark
from tests.support.ranks import RankFailed, RanksHung, RunningRanks, start_ranks
from tests.support.reference import CLASSES, Float64Twin, Part, PlainTorch, Share, Verdict, joint_step, judge

# ---- an example ---------------------------------------------------------------------------------------------------


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
    """An unselected one has another shape on every rank, one of an expert session on every group."""

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
    mode: str = "mean"
    name: str = "default"
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that hold replicas of the same parameters; () is the whole world."""
    masters: bool = True
    bucket_bytes: int | None = None
    chunk_numel: int | None = None


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
    lr: float | None = None
    max_grad_norm: float | None = None
    refused_first: bool = False
    """A step that asks for nonsense on one rank comes before the real one."""
    bad: tuple[int, str, float] | None = None
    """Rank, path and what stands in one element of its gradient: NaN or infinity."""
    idle_nan: bool = False
    """Ranks of weight 0 have NaN gradients."""

    def weight(self, rank: int) -> int:
        return sum(micro.weight for micro in self.micro_batches[rank])


@dataclass(frozen=True)
class Example:
    """Everything that is drawn. `seed` gives values of parameters and gradients, small binary fractions if `dyadic`."""

    world_size: int
    params: tuple[Param, ...]
    sessions: tuple[Session, ...]
    windows: tuple[Window, ...]
    together: bool = False
    """All sessions take each step together, otherwise there is one session, which steps alone."""
    dyadic: bool = True
    other_order: bool = False
    """Odd ranks define the parameters in the opposite order."""
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
        model = getattr(model, part)
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
        gradients[window.bad[1]].view(-1)[-1] = window.bad[2]
    return gradients


# ---- drawing ------------------------------------------------------------------------------------------------------

_rarely = st.sampled_from((False,) * 5 + (True,))
_sometimes = st.sampled_from((False, False, True))
_SHAPES = ((), (1,), (7,), (15, 3), (3, 5, 7), (257,), (300,))


def _either(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


_BETAS = _either((0.9, 0.999), (0.8, 0.95), (0.0, 0.5))
_DECAY = _either(0.0, 0.1)
_MAXIMIZE = _either(False, True)
_FUSED = _either(None, True, False)
_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "sgd": {
        "momentum": _either(0.0, 0.9),
        "dampening": _either(0.0, 0.3),
        "nesterov": _either(False, True),
        "weight_decay": _DECAY,
        "fused": _FUSED,
    },
    "adam": {
        "betas": _BETAS,
        "eps": _either(1e-8, 1e-3),
        "weight_decay": _DECAY,
        "amsgrad": _either(False, True),
        "fused": _FUSED,
    },
    "nadam": {
        "betas": _BETAS,
        "weight_decay": _DECAY,
        "momentum_decay": _either(4e-3, 0.5),
        "decoupled_weight_decay": _either(False, True),
    },
    "radam": {"betas": _BETAS, "weight_decay": _DECAY, "decoupled_weight_decay": _either(False, True)},
    "adamax": {"betas": _BETAS, "eps": _either(1e-8, 1e-3), "weight_decay": _DECAY},
    "adagrad": {
        "lr_decay": _either(0.0, 0.1),
        "weight_decay": _DECAY,
        "initial_accumulator_value": _either(0.0, 0.5),
        "fused": _FUSED,
    },
    "adadelta": {"rho": _either(0.9, 0.5), "eps": _either(1e-6, 1e-3), "weight_decay": _DECAY},
    "rmsprop": {
        "alpha": _either(0.99, 0.9),
        "momentum": _either(0.0, 0.9),
        "centered": _either(False, True),
        "weight_decay": _DECAY,
    },
    "rprop": {"etas": _either((0.5, 1.2), (0.3, 1.7)), "step_sizes": _either((1e-6, 50), (0.01, 0.05))},
    "asgd": {"lambd": _either(1e-4, 0.1), "alpha": _either(0.75, 0.5), "t0": _either(1e6, 1), "weight_decay": _DECAY},
}
_OPTIONS["adamw"] = _OPTIONS["adam"]
OWN_OPTIONS = {"sgd": ("weight_decay", "momentum"), "rprop": ("etas",), "adam": ("weight_decay", "betas")}
"""What an option group may set for itself; weight_decay where nothing is said."""


@st.composite
def _optimizers(draw: st.DrawFn, names: Sequence[str], half: bool) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(names))
    options = draw(st.fixed_dictionaries({"lr": _either(0.02, 0.1)}, optional=_OPTIONS[name]))
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        del options["nesterov"]  # torch refuses it
    if name == "sgd" and half:
        options["fused"] = False  # torch's fused SGD leaves most of a 16-bit leaf unchanged (pytorch issue 191763)
    if draw(_rarely):
        options["maximize"] = True
    return name, options


@st.composite
def _option_groups(draw: st.DrawFn, optimizer: str, options: Mapping[str, Any], paths: Sequence[str]) -> Any:
    groups = []
    for _ in range(draw(st.integers(0, 2)) if paths else 0):
        own = {key: _OPTIONS[optimizer][key] for key in OWN_OPTIONS.get(optimizer, ("weight_decay",))}
        drawn = draw(st.fixed_dictionaries({}, optional=own))
        if options.get("nesterov") and drawn.get("momentum") == 0.0:
            del drawn["momentum"]
        inside = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
        groups.append((tuple(inside), drawn, draw(_either(1.0, 0.5, 2.0, 0.0))))
    return tuple(groups)


@st.composite
def _params(draw: st.DrawFn, dtypes: Sequence[str], session: str, prefix: str, most: int) -> list[Param]:
    params = []
    for index in range(draw(st.integers(1, most))):
        shape = draw(st.sampled_from(_SHAPES))
        path = f"{draw(_either('', 'deep.'))}{prefix}{index}"
        selected = not draw(_rarely)
        params.append(
            Param(
                path,
                shape,
                draw(st.sampled_from(dtypes)),
                session if selected else None,
                trainable=not draw(_rarely),
                turned=len(shape) > 1 and draw(_sometimes),
                tied=draw(_either(f"a.{prefix}{index}", f"z.{prefix}{index}")) if draw(_rarely) else None,
                ragged=not selected and len(shape) > 0 and draw(_sometimes),
            )
        )
    return params


@st.composite
def _windows(draw: st.DrawFn, world_size: int, params: Sequence[Param], finite: bool) -> Window:
    names = [path for param in params if param.trainable for path in param.names]
    some = st.lists(st.sampled_from(names), max_size=2, unique=True) if names else st.just([])
    nowhere = draw(some) if draw(_sometimes) else []
    by_rank = []
    for _ in range(world_size):
        count = draw(_either(1, 2, 3, 0)) if draw(_sometimes) else 1
        by_rank.append(
            tuple(
                Micro(
                    draw(_either(1, 2, 7, 0, 2**31 + 1)),
                    tuple(sorted({*nowhere, *(draw(some) if draw(_sometimes) else [])})),
                )
                for _ in range(count)
            )
        )
    bad = None
    if names and not finite and draw(_rarely):
        bad = (draw(st.integers(0, world_size - 1)), draw(st.sampled_from(names)), draw(_either(math.nan, math.inf)))
    return Window(
        tuple(by_rank),
        draw(_either("error", "zero", "zero")),
        draw(_either(None, None, 0.05, 0.0)),
        draw(_either(None, 0.25, math.inf, 1e3)),
        draw(_rarely),
        bad,
        draw(_sometimes),
    )


ELEMENTWISE_NOW = ("sgd", "adam", "adamw")


@st.composite
def examples(draw: st.DrawFn, kind: str) -> Example:
    """One example of a kind: zero2."""
    world_size = draw(st.integers(1, 4))
    dtypes = draw(_either(("float32",), ("bfloat16",), ("float32", "bfloat16")))
    params = draw(_params(dtypes, "default", "p", 6))
    masters = draw(_either(True, True, False))
    optimizer, options = draw(_optimizers(ELEMENTWISE_NOW, half=not masters and "bfloat16" in dtypes))
    trainable = [path for p in params if p.session and p.trainable for path in p.names]
    session = Session(
        optimizer,
        options,
        draw(_option_groups(optimizer, options, trainable)),
        engine=kind,
        mode=draw(_either("mean", "mean", "sum")),
        masters=masters,
        bucket_bytes=draw(_either(None, 1, 512, 4096)),
        chunk_numel=draw(_either(None, 256)),
    )
    windows = [draw(_windows(world_size, params, finite=False)) for _ in range(draw(st.integers(1, 4)))]
    return Example(
        world_size,
        tuple(params),
        (session,),
        tuple(windows),
        dyadic=draw(_either(True, False)),
        other_order=draw(_sometimes),
        seed=draw(st.integers(0, 999)),
    )


# ---- on the ranks -------------------------------------------------------------------------------------------------

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
class Attempt:
    """One call that was refused: the class of the error, its message, and what was not as before afterwards."""

    kind: str
    message: str
    changed: tuple[str, ...]


@dataclass
class Told:
    """What one rank saw in one window."""

    refusals: list[Attempt] = field(default_factory=list)
    results: dict[str, tuple[int, float | None, tuple[str, ...]]] | None = None
    """Session -> (global weight, norm, absent), unless every attempt was refused."""
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


class _Rank:
    """One rank's side of one example."""

    def __init__(self, subgroup: Callable[[tuple[int, ...]], sr.Communicator | None], rank: int, example: Example):
        self.rank = rank
        self.example = example
        self.model = build_model(example, rank)
        self.named = dict(self.model.named_parameters(remove_duplicate=False))
        self.engines: dict[str, sr.SelectedZero2] = {}
        for session in example.sessions:
            for group in example.groups(session):
                comm = subgroup(group)
                if comm is not None:
                    self.engines[session.name] = self._make(comm, session)
        chosen = {path for engine in self.engines.values() for path in engine.parameters}
        self.unselected = {path: p for path, p in self.named.items() if path not in chosen}

    def _make(self, comm: sr.Communicator, session: Session) -> sr.SelectedZero2:
        include = [param.path for param in self.example.params if param.session == session.name]
        selection = sr.select_parameters(self.model, include=include, comm=comm)
        held = sr.SelectedDataParallel(comm, self.model, selection)
        sizes = {"bucket_bytes": session.bucket_bytes, "chunk_numel": session.chunk_numel}
        return sr.SelectedZero2(
            held,
            CLASSES[session.optimizer],
            option_groups=[sr.OptionGroup(frozenset(paths), own, scale) for paths, own, scale in session.option_groups],
            masters=session.masters,
            name=session.name,
            **{key: value for key, value in sizes.items() if value is not None},
            **session.options,
        )

    def run(self) -> RankReport:
        report = RankReport()
        for number in range(len(self.example.windows)):
            report.windows.append(self._window(number))
        for name, engine in self.engines.items():
            record = engine.to_record()
            tensors = {key: bits(tensor) for key, tensor in record.tensors.items()}
            report.state[name] = (record.meta["fragments"], tensors)
        return report

    def _window(self, number: int) -> Told:
        window = self.example.windows[number]
        for index in range(len(window.micro_batches[self.rank])):
            push(self.model, micro_batch(self.example, number, self.rank, index))
        told = Told()
        if self.engines:
            if window.refused_first:
                self._attempt(told, window, {"missing": "zero", "lr": -1.0 if self.rank == 0 else 0.1})
            self._attempt(told, window, {"missing": window.missing, "lr": window.lr})
            if told.results is None and told.refusals[-1].kind == "StepRefused":
                self._attempt(told, window, {"missing": "zero", "lr": window.lr})
        self.model.zero_grad(set_to_none=True)
        told.parameters = {path: bits(parameter) for path, parameter in self.named.items()}
        return told

    def _attempt(self, told: Told, window: Window, terms: Mapping[str, Any]) -> None:
        before = self._photograph()
        left = {path: parameter.grad for path, parameter in self.unselected.items() if parameter.grad is not None}
        try:
            results = self._step(window, {**terms, "max_grad_norm": window.max_grad_norm})
        except sr.errors.StepRefused as error:
            after = self._photograph()
            changed = tuple(name for name in before if before[name] != after[name])
            told.refusals.append(Attempt(type(error).__name__, str(error), changed))
            return
        told.results = {name: (r.global_weight, r.grad_norm, tuple(r.absent)) for name, r in results.items()}
        for name, result in results.items():
            told.problems += self._remaining(name, result.remaining_gradients, left)
        told.problems += [f"{path}: the gradient of an unselected parameter was changed" for path in left
                          if bits(left[path]) != before[f"gradient {path}"]]  # fmt: skip
        told.problems += [f"{path}: its consumed gradient is still there" for path, p in self.named.items()
                          if path not in self.unselected and p.grad is not None]  # fmt: skip

    def _step(self, window: Window, terms: Mapping[str, Any]) -> dict[str, Any]:
        (session,) = self.example.sessions
        weight = window.weight(self.rank)
        engine = self.engines[session.name]
        if session.mode == "mean":
            return {session.name: engine.step(local_weight=weight, **terms)}
        return {session.name: engine.step_sum(local_active=weight > 0, **terms)}

    def _remaining(self, name: str, remaining: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> list[str]:
        ours = {path: grad for path, grad in remaining.items() if path in self.unselected}
        if sorted(ours) != sorted(left):
            return [f"remaining gradients of {name}: {sorted(ours)}, expected {sorted(left)}"]
        return [f"{path}: its remaining gradient is another object" for path in ours if ours[path] is not left[path]]

    def _photograph(self) -> dict[str, Bits | None]:
        values: dict[str, Bits | None] = {f"parameter {path}": bits(p) for path, p in self.named.items()}
        for path, parameter in self.named.items():
            values[f"gradient {path}"] = None if parameter.grad is None else bits(parameter.grad)
        return values


def serve(comm: sr.Communicator, folder: str) -> int:
    """The body of a rank that runs examples until it is told to stop; returns how many. Ends after an error."""
    subgroups: dict[tuple[int, ...], sr.Communicator | None] = {tuple(range(comm.world_size)): comm}

    def subgroup(ranks: tuple[int, ...]) -> sr.Communicator | None:
        return subgroups[ranks]

    with connection.Client(str(Path(folder) / str(comm.rank)), family="AF_UNIX") as pipe:
        mark("connected")
        done = 0
        while order := pipe.recv_bytes():
            try:
                report = _Rank(subgroup, comm.rank, pickle.loads(order)).run()
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
        ranks = stack.enter_context(start_ranks(world_size, serve, folder, comm_timeout_s=20.0, debug="OFF"))
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


# ---- against the reference ----------------------------------------------------------------------------------------


class _Replica:
    """The reference's side of one session in one group."""

    def __init__(self, example: Example, session: Session, group: tuple[int, ...]) -> None:
        self.session = session
        self.group = group
        params = [param for param in example.params if param.session == session.name]
        root = dict(build_model(example, group[0]).named_parameters(remove_duplicate=False))
        self.names = {param.names[0]: param.names for param in params}
        self.parameters = {path: root[path] for path in self.names}
        for parameter in self.parameters.values():
            # A session equals the contiguous twin (C095): fused kernels walk memory, and treat the end of it otherwise.
            parameter.data = parameter.data.contiguous()
        self.paths = [param.names[0] for param in params if param.trainable]
        options = self._options_by_path()
        defaults = dict(session.options)
        if defaults.get("fused") is None:
            defaults["fused"] = True  # torch has it for all three on a CPU, and shardrun takes it where torch has it
        self.exact = PlainTorch(
            self.parameters,
            CLASSES[session.optimizer],
            options=options,
            master_weights=session.masters,
            **defaults,
        )
        trained = {path: self.parameters[path] for path in self.paths}
        self.half = any(p.dtype != torch.float32 for p in trained.values()) and not session.masters
        self.twin = Float64Twin(
            trained,
            session.optimizer,
            groups=options,
            cancelled=0.1 if self.half else 1e-4,
            **session.options,
        )

    def _options_by_path(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for path, names in self.names.items():
            for inside, own, scale in self.session.option_groups:
                if {*inside} & {*names}:
                    found[path] = {**own, "lr_scale": scale}
                    break
        return found


def local_gradients(example: Example, number: int, rank: int) -> dict[str, Tensor | None]:
    """What plain torch leaves in float32 after the micro-batches of a window, by path (both paths of a tie)."""
    model = build_model(example, rank)
    named = dict(model.named_parameters(remove_duplicate=False))
    for parameter in named.values():
        parameter.grad_dtype = torch.float32
    for index in range(len(example.windows[number].micro_batches[rank])):
        push(model, micro_batch(example, number, rank, index))
    return {path: parameter.grad for path, parameter in named.items()}


def differences(example: Example, reports: Sequence[RankReport]) -> list[str]:
    """Where the ranks disagree with the reference; empty when every bit, refusal and figure is as it must be."""
    errors = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error is not None]
    if errors:
        return errors
    replicas = [_Replica(example, session, g) for session in example.sessions for g in example.groups(session)]
    units = [replicas] if example.together else [[replica] for replica in replicas]
    for number, window in enumerate(example.windows):
        gradients = [local_gradients(example, number, rank) for rank in range(example.world_size)]
        told = [report.windows[number] for report in reports]
        problems = [problem for unit in units for problem in _unit(example, window, unit, gradients, told)]
        problems += _values(example, replicas, told)
        if problems:
            return [f"window {number}: {problem}" for problem in problems]
    return [problem for replica in replicas for problem in _state(replica, reports)]


def _unit(
    example: Example,
    window: Window,
    unit: Sequence[_Replica],
    gradients: Sequence[Mapping[str, Tensor | None]],
    told: Sequence[Told],
) -> list[str]:
    """One step of the sessions that take it together: the verdict, the figures, and the update of the reference."""
    parts = []
    for replica in unit:
        scale = (lambda w: w) if replica.session.mode == "mean" else (lambda w: int(w > 0))
        parts.append(
            Part(
                replica.paths,
                replica.session.mode,
                {rank: Share(scale(window.weight(rank)), gradients[rank]) for rank in replica.group},
            )
        )
    ranks = sorted({rank for replica in unit for rank in replica.group})
    denominator = sum(window.weight(rank) for rank in (range(example.world_size) if example.together else ranks))
    strict, verdict = judge(parts, window.missing, denominator), judge(parts, "zero", denominator)
    refusals = [Verdict("nonsense", ((ranks[0], "learning rate"),), (), (), ())] if window.refused_first else []
    refusals += [strict] if strict.refusal == "missing" else []
    refusals += [verdict] if verdict.refusal is not None else []
    problems = [
        f"rank {rank}: {problem}"
        for rank in ranks
        for problem in [*_refused(told[rank], refusals), *told[rank].problems]
    ]
    if verdict.refusal is not None:
        if any(told[rank].results is not None for rank in ranks):
            problems.append(f"stepped, although the window is {verdict.refusal}")
        return problems
    norm = _update(unit, parts, verdict, window)
    for rank in ranks:
        problems += [f"rank {rank}: {p}" for p in _figures(unit, rank, verdict, window, norm, told[rank])]
    return problems


def _update(unit: Sequence[_Replica], parts: Sequence[Part], verdict: Verdict, window: Window) -> float:
    sums = [part.sums() for part in parts]
    terms = {"lr": window.lr, "max_grad_norm": window.max_grad_norm}
    for replica, part, divisor in zip(unit, parts, verdict.divisors, strict=True):
        replica.twin.note_magnitudes(part.magnitudes(), divisor)
    joint_step([replica.twin for replica in unit], sums, verdict.divisors, **terms)
    return joint_step([replica.exact for replica in unit], sums, verdict.divisors, **terms)


_KINDS = {
    "nonsense": "StepRefused",
    "missing": "StepRefused",
    "empty": "EmptyWindowError",
    "non-finite": "NonFiniteError",
}


def _refused(told: Told, expected: Sequence[Verdict]) -> list[str]:
    kinds, wanted = [attempt.kind for attempt in told.refusals], [_KINDS[str(v.refusal)] for v in expected]
    if kinds != wanted:
        return [f"refused as {[(a.kind, a.message) for a in told.refusals]}, expected {wanted}"]
    problems = []
    for attempt, verdict in zip(told.refusals, expected, strict=True):
        if attempt.changed:
            problems.append(f"a refused step changed {attempt.changed}: {attempt.message}")
        if verdict.blamed and not any(_names(attempt.message, rank, path) for rank, path in verdict.blamed):
            problems.append(f"{attempt.message!r} blames none of {verdict.blamed}")
    return problems


def _names(message: str, rank: int, path: str) -> bool:
    """Whether the message says that `rank` (or every rank) is wrong about `path`."""
    return path in message and (f"rank {rank}" in message or "no rank has a gradient" in message)


def _figures(
    unit: Sequence[_Replica], rank: int, verdict: Verdict, window: Window, norm: float, told: Told
) -> list[str]:
    if told.results is None:
        return ["did not step"]
    problems = []
    for replica, weight, absent in zip(unit, verdict.global_weights, verdict.absent, strict=True):
        if rank not in replica.group:
            continue
        got_weight, got_norm, got_absent = told.results[replica.session.name]
        if got_weight != weight:
            problems.append(f"{replica.session.name}: global weight {got_weight}, expected {weight}")
        if sorted(got_absent) != sorted(absent):
            problems.append(f"{replica.session.name}: absent {got_absent}, expected {absent}")
        if (got_norm is None) != (window.max_grad_norm is None):
            problems.append(f"{replica.session.name}: norm {got_norm}, max_grad_norm {window.max_grad_norm}")
        if got_norm is not None and not abs(got_norm - norm) <= 1e-12 * norm:
            problems.append(f"{replica.session.name}: norm {got_norm!r}, expected {norm!r}")
    return problems


def _values(example: Example, replicas: Sequence[_Replica], told: Sequence[Told]) -> list[str]:
    """Every parameter of every rank: the bits of plain torch, and close to float64; unselected ones are untouched."""
    problems = []
    for rank in range(example.world_size):
        expected = {path: bits(p) for path, p in build_model(example, rank).named_parameters(remove_duplicate=False)}
        for replica in replicas:
            if rank in replica.group:
                for path, names in replica.names.items():
                    expected |= dict.fromkeys(names, bits(replica.parameters[path]))
        for path, want in expected.items():
            if told[rank].parameters[path] != want:
                problems.append(f"rank {rank}: {path}: {first_difference(told[rank].parameters[path], want)}")
    for replica in replicas:
        for path in replica.paths:
            got = tensor_of(told[replica.group[0]].parameters[path])
            problems += _far(replica, path, got)
    return problems


def _far(replica: _Replica, path: str, got: Tensor) -> list[str]:
    """What float32 (or 16-bit parameters) cannot explain of the distance to the float64 twin."""
    want, travelled = replica.twin.parameters[path], replica.twin.travelled[path]
    allowed = 1e-6 * want.abs() + 1e-4 * travelled.max() + 1e-9
    if got.dtype != torch.float32:
        allowed = allowed + 2.0**-8 * want.abs()
    if replica.half:
        allowed = allowed + 0.1 * travelled.max() + 2.0**-6 * want.abs()
    far = ((got.double() - want).abs() > allowed) & ~replica.twin.fragile[path]
    if not bool(far.any()):
        return []
    index = int(far.flatten().nonzero()[0])
    return [f"{path}: element {index} is {got.flatten()[index].item()!r}, float64 {want.flatten()[index].item()!r}"]


def _state(replica: _Replica, reports: Sequence[RankReport]) -> list[str]:
    """Optimizer state, put together from the records of all members, against plain torch's."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in replica.group:
        fragments, tensors = reports[rank].state[replica.session.name]
        for name, held in tensors.items():
            pieces.setdefault(name, []).append((fragments[name.rpartition("/")[0]][0], tensor_of(held)))
    got = {}
    for name, parts in pieces.items():
        tensors_in_order = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
        got[name] = tensors_in_order[0] if tensors_in_order[0].dim() == 0 else torch.cat(tensors_in_order)
    problems = []
    steps = replica.twin.steps
    for path, keys in replica.exact.state().items():
        ours = {name.rpartition("/")[2]: value for name, value in got.items() if name.rpartition("/")[0] == path}
        problems += [f"state {path}/{key} is missing" for key in keys if key not in ours]
        for key, value in ours.items():
            if key not in keys and steps[path] == 0:
                if key == "step" and value.item() != 0:
                    problems.append(f"state {path}/step is {value.item()}, but it never took one")
                continue
            want = keys.get(key, torch.zeros_like(value)).contiguous().reshape(value.shape)
            if bits(value) != bits(want):
                problems.append(f"state {path}/{key}: {first_difference(bits(value), bits(want))}")
    return problems


def first_difference(got: Bits, want: Bits) -> str:
    """In words."""
    if got[:2] != want[:2]:
        return f"{got[:2]}, expected {want[:2]}"
    one, other = tensor_of(got).flatten(), tensor_of(want).flatten()
    index = int((one != other).nonzero()[0]) if bool((one != other).any()) else 0
    return f"element {index} of {one.numel()} is {one[index].item()!r}, expected {other[index].item()!r}"
