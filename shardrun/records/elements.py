"""The elements of a stored tensor as numbers, without torch. numpy knows no bf16: it is decoded here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrun.records.header_parser import DTYPE_BYTES

_NUMPY = {
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
    "F32": "<f4",
    "U32": "<u4",
    "I32": "<i4",
    "F16": "<f2",
    "U16": "<u2",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}


def decode(dtype: str, raw: bytes | bytearray) -> NDArray[Any] | None:
    """Whole elements of a safetensors dtype as an array (elements,); bf16 as float32, bool as uint8. None for 8-bit
    floats, of which numpy knows none."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, _NUMPY[dtype]) if dtype in _NUMPY else None


def is_float(dtype: str) -> bool:
    """Whether the dtype can hold a NaN or an infinity."""
    return dtype == "BF16" or dtype[0] in "FC"


def first_difference(one: bytes | bytearray, other: bytes | bytearray, dtype: str) -> tuple[int, int]:
    """Of two equally long runs of elements: how many differ in any bit, and the index of the first that does."""
    size = DTYPE_BYTES[dtype]
    left, right = (np.frombuffer(raw, np.uint8).reshape(-1, size) for raw in (one, other))
    differs = (left != right).any(axis=1)
    return int(np.count_nonzero(differs)), int(np.argmax(differs))


def value_text(dtype: str, raw: bytes | bytearray) -> str:
    """One element for the eye: its shortest decimal form, and for what is not an integer its bits."""
    if dtype == "BOOL":
        return str(raw != b"\0")
    if dtype[0] in "IU":
        return str(int.from_bytes(raw, "little", signed=dtype[0] == "I"))
    bits = f"0x{raw[::-1].hex()}"
    decoded = decode(dtype, raw)
    return f"{dtype} {bits}" if decoded is None or dtype == "C64" else f"{decoded[0]!s} ({bits})"
