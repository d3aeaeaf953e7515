"""Several sessions in one step: one agreement, one weight, one norm, one decision, one commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import Scalars, Vectors, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.reference import PlainTorch, joint_step, replicated_sum
from tests.support.sessions import Photograph, make_zero2, photograph, same_bits, told

_SGD = torch.optim.SGD
_INF = math.inf


def _subgroup(comm: sr.Communicator, *lists: Sequence[int]) -> sr.Communicator:
    """Of subgroups that share no rank, the one that this rank is in."""
    (own,) = [group for group in map(comm.subgroup, lists) if group is not None]
    return own


def _values(model: nn.Module) -> dict[str, float]:
    return {name: parameter.item() for name, parameter in model.named_parameters()}


# ---- dense weights on four ranks, experts on two and two ----------------------------------------------------------

_HIDDEN = {"a": 9, "b": 5}
_WINDOWS = [(3, 5, 2, 4), (1, 0, 2, 3), (4, 2, 0, 0), (2, 2, 5, 1)]
"""Tokens by rank; those of ranks 0 and 1 are for expert a, the others' for b, which gets none in the third window."""


def _expert(name: str) -> nn.Module:
    hidden = _HIDDEN[name]
    return seeded(hidden, lambda: nn.Sequential(nn.Linear(15, hidden), nn.Tanh(), nn.Linear(hidden, 3)))


class _Moe(nn.Module):
    """7 -> 15 -> an expert, 15 -> 9 -> 3 or 15 -> 5 -> 3 -> 17."""

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.up, self.head = (seeded(3, lambda: nn.Linear(7, 15)), seeded(4, lambda: nn.Linear(3, 17)))
        self.experts = nn.ModuleDict(experts)
        self.route = next(iter(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (tokens, 17) of `x` (tokens, 7), all of which go to the expert `route`."""
        return self.head(torch.tanh(self.experts[self.route](torch.tanh(self.up(x)))))  # type: ignore[no-any-return]


def _batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    return token_batch(10 * number + rank, _WINDOWS[number][rank])


def _routed(number: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Every token where its expert lives."""
    return {"ab"[rank // 2]: _batch(number, rank)}


def _dealt(number: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The same tokens of the window, dealt out in turn to all ranks."""
    dealt = {}
    for name, homes in (("a", (0, 1)), ("b", (2, 3))):
        batches = [_batch(number, home) for home in homes]
        inputs, targets = (torch.cat(parts)[rank::4] for parts in zip(*batches, strict=True))
        dealt[name] = (inputs, targets)
    return dealt


@dataclass(frozen=True)
class _Trained:
    """What a rank has after each window, by path as if it held all experts: those of others are left out."""

    gradients: list[dict[str, Tensor | None]]
    parameters: list[dict[str, Tensor]]
    norms: list[float | None]
    absent: list[tuple[str, ...]]
    records: dict[str, Tensor]
    fragments: dict[str, list[int]]


def _train(
    model: _Moe,
    rank: int,
    sessions: Sequence[sr.SelectedZero2],
    tokens: Callable[[int, int], dict[str, tuple[Tensor, Tensor]]],
    rename: Callable[[str], str],
) -> _Trained:
    gradients, parameters, norms, absent = [], [], [], []
    for number in range(len(_WINDOWS)):
        batches = tokens(number, rank)
        for name, batch in batches.items():
            if len(batch[1]):
                model.route = name if name in model.experts else "own"
                torch.autograd.backward(loss_sum(model, batch))
        named = {rename(path): p for path, p in model.named_parameters()}
        gradients.append({path: None if p.grad is None else p.grad.clone() for path, p in named.items()})
        weight = sum(len(targets) for _, targets in batches.values())
        results = sr.take_step(sessions, local_weight=weight, missing="zero", max_grad_norm=0.3)
        norms.append(next(iter(results.values())).grad_norm)
        absent.append(tuple(rename(path) for result in results.values() for path in result.absent))
        parameters.append({path: p.detach().clone() for path, p in named.items()})
    held = [session.to_record() for session in sessions]
    return _Trained(
        gradients,
        parameters,
        norms,
        absent,
        {rename(name): tensor for record in held for name, tensor in record.tensors.items()},
        {rename(path): extent for record in held for path, extent in record.meta["fragments"].items()},
    )


def _layouts(
    comm: sr.Communicator, half: sr.Communicator, optimizer: type[torch.optim.Optimizer], **options: Any
) -> dict[str, _Trained]:
    """Layout -> what becomes of it: experts apart, or together with the tokens where they were, or dealt out."""

    def sessions(group: sr.Communicator, model: nn.Module) -> list[sr.SelectedZero2]:
        return [
            make_zero2(comm, model, optimizer, exclude=["experts.*"], name="dense", **options),
            make_zero2(group, model, optimizer, include=["experts.*"], name="experts", **options),
        ]

    own = "ab"[comm.rank // 2]
    model = _Moe({"own": _expert(own)})
    trained = {
        "apart": _train(
            model,
            comm.rank,
            sessions(half, model),
            _routed,
            lambda path: path.replace("experts.own.", f"experts.{own}."),
        )
    }
    for name, tokens in (("together", _routed), ("dealt", _dealt)):
        model = _Moe({expert: _expert(expert) for expert in _HIDDEN})
        trained[name] = _train(model, comm.rank, sessions(comm, model), tokens, str)
    return trained


def _all_layouts(comm: sr.Communicator) -> dict[str, dict[str, _Trained]]:
    half = _subgroup(comm, [0, 1], [2, 3])
    return {
        "AdamW": _layouts(comm, half, torch.optim.AdamW, lr=0.01),
        "SGD": _layouts(comm, half, _SGD, lr=0.1, momentum=0.9),
    }


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, dict[str, _Trained]]]:
    """By rank: optimizer -> layout -> what became of it."""
    return run_ranks(4, _all_layouts)


def _whole_records(ranks: Sequence[_Trained]) -> dict[str, Tensor]:
    """Name -> the whole tensor of state, put together from the holders' fragments."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for trained in ranks:
        for name, tensor in trained.records.items():
            begin = trained.fragments[name.rpartition("/")[0]][0]
            held = pieces.setdefault(name, {}).setdefault(begin, tensor)
            assert same_bits(held, tensor), f"{name} differs between its holders"
    return {
        name: torch.cat([held[k] for k in sorted(held)]) if held[min(held)].dim() else held[min(held)]
        for name, held in pieces.items()
    }


def test_experts_of_some_ranks_learn_what_they_would_learn_on_all_of_them(
    layouts: list[dict[str, dict[str, _Trained]]],
) -> None:
    """Bit for bit: a rank that has no token for an expert adds zeros, and nothing else differs in the sums."""
    apart, together = ([ranks["AdamW"][name] for ranks in layouts] for name in ("apart", "together"))
    for one, other in zip(apart, together, strict=True):
        assert one.norms == other.norms
        assert all(norm is not None and norm > 0.3 for norm in one.norms), "clipping is active"
        for held, wanted in zip(one.parameters, other.parameters, strict=True):
            assert [path for path, value in held.items() if not same_bits(value, wanted[path])] == []
    records, wanted_records = _whole_records(apart), _whole_records(together)
    assert records.keys() == wanted_records.keys()
    assert [name for name, tensor in records.items() if not same_bits(tensor, wanted_records[name])] == []
    assert {path.split(".")[1] for path in apart[2].absent[2]} == {"b"}
    assert all(len(trained.parameters[0]) == 8 for trained in apart), "dense and one expert of two"
    assert all(len(trained.parameters[0]) == 12 for trained in together)


def test_sessions_of_one_step_are_plain_torch_clipped_by_one_norm(
    layouts: list[dict[str, dict[str, _Trained]]],
) -> None:
    apart = [ranks["AdamW"]["apart"] for ranks in layouts]
    model = _Moe({name: _expert(name) for name in _HIDDEN})
    twins = [
        PlainTorch(dict(part.named_parameters()), torch.optim.AdamW, lr=0.01, fused=True)
        for part in (nn.ModuleDict({"up": model.up, "head": model.head}), *model.experts.values())
    ]
    homes = [range(4), range(2), range(2, 4)]
    prefixes = ["", "experts.a.", "experts.b."]
    for number, weights in enumerate(_WINDOWS):
        sums = [
            replicated_sum(
                [{path: apart[rank].gradients[number].get(prefix + path) for path in twin.leaves} for rank in ranks],
                [weights[rank] for rank in ranks],
            )
            for twin, ranks, prefix in zip(twins, homes, prefixes, strict=True)
        ]
        norm = joint_step(twins, sums, [sum(weights)] * 3, max_grad_norm=0.3)
        for twin, ranks, prefix in zip(twins, homes, prefixes, strict=True):
            for rank in ranks:
                held = apart[rank]
                assert held.norms[number] == pytest.approx(norm, rel=1e-12)
                for path, leaf in twin.leaves.items():
                    assert same_bits(held.parameters[number][prefix + path], leaf), (number, rank, path)


def test_where_a_tokens_loss_is_computed_changes_the_order_of_sums_only(
    layouts: list[dict[str, dict[str, _Trained]]],
) -> None:
    """The same tokens on other ranks: FP32 sums in another order, so to 1e-6 and not to the last bit."""
    for ranks in layouts:
        apart, dealt = ranks["SGD"]["apart"], ranks["SGD"]["dealt"]
        assert apart.norms == pytest.approx(dealt.norms, rel=1e-6)
        for held, wanted in zip(apart.parameters, dealt.parameters, strict=True):
            for path, value in held.items():
                assert torch.allclose(value, wanted[path], rtol=1e-6, atol=1e-8), path


# ---- what is asked for, and what comes back -----------------------------------------------------------------------


def _joint(comm: sr.Communicator) -> list[dict[str, Any]]:
    """Weights 1, 2, 3, 4; rank r has gradient r + 1 everywhere; odd ranks give the sessions in the other order."""
    half = _subgroup(comm, [0, 1], [2, 3])
    model = Scalars("d", "e", "spare")
    sessions = [
        make_zero2(comm, model, _SGD, include=["d"], name="dense", lr=1.0),
        make_zero2(half, model, _SGD, include=["e"], name="experts", lr=1.0),
    ]
    told_by_step = []
    for _ in range(2):
        before = _values(model)
        push(model, {path: torch.tensor([comm.rank + 1.0]) for path in ("d", "e", "spare")})
        spare = model.get_parameter("spare").grad
        given = sessions[::-1] if comm.rank % 2 else sessions
        results = sr.take_step(given, local_weight=torch.tensor(comm.rank + 1), max_grad_norm=_INF)
        told_by_step.append(
            {
                "moved": {path: before[path] - value for path, value in _values(model).items()},
                "results": {name: (r.global_weight, r.grad_norm, r.absent) for name, r in sorted(results.items())},
                "remaining": [list(r.remaining_gradients) for r in results.values()],
                "same": all(r.remaining_gradients["spare"] is spare for r in results.values()),
                "bits": spare is not None and spare.item() == comm.rank + 1.0,
                "pending": model.get_parameter("d").grad is not None or model.get_parameter("e").grad is not None,
                "steps": [session.step_count for session in sessions],
            }
        )
        model.get_parameter("spare").grad = None
    return told_by_step


def test_one_weight_and_one_norm_whatever_order_a_rank_gives_the_sessions_in() -> None:
    for rank, steps in enumerate(run_ranks(4, _joint)):
        means = {"d": torch.tensor(10.0).div(10), "e": torch.tensor([3.0, 7.0]).div(10)}
        norm = math.sqrt(math.fsum(float(x) ** 2 for x in (means["d"], *means["e"])))
        for number, step in enumerate(steps, 1):
            assert step["moved"] == pytest.approx({"d": 1.0, "e": float(means["e"][rank // 2]), "spare": 0.0})
            assert step["results"] == dict.fromkeys(("dense", "experts"), (10, pytest.approx(norm, rel=1e-12), ()))
            assert step["remaining"] == [["spare"], ["spare"]]
            assert step["same"]
            assert step["bits"]
            assert not step["pending"]
            assert step["steps"] == [number, number]


def _places(comm: sr.Communicator) -> dict[str, Any]:
    """Three ranks: dense on all, experts on 0 and 1, a session of rank 1 alone, one on a subgroup of all ranks."""
    groups = {name: comm.subgroup(ranks) for name, ranks in (("pair", (0, 1)), ("solo", (1,)), ("all", (0, 1, 2)))}
    held = {"dense": comm} | {name: group for name, group in groups.items() if group is not None}
    model = Scalars(*held)
    sessions = [make_zero2(group, model, _SGD, include=[name], name=name, lr=1.0) for name, group in held.items()]
    push(model, {name: torch.tensor([2.0**comm.rank]) for name in held})
    results = sr.take_step(sessions, local_weight=comm.rank, max_grad_norm=_INF)
    return {
        "values": _values(model),
        "weights": {name: result.global_weight for name, result in results.items()},
        "norms": [result.grad_norm for result in results.values()],
    }


def test_ranks_without_a_session_and_groups_of_one_take_part() -> None:
    """Rank 0 has weight 0 and counts as zeros: "pair" has the gradient 2 of rank 1 alone, over the world's weight 3."""
    two, six = -torch.tensor(2.0).div(3).item(), -torch.tensor(6.0).div(3).item()
    wanted = {"dense": six, "pair": two, "solo": two, "all": six}
    norm = math.sqrt(2 * six**2 + 2 * two**2)
    places = [["dense", "pair", "all"], ["dense", "pair", "solo", "all"], ["dense", "all"]]
    for facts, names in zip(run_ranks(3, _places), places, strict=True):
        assert facts["values"] == {name: wanted[name] for name in names}
        assert facts["weights"] == dict.fromkeys(names, 3)
        assert facts["norms"] == [pytest.approx(norm, rel=1e-12)] * len(names)


def _denominators(comm: sr.Communicator) -> dict[str, tuple[float, int]]:
    """Weights 1, 2, 4 on three ranks; "means" lives on 0 and 1, rank 2 has nothing but "sums"."""
    group = _subgroup(comm, [0, 1], [2])
    name = "means" if group.world_size == 2 else "sums"
    model = Scalars("w")
    session = make_zero2(group, model, _SGD, name=name, lr=1.0)
    weight = 2**comm.rank
    found = {}
    for how in ("joint", "alone"):
        before = model.get_parameter("w").item()
        push(model, {"w": torch.tensor([42.0])})
        if how == "joint":
            active = {"sums": True} if name == "sums" else None
            result = sr.take_step([session], local_weight=weight, local_active=active)[name]
        else:
            result = session.step(local_weight=weight) if name == "means" else session.step_sum(local_active=True)
        found[how] = before - model.get_parameter("w").item(), result.global_weight
    return found


def test_the_weight_of_the_whole_world_divides_and_that_of_the_group_when_a_session_steps_alone() -> None:
    first, second, third = run_ranks(3, _denominators)
    assert first == second == {"joint": (84.0 / 7, 7), "alone": (84.0 / 3, 3)}
    assert third == {"joint": (42.0, 1), "alone": (42.0, 1)}


def _rates(comm: sr.Communicator) -> list[tuple[float, ...]]:
    """How far a gradient of 1 moves dense and expert under each way to give a rate."""
    half = _subgroup(comm, [0, 1], [2, 3])
    model = Vectors({"d": (3,), "e": (2,)})
    dense = make_zero2(comm, model, _SGD, include=["d"], name="dense", rules={"d": {"lr_scale": 0.5}}, lr=1.0)
    experts = make_zero2(half, model, _SGD, include=["e"], name="experts", lr=4.0)
    moved = []
    ways: list[float | dict[str, float] | None] = [None, 2, {"experts": 8.0}, {"dense": 16.0, "experts": 32.0}, None]
    for number, lr in enumerate(ways):
        if number == len(ways) - 1:  # as a scheduler of torch does it
            experts.optimizer.param_groups[0]["lr"] = 64.0
        before = {path: p.detach().clone() for path, p in model.named_parameters()}
        push(model, {path: torch.ones_like(p) for path, p in before.items()})
        sr.take_step([dense, experts], local_weight=1, lr=lr)
        d, e = (set((before[path] - p).tolist()) for path, p in model.named_parameters())
        moved.append((*d, *e))
    return moved


def test_a_rate_is_everybodys_or_one_per_name_and_without_one_the_param_groups_say() -> None:
    for moved in run_ranks(4, _rates):
        # A mean over four ranks: dense sums four ones over weight 4, an expert of two ranks two ones over weight 4.
        assert moved == [(0.5, 2.0), (1.0, 1.0), (0.5, 4.0), (8.0, 16.0), (0.5, 32.0)]


def _mixed(comm: sr.Communicator) -> dict[str, Any]:
    """Dense by its mean, experts by their sum; rank 1 is not active there and has a NaN."""
    half = _subgroup(comm, [0, 1], [2, 3])
    model = Scalars("d", "e")
    dense = make_zero2(comm, model, _SGD, include=["d"], name="dense", lr=1.0)
    experts = make_zero2(half, model, _SGD, include=["e"], name="experts", lr=1.0)
    own = math.nan if comm.rank == 1 else comm.rank + 1.0
    push(model, {"d": torch.tensor([4.0 * comm.rank]), "e": torch.tensor([own])})
    active = {"experts": comm.rank != 1}
    results = sr.take_step([dense, experts], local_weight=2, local_active=active, max_grad_norm=_INF)
    return {
        "values": _values(model),
        "weights": [results[name].global_weight for name in ("dense", "experts")],
        "norm": results["experts"].grad_norm,
        "gone": all(p.grad is None for p in model.parameters()),
    }


def test_means_and_sums_step_together() -> None:
    for rank, facts in enumerate(run_ranks(4, _mixed)):
        assert facts["values"] == {"d": -3.0, "e": -1.0 if rank < 2 else -7.0}
        assert facts["weights"] == [8, 1 if rank < 2 else 2]
        assert facts["norm"] == pytest.approx(math.sqrt(9 + 1 + 49), rel=1e-12)
        assert facts["gone"]


# ---- matrices with their owners, experts in slices ------------------------------------------------------------------

_DENSE = {"up": (6, 4), "bias": (300,), "down": (5, 9), "scale": ()}
_GROUPS: dict[int, list[tuple[int, ...]]] = {1: [(0,)], 3: [(0, 1), (2,)]}


class _Mixture(nn.Module):
    """Dense float32 matrices and vectors, and a bf16 expert that differs between groups in shape and values."""

    def __init__(self, group: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7 + group)
        self.expert = nn.Parameter(torch.randn(300 + 10 * group, generator=generator).bfloat16())
        generator.manual_seed(6)
        for name, shape in _DENSE.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def _muon_and_experts(comm: sr.Communicator) -> list[dict[str, Any]]:
    groups = _GROUPS[comm.world_size]
    (number,) = [k for k, ranks in enumerate(groups) if comm.rank in ranks]
    own = _subgroup(comm, *groups)
    model = _Mixture(number)
    dense = sr.SelectedZero1(
        sr.SelectedDataParallel(comm, model, sr.select_parameters(model, exclude=["expert"])),
        torch.optim.Muon,
        lr=0.02,
        rest_options={"lr": 0.01},
        name="dense",
    )
    experts = make_zero2(own, model, include=["expert"], name="experts", lr=0.01)
    windows = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        push(model, {path: torch.randn(p.shape, generator=generator) for path, p in model.named_parameters()})
        sent = {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}
        result = sr.take_step([experts, dense], local_weight=1 + comm.rank, max_grad_norm=3.0)["dense"]
        values = {path: p.detach().clone() for path, p in model.named_parameters()}
        windows.append({"sent": sent, "norm": result.grad_norm, "weight": result.global_weight, "values": values})
    return windows


@pytest.mark.parametrize("world_size", [1, 3])
def test_owned_matrices_and_sliced_experts_step_as_plain_torch_does(world_size: int) -> None:
    ranks = run_ranks(world_size, _muon_and_experts)
    models = [_Mixture(number) for number in range(len(_GROUPS[world_size]))]
    dense = {path: p for path, p in models[0].named_parameters() if path != "expert"}
    twins = [
        PlainTorch({path: p for path, p in dense.items() if p.dim() == 2}, torch.optim.Muon, lr=0.02),
        PlainTorch({path: p for path, p in dense.items() if p.dim() != 2}, torch.optim.AdamW, lr=0.01, fused=True),
    ]
    experts = [{"expert": model.get_parameter("expert")} for model in models]
    twins += [PlainTorch(own, torch.optim.AdamW, master_weights=True, lr=0.01, fused=True) for own in experts]
    homes = [range(world_size), range(world_size), *_GROUPS[world_size]]
    weights = [1 + rank for rank in range(world_size)]
    for step in range(3):
        sums = []
        for twin, home in zip(twins, homes, strict=True):
            sent = [{path: ranks[rank][step]["sent"][path] for path in twin.leaves} for rank in home]
            sums.append(replicated_sum(sent, [weights[rank] for rank in home]))
        norm = joint_step(twins, sums, [sum(weights)] * len(twins), max_grad_norm=3.0)
        assert norm > 3.0, "clipping is active"
        for twin, home in zip(twins, homes, strict=True):
            for told_by_rank in (ranks[rank][step] for rank in home):
                assert told_by_rank["norm"] == pytest.approx(norm, rel=1e-12)
                assert told_by_rank["weight"] == sum(weights)
                for path, parameter in twin.parameters.items():
                    assert same_bits(told_by_rank["values"][path], parameter.detach()), (step, path)


# ---- who is left alone --------------------------------------------------------------------------------------------


def _idle(comm: sr.Communicator) -> dict[str, Any]:
    half = _subgroup(comm, [0, 1], [2, 3])
    model = Vectors({"d": (300,), "e": (700 + comm.rank // 2,)}, value=1.0)
    dense = make_zero2(comm, model, include=["d"], name="dense", lr=0.1)
    experts = make_zero2(half, model, include=["e"], name="experts", lr=0.1)
    sessions = [dense, experts]

    def step(kind: str) -> tuple[list[list[str]], Any]:
        """What changed in each session, and the norm."""
        before = [photograph(session) for session in sessions]
        given: dict[str, Any] = {"local_weight": 1, "missing": "zero", "max_grad_norm": 1.0}
        idle_group = comm.rank >= 2
        gradients = {path: torch.ones_like(p) for path, p in model.named_parameters()}
        if kind == "nobody has a gradient":
            gradients = {}
        elif kind == "nobody is active":
            given["local_active"] = {"dense": False, "experts": False}
        elif kind == "a group without a gradient" and idle_group:
            del gradients["e"]
        elif kind == "a group of weight 0" and idle_group:
            gradients = {path: torch.full_like(gradient, math.nan) for path, gradient in gradients.items()}
            given["local_weight"] = 0
        push(model, gradients)
        results = sr.take_step(sessions, **given)
        changed = [b.differences(photograph(s), gradients=False) for b, s in zip(before, sessions, strict=True)]
        assert all(p.grad is None for p in model.parameters())
        own = [[c for c in found if c != f"parameter {other}"] for found, other in zip(changed, "ed", strict=True)]
        return own, [(results[s.name].grad_norm, results[s.name].absent) for s in sessions]

    found: dict[str, Any] = {}
    for kind in (
        "everybody",
        "nobody has a gradient",
        "nobody is active",
        "a group without a gradient",
        "a group of weight 0",
    ):
        found[kind] = step(kind)
    found["steps"] = [session.step_count for session in sessions]
    return found


def test_a_session_that_nobody_has_a_gradient_for_is_untouched_while_the_others_step() -> None:
    """No update, no weight decay, no step count, though there is momentum from an earlier step."""
    for rank, found in enumerate(run_ranks(4, _idle)):
        for kind in ("nobody has a gradient", "nobody is active"):
            assert found[kind] == ([[], []], [(0.0, ("d",)), (0.0, ("e",))]), kind
        for kind in ("a group without a gradient", "a group of weight 0"):
            (dense, experts), ((_, dense_absent), (_, absent)) = found[kind]
            assert "parameter d" in dense
            assert dense_absent == ()
            assert ("parameter e" in experts, absent) == ((True, ()) if rank < 2 else (False, ("e",))), kind
            assert experts == [] or rank < 2
        assert found["steps"] == ([3, 3] if rank < 2 else [3, 1])


# ---- refused by all -----------------------------------------------------------------------------------------------

_Given = dict[str, Any]


class _Setting:
    """Dense on four ranks and experts, of other shapes, on two and two, after one step; gradients of a second pending.

    `given` is what a rank asks for when nothing is wrong.
    """

    def __init__(self, comm: sr.Communicator) -> None:
        self.rank = comm.rank
        half = _subgroup(comm, [0, 1], [2, 3])
        self.model = Vectors({"dense": (300,), "expert": (500 + comm.rank // 2 * 100,)}, value=1.0)
        self.dense = make_zero2(comm, self.model, include=["dense"], name="dense", lr=0.1)
        self.experts = make_zero2(half, self.model, include=["expert"], name="experts", lr=0.2)
        self.sessions = [self.dense, self.experts]
        self.push()
        sr.take_step(**self.given())
        self.push()

    def given(self) -> _Given:
        return {"sessions": self.sessions, "local_weight": 3, "max_grad_norm": 0.5}

    def push(self) -> None:
        for number, path in enumerate(("dense", "expert")):
            parameter = self.model.get_parameter(path)
            generator = torch.Generator().manual_seed(10 * self.rank + number)
            push(self.model, {path: torch.randn(parameter.shape, generator=generator)})

    def grad(self, path: str) -> Tensor:
        grad = self.model.get_parameter(path).grad
        assert grad is not None
        return grad

    def photographs(self) -> list[Photograph]:
        return [photograph(session) for session in self.sessions]


_Case = Callable[[_Setting, _Given], AbstractContextManager[None]]


def _asks(*ranks: int, **changes: Any) -> _Case:
    @contextmanager
    def case(setting: _Setting, given: _Given) -> Iterator[None]:
        given |= changes if setting.rank in ranks else {}
        yield

    return case


def _brings(rank: int, choose: Callable[[_Setting], list[Any]]) -> _Case:
    @contextmanager
    def case(setting: _Setting, given: _Given) -> Iterator[None]:
        if setting.rank == rank:
            given["sessions"] = choose(setting)
        yield

    return case


def _has(value: float, *ranks: int, path: str = "expert") -> _Case:
    @contextmanager
    def case(setting: _Setting, given: _Given) -> Iterator[None]:
        grad = setting.grad(path)
        before = grad.clone()
        if setting.rank in ranks:
            grad[7] = value
        yield
        grad.copy_(before)

    return case


def _lacks(*ranks: int, path: str = "expert") -> _Case:
    @contextmanager
    def case(setting: _Setting, given: _Given) -> Iterator[None]:
        parameter = setting.model.get_parameter(path)
        grad = parameter.grad
        if setting.rank in ranks:
            parameter.grad = None
        yield
        parameter.grad = grad

    return case


def _with(rank: int, target: Callable[[_Setting], Any], name: str, value: Any) -> _Case:
    """An attribute, or an item, is another one on `rank`."""

    @contextmanager
    def case(setting: _Setting, given: _Given) -> Iterator[None]:
        held = target(setting)
        fields = held if isinstance(held, dict) else None
        before = getattr(held, name) if fields is None else fields[name]
        put = partial(setattr, held, name) if fields is None else partial(fields.__setitem__, name)
        put(value if setting.rank == rank else before)
        yield
        put(before)

    return case


def _in_another_world() -> sr.SelectedZero2:
    return make_zero2(sr.Communicator.single(), Scalars("w"), name="elsewhere")


_EVERYBODY = (0, 1, 2, 3)
_DIFFERENT = "refused before the update, the ranks ask for different steps: rank 0: "
_CASES: dict[str, tuple[_Case, str, tuple[str, ...]]] = {
    "NaN": (_has(math.nan, 3), "NonFiniteError", ("rank 3 has a non-finite gradient for expert",)),
    "NaN in dense": (
        _has(math.nan, 1, path="dense"),
        "NonFiniteError",
        ("rank 1 has a non-finite gradient for dense",),
    ),
    "overflow": (_has(3e38, 2, 3), "NonFiniteError", ("every local gradient is finite, their FP32 sum overflowed",)),
    "gradient": (_lacks(2), "StepRefused", ("experts of ranks 2,3: rank 2 has no gradient for expert",)),
    "gradients": (
        _lacks(0, 3),
        "StepRefused",
        ("ranks 0,1: rank 0 has no gradient for expert", "ranks 2,3: rank 3 has no gradient for expert"),
    ),
    "gradients of a group": (_lacks(0, 1), "StepRefused", ("of ranks 0,1: no rank has a gradient for expert",)),
    "dense gradient": (_lacks(3, path="dense"), "StepRefused", ("dense: rank 3 has no gradient for dense",)),
    "rate": (_asks(3, lr={"experts": 0.5}), "StepRefused", (_DIFFERENT, f"lr {(0.5).hex()}", f"lr {(0.2).hex()}")),
    "rate of dense": (_asks(1, lr={"dense": 0.5}), "StepRefused", (_DIFFERENT, f"lr {(0.5).hex()}")),
    "option": (
        _with(1, lambda s: s.experts.optimizer.param_groups[0], "weight_decay", 0.25),
        "StepRefused",
        (_DIFFERENT, "0.25"),
    ),
    "policy": (_asks(0, missing="zero"), "StepRefused", (_DIFFERENT, "missing zero", "missing error")),
    "norm": (_asks(3, max_grad_norm=1.0), "StepRefused", (_DIFFERENT, f"max_grad_norm {(1.0).hex()}")),
    "mode": (_asks(0, local_active={"experts": True}), "StepRefused", (_DIFFERENT, "mode sum", "mode mean")),
    "step": (_with(1, lambda s: s.experts, "step_count", 8), "StepRefused", (_DIFFERENT, "step 9", "step 2")),
    "name": (_with(2, lambda s: s.experts, "name", "others"), "StepRefused", (_DIFFERENT, "others of ranks 2,3: ")),
    "experts": (_brings(2, lambda s: [s.dense]), "StepRefused", (_DIFFERENT, "rank 3: ")),
    "dense": (_brings(3, lambda s: [s.experts]), "StepRefused", (_DIFFERENT, "rank 3: ")),
    "empty": (_asks(*_EVERYBODY, local_weight=0), "EmptyWindowError", ("the global weight is 0",)),
    "empty beside a sum": (
        _asks(*_EVERYBODY, local_weight=0, local_active={"experts": True}),
        "EmptyWindowError",
        ("the global weight is 0",),
    ),
    "weight": (_asks(2, local_weight=-1), "StepRefused", ("rank 2: weight is -1; it must be 0 to ",)),
    "no integer": (_asks(0, local_weight=1.0), "StepRefused", ("rank 0: weight is 1.0; it must be an int",)),
    "no integer beside sums": (
        _asks(*_EVERYBODY, local_weight=None, local_active={"dense": True, "experts": True}),
        "StepRefused",
        ("rank 0: weight is None; it must be an int",),
    ),
    "no rate": (_asks(2, lr={"experts": math.nan}), "StepRefused", ("rank 2: learning rate is nan; it must be ",)),
    "no norm": (_asks(*_EVERYBODY, max_grad_norm=0), "StepRefused", ("rank 3: max_grad_norm is 0; it must be ",)),
    "no flag": (
        _asks(*_EVERYBODY, local_active={"experts": 1}),
        "StepRefused",
        ("rank 0: local_active is 1, not True or False",),
    ),
    "unknown rate": (
        _asks(1, lr={"expert": 0.1}),
        "StepRefused",
        ("rank 1: lr names expert, which is none of the sessions dense, experts",),
    ),
    "unknown flag": (
        _asks(0, local_active={"dens": True}),
        "StepRefused",
        ("rank 0: local_active names dens, which is none of the sessions",),
    ),
    "twice": (
        _brings(3, lambda s: [s.experts, s.dense, s.experts]),
        "StepRefused",
        ("rank 3: sessions of one step have names of their own, found experts, dense, experts",),
    ),
    "another world": (
        _brings(1, lambda s: [_in_another_world(), *s.sessions]),
        "StepRefused",
        ("rank 1: the sessions of one step are on one world or on subgroups of it, found sessions of different",),
    ),
    "frozen": (
        _with(2, lambda s: s.model.get_parameter("expert"), "requires_grad", False),
        "StepRefused",
        ("rank 2: expert: was trainable at set-up and is frozen now",),
    ),
    "another call": (_asks(0, alone=True), "CallMismatch", ("rank 0 in step 2 of dense", "rank 3 in take_step")),
}
"""What is wrong -> how it comes to be, what every rank of the world raises, and words of its message."""


def _refusals(comm: sr.Communicator) -> dict[str, Any]:
    setting, untried = _Setting(comm), _Setting(comm)
    raised, changed = {}, {}
    for name, (case, _, _) in _CASES.items():
        given = setting.given()
        with case(setting, given):
            before = setting.photographs()
            try:
                if given.pop("alone", False):
                    setting.dense.step(local_weight=3, max_grad_norm=0.5)
                else:
                    sr.take_step(**given)
                raised[name] = ("nothing", "")
            except sr.errors.ShardrunError as error:
                raised[name] = told(error)
            changed[name] = [b.differences(a) for b, a in zip(before, setting.photographs(), strict=True)]
    poisoned = comm.is_poisoned
    norms = {sr.take_step(**one.given())["dense"].grad_norm for one in (setting, untried)}
    pairs = zip(setting.photographs(), untried.photographs(), strict=True)
    return {
        "raised": raised,
        "changed": changed,
        "poisoned": poisoned,
        "norms": norms,
        "retried": [one.differences(other) for one, other in pairs],
        "steps": [session.step_count for session in setting.sessions],
    }


def test_what_is_wrong_on_one_rank_is_refused_by_all_and_the_retry_equals_never_refused() -> None:
    for rank, facts in enumerate(run_ranks(4, _refusals, comm_timeout_s=10)):
        for name, (_, kind, words) in _CASES.items():
            assert facts["raised"][name][0] == kind, (rank, name, facts["raised"][name])
            for word in words:
                assert word in facts["raised"][name][1], (rank, name)
            assert facts["changed"][name] == [[], []], (rank, name)
        assert not facts["poisoned"]
        assert len(facts["norms"]) == 1
        assert facts["retried"] == [[], []]
        assert facts["steps"] == [2, 2]


# ---- a session of a subgroup, by itself ---------------------------------------------------------------------------


def _wrong_in_a_subgroup(comm: sr.Communicator) -> dict[str, tuple[str, str]]:
    """What ranks 1 and 2 raise when something is wrong on rank 2."""
    group = _subgroup(comm, [0], [1, 2])
    if comm.rank == 0:
        return {}
    last = comm.rank == 2
    raised = {}

    def tried(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            raised[name] = ("nothing", "")
        except sr.errors.ShardrunError as error:
            raised[name] = told(error)

    tried("contract", lambda: make_zero2(group, Vectors({"w": (4,) if last else (5,)})))
    buffered = Scalars("w")
    buffered.register_buffer("seen", torch.zeros(2 if last else 3))
    tried("buffers", lambda: sr.DataParallel(group, buffered, broadcast_buffers=True))
    stores = Vectors(dict.fromkeys(("b", "a") if last else ("a", "b"), (3,)))
    push(stores, {"a": torch.ones(3), "b": torch.ones(3)})
    tried("order", lambda: sr.step_sgd(sr.ParamStore(stores), sr.SGDConfig(lr=1.0), group))
    model = Vectors({"w": (5,)})
    zero2 = make_zero2(group, model, lr=0.1)
    record = zero2.to_record()
    record.meta["step_count"] = comm.rank
    tried("record", lambda: zero2.load_record(record))
    push(model, {"w": torch.full((5,), math.nan if last else 1.0)})
    tried("step", lambda: zero2.step(local_weight=1))

    def fault(phase: str, collective: int) -> None:
        if phase == "collect":
            raise ZeroDivisionError("a fault in user code")

    comm.observer = fault if last else None
    tried("fault", lambda: zero2.step(local_weight=1))
    comm.observer = None
    tried("closed", comm.vote)
    return raised


def test_a_session_of_a_subgroup_calls_ranks_by_their_numbers_in_the_world() -> None:
    _, first, last = run_ranks(3, _wrong_in_a_subgroup, comm_timeout_s=10)
    who = "rank 2 (rank 1 of the subgroup 1,2)"
    for raised in (first, last):
        assert f"{who} has shape (4,)" in raised["contract"][1]
        assert f"{who} has torch.float32 (2,)" in raised["buffers"][1]
        assert f"{who} has b" in raised["order"][1]
        assert f"{who} at step 2" in raised["record"][1]
        assert "rank 2 has a non-finite gradient for w" in raised["step"][1]
        assert raised["fault"][0] == "StepFailed"
    assert f"first failure: {who} failed in phase collect of step 1: ZeroDivisionError" in last["closed"][1]
    assert "first failure: collective" in first["closed"][1]
