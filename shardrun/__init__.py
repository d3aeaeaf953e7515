"""shardrun trains PyTorch models on one or many ranks. The library's door: names are imported when first used.

Nothing here imports torch until a name that needs it is asked for, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardrun import errors
    from shardrun.comm.communicator import Communicator
    from shardrun.comm.config import CommunicatorConfig
    from shardrun.optim.kinds import OptionGroup
    from shardrun.records.record import Zero2Record
    from shardrun.shard.selection import select_parameters
    from shardrun.step.data_parallel import SelectedDataParallel
    from shardrun.step.zero2 import MissingGradientPolicy, SelectedZero2

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "CommunicatorConfig",
    "MissingGradientPolicy",
    "OptionGroup",
    "SelectedDataParallel",
    "SelectedZero2",
    "Zero2Record",
    "errors",
    "select_parameters",
]

_ROOMS = {
    "Communicator": "shardrun.comm.communicator",
    "CommunicatorConfig": "shardrun.comm.config",
    "MissingGradientPolicy": "shardrun.step.zero2",
    "OptionGroup": "shardrun.optim.kinds",
    "SelectedDataParallel": "shardrun.step.data_parallel",
    "SelectedZero2": "shardrun.step.zero2",
    "Zero2Record": "shardrun.records.record",
    "select_parameters": "shardrun.shard.selection",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("shardrun.errors")
    if name not in _ROOMS:
        raise AttributeError(f"module 'shardrun' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
