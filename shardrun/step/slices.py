"""This rank's slices of a session: agreed on, allocated once, named by path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import SelectionError, UsageError, by_all
from shardrun.optim.kinds import Elementwise, OptionGroup, check_options, group_of
from shardrun.shard.flat_buffer import FlatBucket
from shardrun.shard.layout import Entry, FlatLayout, plan_layout
from shardrun.step.data_parallel import SelectedDataParallel


@dataclass(frozen=True)
class Slice:
    """One bucket's buffers on this rank; n = bucket.own.numel()."""

    bucket: FlatBucket
    reduced: Tensor
    """(n,) float32: the sum over ranks, then the mean, then clipped."""
    grad: Tensor
    """(n,) in the leaf's dtype, what the optimizer sees; `reduced` itself where that is float32."""
    leaf: Tensor
    """(n,) what is stepped: the FP32 master, or the live parameter slice itself."""
    proposed: Tensor
    """(n,) in the parameter's dtype: the new slice, before anything has changed."""

    @property
    def has_master(self) -> bool:
        """Whether the leaf is an FP32 master beside a 16-bit parameter."""
        return self.leaf is not self.bucket.own


def make_slice(bucket: FlatBucket, masters: bool, proposes: bool) -> Slice:
    """Allocate what a step of `bucket` needs on this rank; without proposing (a world of one), `proposed` is empty."""
    own = bucket.own
    reduced = torch.zeros(own.numel(), dtype=torch.float32, device=own.device)
    leaf = own.float() if masters and own.dtype != torch.float32 else own
    grad = reduced if leaf.dtype == torch.float32 else torch.zeros_like(own)
    return Slice(bucket, reduced, grad, leaf, torch.zeros_like(own if proposes else own[:0]))


def on_first_paths(session: SelectedDataParallel, groups: Sequence[OptionGroup]) -> list[OptionGroup]:
    """The groups with every tied parameter under its first path, whichever of its names they use."""
    first = {spec.path: session.contract.specs[spec.alias].path for spec in session.contract.specs}
    return [replace(group, paths=frozenset(first.get(path, path) for path in group.paths)) for group in groups]


def agree_layout(
    session: SelectedDataParallel,
    name: str,
    kind: Elementwise,
    options: Mapping[str, Any],
    option_groups: Sequence[OptionGroup],
    masters: bool,
    bucket_bytes: int,
) -> FlatLayout:
    """The layout that the group's root computes; collective. Options that differ between ranks are refused by all."""
    specs = {spec.path: spec for spec in session.contract.specs}
    problem: UsageError | None = None
    try:
        check_options(kind, options, option_groups, session.order)
    except UsageError as error:
        problem = error
    for path in session.order:
        if specs[path].dtype == "float16":
            problem = SelectionError(f"{path} is float16, which needs a dynamic loss scale; use bfloat16 or float32")
    entries = [
        Entry(path, specs[path].numel, specs[path].dtype, group_of(path, option_groups)) for path in session.order
    ]
    layout = plan_layout(entries, max(1, bucket_bytes // 4))
    groups = [(sorted(g.paths), sorted(g.options.items()), g.lr_scale) for g in option_groups]
    asked = repr((kind.name, sorted(options.items()), groups, masters, bucket_bytes))
    answers = session.comm.agree(
        f"layout of {name}",
        {
            "asked": hashlib.sha256(asked.encode()).hexdigest(),
            "layout": layout.to_json() if session.comm.rank == 0 else None,
        },
        problem,
    )
    if len({answer["asked"] for answer in answers}) > 1:
        raise by_all(UsageError(f"the ranks give {name} different optimizers or options; this rank: {asked}"))
    return FlatLayout.from_json(answers[0]["layout"])
