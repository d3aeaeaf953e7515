"""Drawn examples of everything a step can meet, and how they are run on real ranks that stay alive.

`examples(kind)` draws an `Example`: parameters, sessions, windows and a world size, as plain data whose repr runs it
again. `Worlds.run` sends it to the ranks of that world, which build the model, make the sessions, step, and tell what
they saw (`RankReport`). Nothing is judged here: tests/ranks/test_matrix.py holds the reports to the reference, which
shares with the ranks only how a model and a micro-batch follow from an example's numbers.
"""

from __future__ import annotations

import contextlib
import math
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
from hypothesis import strategies as st
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import push
from tests.support.rank_process import mark
from tests.support.ranks import RankFailed, RanksHung, RunningRanks, start_ranks
from tests.support.reference import CLASSES, PlainTorch

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


# ---- drawing ------------------------------------------------------------------------------------------------------

KINDS = ("zero2", "zero1", "reduce", "subgroups", "together", "free")
FUSED = ("sgd", "adam", "adamw", "adagrad")
_SHAPES = ((), (1,), (7,), (15, 3), (3, 5, 7), (257,), (300,), (6, 17), (512,))
_PARTITIONS: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = {
    1: (((0,),),),
    2: (((0,), (1,)), ((0, 1),), ((1,),)),
    3: (((0, 1), (2,)), ((0,), (1, 2)), ((0, 2), (1,)), ((0,), (1,), (2,)), ((1, 2),)),
    4: (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),), ((1, 3),)),
}


def _either(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


_rarely = _either(*[False] * 5, True)
_sometimes = _either(False, False, True)
_BETAS = _either((0.9, 0.999), (0.8, 0.95), (0.0, 0.5))
_DECAY = _either(0.0, 0.1)
_SWITCH = _either(False, True)
_FUSED = _either(None, True, False)
_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "sgd": {
        "momentum": _either(0.0, 0.9),
        "dampening": _either(0.0, 0.3),
        "nesterov": _SWITCH,
        "weight_decay": _DECAY,
        "fused": _FUSED,
    },
    "adam": {"betas": _BETAS, "eps": _either(1e-8, 1e-3), "weight_decay": _DECAY, "amsgrad": _SWITCH, "fused": _FUSED},
    "nadam": {
        "betas": _BETAS,
        "weight_decay": _DECAY,
        "momentum_decay": _either(4e-3, 0.5),
        "decoupled_weight_decay": _SWITCH,
    },
    "radam": {"betas": _BETAS, "weight_decay": _DECAY, "decoupled_weight_decay": _SWITCH},
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
        "centered": _SWITCH,
        "weight_decay": _DECAY,
    },
    "rprop": {"etas": _either((0.5, 1.2), (0.3, 1.7)), "step_sizes": _either((1e-6, 50), (0.01, 0.05))},
    "asgd": {"lambd": _either(1e-4, 0.1), "alpha": _either(0.75, 0.5), "t0": _either(1e6, 1), "weight_decay": _DECAY},
    "muon": {
        "momentum": _either(0.95, 0.5),
        "nesterov": _SWITCH,
        "weight_decay": _DECAY,
        "ns_steps": _either(5, 2),
        "adjust_lr_fn": _either(None, "match_rms_adamw"),
    },
}
_OPTIONS["adamw"] = _OPTIONS["adam"]
_OWN_OPTIONS = {"sgd": ("weight_decay", "momentum"), "rprop": ("etas",), "adam": ("weight_decay", "betas")}
"""What an option group may set for itself; weight_decay where nothing is said."""
ELEMENTWISE = tuple(name for name in _OPTIONS if name != "muon")


@st.composite
def _optimizers(draw: st.DrawFn, names: Sequence[str], half: bool) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(names))
    options = draw(st.fixed_dictionaries({"lr": _either(0.02, 0.1)}, optional=_OPTIONS[name]))
    if name == "sgd" and options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        del options["nesterov"]  # torch refuses it
    if name == "sgd" and half and options.get("fused"):
        del options["fused"]  # refused, see `settled`
    if name != "muon" and draw(_rarely):
        options["maximize"] = True
    return name, options


@st.composite
def _option_groups(draw: st.DrawFn, optimizer: str, options: Mapping[str, Any], paths: Sequence[str]) -> Any:
    groups = []
    for _ in range(draw(st.integers(0, 2)) if paths else 0):
        own = {key: _OPTIONS[optimizer][key] for key in _OWN_OPTIONS.get(optimizer, ("weight_decay",))}
        drawn = draw(st.fixed_dictionaries({}, optional=own))
        if options.get("nesterov") and drawn.get("momentum") == 0.0:
            del drawn["momentum"]
        inside = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
        groups.append((tuple(inside), drawn, draw(_either(1.0, 0.5, 2.0, 0.0))))
    return tuple(groups)


@st.composite
def _params(draw: st.DrawFn, dtypes: Sequence[str], session: str, most: int, grouped: bool) -> list[Param]:
    """Some parameters of one session, and some that nobody selects."""
    params = []
    empty = draw(_rarely) and draw(_rarely)  # which a session may be
    for index in range(draw(st.sampled_from(range(1, most + 1)))):
        shape = draw(st.sampled_from(_SHAPES))
        name = f"{session[0]}{index}"
        trained = index == 0 and not empty
        selected = trained or not draw(_rarely)
        ragged = len(shape) > 0 and (grouped or not selected) and draw(_sometimes)
        params.append(
            Param(
                draw(_either("", "deep.")) + name,
                shape,
                draw(st.sampled_from(dtypes)),
                session if selected else None,
                trainable=trained or not draw(_rarely),
                turned=len(shape) > 1 and draw(_SWITCH),
                tied=draw(_either("a.", "z.")) + name if draw(_rarely) else None,
                ragged=ragged,
            )
        )
    return params


@st.composite
def _session(
    draw: st.DrawFn, engine: str, params: Sequence[Param], name: str, groups: tuple[tuple[int, ...], ...]
) -> Session:
    own = [param for param in params if param.session == name]
    half = any(param.dtype != "float32" for param in own)
    masters = draw(_either(True, True, False)) and engine != "free"
    names = {"zero1": (*["muon"] * 4, *ELEMENTWISE), "free": ("sgd", "adam", "adamw")}.get(engine, ELEMENTWISE)
    optimizer, options = draw(_optimizers(names, half and not masters))
    trainable = [path for param in own if param.trainable for path in param.names]
    rest: tuple[str, dict[str, Any]] = ("adamw", {})
    if optimizer == "muon":
        rest = draw(_optimizers(("adamw", "sgd", "adagrad"), half and not masters))
        # A power of two between the rates: what follows the first rate in proportion is exact then.
        rest[1]["lr"] = options["lr"] * draw(_either(1.0, 0.25))
    return Session(
        optimizer,
        options,
        draw(_option_groups(optimizer, options, trainable)) if engine != "free" else (),
        engine,
        draw(_either("mean", "mean", "sum")) if engine != "free" else "mean",
        name,
        groups,
        masters,
        fp32=engine in ("zero1", "reduce") and (masters or engine == "reduce" or not half) and draw(_SWITCH),
        bucket_bytes=draw(_either(None, 1, 512, 4096)) if engine in ("zero1", "zero2") else None,
        chunk_numel=draw(_either(None, 256)) if engine == "zero2" else None,
        owners=engine == "zero1" and draw(_sometimes),
        rest=rest[0],
        rest_options=rest[1],
    )


@st.composite
def _windows(draw: st.DrawFn, world_size: int, params: Sequence[Param], kind: str, judged: bool) -> Window:
    names = [path for param in params if param.trainable for path in param.names]
    some = st.lists(st.sampled_from(names), max_size=2, unique=True) if names else st.just([])
    nowhere = draw(some) if draw(_sometimes) else []
    alike = kind == "free" and not draw(_rarely)
    by_rank = []
    for _ in range(world_size):
        count = draw(_either(1, 2, 3, 0)) if kind != "free" and draw(_sometimes) else 1
        by_rank.append(
            tuple(
                Micro(
                    1 if kind == "free" else draw(_either(1, 2, 7, 0, 2**31 + 1)),
                    tuple(sorted({*nowhere, *(draw(some) if not alike and draw(_sometimes) else [])})),
                )
                for _ in range(count)
            )
        )
    bad = None
    if names and judged and draw(_rarely):
        bad = (draw(st.integers(0, world_size - 1)), draw(st.sampled_from(names)), draw(_either("nan", "inf")))
    rates: list[Any] = [None, None, 0.05, 0.0]
    return Window(
        tuple(by_rank),
        "zero" if kind == "free" else draw(_either("error", "zero", "zero")),
        draw(_either(*rates, *([{"dense": 0.05}, {"dense": 0.0, "experts": 0.1}] if kind == "together" else []))),
        draw(_either(None, 0.25, 4.0, 16.0, 1e9)) if kind != "free" else None,
        draw(_rarely),
        bad,
        kind != "free" and draw(_sometimes),
    )


@st.composite
def examples(draw: st.DrawFn, kind: str) -> Example:
    """One example of a kind.

    zero2, zero1, reduce: one session over the world. subgroups: one over groups of it, each of which steps alone.
    together: a dense session over the world and one of experts over groups, in take_step. free: step_sgd and its kin.
    """
    world_size = draw(_either(1, 2, 3, 4, 2, 3))
    dtypes = draw(_either(("float32",), ("bfloat16",), ("float32", "bfloat16")))
    names = ("dense", "experts") if kind == "together" else ("default",)
    grouped = {"experts"} if kind == "together" else {"default"} if kind == "subgroups" else set()
    params: list[Param] = []
    sessions = []
    for name in names:
        params += draw(_params(dtypes, name, 6 // len(names), name in grouped))
        groups = draw(st.sampled_from(_PARTITIONS[world_size])) if name in grouped else ()
        engines = ("zero2", "zero1") if kind == "together" else ("zero2", "zero1", "reduce")
        engine = draw(st.sampled_from(engines)) if kind in ("together", "subgroups") else kind
        sessions.append(draw(_session(engine, params, name, groups)))
    judged = all(session.engine in ("zero1", "zero2") for session in sessions)
    windows = [draw(_windows(world_size, params, kind, judged)) for _ in range(draw(_either(1, 2, 3, 4, 4)))]
    return Example(
        world_size,
        tuple(params),
        tuple(sessions),
        tuple(windows),
        together=kind == "together",
        dyadic=draw(_either(True, False)),
        other_order=kind != "free" and draw(_sometimes),
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
            self.optimizer = sr.SelectedZero2(held, CLASSES[session.optimizer], **options)
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
        for index in range(len(window.micro_batches[self.rank])):
            push(self.model, micro_batch(self.example, number, self.rank, index))
        told = Told()
        if self.engines:
            if window.refused_first:
                self._attempt(told, window, window.missing, nonsense=self._is_first())
            self._attempt(told, window, window.missing)
            if told.results is None and told.refusals[-1].kind == "StepRefused" and window.missing == "error":
                self._attempt(told, window, "zero")
        self.model.zero_grad(set_to_none=True)
        told.parameters = {path: bits(parameter) for path, parameter in self.named.items()}
        return told

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
