"""The learning rate, a pure function of how many updates were made."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Multiplies the base rate: linear warm-up, then constant, linear or half-cosine decay to `min_ratio`."""

    name: str
    warmup_steps: int
    min_ratio: float
    total_steps: int

    def factor(self, updates: int) -> float:
        """The factor for the next update when `updates` were made: in warm-up (updates + 1) / warmup_steps."""
        if updates < self.warmup_steps:
            return (updates + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (updates - self.warmup_steps) / span)
        shape = 1.0 - done if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * shape
