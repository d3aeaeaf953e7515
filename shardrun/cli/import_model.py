"""`shardrun import`: a plain model of somebody else as one file for `init_from`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from shardrun import report
from shardrun.checkpoint.import_model import import_model


def run(source: Path, output: Path, json: bool) -> int:
    """Import `source` as the new file `output`; 0. CheckpointError or UsageError say why not."""
    done = import_model(source, output)
    if json:
        report.json_document({**asdict(done), "source": source})
        return 0
    report.line(f"{output}: {done.tensors} tensors, {done.bytes:,} bytes; start from it with init_from: {output}")
    return 0
