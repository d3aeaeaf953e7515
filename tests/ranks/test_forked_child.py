"""A child that the recipe forks has the communicator's memory and connections of its parent, and may touch neither."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import shardrun as sr
from shardrun.errors import UsageError
from tests.support.ranks import run_ranks


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
