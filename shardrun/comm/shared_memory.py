"""Buffers that the ranks of one host can read of each other in place: nothing of their size is sent.

[Note: reading in place] Every rank of a group makes a buffer of the same size at the same time, as memory without a
name (memfd) that the others map for reading only; no rank can write into another one's. A place in the own buffer is
the same place in all of them. The memory lives as long as anybody maps it, also when its rank has died, and leaves
nothing behind. A process that is forked from a rank finds the memory as it is, and what it writes there is its own.
Where the ranks cannot reach each other's memory (several hosts, other users, other process namespaces), all of them
hear of it and use ordinary memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
from torch import Tensor

_NONCE_BYTES = 16
_SMALL = 128 << 20
"""Bytes up to which the buffers of other ranks stay mapped, and count as memory of every rank that read them."""
_HUGE = 4 << 20
"""Bytes from which on a buffer is worth pages of 2 MB."""


@dataclass(frozen=True)
class _Region:
    """One buffer of every rank, as bytes."""

    own: weakref.ref[mmap.mmap]
    begin: int
    nbytes: int
    mapped: tuple[mmap.mmap | None, ...]
    """By rank; None for this one."""
    bytes_of: tuple[Tensor | None, ...]


class Place:
    """Where a tensor of this rank stands, and what the other ranks have there."""

    def __init__(self, region: _Region, tensor: Tensor, start: int) -> None:
        self._region = region
        self._tensor = tensor.view(-1)
        self._start = start

    def of(self, rank: int, low: int, numel: int) -> Tensor:
        """(numel,) from element `low` on, as `rank` has it; only what is this rank's own may be written."""
        theirs = self._region.bytes_of[rank]
        if theirs is None:
            return self._tensor[low : low + numel]
        size = self._tensor.element_size()
        begin = self._start + low * size
        return theirs[begin : begin + numel * size].view(self._tensor.dtype)

    def let_go(self, rank: int, low: int, numel: int) -> None:
        """Count these pages no longer as memory of this process; who reads them again finds them as they are.

        Not worth its time where all buffers are small.
        """
        mapped, size = self._region.mapped[rank], self._tensor.element_size()
        if mapped is not None and numel and self._region.nbytes > _SMALL:
            begin, end = self._start + low * size, self._start + (low + numel) * size
            begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class Offer:
    """A buffer of this rank before the others have mapped it."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there is no such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name (memfd)")
        self.nbytes = nbytes
        self._file = FileIO(os.memfd_create("shardrun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
        self._file.truncate(nbytes)
        # A mapping of what has shrunk would end the process that reads it.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = _map(self._file, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._nonce = os.urandom(_NONCE_BYTES)
        self.memory[-_NONCE_BYTES:] = self._nonce

    def address(self) -> dict[str, Any]:
        """Where the other ranks find it, as plain JSON."""
        return {"pid": os.getpid(), "fd": self._file.fileno(), "nonce": self._nonce.hex()}

    def attach(self, addresses: Sequence[dict[str, Any]], rank: int) -> list[mmap.mmap | None]:
        """The buffers of all ranks but this one, for reading; OSError or ValueError where one is not the one meant."""
        return [None if r == rank else _attach(address, self.nbytes) for r, address in enumerate(addresses)]

    def settle(self) -> None:
        """All ranks have mapped it, or will not: the buffer holds zeros."""
        self.memory[-_NONCE_BYTES:] = bytes(_NONCE_BYTES)
        _keep_from_children(self.memory, self._file, self.nbytes)


class SharedMemory:
    """The buffers of one group. Local."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    def add(self, offer: Offer, mapped: Sequence[mmap.mmap | None], pids: Sequence[int]) -> Tensor:
        """(nbytes,) uint8, the own buffer; known for as long as any tensor uses it."""
        own = torch.frombuffer(offer.memory, dtype=torch.uint8)
        readable = tuple(None if one is None else _readable(one) for one in mapped)
        # The memory of the other ranks is let go with the own: it would be theirs for as long as it is mapped here.
        alive = weakref.ref(offer.memory, self._forget)
        self._regions.append(_Region(alive, own.data_ptr(), offer.nbytes, tuple(mapped), readable))
        return own

    def _forget(self, dead: weakref.ref[mmap.mmap]) -> None:
        self._regions[:] = [one for one in self._regions if one.own is not dead]

    def find(self, tensor: Tensor) -> Place | None:
        """Where `tensor` (contiguous, not empty) stands in all ranks' buffers; None if in ordinary memory."""
        for region in self._regions:
            start = tensor.data_ptr() - region.begin
            if start >= 0 and start + tensor.nbytes <= region.nbytes and region.own() is not None:
                return Place(region, tensor, start)
        return None


def _map(file: FileIO, nbytes: int, protection: int) -> mmap.mmap:
    mapped = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, protection)
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a hint, which a kernel without such pages refuses
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


_OWN: dict[int, tuple[FileIO, int]] = {}
"""Address -> file and bytes of every buffer of this process that others read."""
_MAP_FIXED = 0x10


def _keep_from_children(memory: mmap.mmap, file: FileIO, nbytes: int) -> None:
    """What a forked child writes into `memory` is not to be seen here, as with all other memory."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _OWN[address] = file, nbytes
    weakref.finalize(memory, _forget_own, address).atexit = False


def _forget_own(address: int) -> None:
    if address in _OWN:
        _OWN.pop(address)[0].close()


def _map_privately() -> None:
    """In a child: the same pages in the same place, copied when they are written to."""
    if not _OWN:
        return
    libc_mmap = ctypes.CDLL(None).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for address, (file, nbytes) in _OWN.items():
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        if libc_mmap(address, nbytes, protection, flags, file.fileno(), 0) != address:
            os.abort()  # better than to write into the gradients of the parent
        file.close()
    _OWN.clear()


os.register_at_fork(after_in_child=_map_privately)


def _attach(address: dict[str, Any], nbytes: int) -> mmap.mmap:
    path = f"/proc/{int(address['pid'])}/fd/{int(address['fd'])}"
    with closing(FileIO(path, "r")) as file:
        if (size := os.fstat(file.fileno()).st_size) != nbytes:
            raise ValueError(f"{path} has {size} bytes, expected {nbytes}")
        mapped = _map(file, nbytes, mmap.PROT_READ)
    if mapped[-_NONCE_BYTES:].hex() != address["nonce"]:
        raise ValueError(f"{path} is not the memory of that rank")  # another host, where the process has another number
    return mapped


def _readable(mapped: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written is the point
        return torch.frombuffer(mapped, dtype=torch.uint8)
