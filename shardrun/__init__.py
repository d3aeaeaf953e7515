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
    from shardrun.optim.kinds import Declared, OptionGroup
    from shardrun.records.record import Zero1Record, Zero2Record
    from shardrun.shard.selection import select_parameters
    from shardrun.step.agreement import MissingGradientPolicy
    from shardrun.step.data_parallel import DataParallel, ReduceResult, SelectedDataParallel
    from shardrun.step.joint_step import StepResult, take_step
    from shardrun.step.replicated import AdamConfig, AdamWConfig, ParamStore, SGDConfig, step_adam, step_adamw, step_sgd
    from shardrun.step.zero1 import SelectedZero1
    from shardrun.step.zero2 import SelectedZero2

__version__ = "0.1.0"

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "Communicator",
    "CommunicatorConfig",
    "DataParallel",
    "Declared",
    "MissingGradientPolicy",
    "OptionGroup",
    "ParamStore",
    "ReduceResult",
    "SGDConfig",
    "SelectedDataParallel",
    "SelectedZero1",
    "SelectedZero2",
    "StepResult",
    "Zero1Record",
    "Zero2Record",
    "errors",
    "select_parameters",
    "step_adam",
    "step_adamw",
    "step_sgd",
    "take_step",
]

_ROOMS = {
    "AdamConfig": "shardrun.step.replicated",
    "AdamWConfig": "shardrun.step.replicated",
    "Communicator": "shardrun.comm.communicator",
    "CommunicatorConfig": "shardrun.comm.config",
    "DataParallel": "shardrun.step.data_parallel",
    "Declared": "shardrun.optim.kinds",
    "MissingGradientPolicy": "shardrun.step.agreement",
    "OptionGroup": "shardrun.optim.kinds",
    "ParamStore": "shardrun.step.replicated",
    "ReduceResult": "shardrun.step.data_parallel",
    "SGDConfig": "shardrun.step.replicated",
    "SelectedDataParallel": "shardrun.step.data_parallel",
    "SelectedZero1": "shardrun.step.zero1",
    "SelectedZero2": "shardrun.step.zero2",
    "StepResult": "shardrun.step.joint_step",
    "Zero1Record": "shardrun.records.record",
    "Zero2Record": "shardrun.records.record",
    "select_parameters": "shardrun.shard.selection",
    "step_adam": "shardrun.step.replicated",
    "step_adamw": "shardrun.step.replicated",
    "step_sgd": "shardrun.step.replicated",
    "take_step": "shardrun.step.joint_step",
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
