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
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardrun.data.seeding import rng_states
from shardrun.records.fit import holds_whole
from shardrun.records.record import record_key
from shardrun.run.build import Built
from shardrun.shard.contract import Contract

State = dict[str, dict[str, Any]]
"""model: path -> tensor; optimizer: "path/key" -> tensor; streams: rank -> its random streams."""


def whole_state(built: Built) -> State:
    """The live model, and optimizer state in the whole forms of what all ranks have in their records; collective.

    What it holds is made up, for nobody reads it; but it is memory of its own.
    """
    (group,) = built.groups
    record = group.sharded.live_record()
    whole = (
        {} if holds_whole(record.meta) else {s.path: s.shape for s in Contract.from_json(record.meta["contract"]).specs}
    )
    forms = {
        name: [
            str(one.dtype).removeprefix("torch."),
            list(whole.get(record_key(name)[0], one.shape) if one.dim() else ()),
        ]
        for name, one in record.tensors.items()
    }
    every = {name: form for held in built.comm.agree("forms of state", forms) for name, form in held.items()}
    made = {name: torch.full(shape, 1, dtype=getattr(torch, dtype)) for name, (dtype, shape) in sorted(every.items())}
    streams = {f"rank-{rank}": rng_states() for rank in range(built.comm.world_size)}
    return {"model": dict(built.model.state_dict()), "optimizer": made, "streams": streams}


def nbytes(state: State) -> int:
    """Bytes of all its tensors, tied ones once."""
    return sum({one.data_ptr(): one.nbytes for _, one in _leaves(state)}.values())


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
