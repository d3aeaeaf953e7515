"""Drawn models, windows and worlds: every session is held to the reference, to the last bit and beside float64.

SHARDRUN_MATRIX_EXAMPLES is how many are drawn in all. A counterexample is printed as the expression that runs it again:
`differences(example, worlds.run(example))`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.support.matrix_draws import KINDS, examples
from tests.support.matrix_example import (
    Example,
    Micro,
    Param,
    Session,
    Window,
    build_model,
    micro_batch,
    options_by_path,
    settled,
)
from tests.support.matrix_ranks import Bits, RankReport, Told, Worlds, bits, tensor_of
from tests.support.models import push
from tests.support.reference import CLASSES, Float64Twin, Part, PlainTorch, Share, Verdict, joint_step, judge

_EXAMPLES = int(os.environ.get("SHARDRUN_MATRIX_EXAMPLES", "60"))


def _drawn(share: int) -> settings:
    """Settings for one part in `share` of all examples. Ranks take their time, so neither speed nor size is judged."""
    return settings(max_examples=max(1, _EXAMPLES // share), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as started:
        yield started


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_every_session_is_the_reference(kind: str, worlds: Worlds) -> None:
    @_drawn(len(KINDS))
    @given(example=examples(kind))
    def hold(example: Example) -> None:
        found = differences(example, worlds.run(example))
        assert found == [], "\n".join(found)

    hold()


# ---- the equalities of SPEC section 5, session against session ----------------------------------------------------


def _variants(example: Example) -> dict[str, Example]:
    """Other ways to the same bits, from an example of ZeRO-2."""
    (session,) = example.sessions
    fp32 = session.masters

    def by(**changes: Any) -> Example:
        return replace(example, sessions=(replace(session, **changes),))

    other = [replace(window, refused_first=not window.refused_first) for window in example.windows]
    return {
        "again": example,
        "refused and retried": replace(example, windows=tuple(other)),
        "other buckets, streamed or not": by(
            bucket_bytes=2048 if session.bucket_bytes is None else None, chunk_numel=512, streams=not session.streams
        ),
        "ZeRO-1": by(engine="zero1", fp32=fp32, chunk_numel=None, streams=False),
        "data parallel and the ordinary optimizer": by(
            engine="reduce", fp32=fp32, bucket_bytes=None, chunk_numel=None, streams=False
        ),
    }


@pytest.mark.timeout(0)
def test_sessions_equal_each_other_bit_for_bit(worlds: Worlds) -> None:
    @_drawn(2 * len(KINDS))
    @given(example=examples("zero2"))
    def hold(example: Example) -> None:
        # An optimizer of the user's own walks a non-contiguous parameter in another order; and it is not judged.
        params = tuple(replace(param, turned=False) for param in example.params)
        example = replace(example, params=params, windows=tuple(replace(w, bad=None) for w in example.windows))
        first = worlds.run(example)
        for name, variant in _variants(example).items():
            for rank, (one, other) in enumerate(zip(first, worlds.run(variant), strict=True)):
                assert one.error is None, one.error
                assert other.error is None, other.error
                for number, (seen, also) in enumerate(zip(one.windows, other.windows, strict=True)):
                    assert seen.parameters == also.parameters, f"{name}: rank {rank}, window {number}"
                    if variant.sessions[0].engine != "reduce":  # whose norm is the test's own
                        assert seen.results == also.results, f"{name}: rank {rank}, window {number}"
                if variant.sessions == example.sessions:
                    assert one.state == other.state, f"{name}: rank {rank}"

    hold()


# ---- what would be seen -------------------------------------------------------------------------------------------

_MICRO = ((Micro(1), Micro(2, ("p0",))), (Micro(0),), (Micro(4, ("p0",)),))
_FIXED = Example(
    3,
    (Param("p0", (7,)), Param("p1", (300,), "bfloat16", tied="a.p1"), Param("u", (2,), session=None)),
    (Session("adamw", {"lr": 0.1}, bucket_bytes=512),),
    (
        Window(_MICRO, missing="error", max_grad_norm=0.25, refused_first=True),
        Window(((Micro(0),),) * 3, missing="zero"),
        Window((*_MICRO[:2], (Micro(1),)), missing="zero", bad=(2, "p0", "nan")),
        Window(_MICRO, missing="zero", idle_nan=True),
    ),
)


def _other_bit(held: Bits, byte: int = 0) -> Bits:
    return held[0], held[1], bytes([*held[2][:byte], held[2][byte] ^ 1, *held[2][byte + 1 :]])


def _tamperings(reports: list[RankReport]) -> dict[str, Callable[[], object]]:
    """Ways to make one thing wrong in what the ranks told about `_FIXED`."""
    last = reports[1].windows[3]
    assert last.results is not None
    weight, norm, absent = last.results["default"]
    first = reports[2].windows[0]
    tensors = reports[0].state["default"][1]
    return {
        "one bit of a parameter": lambda: last.parameters.update({"p0": _other_bit(last.parameters["p0"], 20)}),
        "one bit of a tied name": lambda: last.parameters.update({"p1": _other_bit(last.parameters["p1"])}),
        "one bit of an unselected one": lambda: last.parameters.update({"u": _other_bit(last.parameters["u"])}),
        "one bit of the state": lambda: tensors.update({"p0/exp_avg": _other_bit(tensors["p0/exp_avg"])}),
        "state that is missing": lambda: tensors.pop("p0/exp_avg_sq"),
        "a step count": lambda: tensors.update({"p0/step": bits(torch.tensor(3.0))}),
        "a record that is missing": lambda: reports[2].state.clear(),
        "the weight": lambda: last.results.update({"default": (weight + 1, norm, absent)}),  # type: ignore[union-attr]
        "what is absent": lambda: last.results.update({"default": (weight, norm, ("p0",))}),  # type: ignore[union-attr]
        "a norm": lambda: last.results.update({"default": (weight, 1.0, absent)}),  # type: ignore[union-attr]
        "a step that was refused": lambda: setattr(last, "results", None),
        "a refusal that did not come": lambda: first.refusals.pop(),
        "a refusal of another kind": lambda: first.refusals.insert(0, first.refusals.pop()),
        "a refusal that blames another": lambda: first.refusals.append(
            replace(first.refusals.pop(), message="rank 1 has no gradient for p0")
        ),
        "a refusal that changed something": lambda: first.refusals.append(
            replace(first.refusals.pop(), changed=("parameter p0",))
        ),
        "a step that was not refused": lambda: setattr(reports[0].windows[2], "results", last.results),
        "a complaint of a rank": lambda: last.problems.append("its consumed gradient is still there"),
        "an error": lambda: setattr(reports[0], "error", "Traceback"),
    }


def test_an_example_is_what_its_repr_says() -> None:
    assert eval(repr(_FIXED)) == _FIXED


def test_whatever_a_rank_gets_wrong_is_seen(worlds: Worlds) -> None:
    reports = worlds.run(_FIXED)
    assert differences(_FIXED, reports) == []
    unseen = []
    for name in _tamperings(reports):
        tampered = copy.deepcopy(reports)
        _tamperings(tampered)[name]()
        if differences(_FIXED, tampered) == []:
            unseen.append(name)
    assert unseen == []


# ---- the reference's side of an example ---------------------------------------------------------------------------


class _Replica:
    """One session in one group."""

    def __init__(self, example: Example, session: Session, group: tuple[int, ...]) -> None:
        self.session = session
        self.group = group
        params = [param for param in example.params if param.session == session.name]
        self.names = {param.names[0]: param.names for param in params}
        self.paths = [param.names[0] for param in params if param.trainable]
        root = dict(build_model(example, group[0]).named_parameters(remove_duplicate=False))
        self.parameters = {path: root[path] for path in self.names}
        if session.engine in ("zero1", "zero2"):
            for parameter in self.parameters.values():
                # It moves into flat memory and equals the contiguous twin (C095): fused kernels walk memory as it is,
                # and treat its end otherwise.
                parameter.data = parameter.data.contiguous()
        # Steps see gradients as the optimizer is declared: float32 where there are masters.
        self.rounds = session.engine == "reduce" and not session.fp32
        sixteen = any(self.parameters[path].dtype != torch.float32 for path in self.paths)
        self.coarse = sixteen and (self.rounds or not session.masters)
        """Whether its optimizer sees 16-bit gradients, whose rounding also reaches the norm that clips all others."""
        self.groups = options_by_path(session, self.names)
        self.exact: list[PlainTorch] = []
        self.twins: list[Float64Twin] = []
        self._factors: list[float] = []
        self.asked = False
        """free: whether a step was made or refused, before which wrong options are those of the set-up."""
        matrices = {path for path in self.paths if self.parameters[path].dim() == 2}
        first = matrices if session.optimizer == "muon" else set(self.paths)
        self._add(session.optimizer, session.options, first)
        if session.optimizer == "muon":
            self._add(session.rest, session.rest_options, set(self.paths) - matrices)

    def _add(self, optimizer: str, options: Mapping[str, object], paths: set[str]) -> None:
        own = {path: self.parameters[path] for path in self.paths if path in paths}
        masters = self.session.masters
        leaves = {torch.float32 if masters else parameter.dtype for parameter in own.values()}
        free = self.session.engine == "free"
        exact = PlainTorch(
            own,
            CLASSES[optimizer],
            options=self.groups,
            master_weights=masters,
            round_gradients=self.rounds,
            **(options if free else settled(optimizer, options, leaves)),
        )
        self.exact.append(exact)
        lr = float(options["lr"])  # type: ignore[arg-type]
        given = {key: value for key, value in options.items() if key != "lr"}
        cancelled = 0.1 if self.coarse else 1e-4
        self.twins.append(Float64Twin(own, optimizer, lr, groups=self.groups, cancelled=cancelled, **given))
        self._factors.append(lr / float(self.session.options["lr"]))

    def rates(self, window: Window) -> list[float | None]:
        """Base rates of this step; what muon leaves over follows in proportion."""
        rate = window.rate(self.session.name)
        return [None if rate is None else rate * factor for factor in self._factors]

    def gradient(self, path: str, total: Tensor, divisor: int | None) -> Tensor:
        """What a reduction hands out."""
        mean = total if divisor is None else total / divisor
        return mean if self.session.fp32 else mean.to(self.parameters[path].dtype)


def local_gradients(example: Example, number: int, rank: int) -> dict[str, Tensor | None]:
    """What plain torch leaves in float32 after the micro-batches of a window, by path (both paths of a tie).

    For the free functions, which are `loss.backward(); opt.step()`, in the parameters' own dtype.
    """
    model = build_model(example, rank)
    named = dict(model.named_parameters(remove_duplicate=False))
    for parameter in named.values() if example.sessions[0].engine != "free" else ():
        parameter.grad_dtype = torch.float32
    for index in range(len(example.windows[number].micro_batches[rank])):
        push(model, micro_batch(example, number, rank, index))
    return {path: parameter.grad for path, parameter in named.items()}


def differences(example: Example, reports: Sequence[RankReport]) -> list[str]:
    """Where the ranks disagree with the reference; empty when every bit, refusal and figure is as it must be."""
    errors = {rank: report.error for rank, report in enumerate(reports) if report.error is not None}
    if errors:
        # One rank's failure closes the communicator of the others.
        causes = {rank: error for rank, error in errors.items() if "communicator closed" not in error} or errors
        return [f"rank {rank}: {error}" for rank, error in causes.items()]
    replicas = [_Replica(example, session, g) for session in example.sessions for g in example.groups(session)]
    units = [replicas] if example.together else [[replica] for replica in replicas]
    for number, window in enumerate(example.windows):
        gradients = [local_gradients(example, number, rank) for rank in range(example.world_size)]
        told = [report.windows[number] for report in reports]
        problems = [problem for unit in units for problem in _one_step(example, window, unit, gradients, told)]
        problems = problems or _values(example, replicas, told)
        if problems:
            return [f"window {number}: {problem}" for problem in problems]
    return [problem for replica in replicas for problem in _state(replica, reports)]


_KINDS = {
    "nonsense": "StepRefused",
    "bad options": "UsageError",
    "unlike": "StepRefused",
    "missing": "StepRefused",
    "empty": "EmptyWindowError",
    "non-finite": "NonFiniteError",
}


def _one_step(
    example: Example,
    window: Window,
    unit: Sequence[_Replica],
    gradients: Sequence[Mapping[str, Tensor | None]],
    told: Sequence[Told],
) -> list[str]:
    """What the sessions of one step had to conclude and tell; and the step of the reference."""
    parts = [_part(replica, window, gradients) for replica in unit]
    ranks = sorted({rank for replica in unit for rank in replica.group})
    denominator = sum(window.weight(rank) for rank in (range(example.world_size) if example.together else ranks))
    verdict = judge(parts, "zero", denominator)
    refusals = _refusals(window, unit, parts, denominator, verdict)
    problems = []
    for rank in ranks:
        problems += [f"rank {rank}: {p}" for p in (*_refused(told[rank], refusals), *told[rank].problems)]
        if (told[rank].results is None) == (
            not refusals or refusals[-1].refusal in ("nonsense", "bad options", "missing")
        ):
            problems.append(f"rank {rank}: stepped: {told[rank].results}, refused: {told[rank].refusals}")
    if problems or told[ranks[0]].results is None:
        return problems
    sums = [part.sums() for part in parts]
    norm = _update(unit, parts, sums, verdict, window)
    for replica, weight, absent, total, divisor in zip(
        unit, verdict.global_weights, verdict.absent, sums, verdict.divisors, strict=True
    ):
        for rank in replica.group:
            where = f"rank {rank}: {replica.session.name}"
            problems += [f"{where}: {p}" for p in _figures(replica, told[rank], weight, absent, norm, window)]
            if replica.session.engine == "reduce":
                problems += [f"{where}: {p}" for p in _handed_out(replica, told[rank], total, divisor)]
    return problems


def _part(replica: _Replica, window: Window, gradients: Sequence[Mapping[str, Tensor | None]]) -> Part:
    mode = replica.session.mode
    weights = {rank: window.weight(rank) for rank in replica.group}
    counted = {rank: weight if mode == "mean" else int(weight > 0) for rank, weight in weights.items()}
    return Part(replica.paths, mode, {rank: Share(counted[rank], gradients[rank]) for rank in replica.group})


def _refusals(
    window: Window, unit: Sequence[_Replica], parts: Sequence[Part], denominator: int, verdict: Verdict
) -> list[Verdict]:
    """What is refused, one after the other, before the step is made or given up."""
    first = min(rank for replica in unit for rank in replica.group)
    found = []
    if window.refused_first:
        at_setup = unit[0].session.engine == "free" and not unit[0].asked
        found = [Verdict("bad options" if at_setup else "nonsense", () if at_setup else ((first, ""),), (), (), ())]
    strict = judge(parts, window.missing, denominator)
    if unit[0].session.engine == "free":
        unit[0].asked = True
        shown = {tuple(s.gradients.get(path) is None for path in parts[0].paths) for s in parts[0].shares.values()}
        return found + ([replace(verdict, refusal="unlike")] if len(shown) > 1 else [])
    found += [strict] if strict.refusal == "missing" else []
    judged = verdict.refusal == "empty" or unit[0].session.engine != "reduce"
    return found + ([verdict] if verdict.refusal is not None and judged else [])


def _refused(told: Told, expected: Sequence[Verdict]) -> list[str]:
    kinds, wanted = [refusal.kind for refusal in told.refusals], [_KINDS[str(verdict.refusal)] for verdict in expected]
    if kinds != wanted:
        return [f"refused as {[(r.kind, r.message) for r in told.refusals]}, expected {wanted}"]
    problems = []
    for refusal, verdict in zip(told.refusals, expected, strict=True):
        if refusal.changed:
            problems.append(f"a refused step changed {refusal.changed}: {refusal.message}")
        if verdict.blamed and not any(_names(refusal.message, rank, path) for rank, path in verdict.blamed):
            problems.append(f"{refusal.message!r} blames none of {verdict.blamed}")
    return problems


def _names(message: str, rank: int, path: str) -> bool:
    """Whether the message says that `rank` (or every rank) is wrong about `path`."""
    return path in message and (f"rank {rank}" in message or "no rank has a gradient" in message)


def _update(
    unit: Sequence[_Replica],
    parts: Sequence[Part],
    sums: Sequence[Mapping[str, Tensor | None]],
    verdict: Verdict,
    window: Window,
) -> float:
    """The step of both references; the norm."""
    exact: list[PlainTorch] = []
    twins: list[Float64Twin] = []
    totals: list[Mapping[str, Tensor | None]] = []
    divisors: list[int | None] = []
    rates: list[float | None] = []
    for replica, part, total, divisor in zip(unit, parts, sums, verdict.divisors, strict=True):
        exact += replica.exact
        twins += replica.twins
        totals += [total] * len(replica.exact)
        divisors += [divisor] * len(replica.exact)
        rates += replica.rates(window)
        for twin in replica.twins:
            twin.note_magnitudes(part.magnitudes(), divisor)
    joint_step(twins, totals, divisors, lr=rates, max_grad_norm=window.max_grad_norm)
    return joint_step(exact, totals, divisors, lr=rates, max_grad_norm=window.max_grad_norm)


def _figures(
    replica: _Replica, told: Told, weight: int, absent: Sequence[str], norm: float, window: Window
) -> list[str]:
    assert told.results is not None
    got_weight, got_norm, got_absent = told.results[replica.session.name]
    problems = []
    if got_weight != weight:
        problems.append(f"global weight {got_weight}, expected {weight}")
    if got_absent != tuple(sorted(absent)):
        problems.append(f"absent {got_absent}, expected {absent}")
    if (got_norm is None) != (window.max_grad_norm is None):
        problems.append(f"norm {got_norm}, max_grad_norm {window.max_grad_norm}")
    if got_norm is not None and not abs(got_norm - norm) <= 1e-12 * norm:
        problems.append(f"norm {got_norm!r}, expected {norm!r}")
    return problems


def _handed_out(replica: _Replica, told: Told, total: Mapping[str, Tensor | None], divisor: int | None) -> list[str]:
    want = {path: bits(replica.gradient(path, held, divisor)) for path, held in total.items() if held is not None}
    if sorted(want) != sorted(told.gradients):
        return [f"gradients of {sorted(told.gradients)}, expected {sorted(want)}"]
    return [
        f"gradient of {path}: {first_difference(told.gradients[path], want[path])}"
        for path in want
        if told.gradients[path] != want[path]
    ]


# ---- values and state ---------------------------------------------------------------------------------------------


def _values(example: Example, replicas: Sequence[_Replica], told: Sequence[Told]) -> list[str]:
    """Every parameter of every rank: the bits of plain torch, and close to float64; unselected ones are untouched."""
    problems = []
    for rank in range(example.world_size):
        expected = {path: bits(p) for path, p in build_model(example, rank).named_parameters(remove_duplicate=False)}
        for replica in replicas:
            if rank in replica.group:
                for path, names in replica.names.items():
                    expected |= dict.fromkeys(names, bits(replica.parameters[path]))
        problems += [
            f"rank {rank}: {path}: {first_difference(told[rank].parameters[path], want)}"
            for path, want in expected.items()
            if told[rank].parameters[path] != want
        ]
    for replica in replicas:
        coarse = any(other.coarse for other in (replicas if example.together else [replica]))
        for twin in replica.twins:
            for path in twin.parameters:
                got = tensor_of(told[replica.group[0]].parameters[path])
                problems += _far(replica, twin, path, got, coarse=coarse)
    return problems


def _far(replica: _Replica, twin: Float64Twin, path: str, got: Tensor, *, coarse: bool) -> list[str]:
    """What rounding cannot explain of the distance to the float64 twin."""
    if replica.session.optimizer == "muon" and got.dim() == 2:
        return []  # torch iterates in bfloat16, where what is nearly singular may end anywhere
    want, travelled = twin.parameters[path], twin.travelled[path].max()
    allowed = 1e-6 * want.abs() + (2.0**-6 if coarse else 1e-4) * travelled + 1e-9
    if got.dtype != torch.float32:
        allowed = allowed + 2.0**-8 * want.abs()
        if not replica.session.masters:
            allowed = allowed + 0.1 * travelled + 2.0**-6 * want.abs()
    far = ((got.double() - want).abs() > allowed) & ~twin.fragile[path]
    if not bool(far.any()):
        return []
    index = int(far.flatten().nonzero()[0])
    return [f"{path}: element {index} is {got.flatten()[index].item()!r}, float64 {want.flatten()[index].item()!r}"]


def _state(replica: _Replica, reports: Sequence[RankReport]) -> list[str]:
    """Optimizer state, put together from the records of all members, against plain torch's."""
    if any(replica.session.name not in reports[rank].state for rank in replica.group):
        # The ordinary optimizer after a reduction is the test's own; a store that never stepped has none.
        sharded = replica.session.engine in ("zero1", "zero2")
        return [f"no record of {replica.session.name}"] if sharded else []
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in replica.group:
        fragments, tensors = reports[rank].state[replica.session.name]
        for name, held in tensors.items():
            pieces.setdefault(name, []).append((fragments[name.rpartition("/")[0]][0], tensor_of(held)))
    whole = replica.session.engine == "free"  # every rank has all of it
    got = {name: _joined(parts[:1] if whole else parts) for name, parts in pieces.items()}
    problems = []
    for exact, twin in zip(replica.exact, replica.twins, strict=True):
        steps = twin.steps
        for path, keys in exact.state().items():
            ours = {name.rpartition("/")[2]: value for name, value in got.items() if name.rpartition("/")[0] == path}
            problems += [f"state {path}/{key}: {p}" for key, p in _unlike(ours, keys, steps[path])]
    return problems


def _joined(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    tensors = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    return tensors[0] if tensors[0].dim() == 0 else torch.cat([tensor.flatten() for tensor in tensors])


def _unlike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], steps: int) -> Iterator[tuple[str, str]]:
    """Keys whose state is not plain torch's, and how."""
    yield from ((key, "is missing") for key in theirs if key not in ours)
    for key, value in ours.items():
        if key not in theirs and steps == 0:
            if key == "step" and value.item() != 0:
                yield key, f"is {value.item()}, but it never took one"
            continue
        want = theirs.get(key, torch.zeros_like(value)).contiguous().reshape(value.shape)
        if bits(value) != bits(want):
            yield key, first_difference(bits(value), bits(want))


def first_difference(got: Bits, want: Bits) -> str:
    """In words."""
    if got[:2] != want[:2]:
        return f"{got[:2]}, expected {want[:2]}"
    one, other = tensor_of(got).flatten(), tensor_of(want).flatten()
    index = int((one != other).nonzero()[0]) if bool((one != other).any()) else 0
    return f"element {index} of {one.numel()} is {one[index].item()!r}, expected {other[index].item()!r}"
