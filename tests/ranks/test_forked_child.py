"""A child that the recipe forks has the communicator's memory and connections of its parent, and may touch neither."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import shardrun as sr
from shardrun.errors import UsageError
from tests.support.models import OddNet, loss_sum, seeded, token_batch
from tests.support.ranks import run_ranks
from tests.support.sessions import make_zero2, same_bits


def _in_child(comm: sr.Communicator) -> str:
    with pytest.raises(UsageError) as caught:
        comm.vote()
    comm.poison("by the child")
    comm.close()
    return str(caught.value)


def _forks(comm: sr.Communicator) -> tuple[str, int]:
    comm.flat_zeros(256, torch.device("cpu"))
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if child == 0:
        try:
            os.write(write, _in_child(comm).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    told = os.read(read, 1000).decode()
    os.close(read)
    return told, comm.sum_integers([1])[0]


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_forked_child_does_with_it_does_not_reach_the_ranks(shared: bool) -> None:
    for told, ranks in run_ranks(2, _forks, debug="OFF", shared_memory=shared):
        assert "this communicator is that of process" in told
        assert ranks == 2


def _forks_a_backward(comm: sr.Communicator, streams: bool) -> list[bool]:
    """A child, and one of the child's own, go on with gradients that they have in common with the rank."""
    models = []
    for forks in (False, True):
        models.append(model := seeded(5, OddNet))
        zero2 = make_zero2(comm, model, lr=0.02, bucket_bytes=256, stream_gradients=streams)
        for step in range(2):
            with zero2.window(local_weight=3, last=False):
                torch.autograd.backward(loss_sum(model, token_batch(10 * step + comm.rank, 3)))
            if forks:
                _in_children(model)
            with zero2.window(local_weight=6):
                torch.autograd.backward(loss_sum(model, token_batch(10 * step + 5 + comm.rank, 3)))
            zero2.step(local_weight=6)
    return [same_bits(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True)]


def _in_children(model: torch.nn.Module) -> None:
    before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
        if child == 0:
            try:
                loss_sum(model, token_batch(99, 3)).backward()  # type: ignore[no-untyped-call]
                after = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
                grandchild = os.fork()
                same = all(
                    a is None or (b is not None and torch.equal(a, b))
                    for a, b in zip(after, (one.grad for one in model.parameters()), strict=True)
                )
                changed = any(
                    b is not None and (a is None or not torch.equal(a, b)) for a, b in zip(before, after, strict=True)
                )
                code = 0 if same and changed else 1
                if grandchild:
                    code |= os.waitpid(grandchild, 0)[1]
                model.zero_grad(set_to_none=False)
                os._exit(1 if code else 0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_a_forked_child_are_its_own(streams: bool, shared: bool) -> None:
    for same in run_ranks(2, _forks_a_backward, streams, debug="OFF", shared_memory=shared):
        assert all(same)
