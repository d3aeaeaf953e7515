"""A rank's slices of optimizer state, together with the contract and the topology that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardrun.records.fit import holds_whole

RECORD_VERSION = 1


@dataclass
class ShardRecord:
    """Optimizer state of one rank, by path; what `to_record` of a session gives and `load_record` takes.

    `meta` is plain JSON: version, group, rank, world_size, contract, layout, optimizer, numerics, and `fragments`,
    path -> [start, stop]: which elements of the flattened parameter this rank holds. Where an optimizer makes state in
    a first update, `state` lists what it made: path -> keys, so that a record that lost some of it is refused.

    `tensors` are named "<path>/<key>", key being what torch.optim calls it (exp_avg, momentum_buffer, ...) or "master".
    Per element: 1-D, (stop - start,), valid elements only, never padding. Per parameter (step, mu_product, ...): 0-dim;
    every holder of a fragment may carry it, equal on all of them; on disk it is kept once, by the rank whose fragment
    starts at 0. What an optimizer makes from a first gradient (momentum_buffer) is missing before that.
    """

    meta: dict[str, Any]
    tensors: dict[str, Tensor]


class Zero2Record(ShardRecord):
    """The record of a SelectedZero2: fragments are slices, wherever they cut a parameter."""


class Zero1Record(ShardRecord):
    """The record of a SelectedZero1: fragments are whole parameters, and state tensors keep their shapes."""


def record_of(meta: dict[str, Any], tensors: dict[str, Tensor]) -> ShardRecord:
    """The record of the strategy that `meta` is about."""
    return (Zero1Record if holds_whole(meta) else Zero2Record)(meta, tensors)


def record_key(name: str) -> tuple[str, str]:
    """(path, key) of a record's tensor name; paths are dotted and hold no slash."""
    path, _, key = name.rpartition("/")
    return path, key
