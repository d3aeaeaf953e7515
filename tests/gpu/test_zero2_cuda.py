"""The step on a CUDA device: a world of one against plain torch, NCCL as the backend, and CUDA dtypes."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardrun as sr
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.parity import SCENARIOS, Scenario
from tests.support.reference import PlainTorch
from tests.support.sessions import make_zero2, options_by_path, photograph, same_bits, whole_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]

_TOKEN_SCENARIOS = [name for name in SCENARIOS if "odd" not in name and "long" not in name]


def _cuda_communicator(folder: Path) -> sr.Communicator:
    """A world of one that knows its device; a world of one opens no process group, whatever the backend."""
    config = sr.CommunicatorConfig(rank=0, world_size=1, backend="nccl", init_file=folder / "rendezvous")
    return sr.Communicator.open(config)


def _compare(comm: sr.Communicator, scenario: Scenario) -> list[str]:
    """tests/support/parity.py has the whole comparison on the CPU; here both sides live on the device."""
    model = seeded(3, scenario.build).to("cuda")
    if scenario.dtype is not None:
        model = model.to(scenario.dtype)
    twin = copy.deepcopy(model)
    named = dict(twin.named_parameters())
    plain = PlainTorch(
        named,
        scenario.optimizer,
        options=options_by_path(list(named), scenario.rules),
        master_weights=scenario.masters,
        **scenario.options,
    )
    zero2 = make_zero2(
        comm, model, scenario.optimizer, rules=scenario.rules, masters=scenario.masters, **scenario.options
    )
    problems = []
    for step in range(scenario.steps):
        inputs, targets = (part.to("cuda") for part in token_batch(step, 7))
        for one in (model, twin):
            torch.autograd.backward(loss_sum(one, (inputs, targets)))
        result = zero2.step(local_weight=7, max_grad_norm=scenario.max_grad_norm)
        norm = plain.step(plain.take_gradients(), 7, max_grad_norm=scenario.max_grad_norm)
        if scenario.max_grad_norm is not None and result.grad_norm != pytest.approx(norm, rel=1e-12):
            problems.append(f"step {step}: norm {result.grad_norm}, expected {norm}")
        different = [path for path, p in model.named_parameters() if not same_bits(p, named[path])]
        problems += [f"step {step}: {path}" for path in different]
    return problems


@pytest.mark.parametrize("name", _TOKEN_SCENARIOS)
def test_equals_plain_torch_on_the_device(name: str, tmp_path: Path) -> None:
    comm = _cuda_communicator(tmp_path)
    assert comm.device.type == "cuda"
    assert _compare(comm, SCENARIOS[name]) == []
    assert not dist.is_initialized()


def test_float16_is_refused_and_bfloat16_without_masters_works(tmp_path: Path) -> None:
    comm = _cuda_communicator(tmp_path)
    with pytest.raises(sr.errors.SelectionError, match="float16"):
        make_zero2(comm, seeded(1, OddNet).to("cuda", torch.float16))
    bf16 = dataclasses.replace(SCENARIOS["adamw bf16 alone"], steps=5)
    assert _compare(comm, bf16) == []


def test_a_record_from_the_device_goes_back_to_it(tmp_path: Path) -> None:
    comm = _cuda_communicator(tmp_path)
    models = [seeded(seed, OddNet).to("cuda") for seed in (1, 2)]
    straight, resumed = (make_zero2(comm, model, lr=0.01) for model in models)
    batch = tuple(part.to("cuda") for part in token_batch(0, 5))
    torch.autograd.backward(loss_sum(models[0], (batch[0], batch[1])))
    straight.step(local_weight=5)
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    resumed.load_record(straight.to_record())
    for model, session in zip(models, (straight, resumed), strict=True):
        torch.autograd.backward(loss_sum(model, (batch[0], batch[1])))
        session.step(local_weight=5, max_grad_norm=0.1)
    assert photograph(straight).differences(photograph(resumed)) == []
    assert {key for keys in whole_state(comm, resumed).values() for key in keys} == {"exp_avg", "exp_avg_sq", "step"}


def test_the_native_seam_reduces_and_gathers_over_nccl(tmp_path: Path) -> None:
    """A group of one that does open NCCL: the collectives that the step would use are there and give its own slice."""
    from shardrun.comm.slices import NativeSeam

    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        seam = NativeSeam(1)
        bucket = torch.arange(512, dtype=torch.float32, device="cuda")
        out = torch.empty_like(bucket)
        seam.reduce(bucket, out, contributes=True)
        assert torch.equal(out, bucket)
        seam.reduce(bucket * torch.nan, out, contributes=False)
        assert torch.equal(out, torch.zeros_like(bucket))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            own = torch.randn(512, device="cuda").to(dtype)
            gathered = torch.empty_like(own)
            seam.gather(gathered, own)
            assert same_bits(gathered, own)
    finally:
        dist.destroy_process_group()
