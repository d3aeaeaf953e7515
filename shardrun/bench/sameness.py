"""Whether two contenders have trained the same model: how far apart their parameters are, by how far they have come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_parameters(parameters: Iterable[tuple[str, Tensor]], path: Path | None) -> None:
    """Write them for others to be compared with; every rank calls it, one has a `path`."""
    held = {name: one.cpu().contiguous().clone() for name, one in parameters if path is not None}
    if path is not None:
        save_file(held, path)


def distance(parameters: Iterable[tuple[str, Tensor]], path: Path | None, start: Mapping[str, Tensor]) -> float:
    """L2 distance to the parameters at `path`, divided by the distance of those from `start`.

    Every rank calls it, because `parameters` may be gathered; one has the `path`, the others get 0.
    """
    if path is None:
        for _ in parameters:
            pass
        return 0.0
    apart = moved = 0.0
    with safe_open(path, framework="pt") as file:
        for name, one in parameters:
            reference = file.get_tensor(name).double()
            apart += float((one.cpu().double() - reference).square().sum())
            moved += float((reference - start[name].double()).square().sum())
    return math.sqrt(apart / moved) if moved else math.inf * apart if apart else 0.0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal to the bit; what is NaN is equal to itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
