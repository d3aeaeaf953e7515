"""Where a run stands, in integers; saved in every checkpoint and enough to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from shardrun.errors import CheckpointError


@dataclass
class Progress:
    """`step` counts windows, whether they led to an update or not; the schedule's position is `updates`."""

    step: int = 0
    updates: int = 0
    skipped_nonfinite: int = 0
    skipped_empty: int = 0
    position: int = 0
    """Samples consumed, which is the position in the data."""
    epoch: int = 0
    """Of the last window, counted from 1; 0 before the first."""
    samples: int = 0
    tokens: int = 0
    """Sum of all weights: tokens, or whatever the recipe's loss counts."""

    def to_json(self) -> dict[str, int]:
        """As plain integers."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; CheckpointError for a counter that is missing, unknown or no count."""
        expected = set(cls.__dataclass_fields__)
        wrong = sorted(expected ^ set(saved)) or sorted(
            key for key, value in saved.items() if isinstance(value, bool) or not isinstance(value, int) or value < 0
        )
        if wrong:
            raise CheckpointError(f"counters of the checkpoint do not fit: {', '.join(wrong)} (saved {dict(saved)})")
        return cls(**saved)
