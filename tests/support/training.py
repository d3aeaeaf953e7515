"""Train a config through the worker, as `shardrun train` does, but on ranks of the test process's forkserver.

The launcher and the screen are left out, so a run costs a fraction of a second; what they do has tests of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.rank_process import Seat
from tests.support.ranks import run_ranks

RECIPES = Path(__file__).parent / "recipes"
TOY = str(RECIPES / "toy.py")


@dataclass
class Trained:
    """How a start of a run ended: exit code and error text per rank, rank 0's events, rows of metrics.jsonl."""

    codes: list[int]
    errors: list[str]
    events: list[dict[str, Any]]
    run_dir: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)
    """Step and phase in which each rank was last seen."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of windows, without what depends on the clock."""
        clock = ("seconds", "tokens_per_s")
        return [{k: v for k, v in row.items() if k not in clock} for row in self.rows if "loss" in row]

    def texts(self, kind: str) -> list[str]:
        """Texts of the events of one kind: note or warning."""
        return [event["text"] for event in self.events if event["event"] == kind]

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.run_dir / "checkpoints" / f"step-{step:010d}"

    def model(self, step: int) -> dict[str, Any]:
        """Tensors of model.safetensors at `step`, read by the official library."""
        from safetensors.torch import load_file

        tensors: dict[str, Any] = load_file(self.checkpoint(step) / "model.safetensors")
        return tensors

    def state(self, step: int) -> dict[str, Any]:
        """Optimizer state at `step`, all ranks' put together: "<path>/<key>" -> 1-D or 0-dim; under zero1 as it is."""
        import torch
        from safetensors.torch import load_file

        parts: dict[str, list[Any]] = {}
        (folder,) = self.checkpoint(step).glob("zero[12]/default")
        for file in sorted(folder.iterdir()):
            for name, tensor in load_file(file).items():
                parts.setdefault(name, []).append(tensor)
        return {name: held[0] if len(held) == 1 else torch.cat(held) for name, held in parts.items()}


def document(
    run_dir: Path, world_size: int, sections: Mapping[str, Any], recipe: str = TOY, **recipe_args: Any
) -> dict[str, Any]:
    """A config as plain data: `sections` over defaults for a tiny run in `run_dir`."""
    base: dict[str, Any] = {
        "run": {"name": "test", "dir": str(run_dir)},
        "recipe": recipe,
        "recipe_args": recipe_args,
        "optimizer": {"name": "sgd", "lr": 1.0},
        "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": world_size},
        "data": {"shuffle": False},
        "topology": {"world_size": world_size, "timeout_s": 30},
        "eval": {"at_end": False},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) and name != "optimizer" else section
    return base


def train(config: Mapping[str, Any], **options: Any) -> Trained:
    """Start (or go on with) the run of `config`; `options` as in a job: stop_at, resume_from, accept_changes, ..."""
    from shardrun.run.metrics import read_rows

    run_dir = Path(config["run"]["dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    job = {"config": dict(config), "run_dir": str(run_dir), "options": options}
    world_size = config["topology"]["world_size"]
    ended = run_ranks(world_size, _work, job, timeout_s=90, open_comm=False, debug="OFF")
    codes, errors, events, places = (list(column) for column in zip(*ended, strict=True))
    return Trained(codes, errors, events[0], run_dir, read_rows(run_dir / "metrics.jsonl"), places)


def trained(config: Mapping[str, Any], **options: Any) -> Trained:
    """As `train`, for a start that must end well."""
    done = train(config, **options)
    assert set(done.codes) == {0 if "stop_at" not in options else 75}, done.errors
    return done


def _work(seat: Seat, job: Mapping[str, Any]) -> tuple[int, str, list[dict[str, Any]], tuple[int, str]]:
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "SHARDRUN_INIT_FILE": seat.init_file}
    from shardrun.run.tether import Tether
    from shardrun.run.worker import run_worker

    events: list[dict[str, Any]] = []
    tether = Tether.from_env(lambda rank, event: events.append(dict(event)))
    code = tether.run(lambda tied: run_worker(job, tied))
    failure = tether.failure
    return (
        code,
        "" if failure is None else f"{failure.type}: {failure.message}",
        events,
        (tether.status.status.step, tether.status.status.phase),
    )


def save_now(built: Any, run_dir: Path, step: int) -> Any:
    """Save the live state of `built` as that of `step`; collective."""
    from shardrun.checkpoint.commit import save
    from shardrun.run.progress import Progress
    from shardrun.run.state import Lineage, snapshot_of

    lineage = Lineage("run", "attempt", None, None)
    return save(run_dir, built.comm, snapshot_of(built, Progress(step=step), lineage))
