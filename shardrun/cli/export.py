"""`shardrun export`: a checkpoint in the forms that other programs read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from shardrun import report
from shardrun.checkpoint.export import Exported, export_hf, export_safetensors
from shardrun.checkpoint.store import complete

Format = Literal["safetensors", "hf", "torch"]


def run(path: Path, output: Path, form: Format, json: bool) -> int:
    """Export the checkpoint `path`, or the newest of the run folder `path`, as the new folder `output`; 0.

    CheckpointError if there is none or it is damaged; UsageError if `output` is there already.
    """
    source = complete(path, "export")
    done = _export(source, output, form)
    if json:
        report.json_document({**asdict(done), "source": source, "format": form})
        return 0
    report.line(f"{source}: step {done.step}, as {form}")
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
