"""The median of paired measurements and how well it is known. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_CONFIDENCE = 1.96  # of the normal distribution, to which the binomial one of the ranks is close


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval by order statistics, which assumes nothing of how the values are spread."""
    ordered = sorted(values)
    half = _CONFIDENCE * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return median(ordered), ordered[low], ordered[high]
