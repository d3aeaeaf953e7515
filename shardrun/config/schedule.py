"""The learning rate over the updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shardrun.config.section import Broken, Count, Fraction, Natural, Section


class Schedule(Section):
    """The learning rate over the updates."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Natural = 0
    """Updates over which the rate rises linearly to optimizer.lr."""
    min_lr_ratio: Fraction = 0.0
    """The rate at the end of linear and cosine, as a share of optimizer.lr."""
    total_steps: Count | None = None
    """Updates until the end of the shape; null: the run's length."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """A constant rate falls to nothing."""
        ratio, name = given.get("min_lr_ratio"), given.get("name", "constant")
        if name == "constant" and isinstance(ratio, int | float) and ratio is not True and 0 < ratio <= 1:
            yield Broken("min_lr_ratio", f"{ratio} has no effect with schedule.name constant; choose linear or cosine")
