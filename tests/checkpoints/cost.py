"""What a save and a load cost: 60 million parameters with Adam state on two ranks, beside torch.save and DCP.

    python -m tests.checkpoints.cost [--rounds 5] [--dir FOLDER] [--split]

As `shardrun bench --checkpoint` does it, of a model that is large enough for the disk to count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardrun import report
from shardrun.bench.checkpoint import measure_checkpoints
from shardrun.bench.ranks import scratch_folder
from shardrun.cli.bench_checkpoint import checkpoint_view
from shardrun.config.load import from_mapping
from tests.support.launching import ROOT
from tests.support.training import document

WORLD_SIZE = 2
_MODEL = {"context": 128, "layers": 10, "width": 704, "heads": 11}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write; the folder of temporary files by default"
    )
    parser.add_argument("--split", action="store_true", help="with checkpoint.split_model")
    asked = parser.parse_args()
    sections = {
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 1000, "micro_batch_size": 1, "global_batch_size": WORLD_SIZE},
        "topology": {"timeout_s": 600},
        "checkpoint": {"every": 1, "split_model": asked.split},
    }
    with scratch_folder(asked.dir) as scratch:
        config = document(scratch / "run", WORLD_SIZE, sections, str(ROOT / "recipes" / "gpt.py"), **_MODEL)
        report.show(checkpoint_view(measure_checkpoints(from_mapping(config), asked.rounds, scratch, report.error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
