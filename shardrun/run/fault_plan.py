"""`shardrun train --fault`: a plan of faults, at work in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.comm.faults import Plan, plan


def install_faults(
    text: str | None, comm: Communicator, step: Callable[[], int], parameters: Mapping[str, Tensor] | None = None
) -> None:
    """Let the faults of `text` happen on this rank, if there are any; local. `step` tells the window under way.

    To be called twice: without `parameters` as soon as there is a communicator, so that a rank can fail while it
    starts, and with them once they are there, for those faults that change one.
    """
    if text is None:
        return
    faults = plan(text, comm.world_size).faults
    about_parameters = parameters is not None
    chosen = tuple(fault for fault in faults if (fault.about == "parameter") == about_parameters)
    Plan(chosen).install(comm, step=step, parameters=parameters)
