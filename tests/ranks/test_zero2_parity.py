"""ZeRO-2 on two and three ranks: the bits of replicated torch optimizers; other cuts of a batch to a tolerance."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.parity import SCENARIOS, compare_with_plain_torch
from tests.support.ranks import run_ranks
from tests.support.reference import Float64Twin
from tests.support.sessions import make_zero2, same_bits

_TWENTY_STEPS = ("adamw fused", "adamw bf16 masters")
_FEWER_STEPS = 5  # rank 1 has weight 0 and NaN gradients in the fifth


def _all_scenarios(comm: sr.Communicator) -> dict[str, list[str]]:
    verdicts = {}
    for name, scenario in SCENARIOS.items():
        steps = scenario.steps if name in _TWENTY_STEPS else _FEWER_STEPS
        verdicts[name] = compare_with_plain_torch(comm, dataclasses.replace(scenario, steps=steps))
    return verdicts


@functools.cache
def _verdicts(world_size: int) -> dict[str, list[str]]:
    """One start of the ranks serves all scenarios."""
    by_rank = run_ranks(world_size, _all_scenarios, timeout_s=120, debug="DETAIL" if world_size == 2 else "OFF")
    return {name: [f"rank {r}: {p}" for r, found in enumerate(by_rank) for p in found[name]] for name in SCENARIOS}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_replicated_torch_bit_for_bit(name: str, world_size: int) -> None:
    assert _verdicts(world_size)[name] == []


_AT_FOUR = ("adamw groups, small buckets", "adamw long, cut in chunks")


def _few_scenarios(comm: sr.Communicator) -> dict[str, list[str]]:
    return {name: compare_with_plain_torch(comm, dataclasses.replace(SCENARIOS[name], steps=3)) for name in _AT_FOUR}


def test_four_ranks_of_which_some_hold_nothing() -> None:
    for verdicts in run_ranks(4, _few_scenarios, debug="OFF"):
        assert verdicts == {name: [] for name in _AT_FOUR}


# ---- the same global batch, cut otherwise -------------------------------------------------------------------------

_STEPS, _TOKENS, _MAX_NORM, _LR = 8, 12, 0.5, 0.02
_CUTS: dict[int, list[list[list[int]]]] = {
    # world size -> cuts; a cut is, per rank, the tokens of each of its micro-batches
    1: [[[12]], [[5, 7]], [[1, 1, 10]]],
    2: [[[6], [6]], [[10], [2]], [[3, 4], [5]], [[12], [0]]],
    3: [[[4], [4], [4]], [[1, 2], [3, 3], [2, 1]], [[12], [0], [0]]],
}


def _train_cut(comm: sr.Communicator, cuts: list[list[list[int]]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Per cut: the norms of all steps and the final parameters."""
    results = []
    for cut in cuts:
        model = seeded(5, OddNet)
        zero2 = make_zero2(comm, model, lr=_LR, weight_decay=0.1)
        norms = []
        for step in range(_STEPS):
            inputs, targets = token_batch(step, _TOKENS)
            first = sum(sum(tokens) for tokens in cut[: comm.rank])
            for tokens in cut[comm.rank]:
                part = slice(first, first + tokens)
                torch.autograd.backward(loss_sum(model, (inputs[part], targets[part])))
                first += tokens
            result = zero2.step(local_weight=sum(cut[comm.rank]), max_grad_norm=_MAX_NORM)
            assert result.global_weight == _TOKENS
            assert result.grad_norm is not None
            norms.append(result.grad_norm)
        results.append((norms, {path: p.detach().clone() for path, p in model.named_parameters()}))
    return results


def _float64_run() -> tuple[list[float], dict[str, Tensor]]:
    """The whole batch in one process, float64 from end to end."""
    model: nn.Module = copy.deepcopy(seeded(5, OddNet)).double()
    named = dict(model.named_parameters())
    twin = Float64Twin(named, "adamw", _LR, weight_decay=0.1)
    norms = []
    for step in range(_STEPS):
        inputs, targets = token_batch(step, _TOKENS)
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs.double()), targets, reduction="sum"))
        norms.append(twin.step({path: p.grad for path, p in named.items()}, _TOKENS, max_grad_norm=_MAX_NORM))
        with torch.no_grad():
            for path, parameter in named.items():
                parameter.copy_(twin.parameters[path])
                parameter.grad = None
    return norms, twin.parameters


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_batch_over_other_cuts_matches_a_float64_process(world_size: int) -> None:
    """Adam divides by the root of tiny squares, so float32 rounding shows at 1e-4 of a learning rate per step."""
    norms, parameters = _float64_run()
    by_rank = run_ranks(world_size, _train_cut, _CUTS[world_size])
    for index, cut in enumerate(_CUTS[world_size]):
        for rank in range(world_size):
            got_norms, got = by_rank[rank][index]
            assert got_norms == pytest.approx(norms, rel=1e-5), f"cut {cut}"
            for path, want in parameters.items():
                assert torch.allclose(got[path].double(), want, rtol=1e-5, atol=_LR * 1e-3), f"cut {cut}: {path}"
                assert same_bits(got[path], by_rank[0][index][1][path]), f"cut {cut}: {path} differs between ranks"
