"""What the elements of a tensor are like, taken in one pass over its bytes and in the memory of one chunk."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from shardrun.checkpoint.assemble import Whole, chunks
from shardrun.checkpoint.contents import Meter
from shardrun.records.elements import decode, is_float

CHUNK = 1 << 20
"""Bytes that are looked at at once; a multiple of every element's size."""


class Statistics:
    """Norm, extremes, zeros and non-finite elements. Norm and extremes are those of the finite elements, in float64;
    of a complex number the absolute value counts."""

    def __init__(self, dtype: str) -> None:
        self.elements = self.zeros = self.nonfinite = 0
        self.first_nonfinite: int | None = None
        self.squares = 0.0
        self.least: float | int | None = None
        self.most: float | int | None = None
        self._dtype = dtype

    def add(self, raw: bytes | bytearray) -> None:
        """The next whole elements."""
        values = decode(self._dtype, raw)
        if values is None:
            raise ValueError(f"elements of {self._dtype} cannot be decoded")
        before = self.elements
        self.elements += values.size
        self.zeros += values.size - int(np.count_nonzero(values))
        if is_float(self._dtype):
            finite = np.isfinite(values)
            bad = values.size - int(np.count_nonzero(finite))
            if bad:
                if self.first_nonfinite is None:
                    self.first_nonfinite = before + int(np.argmin(finite))
                self.nonfinite += bad
                values = values[finite]
        if self._dtype == "C64":
            values = np.abs(values)
        if values.size:
            low, high = values.min().item(), values.max().item()
            self.least = low if self.least is None else min(self.least, low)
            self.most = high if self.most is None else max(self.most, high)
            wide = values.astype(np.float64)
            self.squares += float(np.dot(wide, wide))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `zeros` is a count."""
        return {
            "elements": self.elements,
            "norm": math.sqrt(self.squares),
            "min": self.least,
            "max": self.most,
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "first_nonfinite": self.first_nonfinite,
        }


def read_whole(root: Path, whole: Whole, *, hashes: bool, stats: bool, meter: Meter) -> dict[str, Any]:
    """{"sha256", "stats"} of a tensor whose bytes are all there, in its own order of elements; `stats` is None where
    the dtype cannot be decoded. CheckpointError or OSError if it cannot be read after all."""
    digest = hashlib.sha256()
    numbers = Statistics(whole.dtype) if stats and decode(whole.dtype, b"") is not None else None
    for run in chunks(root, whole.pieces, CHUNK):
        if hashes:
            digest.update(run)
        if numbers is not None:
            numbers.add(run)
        meter.read(len(run))
    found: dict[str, Any] = {"sha256": digest.hexdigest()} if hashes else {}
    if stats:
        found["stats"] = None if numbers is None else numbers.to_json()
    return found
