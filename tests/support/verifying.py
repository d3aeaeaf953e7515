"""Verifications that are tried: a small config with everything that a resume can lose, and legs that start fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun.run.launch import Screen
from shardrun.run.outcome import Outcome
from shardrun.run.worker_process import Job
from tests.support.launching import ROOT
from tests.support.training import train


def verify_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """7 windows of 8 samples in micro-batches of 2, 4 windows to an epoch, the last one short; sections lie over it."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "recipe": str(ROOT / "tests" / "support" / "recipes" / "verify_net.py"),
        "optimizer": {
            "name": "adamw",
            "lr": 0.01,
            "options": [{"match": ["*.bias"], "weight_decay": 0.0, "lr_scale": 0.5}],
        },
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "train": {"steps": 7, "micro_batch_size": 2, "global_batch_size": 8, "max_grad_norm": 1.0},
        "topology": {"backend": "gloo", "timeout_s": 60},
        "eval": {"every": 3},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / "verify.yaml"
    path.write_text(json.dumps(config))
    return path


class Silent:
    """A screen that shows nothing."""

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        return [str(event)]

    def output(self, rank: int, text: str) -> None:
        pass


def forked(job: Job, screen: Screen) -> Outcome:
    """Run a leg in fresh processes of the test's forkserver: the same worker, without the launcher around it."""
    done = train(job.document["config"], **job.document["options"])
    code = done.codes[0] if len(set(done.codes)) == 1 else 1
    return Outcome(code, "; ".join(error for error in done.errors if error), None, ())
