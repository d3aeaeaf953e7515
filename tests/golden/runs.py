"""Run folders with checkpoints of the golden state, for tests in a world of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardrun.checkpoint.commit import save
from shardrun.checkpoint.load import load
from shardrun.checkpoint.store import CHECKPOINTS
from shardrun.comm.communicator import Communicator
from tests.golden import state

RECORD = "zero2/default/rank-00000-of-00001.safetensors"


def put(run_dir: Path, step: int = 3, **options: Any) -> Path:
    """Save the state of `step`, whose values are those of seed `step`."""
    return save(run_dir, Communicator.single(), state.snapshot(step=step, seed=step), **options).path


def require_newest(path: Path, step: int, **options: Any) -> tuple[str, ...]:
    """What a load gives is the state of `step` to the bit; its notes."""
    found = load(path, Communicator.single(), state.expected(), **options)
    assert found is not None
    assert found.step == step
    model = state.parameters(step)
    assert state.same_tensors(found.model, {**model, "head.weight": model["emb.weight"]}) == []
    assert state.same_tensors(found.records[state.GROUP].tensors, state.record(0, 1, step).tensors) == []
    assert state.same_tensors(found.rank_state, dict(state.snapshot(step=step).rank_state)) == []
    return found.notes


def visible(run_dir: Path) -> dict[str, bytes]:
    """Every file below the folder of checkpoints, left-overs included."""
    folder = run_dir / CHECKPOINTS
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def at_call(number: int, act: Callable[[Path], object]) -> Callable[[str, Path], None]:
    """An `on_io` that does `act` before the `number`-th call; of the writes to a file two are counted."""
    calls = 0
    writes: dict[Path, int] = {}

    def on_io(call: str, path: Path) -> None:
        nonlocal calls
        if call == "write":
            writes[path] = writes.get(path, 0) + 1
            if writes[path] > 2:
                return
        calls += 1
        if calls == number:
            act(path)

    return on_io


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
