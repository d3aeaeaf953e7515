"""Draws examples of everything a step can meet: parameters, sessions, windows and a world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.support.matrix_example import Example, Micro, Param, Session, Window

KINDS = ("zero2", "zero1", "reduce", "subgroups", "together", "free")
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
        streams=engine == "zero2" and name == "default" and draw(_SWITCH),  # sessions that step together may not
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
