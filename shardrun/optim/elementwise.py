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

CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that are proposed at once: what the cache holds on a CPU, enough to fill a GPU."""


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
    state: dict[str, Tensor]
    """Flat views, also of what torch has not made yet: that memory is dead until the first gradient is committed."""
    first_leaf: Tensor | None = None
    """The proposed leaf of a first update, which commit copies instead of running a kernel that would allocate."""


@dataclass
class _Pass:
    """Pieces that are proposed together, with scratch leaves of the same sizes, and the copies that load them."""

    group: int
    pieces: list[_Piece]
    leaves: list[Tensor]
    optimizer: torch.optim.Optimizer
    source: list[Tensor]
    target: list[Tensor]


class SliceOptimizer:
    """An ordinary torch.optim object over this rank's slices. Local: no method communicates.

    `optimizer.param_groups[0]` holds what no option group names, the others follow in their order. Their options count
    in every step as they are then, so torch's schedulers of lr or weight decay work on them.
    """

    def __init__(
        self,
        kind: Elementwise,
        options: Mapping[str, Any],
        option_groups: Sequence[OptionGroup],
        slices: Sequence[SliceTensors],
        chunk_numel: int | None = None,
    ) -> None:
        device = slices[0].leaf.device if slices else torch.device("cpu")
        self._chunk_numel = chunk_numel or CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cpu"])
        assert self._chunk_numel % ALIGN == 0
        self.kind = kind
        self.lr_scales = [1.0, *(group.lr_scale for group in option_groups)]
        base = {**options, "fused": resolve_fused(options.get("fused"), options, device)}
        if not base["fused"]:
            # torch's multi-tensor kernels would allocate temporaries for all leaves at once, in commit too.
            base["foreach"] = False
        self.options = [base, *({**base, **group.options} for group in option_groups)]
        self._lazy = kind.lazy_keys()
        self._pieces: list[list[_Piece]] = [[] for _ in self.options]
        self.state_nbytes = 0
        for tensors in slices:
            self._cut(tensors)
        self._all_pieces = [piece for pieces in self._pieces for piece in pieces]
        self.optimizer = self._make([[piece.leaf for piece in pieces] for pieces in self._pieces])
        for group, scale in zip(self.optimizer.param_groups, self.lr_scales, strict=True):
            group["lr"] = float(options["lr"]) * scale
        for number, pieces in enumerate(self._pieces):
            for piece in pieces:
                self.optimizer.state[piece.leaf] = self._initial_state(number, piece.state)
        self._alone = all(tensors.proposed is None for tensors in slices)
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self._passes: list[_Pass] | None = None

    # ---- set-up ------------------------------------------------------------------------------------------------

    def _cut(self, tensors: SliceTensors) -> None:
        keys = self.kind.keys(self.options[tensors.option_group])
        flat = {key: torch.zeros_like(tensors.leaf) for key in keys} if tensors.fragments else {}
        self.state_nbytes += sum(tensor.nbytes for tensor in flat.values())
        for fragment in tensors.fragments:
            end = fragment.offset + fragment.stop - fragment.start
            for low in range(fragment.offset, end, self._chunk_numel):
                part = slice(low, min(low + self._chunk_numel, end))
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
        return factory(groups)

    def _initial_state(self, group: int, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state that torch itself would make at the first step, as views into the flat slices."""
        state = {key: view for key, view in flat.items() if key not in self._lazy}
        for key in self.kind.scalars:
            device = next(iter(flat.values())).device if self.options[group]["fused"] and flat else None
            state[key] = torch.zeros((), dtype=torch.float32, device=device)
        return state

    def _plan(self) -> list[_Pass]:
        """Pieces packed into passes of at most a chunk; made again whenever a first update gave state to a piece."""
        passes = []
        for group, pieces in enumerate(self._pieces):
            batch: list[_Piece] = []
            filled = 0
            for piece in pieces:
                numel = align(piece.leaf.numel())
                if batch and filled + numel > self._chunk_numel:
                    passes.append(self._pass(group, batch))
                    batch, filled = [], 0
                batch.append(piece)
                filled += numel
            if batch:
                passes.append(self._pass(group, batch))
        return passes

    def _pass(self, group: int, pieces: list[_Piece]) -> _Pass:
        leaves: list[Tensor] = []
        source: list[Tensor] = []
        target: list[Tensor] = []
        states: list[dict[str, Tensor]] = []
        offset = 0
        for piece in pieces:
            leaves.append(self._room("leaf", offset, piece.leaf))
            live = self.optimizer.state[piece.leaf]
            # Scalars are a few bytes; each scratch leaf has its own, copied with the rest.
            states.append(
                {k: torch.empty_like(v) if v.dim() == 0 else self._room(k, offset, v) for k, v in live.items()}
            )
            source += [piece.leaf, *live.values()]
            target += [leaves[-1], *states[-1].values()]
            offset += align(piece.leaf.numel())
        groups: list[list[Tensor]] = [[] for _ in self.options]
        groups[group] = leaves
        optimizer = self._make(groups)
        for leaf, state in zip(leaves, states, strict=True):
            optimizer.state[leaf] = state
        return _Pass(group, pieces, leaves, optimizer, source, target)

    def _room(self, key: str, offset: int, like: Tensor) -> Tensor:
        """Scratch (like.numel(),) at `offset` of the one chunk that all passes share."""
        chunk = self._scratch.get((key, like.dtype))
        if chunk is None:
            chunk = torch.empty(self._chunk_numel, dtype=like.dtype, device=like.device)
            self._scratch[key, like.dtype] = chunk
        return chunk[offset : offset + like.numel()]

    # ---- the step ----------------------------------------------------------------------------------------------

    def rates(self, lr: float | None) -> list[float]:
        """Learning rate per param group: `lr` times the group's `lr_scale`; None: as the param groups have it."""
        if lr is None:
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        return [lr * scale for scale in self.lr_scales]

    def terms(self) -> str:
        """The options that count in the next step, but for the rates; equal on all ranks, or the step is refused."""
        return repr([{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups])

    def propose(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Write the new slices to every bucket's `proposed`. Parameters, masters and state are only read.

        A world of one has no `proposed` and proposes first updates only, for the state that they make.
        """
        first = [piece for piece in self._all_pieces if present[piece.path] and self._is_fresh(piece)]
        if self._alone and not first:
            return
        if self._passes is None or first:
            for piece in first:
                piece.first_leaf = None  # of a proposal that was not committed
            self._passes = self._plan()
        for one in self._passes:
            one.optimizer.param_groups[one.group].update(self._live_options(one.group), lr=rates[one.group])
            torch._foreach_copy_(one.target, one.source)
            fresh = [present[piece.path] and self._is_fresh(piece) for piece in one.pieces]
            # Fused SGD takes no mixture of leaves with and without a momentum buffer.
            _run(one, [present[p.path] and not new for p, new in zip(one.pieces, fresh, strict=True)])
            _run(one, fresh)
            self._keep_first(one, fresh)
            if not self._alone:
                proposed = [piece.proposed for piece in one.pieces if piece.proposed is not None]
                torch._foreach_copy_(proposed, one.leaves)

    def _live_options(self, group: int) -> dict[str, Any]:
        return {key: value for key, value in self.optimizer.param_groups[group].items() if key != "params"}

    def _is_fresh(self, piece: _Piece) -> bool:
        """Whether torch has yet to make some state of the piece from its first gradient."""
        if not self._lazy:
            return False
        return any(key in piece.state and key not in self.optimizer.state[piece.leaf] for key in self._lazy)

    def _keep_first(self, one: _Pass, fresh: Sequence[bool]) -> None:
        """Keep what a first update made, in memory that nobody reads before the commit."""
        for piece, leaf, new in zip(one.pieces, one.leaves, fresh, strict=True):
            if new:
                state = one.optimizer.state[leaf]
                for key in self._lazy:
                    if key in state and key in piece.state:
                        piece.state[key].copy_(state.pop(key))
                piece.first_leaf = leaf.clone()

    def commit(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Step the live slices in place: the same kernel, the same gradient, the same bits as the proposal.

        A first update that makes state is not computed again, because that would allocate: its results are linked.
        """
        stepped: list[_Piece] = []
        linked: list[_Piece] = []
        for piece in self._all_pieces:
            if present[piece.path]:
                (stepped if piece.first_leaf is None else linked).append(piece)
        for piece in linked:
            assert piece.first_leaf is not None
            piece.leaf.copy_(piece.first_leaf)
            self.optimizer.state[piece.leaf] |= {key: piece.state[key] for key in self._lazy if key in piece.state}
            piece.first_leaf = None
            self._passes = None
        for piece in stepped:
            piece.leaf.grad = piece.grad
        before = self.rates(None)
        self._set_rates(rates)
        if stepped:
            self.optimizer.step()
        self._set_rates(before)
        for piece in stepped:
            piece.leaf.grad = None

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

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
        for piece in self._all_pieces:
            for key, value in self.optimizer.state[piece.leaf].items():
                if key in self.kind.scalars:
                    held = scalars.setdefault(f"{piece.path}/{key}", value.clone())
                    assert torch.equal(held, value), f"{piece.path}: {key} differs between pieces"
                else:
                    parts.setdefault(f"{piece.path}/{key}", []).append(value)
        return {**{name: torch.cat(views) for name, views in parts.items()}, **scalars}

    def expected_tensors(self, held: Collection[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) for `load_state_tensors`; state that a first gradient makes only if `held` has it."""
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for piece in self._all_pieces:
            expected |= {f"{piece.path}/{key}": ((), torch.float32) for key in self.kind.scalars}
            for key, view in piece.state.items():
                name = f"{piece.path}/{key}"
                if key not in self._lazy or name in held:
                    sizes[name] = sizes.get(name, 0) + view.numel()
                    dtypes[name] = view.dtype
        return expected | {name: ((numel,), dtypes[name]) for name, numel in sizes.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`, as `state_tensors` gives them; the caller has checked names and shapes."""
        taken: dict[str, int] = {}
        for group, pieces in enumerate(self._pieces):
            for piece in pieces:
                state = self._initial_state(group, piece.state)
                for key in self.kind.scalars:
                    state[key].copy_(tensors[f"{piece.path}/{key}"])
                for key, view in piece.state.items():
                    name = f"{piece.path}/{key}"
                    if name in tensors:
                        low = taken.get(name, 0)
                        state[key] = view.copy_(tensors[name][low : low + view.numel()])
                        taken[name] = low + view.numel()
                self.optimizer.state[piece.leaf] = state
        self._passes = None


def _run(one: _Pass, takes_part: Sequence[bool]) -> None:
    for piece, leaf, taken in zip(one.pieces, one.leaves, takes_part, strict=True):
        leaf.grad = piece.grad if taken else None
    if any(takes_part):
        one.optimizer.step()
