"""torch.compile of a run without its compiler: what is refused, and one graph for every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import Tensor

import shardrun as sr
from shardrun.errors import LaunchError, UsageError
from shardrun.run import compiling
from shardrun.run.compiling import MOST_GRAPHS, compiled, require_compiler


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions are traced and guarded, but run by torch's ordinary kernels: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def total(values: Tensor) -> Tensor:
    return (values * values).sum()


def twice(values: Tensor) -> Tensor:
    return values + values


@pytest.mark.usefixtures("eager")
def test_more_shapes_than_graphs_are_refused_and_none_runs_uncompiled() -> None:
    fast = compiled(total, "my.py: loss", deterministic=False)
    for length in range(2, 2 + MOST_GRAPHS):
        values = torch.arange(length, dtype=torch.float32)
        assert torch.equal(fast(values), total(values))
    assert torch.equal(fast(torch.ones(3)), torch.tensor(3.0)), "known shapes go on"
    with pytest.raises(UsageError, match=rf"my\.py: loss was compiled for {MOST_GRAPHS} different .*train\.compile"):
        fast(torch.ones(99))


@pytest.mark.usefixtures("eager")
def test_a_shape_has_a_graph_of_its_own_whatever_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(tuple(inputs[0].shape))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    fast = compiled(twice, "my.py: loss", deterministic=False)
    for length in (4, 5, 6, 4):
        fast(torch.ones(length))
    assert seen == [(4,), (5,), (6,)]
    assert all(isinstance(length, int) for (length,) in seen)


def test_a_machine_that_cannot_compile_is_refused_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(values: Tensor) -> Tensor:
        raise RuntimeError("No working C++ compiler found in g++\n\nSet TORCHDYNAMO_VERBOSE=1 for the stack")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    with pytest.raises(LaunchError) as caught:
        require_compiler(sr.Communicator.single())
    told = str(caught.value)
    assert "RuntimeError: No working C++ compiler found in g++; install" in told
    assert "CXX" in told
    assert "train.compile: false" in told


def test_what_is_measured_is_not_chosen_in_a_deterministic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def compile_(function: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        for deterministic in (True, False):
            compiling.compiled(total, "loss", deterministic=deterministic)
    assert asked == [{"dynamic": False, "options": {"deterministic": True}}, {"dynamic": False, "options": None}]
