"""What a sharded session is before it has ranks, memory or values: who steps what, and where it will stand.

`SelectedZero2` and `SelectedZero1` are made from a draft, and a plan asks one what they would hold on any rank of any
world. Nothing here communicates; on all ranks of a group the drafts are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from shardrun.errors import SelectionError, UsageError
from shardrun.optim.kinds import (
    Declared,
    OptionGroup,
    any_kind,
    check_options,
    elementwise,
    group_of,
    takes,
    update_cost,
)
from shardrun.shard.contract import Contract, ParameterSpec
from shardrun.shard.layout import Entry, FlatLayout, plan_layout
from shardrun.shard.owners import balanced_owners, plan_owned_layout
from shardrun.step.owned import Share

BUCKET_BYTES = 16 << 20
"""Of FP32 gradients, at which a bucket closes."""
_STREAMED_BUCKETS = 16
_LEAST_BUCKET_BYTES = 1 << 20
Optimizer = type[torch.optim.Optimizer] | str | Declared


@dataclass(frozen=True)
class Draft(ABC):
    """The selected trainable parameters of a session and their optimizers."""

    contract: Contract
    order: Sequence[str]
    """First paths of the distinct trainable parameters, as the root defines them."""
    shares: Sequence[Share]
    """The optimizers; those without parameters too."""
    masters: bool
    bucket_bytes: int | None
    """Of FP32 gradients, at which a bucket closes; None: what suits."""

    @abstractmethod
    def layout(self, world_size: int) -> FlatLayout:
        """Where each element lives on so many ranks. UsageError for what is wrong with optimizers and their options."""

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """The trainable parameters by path."""
        trainable = set(self.order)
        return {spec.path: spec for spec in self.contract.distinct() if spec.path in trainable}

    def share_of(self, option_group: int) -> tuple[Share, int]:
        """The optimizer of a canonical space, and the number of its own param group."""
        number, own = divmod(option_group, len(self.shares[0].option_groups) + 1)
        return self.shares[number], own

    def _entries(self, space_of: Callable[[str], int]) -> list[Entry]:
        """What is to be placed, in the root's order; float16 is refused."""
        specs = self.specs
        for path in self.order:
            if specs[path].dtype == "float16":
                raise SelectionError(f"{path} is float16, which needs a dynamic loss scale; use bfloat16 or float32")
        return [Entry(path, specs[path].numel, specs[path].dtype, space_of(path)) for path in self.order]


@dataclass(frozen=True)
class CutDraft(Draft):
    """ZeRO-2: one elementwise optimizer, equal slices."""

    streams: bool = False
    """Whether gradients are reduced inside backward, and not kept."""

    def layout(self, world_size: int) -> FlatLayout:
        """As Draft.layout; the same for every number of ranks."""
        (share,) = self.shares
        check_options(share.kind, share.options, share.option_groups, self.order)
        entries = self._entries(lambda path: group_of(path, share.option_groups))
        return plan_layout(entries, max(1, self._closing_bytes(entries) // 4))

    def _closing_bytes(self, entries: Sequence[Entry]) -> int:
        """Streamed gradients go through memory for a few buckets, which has to be little beside all of them."""
        if self.bucket_bytes is not None or not self.streams:
            return BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        share = 4 * sum(entry.numel for entry in entries) // _STREAMED_BUCKETS
        return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, share))


@dataclass(frozen=True)
class OwnedDraft(Draft):
    """ZeRO-1: one optimizer for what it takes, one for the rest, whole tensors with one owner each."""

    left_out: frozenset[str] = frozenset()
    """What is left to the rest though the first optimizer would take it."""
    owners: Mapping[str, int] | None = None
    """Path -> rank; None: balanced by cost."""

    @cached_property
    def costs(self) -> dict[str, int]:
        """About what an update of each parameter costs."""
        specs = self.specs
        share_of = {path: share for share in self.shares for path in share.paths}
        return {
            path: update_cost(share_of[path].kind, specs[path].shape, share_of[path].options) for path in self.order
        }

    def layout(self, world_size: int) -> FlatLayout:
        """As Draft.layout."""
        first, rest = self.shares
        specs = self.specs
        if unknown := sorted(self.left_out - set(self.order)):
            raise UsageError(f"rest_paths: {unknown[0]} ({len(unknown)} in all) is no selected trainable parameter")
        for share in self.shares:
            check_options(share.kind, share.options, share.groups, share.paths)
        if left := sorted(path for path in rest.paths if not takes(rest.kind, specs[path].shape)):
            raise UsageError(
                f"{left[0]} {specs[left[0]].shape}: neither {first.kind.name} nor {rest.kind.name} takes it"
            )
        given = self.owners
        chosen = balanced_owners(self.costs, world_size) if given is None else self._checked(given, world_size)
        entries = self._entries(self._space_of)
        closing_bytes = BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        return plan_owned_layout(entries, chosen, max(1, closing_bytes // 4), world_size)

    def _space_of(self, path: str) -> int:
        groups = self.shares[0].option_groups
        return group_of(path, groups) + (0 if path in self.shares[0].paths else len(groups) + 1)

    def _checked(self, owners: Mapping[str, int], world_size: int) -> Mapping[str, int]:
        """`owners` by first paths; UsageError unless it names each trainable parameter and a rank of the group."""
        first = _first_paths(self.contract)
        given = {first.get(path, path): rank for path, rank in owners.items()}
        if unlike := sorted(set(given) ^ set(self.order)):
            raise UsageError(
                f"owners: {unlike[0]} ({len(unlike)} in all) is named and not trained, or trained and not named"
            )
        for path, rank in given.items():
            if type(rank) is not int or not 0 <= rank < world_size:
                raise UsageError(f"owners: {path} is given to rank {rank!r}; the group has 0 to {world_size - 1}")
        return given


def draft_zero2(
    contract: Contract,
    order: Sequence[str],
    optimizer: Optimizer,
    /,
    *,
    option_groups: Sequence[OptionGroup] = (),
    masters: bool = True,
    bucket_bytes: int | None = None,
    stream_gradients: bool = False,
    **options: Any,
) -> CutDraft:
    """What SelectedZero2 makes of the same arguments; UsageError if the optimizer cannot be cut."""
    groups = on_first_paths(contract, option_groups)
    share = Share(elementwise(optimizer), set(order), options, groups)
    return CutDraft(contract, order, [share], masters, bucket_bytes, stream_gradients)


def draft_zero1(
    contract: Contract,
    order: Sequence[str],
    optimizer: Optimizer,
    /,
    *,
    option_groups: Sequence[OptionGroup] = (),
    owners: Mapping[str, int] | None = None,
    rest: Optimizer = torch.optim.AdamW,
    rest_options: Mapping[str, Any] | None = None,
    rest_paths: Collection[str] = (),
    masters: bool = True,
    bucket_bytes: int | None = None,
    **options: Any,
) -> OwnedDraft:
    """What SelectedZero1 makes of the same arguments; UsageError if an optimizer cannot be stepped by owners."""
    kinds = any_kind(optimizer), any_kind(rest)
    groups = on_first_paths(contract, option_groups)
    left_out = on_first_paths(contract, [OptionGroup(frozenset(rest_paths))])[0].paths
    shapes = {spec.path: spec.shape for spec in contract.distinct()}
    mine = {path for path in order if takes(kinds[0], shapes[path])} - left_out
    shares = [
        Share(kinds[0], mine, options, groups),
        Share(kinds[1], set(order) - mine, rest_options or {}, groups),
    ]
    return OwnedDraft(contract, order, shares, masters, bucket_bytes, left_out, owners)


def on_first_paths(contract: Contract, groups: Sequence[OptionGroup]) -> list[OptionGroup]:
    """The groups with every tied parameter under its first path, whichever of its names they use."""
    first = _first_paths(contract)
    return [replace(group, paths=frozenset(first.get(path, path) for path in group.paths)) for group in groups]


def _first_paths(contract: Contract) -> dict[str, str]:
    return {spec.path: contract.specs[spec.alias].path for spec in contract.specs}
