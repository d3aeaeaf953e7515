"""Public bug reports of comparable tools, held against the step: experts that live on some of the ranks only.

One test per case id. TOY-MOE: every expert is one float32 parameter, a token x that is routed to expert e has the loss
e * x, and the divisor is the number of tokens of all ranks, not the expert's own. With SGD, lr 1 and parameters at 0
the step leaves -gradient in them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardrun as sr
from tests.support.models import Scalars, feed, push
from tests.support.ranks import run_ranks
from tests.support.sessions import Photograph, make_zero2, photograph

_SGD = torch.optim.SGD
_TOKENS = ({"e0": [2.0], "e1": [4.0]}, {"e0": [6.0, 8.0]})
"""By rank: expert -> the tokens of this rank that are routed to it."""
_HOMES = {1: ((0,), (1,)), 2: ((0, 1),)}
"""Size of the expert groups on 2 ranks -> the groups."""


def _place(comm: sr.Communicator, size: int, *dense: str) -> tuple[nn.Module, sr.Communicator, dict[str, list[float]]]:
    """The model of this rank, the group of its experts, and the tokens that those get here.

    In groups of one, a token travels to the rank that holds its expert.
    """
    made = [comm.subgroup(ranks) for ranks in _HOMES[size]]
    (group,) = [one for one in made if one is not None]
    if size == 2:
        return Scalars(*dense, "e0", "e1"), group, {name: list(xs) for name, xs in _TOKENS[comm.rank].items()}
    own = f"e{comm.rank}"
    return Scalars(*dense, own), group, {own: [x for tokens in _TOKENS for x in tokens.get(own, [])]}


def _gradients(model: nn.Module) -> dict[str, float]:
    return {name: -parameter.item() for name, parameter in model.named_parameters()}


def _experts_alone(comm: sr.Communicator, size: int) -> tuple[dict[str, float], int]:
    model, group, tokens = _place(comm, size)
    experts = make_zero2(group, model, _SGD, name="experts", lr=1.0)
    for name, xs in tokens.items():
        feed(model, name, [xs])
    result = sr.take_step([experts], local_weight=2, missing="zero")["experts"]
    return _gradients(model), result.global_weight


def test_c045_expert_gradients_do_not_grow_with_the_number_of_ranks_that_share_them() -> None:
    replicated, apart = run_ranks(2, _experts_alone, 2), run_ranks(2, _experts_alone, 1)
    assert replicated == [({"e0": 4.0, "e1": 1.0}, 4)] * 2
    assert apart == [({"e0": 4.0}, 4), ({"e1": 1.0}, 4)]


def _with_dense(comm: sr.Communicator, size: int) -> tuple[dict[str, float], list[float | None]]:
    model, group, tokens = _place(comm, size, "d")
    dense = make_zero2(comm, model, _SGD, include=["d"], name="dense", lr=1.0)
    experts = make_zero2(group, model, _SGD, include=["e*"], name="experts", lr=1.0)
    feed(model, "d", [[x for xs in _TOKENS[comm.rank].values() for x in xs]])
    for name, xs in tokens.items():
        feed(model, name, [xs])
    results = sr.take_step([dense, experts], local_weight=2, missing="zero", max_grad_norm=math.inf)
    return _gradients(model), [result.grad_norm for result in results.values()]


@pytest.mark.parametrize("size", [1, 2])
def test_c046_dense_weights_and_experts_share_one_denominator(size: int) -> None:
    held: dict[str, float] = {}
    for gradients, norms in run_ranks(2, _with_dense, size):
        assert norms == [math.sqrt(42.0)] * 2
        for name, gradient in gradients.items():
            assert held.setdefault(name, gradient) == gradient, "the ranks that hold it differ"
    assert held == {"d": 5.0, "e0": 4.0, "e1": 1.0}


_ROUTES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"e0": (0, 1), "e1": (0, 1)},
    {"e0": (0, 1)},
    {"e0": (1,), "e1": (0, 1)},
    {"e0": (0, 1), "e1": (1,)},
    {"e0": (0,), "e1": (0, 1)},
    {"e0": (0, 1), "e1": (0,)},
)
"""By step, counted from 1 in the case: expert -> the ranks that have a token for it."""


def _starved(comm: sr.Communicator, size: int) -> list[dict[str, Any]]:
    """Six steps of AdamW, one session per expert; what each left of e1 on this rank."""
    made = {ranks: comm.subgroup(ranks) for ranks in ((0,), (1,), (0, 1))}
    homes = {"e0": (0, 1), "e1": (0, 1)} if size == 2 else {"e0": (0,), "e1": (1,)}
    own = {name: group for name, ranks in homes.items() if (group := made[ranks]) is not None}
    model = Scalars("d", *own, value=1.0)
    dense = make_zero2(comm, model, include=["d"], name="dense", lr=0.1, weight_decay=0.1)
    experts = {
        name: make_zero2(group, model, include=[name], name=name, lr=0.1, weight_decay=0.1)
        for name, group in own.items()
    }
    told = []
    for routes in _ROUTES:
        for name in own:
            sources = routes.get(name, ())
            tokens = [1.0 + rank for rank in sources if rank == comm.rank or size == 1]
            if tokens:
                feed(model, name, [tokens])
        feed(model, "d", [[1.0]])
        before = {name: _of_expert(name, session) for name, session in experts.items()}
        results = sr.take_step([dense, *experts.values()], local_weight=1, missing="zero")
        told.append(
            {
                name: {
                    "changed": before[name].differences(_of_expert(name, session)),
                    "absent": results[name].absent,
                    "steps": session.step_count,
                    "value": model.get_parameter(name).item(),
                }
                for name, session in experts.items()
            }
        )
    return told


def _of_expert(name: str, session: sr.SelectedZero2) -> Photograph:
    """What there is of one expert: its parameter, its state and the number of its steps."""
    everything = photograph(session)
    return Photograph({name: everything.parameters[name]}, everything.state, {}, everything.step_count)


def _adamw_on_one_process(name: str) -> list[float]:
    """Plain torch: the value of an expert after each of the six steps, each by the mean over two tokens."""
    value = torch.ones(1)
    plain = torch.optim.AdamW([value], lr=0.1, weight_decay=0.1, fused=True)
    after = []
    for routes in _ROUTES:
        tokens = [1.0 + rank for rank in routes.get(name, ())]
        value.grad = torch.tensor([sum(tokens) / 2]) if tokens else None
        plain.step()
        after.append(value.item())
    return after


@pytest.mark.parametrize("size", [1, 2])
def test_c047_an_expert_without_tokens_neither_hangs_nor_moves(size: int) -> None:
    ranks = run_ranks(2, _starved, size, timeout_s=30)
    assert ("e1" in ranks[0][0], "e0" in ranks[1][0]) == (size == 2, size == 2)
    for told in ranks if size == 2 else ranks[1:]:
        steps = [step["e1"] for step in told]
        assert [one["absent"] for one in steps] == [(), ("e1",), (), (), (), ()], "counted as missing"
        assert [one["steps"] for one in steps] == [1, 1, 2, 3, 4, 5]
        assert steps[1]["changed"] == [], "bitwise, moments included"
        assert [one["value"] for one in steps] == _adamw_on_one_process("e1")
    for told in ranks if size == 2 else ranks[:1]:
        assert [step["e0"]["value"] for step in told] == _adamw_on_one_process("e0")


def _norms_of_three(comm: sr.Communicator, size: int) -> tuple[float | None, dict[str, float]]:
    """Mean gradients: dense 12, expert e0 3, expert e1 4."""
    model, group, _ = _place(comm, size, "dense")
    sessions = [
        make_zero2(group, model, _SGD, include=["e*"], name="experts", lr=1.0),
        make_zero2(comm, model, _SGD, include=["dense"], name="dense", lr=1.0),
    ]
    push(model, {"dense": torch.tensor([12.0]), f"e{comm.rank}": torch.tensor([6.0 + 2.0 * comm.rank])})
    norm = sr.take_step(sessions, local_weight=1, missing="zero", max_grad_norm=1.0)["dense"].grad_norm
    return norm, _gradients(model)


@pytest.mark.parametrize("size", [1, 2])
def test_c054_the_norm_does_not_depend_on_where_the_experts_live(size: int) -> None:
    for rank, (norm, clipped) in enumerate(run_ranks(2, _norms_of_three, size)):
        assert norm == 13.0
        wanted = {"dense": 12 / 13, "e0": 3 / 13, "e1": 4 / 13}
        if size == 1:
            del wanted[f"e{1 - rank}"]
        assert clipped == pytest.approx(wanted, rel=1e-6)
