"""torch.compile of a run: whether it can work here, and what keeps its numbers those of the shapes alone.

[Note: one graph per shape] torch can compile a graph again for shapes that it has not seen, "dynamic" from the second
one on, and after some recompilations it silently goes on without compiling. Which code a batch passes through would
depend on the batches before it, and a run that is resumed has seen others: its sums would differ in the last bits. So
every shape has its own static graph, and more shapes than `MOST_GRAPHS` are an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from shardrun.comm.communicator import Communicator
from shardrun.errors import LaunchError, UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")

MOST_GRAPHS = 16
"""Of one function: whole and last micro-batches, in training and in validation, are four."""
_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"deterministic": True}


def require_compiler(comm: Communicator) -> None:
    """Compile something small. LaunchError on all ranks if that fails on any; collective."""
    problem = None
    try:
        torch.compile(_probe, dynamic=False)(torch.ones(8, device=comm.device))
    except Exception as error:
        told = " ".join(line for line in str(error).splitlines()[:2] if line)
        problem = LaunchError(
            f"train.compile is true, but torch.compile does not work here: {type(error).__name__}: {told}; install a "
            "C++ compiler (g++, or another one named by the variable CXX), or set train.compile: false"
        )
    comm.agree("compiler", error=problem)


def _probe(values: torch.Tensor) -> torch.Tensor:
    return values.sin() + 1.0


def compiled(function: Callable[_P, _R], what: str, *, deterministic: bool) -> Callable[_P, _R]:
    """`function` by torch.compile, see [Note: one graph per shape]; `what` is its name in errors.

    `deterministic`: nothing is chosen by measuring, which another process may choose otherwise.
    """
    import torch._dynamo.config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    options = _OPTIONS if deterministic else None
    fast = torch.compile(function, dynamic=False, options=options)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fast(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise UsageError(
                f"{what} was compiled for {MOST_GRAPHS} different inputs and met another one; give batches of few "
                "shapes (pad them in collate), or set train.compile: false. TORCH_LOGS=recompiles in the environment "
                "shows what differs"
            ) from error

    return call
