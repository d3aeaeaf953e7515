"""The same state saved and loaded by torch.save on rank 0, and by torch.distributed.checkpoint (DCP); with fsync.

Both are given the whole state on every rank, as under replicated data parallel: nothing has to be gathered first, and
DCP shares the writing of it out over the ranks by itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardrun.data.seeding import rng_states

State = dict[str, dict[str, Any]]
"""model: path -> tensor; optimizer: path -> {exp_avg, exp_avg_sq, step}; streams: rank -> its random streams."""


def whole_state(model: nn.Module) -> State:
    """The live parameters, and Adam state as large as theirs."""
    made = {
        path: {"exp_avg": torch.rand_like(one), "exp_avg_sq": torch.rand_like(one), "step": torch.tensor(1.0)}
        for path, one in model.named_parameters()
    }
    streams = {f"rank-{rank}": rng_states() for rank in range(dist.get_world_size())}
    return {"model": dict(model.state_dict()), "optimizer": made, "streams": streams}


def torch_save(state: State, folder: Path) -> None:
    """Rank 0 writes one file, beside, and renames it; the others wait."""
    if dist.get_rank() == 0:
        folder.mkdir()
        with (folder / "part").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        (folder / "part").rename(folder / "state.pt")
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    dist.barrier()


def torch_load(state: State, folder: Path) -> None:
    """Every rank reads the file and copies it into the live tensors."""
    loaded = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    for (_, live), (_, read) in zip(_leaves(state), _leaves(loaded), strict=True):
        live.copy_(read)
    dist.barrier()


def dcp_save(state: State, folder: Path) -> None:
    """torch.distributed.checkpoint.save, files synced, which is its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder, sync_files=True))


def dcp_load(state: State, folder: Path) -> None:
    """torch.distributed.checkpoint.load, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, storage_reader=FileSystemReader(folder))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key in sorted(value):
            yield from _leaves(value[key], f"{path}/{key}")
