"""torch.optim over slices: proposed on scratch copies first, then run in place on the very same gradient.

[Note: propose and commit] A full shadow of the state would cost parameter-sized memory at two ranks. Instead the
kernel runs twice: on scratch copies of cache-sized chunks, where only the new parameter slice is kept, and at commit in
place on the live slices with the same reduced gradient. Chunks are cut at multiples of 256: the same bits both times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.kinds import Elementwise, OptionGroup, resolve_fused
from shardrun.shard.layout import ALIGN, Fragment, align

CHUNK_NUMEL = 1 << 18


@dataclass(frozen=True)
class SliceTensors:
    """What the optimizer needs of one bucket: this rank's slice (n,) of everything, and what stands in it."""

    option_group: int
    leaf: Tensor
    """(n,) what is stepped: the FP32 master, or the live parameter slice itself."""
    grad: Tensor
    """(n,) the reduced gradient in the leaf's dtype."""
    proposed: Tensor | None
    """(n,) in the parameter's dtype: where the proposal goes; None in a world of one, which proposes nothing."""
    fragments: tuple[Fragment, ...]


@dataclass
class _Piece:
    """At most a chunk of one fragment; a leaf of its own for torch.optim."""

    path: str
    leaf: Tensor
    grad: Tensor
    proposed: Tensor | None
    state: dict[str, Tensor]  # flat views, also of what torch has not made yet


@dataclass
class _Pass:
    """Pieces that are proposed together, with scratch leaves of the same sizes."""

    pieces: list[_Piece]
    scratch: list[Tensor]
    scratch_state: list[dict[str, Tensor]]
    optimizer: torch.optim.Optimizer


class SliceOptimizer:
    """An ordinary torch.optim object over this rank's slices. Local: no method communicates.

    `optimizer.param_groups[0]` holds what no option group names, the others follow in their order.
    """

    def __init__(
        self,
        kind: Elementwise,
        options: Mapping[str, Any],
        option_groups: Sequence[OptionGroup],
        slices: Sequence[SliceTensors],
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        assert chunk_numel % ALIGN == 0
        self.kind = kind
        self.base_lr = float(options["lr"])
        self.lr_scales = [1.0, *(group.lr_scale for group in option_groups)]
        device = slices[0].leaf.device if slices else torch.device("cpu")
        base = {**options, "fused": resolve_fused(options.get("fused"), options, device)}
        self.options = [base, *({**base, **group.options} for group in option_groups)]
        self._pieces: list[list[_Piece]] = [[] for _ in self.options]
        self.state_nbytes = 0
        for tensors in slices:
            self._cut(tensors, chunk_numel)
        self.optimizer = self._make([[piece.leaf for piece in pieces] for pieces in self._pieces])
        for group, pieces in enumerate(self._pieces):
            for piece in pieces:
                self.optimizer.state[piece.leaf] = self._fresh_state(group, piece.state)
        proposing = any(tensors.proposed is not None for tensors in slices)
        self._passes = self._plan_passes(chunk_numel) if proposing else []

    # ---- set-up ------------------------------------------------------------------------------------------------

    def _cut(self, tensors: SliceTensors, chunk_numel: int) -> None:
        keys = self.kind.keys(self.options[tensors.option_group])
        flat = {key: torch.zeros_like(tensors.leaf) for key in keys} if tensors.fragments else {}
        self.state_nbytes += sum(tensor.nbytes for tensor in flat.values())
        for fragment in tensors.fragments:
            end = fragment.offset + fragment.stop - fragment.start
            for low in range(fragment.offset, end, chunk_numel):
                part = slice(low, min(low + chunk_numel, end))
                self._pieces[tensors.option_group].append(
                    _Piece(
                        fragment.path,
                        tensors.leaf[part],
                        tensors.grad[part],
                        None if tensors.proposed is None else tensors.proposed[part],
                        {key: tensor[part] for key, tensor in flat.items()},
                    )
                )

    def _make(self, leaves: Sequence[Iterable[Tensor]]) -> torch.optim.Optimizer:
        groups = [{"params": list(group), **options} for group, options in zip(leaves, self.options, strict=True)]
        factory: Callable[..., torch.optim.Optimizer] = self.kind.cls
        return factory(groups, lr=self.base_lr)

    def _fresh_state(self, group: int, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state that torch itself would make at the first step, as views into the flat slices."""
        lazy = self.kind.lazy_keys()
        state = {key: view for key, view in flat.items() if key not in lazy}
        on_device = self.options[group]["fused"] or self.options[group].get("capturable")
        for key in self.kind.scalars:
            device = next(iter(flat.values())).device if on_device and flat else None
            state[key] = torch.zeros((), dtype=torch.float32, device=device)
        return state

    def _plan_passes(self, chunk_numel: int) -> list[_Pass]:
        scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        passes: list[_Pass] = []
        for group, pieces in enumerate(self._pieces):
            batch: list[_Piece] = []
            for piece in pieces:
                if batch and sum(align(p.leaf.numel()) for p in [*batch, piece]) > chunk_numel:
                    passes.append(self._pass(group, batch, scratch, chunk_numel))
                    batch = []
                batch.append(piece)
            if batch:
                passes.append(self._pass(group, batch, scratch, chunk_numel))
        return passes

    def _pass(
        self, group: int, pieces: list[_Piece], scratch: dict[tuple[str, torch.dtype], Tensor], chunk_numel: int
    ) -> _Pass:
        def room(key: str, offset: int, like: Tensor) -> Tensor:
            buffer = scratch.setdefault(
                (key, like.dtype), torch.empty(chunk_numel, dtype=like.dtype, device=like.device)
            )
            return buffer[offset : offset + like.numel()]

        leaves, states, offset = [], [], 0
        for piece in pieces:
            leaves.append(room("leaf", offset, piece.leaf))
            states.append({key: room(key, offset, view) for key, view in piece.state.items()})
            offset += align(piece.leaf.numel())
        groups: list[list[Tensor]] = [[] for _ in self.options]
        groups[group] = leaves
        return _Pass(pieces, leaves, states, self._make(groups))

    # ---- the step ----------------------------------------------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        """Use `lr` as the base rate; each option group's `lr_scale` multiplies it."""
        for optimizer in (self.optimizer, *(one.optimizer for one in self._passes)):
            for group, scale in zip(optimizer.param_groups, self.lr_scales, strict=True):
                group["lr"] = lr * scale

    def propose(self, present: Mapping[str, bool]) -> None:
        """Write the new slices to every bucket's `proposed`. Parameters, masters and state are only read."""
        for one in self._passes:
            self._load_scratch(one)
            for fresh in (True, False):
                for piece, leaf in zip(one.pieces, one.scratch, strict=True):
                    takes_part = present[piece.path] and self._is_fresh(piece) == fresh
                    leaf.grad = piece.grad if takes_part else None
                _step_if_any(one.optimizer, one.scratch)
            torch._foreach_copy_([piece.proposed for piece in one.pieces if piece.proposed is not None], one.scratch)

    def _load_scratch(self, one: _Pass) -> None:
        source, target = [piece.leaf for piece in one.pieces], list(one.scratch)
        for piece, leaf, room in zip(one.pieces, one.scratch, one.scratch_state, strict=True):
            live = self.optimizer.state[piece.leaf]
            state: dict[str, Tensor] = {}
            for key, value in live.items():
                if key in self.kind.scalars:
                    state[key] = value.clone()
                else:
                    state[key] = room[key]
                    source.append(value)
                    target.append(room[key])
            one.optimizer.state[leaf] = state
        torch._foreach_copy_(target, source)

    def commit(self, present: Mapping[str, bool]) -> None:
        """Step the live slices in place: the same kernel, the same gradient, the same bits as the proposal."""
        taking_part_at_all = [piece for pieces in self._pieces for piece in pieces if present[piece.path]]
        fresh = [piece for piece in taking_part_at_all if self._is_fresh(piece)]
        stepped_before = [piece for piece in taking_part_at_all if not self._is_fresh(piece)]
        for taking_part in (fresh, stepped_before):
            for piece in taking_part:
                piece.leaf.grad = piece.grad
            _step_if_any(self.optimizer, [piece.leaf for piece in taking_part])
            for piece in taking_part:
                piece.leaf.grad = None
                self._keep_flat(piece)

    def _is_fresh(self, piece: _Piece) -> bool:
        """Whether torch has yet to make some state from the first gradient. Fused SGD takes no mixture of both."""
        return any(key in piece.state and key not in self.optimizer.state[piece.leaf] for key in self.kind.lazy_keys())

    def _keep_flat(self, piece: _Piece) -> None:
        """State that torch made at a first step moves into its place in the flat slice."""
        state = self.optimizer.state[piece.leaf]
        for key in self.kind.lazy_keys():
            made = state.get(key)
            if made is not None and key in piece.state and made is not piece.state[key]:
                state[key] = piece.state[key].copy_(made)

    def described(self) -> list[dict[str, Any]]:
        """Options per option group as plain JSON, the base rate left out: schedules change it."""
        groups = [
            {**{key: value for key, value in options.items() if key != "lr"}, "lr_scale": scale}
            for options, scale in zip(self.options, self.lr_scales, strict=True)
        ]
        plain: list[dict[str, Any]] = json.loads(json.dumps(groups))
        return plain

    # ---- records -----------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """ "<path>/<key>" -> a copy of this rank's fragment (1-D) or of the parameter's scalar (0-dim)."""
        parts: dict[str, list[Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for piece in (piece for pieces in self._pieces for piece in pieces):
            for key, value in self.optimizer.state[piece.leaf].items():
                if key in self.kind.scalars:
                    held = scalars.setdefault(f"{piece.path}/{key}", value.clone())
                    assert torch.equal(held, value), f"{piece.path}: {key} differs between pieces"
                else:
                    parts.setdefault(f"{piece.path}/{key}", []).append(value)
        return {**{name: torch.cat(views) for name, views in parts.items()}, **scalars}

    def expected_tensors(self, held: Collection[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) for `load_state_tensors`; state that a first gradient makes only if `held` has it."""
        lazy = self.kind.lazy_keys()
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for piece in (piece for pieces in self._pieces for piece in pieces):
            expected |= {f"{piece.path}/{key}": ((), torch.float32) for key in self.kind.scalars}
            for key, view in piece.state.items():
                name = f"{piece.path}/{key}"
                if key not in lazy or name in held:
                    sizes[name] = sizes.get(name, 0) + view.numel()
                    dtypes[name] = view.dtype
        return expected | {name: ((numel,), dtypes[name]) for name, numel in sizes.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`, as `state_tensors` gives them; the caller has checked names and shapes."""
        taken: dict[str, int] = {}
        for group, pieces in enumerate(self._pieces):
            for piece in pieces:
                state = self._fresh_state(group, piece.state)
                for key in self.kind.scalars:
                    state[key].copy_(tensors[f"{piece.path}/{key}"])
                for key, view in piece.state.items():
                    name = f"{piece.path}/{key}"
                    if name in tensors:
                        low = taken.get(name, 0)
                        state[key] = view.copy_(tensors[name][low : low + view.numel()])
                        taken[name] = low + view.numel()
                self.optimizer.state[piece.leaf] = state


def _step_if_any(optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor]) -> None:
    if any(leaf.grad is not None for leaf in leaves):
        optimizer.step()
