"""`shardrun reshard`: a checkpoint for another number of ranks, as a folder of its own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from shardrun import report
from shardrun.checkpoint.reshard import CLAIM, reshard
from shardrun.checkpoint.store import complete


def run(path: Path, world_size: int, output: Path, json: bool) -> int:
    """Reshard the checkpoint `path`, or the newest of the run folder `path`; 0.

    CheckpointError if there is none, if it is damaged or cannot be cut; UsageError if `output` is there already.
    """
    source = complete(path, "reshard")
    done = reshard(source, output, world_size)
    if json:
        report.json_document({**asdict(done), "path": str(done.path), "source": str(source), "claim": CLAIM})
        return 0
    report.line(f"{source}: step {done.step}, resharded from {done.before} to {world_size} ranks")
    report.line(f"{output}: {done.bytes:,} bytes, {done.seconds:.1f} s")
    report.line(CLAIM)
    for note in done.notes:
        report.line(f"note: {note}")
    report.line(f"go on from it: shardrun train CONFIG topology.world_size={world_size} --resume-from {output}")
    return 0
