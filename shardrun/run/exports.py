"""exports/: what a recipe's `on_save` writes, a folder for each checkpoint, and gone when that checkpoint is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from shardrun.checkpoint.store import CHECKPOINTS, step_of
from shardrun.records.durable import make_folder, remove_tree
from shardrun.run.evaluate import training_aside

EXPORTS = "exports"
"""Folder of the run, beside checkpoints: a checkpoint holds only what its manifest names."""
_PART, _OLD = ".part-", ".old-"


def write_export(run_dir: Path, name: str, on_save: Callable[[nn.Module, Path], None], model: nn.Module) -> Path:
    """Let `on_save` fill exports/NAME, which appears when it is whole; the training goes on as if it had not run.

    The model is in eval mode meanwhile. Exports of checkpoints that were retired are removed. Rank 0 only; raises what
    `on_save` raises, and OSError.
    """
    exports = run_dir / EXPORTS
    make_folder(exports, exist_ok=True)
    for left in sorted(exports.iterdir()):  # of a start that was killed
        if left.name.startswith((_PART, _OLD)):
            remove_tree(left)
    part, old = exports / f"{_PART}{name}", exports / f"{_OLD}{name}"
    make_folder(part)
    with training_aside(model):
        on_save(model, part)
    if (exports / name).exists():  # this step was saved before, and gone on from elsewhere
        (exports / name).rename(old)
    part.rename(exports / name)
    remove_tree(old)
    for other in sorted(exports.iterdir()):
        if step_of(other.name) is not None and not (run_dir / CHECKPOINTS / other.name).exists():
            remove_tree(other)
    return exports / name
