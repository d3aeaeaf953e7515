"""Between tensors and the bytes of a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from shardrun.errors import CheckpointError
from shardrun.records.header import Entry, TensorBytes
from shardrun.records.header_parser import DTYPE_NAMES

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPE_NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def tensor_bytes(name: str, tensor: Tensor) -> TensorBytes:
    """How `tensor` (any device, any strides, any shape) is written; it is copied to the CPU when its turn comes.

    CheckpointError if it has no storage to read (meta, sparse, quantized) or a dtype that safetensors cannot hold.
    """
    if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{name}: {tensor.dtype} on {tensor.device}, {tensor.layout}, cannot be stored; "
            "dense tensors of the usual dtypes can"
        )
    return TensorBytes(_CODES[tensor.dtype], tuple(tensor.shape), lambda: host_bytes(tensor))


def form_bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorBytes:
    """As `tensor_bytes`, of a tensor that is described and has no bytes to write."""
    if dtype not in _CODES:
        raise CheckpointError(f"{name}: {dtype} cannot be stored; dense tensors of the usual dtypes can")
    return TensorBytes(_CODES[dtype], shape, _no_bytes)


def _no_bytes() -> bytes:
    raise AssertionError("a tensor that was only described is written")


def host_bytes(tensor: Tensor) -> memoryview:
    """The elements of `tensor` in logical order as bytes on the host; a view where it is one already, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
    return as_bytes(flat)


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over names and elements, in the order of `tensors`."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(host_bytes(tensor))
    return digest.hexdigest()


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that shares no memory with `tensor`."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def as_bytes(flat: Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor as bytes, writable; the tensor stays alive as long as the view."""
    assert sys.byteorder == "little", "safetensors is little-endian"
    return flat.reshape(-1).view(torch.uint8).numpy().data


def fresh_tensor(entry: Entry) -> Tensor:
    """An uninitialised CPU tensor for what `entry` describes.

    torch.empty would fill it where deterministic algorithms are on, which takes longer than reading what belongs there.
    """
    storage = torch.UntypedStorage(entry.nbytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=_DTYPES[entry.dtype], device="cpu").set_(storage).view(entry.shape)


def scalar_tensor(dtype: str, data: bytes) -> Tensor:
    """A 0-dim CPU tensor of `dtype` ("float32", ...) from its bytes."""
    tensor = torch.empty((), dtype=getattr(torch, dtype))
    as_bytes(tensor)[:] = data
    return tensor
