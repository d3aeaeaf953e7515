"""The config that verifications are tried with: small, with everything that a resume can lose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.launching import ROOT


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
