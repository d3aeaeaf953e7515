"""`shardrun export`: a checkpoint in the forms that other programs read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from shardrun import report
from shardrun.checkpoint.export import Exported, export_hf, export_safetensors
from shardrun.checkpoint.store import candidates
from shardrun.errors import CheckpointError

Format = Literal["safetensors", "hf", "torch"]


def run(path: Path, output: Path, form: Format, json: bool) -> int:
    """Export the checkpoint `path`, or the newest of the run folder `path`, as the new folder `output`; 0.

    CheckpointError if there is none or it is damaged; UsageError if `output` is there already.
    """
    newest = candidates(path, required=True)[0]
    if not newest.complete:
        raise CheckpointError(f"checkpoint {newest.path} is damaged: {newest.why}")
    done = _export(newest.path, output, form)
    if json:
        report.json_document({**asdict(done), "source": newest.path, "format": form})
        return 0
    report.line(f"{newest.path}: step {done.step}, as {form}")
    report.line(f"{output}: {', '.join(done.files)}, {done.bytes:,} bytes")
    for note in done.notes:
        report.line(f"note: {note}")
    return 0


def _export(source: Path, target: Path, form: Format) -> Exported:
    if form == "safetensors":
        return export_safetensors(source, target)
    if form == "hf":
        return export_hf(source, target)
    from shardrun.checkpoint.export_torch import export_torch

    return export_torch(source, target)
