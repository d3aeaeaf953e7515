"""What the ranks of a group agree that the selected parameters are: paths, shapes, dtypes, trainable flags, ties."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class ParameterSpec:
    """One selected path. `alias` is the index, in the sorted contract, of the first path that is the same Parameter."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    alias: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Contract:
    """The specs of all selected paths, sorted by path: equal on all ranks, whatever order they define them in."""

    specs: tuple[ParameterSpec, ...]

    @staticmethod
    def of(specs: Iterable[ParameterSpec]) -> Contract:
        """A contract from specs that are already sorted by path."""
        ordered = tuple(specs)
        assert all(a.path < b.path for a, b in itertools.pairwise(ordered))
        return Contract(ordered)

    def distinct(self) -> list[ParameterSpec]:
        """One spec per Parameter object: the first path of each tie."""
        return [spec for index, spec in enumerate(self.specs) if spec.alias == index]

    def aliases(self) -> dict[str, str]:
        """Further paths of tied parameters -> the first path."""
        return {s.path: self.specs[s.alias].path for i, s in enumerate(self.specs) if s.alias != i}

    def to_json(self) -> list[dict[str, Any]]:
        """As plain JSON, in order."""
        return [
            {"path": s.path, "shape": list(s.shape), "dtype": s.dtype, "trainable": s.trainable, "alias": s.alias}
            for s in self.specs
        ]

    @staticmethod
    def from_json(items: list[dict[str, Any]]) -> Contract:
        """The inverse of `to_json`."""
        return Contract(
            tuple(ParameterSpec(i["path"], tuple(i["shape"]), i["dtype"], i["trainable"], i["alias"]) for i in items)
        )

    @property
    def digest(self) -> str:
        """sha256 (hex) of the contract; equal digests mean equal contracts."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":")).encode()).hexdigest()


def first_difference(contracts: list[Contract], named: Callable[[int], str]) -> str | None:
    """The first path at which the ranks' contracts differ and what each side holds, or None.

    `named` has the name of a rank by its number in the group.
    """
    by_path = [{spec.path: _describe(contract, spec) for spec in contract.specs} for contract in contracts]
    for path in sorted(set().union(*by_path)):
        sides = [held.get(path, "not selected or not there") for held in by_path]
        if len(set(sides)) > 1:
            return f"{path}: " + "; ".join(f"{named(rank)} has {side}" for rank, side in enumerate(sides))
    return None


def _describe(contract: Contract, spec: ParameterSpec) -> str:
    tie = contract.specs[spec.alias].path
    return f"shape {spec.shape}, {spec.dtype}, {'trainable' if spec.trainable else 'frozen'}" + (
        f", the same tensor as {tie}" if tie != spec.path else ""
    )
