"""Public bug reports of comparable tools, held against the step: gradient means, ties, frozen and missing ones.

One test per case id. TOY is one float32 parameter w, the loss of a token is w * x; with SGD, lr 1 and w = 0 the step
leaves -gradient in w.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardrun as sr
from tests.support.models import OddNet, Scalars, TiedNet, Vectors, feed, loss_sum, push, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import gather, make_zero2, photograph, same_bits, whole_state

_SGD = torch.optim.SGD
_INF = float("inf")


def _toy(comm: sr.Communicator, micro_batches_by_rank: list[list[list[float]]]) -> tuple[float, float, int]:
    """The gradient that one TOY step used, its norm and the global weight."""
    model = Scalars("w")
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    weight = feed(model, "w", micro_batches_by_rank[comm.rank])
    result = zero2.step(local_weight=weight, missing="zero", max_grad_norm=_INF)
    assert result.grad_norm is not None
    return -model.get_parameter("w").item(), result.grad_norm, result.global_weight


def test_c001_ranks_weigh_by_their_tokens() -> None:
    assert run_ranks(2, _toy, [[[6.0]], [[1.0, 2.0, 3.0]]]) == [(3.0, 3.0, 4)] * 2


def test_c002_the_cut_into_micro_batches_changes_nothing() -> None:
    for cut in ([[[6.0, 1.0, 2.0, 3.0]]], [[[6.0], [1.0, 2.0, 3.0]]]):
        assert run_ranks(1, _toy, cut) == [(3.0, 3.0, 4)]
    for cut in ([[[6.0]], [[1.0, 2.0, 3.0]]], [[[6.0], []], [[1.0], [2.0, 3.0]]]):
        assert run_ranks(2, _toy, cut) == [(3.0, 3.0, 4)] * 2


def test_c003_every_micro_batch_of_a_window_counts() -> None:
    window = [[1.0], [2.0], [4.0]]
    third = torch.tensor(7.0).div(3).item()
    assert run_ranks(2, _toy, [window, window]) == [(third, pytest.approx(third), 6)] * 2
    assert run_ranks(1, _toy, [window]) == [(third, pytest.approx(third), 3)]


def _masked_rank(comm: sr.Communicator) -> tuple[float, float, int]:
    model = Scalars("w")
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    weight = feed(model, "w", [[4.0, 2.0]]) if comm.rank == 0 else 0
    if comm.rank == 1:  # 0 / 0, as a mean over no labels gives
        feed(model, "w", [[1.0]], scale=float("nan"))
    result = zero2.step(local_weight=weight, max_grad_norm=_INF)
    assert result.grad_norm is not None
    return -model.get_parameter("w").item(), result.grad_norm, result.global_weight


def test_c004_a_rank_without_labels_contributes_nothing() -> None:
    assert run_ranks(2, _masked_rank) == [(3.0, 3.0, 2)] * 2


def _short_last_window(comm: sr.Communicator) -> tuple[list[float], float]:
    """Samples 1..7 dealt in turn; the second window of rank 1 has one micro-batch where two are usual."""
    windows = [[[[1.0], [3.0]], [[2.0], [4.0]]], [[[5.0], [7.0]], [[6.0]]]]
    model = Scalars("w")
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    gradients = []
    for window in windows:
        before = model.get_parameter("w").item()
        zero2.step(local_weight=feed(model, "w", window[comm.rank]))
        gradients.append(before - model.get_parameter("w").item())
    return gradients, model.get_parameter("w").item()


def test_c005_a_short_last_window_is_divided_by_what_it_holds() -> None:
    assert run_ranks(2, _short_last_window) == [([2.5, 6.0], -8.5)] * 2


def _tied_scalar(comm: sr.Communicator) -> dict[str, Any]:
    model = Scalars("emb", value=1.0)
    model.register_parameter("head", model.get_parameter("emb"))
    zero2 = make_zero2(comm, model, lr=0.1)
    a, b = (1.0, 2.0) if comm.rank == 0 else (3.0, 4.0)
    first: dict[str, dict[str, Tensor]] = {}
    norms = []
    for step in range(3):
        torch.autograd.backward((model.get_parameter("emb") * a + model.get_parameter("head") * b).sum())
        norms.append(zero2.step(local_weight=1, max_grad_norm=_INF).grad_norm)
        first = whole_state(comm, zero2) if step == 0 else first
    records = [name for names in gather(comm, list(zero2.to_record().tensors)) for name in names]
    return {
        "norm": norms[0],
        "exp_avg": {path: keys["exp_avg"].tolist() for path, keys in first.items()},
        "records": [name for name in records if name.endswith("/exp_avg")],
        "equal": same_bits(model.get_parameter("emb"), model.get_parameter("head")),
    }


def test_c030_a_tied_weight_has_one_gradient_and_one_moment() -> None:
    for facts in run_ranks(2, _tied_scalar):
        assert facts["norm"] == 5.0
        assert facts["exp_avg"] == {"emb": [0.5]}
        assert facts["records"] == ["emb/exp_avg"]
        assert facts["equal"]


def test_c033a_selecting_one_name_of_a_tie_selects_the_tensor_and_excluding_it_is_refused() -> None:
    model = TiedNet()
    selection = sr.select_parameters(model, include=["emb.*"])
    assert sorted(selection.parameters) == ["emb.weight", "head.weight"]
    assert selection.added == ("head.weight",)
    with pytest.raises(sr.errors.SelectionError, match=r"head\.weight.*emb\.weight|emb\.weight.*head\.weight"):
        sr.select_parameters(model, include=["*"], exclude=["head.*"])


def _freeze_midway(comm: sr.Communicator) -> tuple[str, list[str], dict[str, int]]:
    model = Vectors({"a": (3,), "b": (5,)})
    zero2 = make_zero2(comm, model)
    for step in range(3):
        if step == 2:
            model.get_parameter("a").requires_grad_(False)
            model.get_parameter("a").grad = None
        names = ["b"] if step == 2 else ["a", "b"]
        push(model, {name: torch.ones_like(model.get_parameter(name)) for name in names})
        before = photograph(zero2)
        try:
            zero2.step(local_weight=1)
        except sr.errors.ShardrunError as error:
            message = str(error)
    steps = {path: int(keys["step"]) for path, keys in whole_state(comm, zero2).items()}
    return message, before.differences(photograph(zero2)), steps


def test_c035_freezing_in_the_middle_is_refused_by_name_and_loses_no_state() -> None:
    for message, changed, steps in run_ranks(2, _freeze_midway):
        assert "a: was trainable at set-up and is frozen now" in message
        assert changed == []
        assert steps == {"a": 2, "b": 2}


def _frozen_in_front(comm: sr.Communicator) -> dict[str, Any]:
    model = seeded(comm.rank, lambda: nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3)))
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    zero2 = make_zero2(comm, model)
    frozen = model.get_parameter("0.weight").detach().clone()
    torch.autograd.backward(model(torch.ones(2, 7)).sum())
    zero2.step(local_weight=2)
    flags = {spec.path: spec.trainable for spec in zero2.session.contract.specs}
    records = sorted(
        {name.rpartition("/")[0] for names in gather(comm, list(zero2.to_record().tensors)) for name in names}
    )
    return {
        "flags": flags,
        "records": records,
        "frozen": frozen,
        "same": same_bits(frozen, model.get_parameter("0.weight")),
    }


def test_c036_a_frozen_layer_in_front_is_selected_and_not_sharded() -> None:
    first, second = run_ranks(2, _frozen_in_front)
    assert same_bits(first["frozen"], second["frozen"]), "frozen selected parameters are the root's, too"
    for facts in (first, second):
        assert facts["flags"] == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
        assert facts["records"] == ["1.bias", "1.weight"]
        assert facts["same"]


class _WithUnused(OddNet):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(7, 3)


def _unused(comm: sr.Communicator) -> tuple[bool, tuple[str, ...], list[float]]:
    model = seeded(1, _WithUnused)
    zero2 = make_zero2(comm, model, weight_decay=0.1)
    before = [p.detach().clone() for path, p in model.named_parameters() if path.startswith("spare.")]
    for step in range(3):
        torch.autograd.backward(loss_sum(model, token_batch(step, 3)))
        result = zero2.step(local_weight=3, missing="zero")
    after = [p for path, p in model.named_parameters() if path.startswith("spare.")]
    state = whole_state(comm, zero2)
    moments = [float(value.abs().max()) for path in result.absent for value in state[path].values()]
    return all(same_bits(a, b) for a, b in zip(before, after, strict=True)), result.absent, moments


def test_c039_an_unused_layer_neither_hangs_nor_moves() -> None:
    for same, absent, moments in run_ranks(2, _unused, timeout_s=30):
        assert same
        assert absent == ("spare.weight", "spare.bias")
        assert moments == [0.0] * 6


def _never_used(comm: sr.Communicator) -> tuple[float, float, int]:
    model = Scalars("p", "q", value=1.0)
    zero2 = make_zero2(comm, model, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        push(model, {"q": torch.ones(1)})
        zero2.step(local_weight=1, missing="zero")
    return model.get_parameter("p").item(), whole_state(comm, zero2)["p"]["step"].item(), zero2.step_count


def test_c040_no_gradient_on_any_rank_means_no_decay_and_no_step() -> None:
    assert run_ranks(2, _never_used) == [(1.0, 0.0, 3)] * 2


def _branches(comm: sr.Communicator) -> list[tuple[float, float]]:
    model = Scalars("a", "b")
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    seen = []
    before = (0.0, 0.0)
    for step in range(4):
        used = "a" if (comm.rank + step) % 2 == 0 else "b"
        weight = feed(model, used, [[2.0 if comm.rank == 0 else 4.0]])
        zero2.step(local_weight=weight, missing="zero")
        now = (model.get_parameter("a").item(), model.get_parameter("b").item())
        seen.append((before[0] - now[0], before[1] - now[1]))
        before = now
    return seen


def test_c041_rank_dependent_branches_sum_over_the_global_weight() -> None:
    assert run_ranks(2, _branches) == [[(1.0, 2.0), (2.0, 1.0), (1.0, 2.0), (2.0, 1.0)]] * 2


def _one_branch_each(comm: sr.Communicator) -> dict[str, Any]:
    """Rank 0 uses only a, rank 1 only b, one token each."""
    own, x = ("a", 1.0) if comm.rank == 0 else ("b", 2.0)
    model = Scalars("a", "b")
    zero2 = make_zero2(comm, model, _SGD, lr=1.0)
    weight = feed(model, own, [[x]])
    before = photograph(zero2)
    with pytest.raises(sr.errors.StepRefused) as caught:
        zero2.step(local_weight=weight, missing=sr.MissingGradientPolicy.ERROR)
    changed = before.differences(photograph(zero2))
    zero2.step(local_weight=weight, missing=sr.MissingGradientPolicy.ZERO)
    return {
        "refusal": str(caught.value),
        "changed": changed,
        "gradients": {name: -parameter.item() for name, parameter in model.named_parameters()},
    }


def test_one_branch_per_rank_is_half_of_each_with_zero_and_refused_with_error() -> None:
    for facts in run_ranks(2, _one_branch_each):
        assert "rank 0 has no gradient for b" in facts["refusal"]
        assert facts["changed"] == []
        assert facts["gradients"] == {"a": 0.5, "b": 1.0}, "1.5 for both adds the a of one rank to the b of the other"


def _alternating(comm: sr.Communicator, resume: bool) -> tuple[list[str], dict[str, float], dict[str, Tensor]]:
    model = seeded(3, lambda: Vectors({"l1": (5,), "l2": (700,)}, value=1.0))
    zero2 = make_zero2(comm, model, lr=0.1, weight_decay=0.1)
    moved_wrongly = []
    for step in range(6):
        if step == 3 and resume:
            record, weights = zero2.to_record(), copy.deepcopy(model.state_dict())
            model = Vectors({"l1": (5,), "l2": (700,)})
            model.load_state_dict(weights)
            zero2 = make_zero2(comm, model, lr=0.1, weight_decay=0.1)
            zero2.load_record(record)
        used, idle = ("l1", "l2") if step % 2 == 0 else ("l2", "l1")
        before = model.get_parameter(idle).detach().clone()
        push(model, {used: torch.full_like(model.get_parameter(used), 1.0 + step)})
        zero2.step(local_weight=1, missing="zero")
        if not same_bits(before, model.get_parameter(idle)):
            moved_wrongly.append(f"{idle} at step {step}")
    steps = {path: keys["step"].item() for path, keys in whole_state(comm, zero2).items()}
    return moved_wrongly, steps, {path: p.detach() for path, p in model.named_parameters()}


def test_c042_alternating_losses_keep_separate_steps_also_over_a_resume() -> None:
    straight, resumed = run_ranks(2, _alternating, False), run_ranks(2, _alternating, True)
    for one, other in zip(straight, resumed, strict=True):
        assert one[0] == other[0] == []
        assert one[1] == other[1] == {"l1": 3.0, "l2": 3.0}
        assert all(same_bits(one[2][path], other[2][path]) for path in ("l1", "l2"))
