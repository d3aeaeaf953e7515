"""torch.optim over slices: proposed on scratch copies first, then run in place on the very same gradient.

[Note: propose and commit] A full shadow of the state, or of the new slice, would cost parameter-sized memory at two
ranks. Instead the kernel runs twice: on scratch copies of cache-sized chunks, from which only the new parameter slice
is taken, and at commit in place on the live slices with the same reduced gradient. Chunks are cut at multiples of 256:
the same bits both times. The new slice goes to the memory of the pending gradients, which a failure must find whole as
long as anything else can go wrong: `propose` tries the kernel on one chunk of each param group, `stage` runs all. Where
one chunk holds all slices, `propose` runs all, and `stage` takes what it has left in the scratch.

What the commit allocates: nothing that stays. A first update that makes state is not run again, its results are linked.
A fused kernel needs no memory. One that is not fused takes temporaries of one leaf (at most a chunk) and frees them
before the next leaf, as it did in the proposal just before. A user's own optimizer runs in the proposal alone: its
results are kept, parameter- and state-sized on this rank's slices, and the commit copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardrun.errors import UsageError
from shardrun.optim.grouped import GroupedOptimizer
from shardrun.optim.kinds import OptionGroup
from shardrun.optim.pieces import CHUNK_NUMEL, Kept, Pass, Piece, Scratch, SliceTensors, cut, packed
from shardrun.optim.state import StateSpec, from_record, to_record
from shardrun.optim.stepper import Shapes
from shardrun.optim.table import Elementwise
from shardrun.shard.layout import ALIGN, align

__all__ = ["SliceOptimizer", "SliceTensors"]


class SliceOptimizer(GroupedOptimizer):
    """An ordinary torch.optim object over this rank's slices; has the surface of `Stepper`. Local.

    The bits of the unsharded optimizer of the same class, options and `fused` flag (`foreach=False` where that is off),
    as long as fragments are cut at multiples of 256. See [Note: propose and commit].
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
        super().__init__(kind, options, option_groups, device, {tensors.leaf.dtype for tensors in slices})
        self._chunk_numel = chunk_numel or CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cpu"])
        assert self._chunk_numel % ALIGN == 0
        self._alone = all(tensors.proposed is None for tensors in slices)
        # The code of a user must not raise in a commit, so it never runs there.
        self._keeps_all = kind.declared is not None
        self._pieces: list[list[Piece]] = [[] for _ in self.options]
        self._of_slice: list[list[Piece]] = []
        self._groups: list[int] = []  # of each slice
        self._specs: dict[tuple[int, torch.dtype], StateSpec] = {}
        self._cut_all(slices, device)
        self._all_pieces = [piece for pieces in self._pieces for piece in pieces]
        self._start([[piece.leaf for piece in pieces] for pieces in self._pieces])
        for piece in self._all_pieces:
            self._begin(piece)
        self._watch([[piece.path for piece in pieces] for pieces in self._pieces])
        self._scratch = Scratch(self._chunk_numel)
        self._all_fit = sum(align(piece.leaf.numel()) for piece in self._all_pieces) <= self._chunk_numel
        self._passes: list[list[Pass]] | None = None

    # ---- set-up ------------------------------------------------------------------------------------------------

    def _cut_all(self, slices: Sequence[SliceTensors], device: torch.device) -> None:
        """The pieces of all slices. Their state has one memory per key and dtype: many small ones get no huge pages."""
        numels: dict[tuple[str, torch.dtype], int] = {}
        for tensors in slices:
            for key, dtype in self._spec_for(tensors).elements.items():
                numels[key, dtype] = numels.get((key, dtype), 0) + tensors.leaf.numel()
        memory = {(key, dtype): torch.zeros(n, dtype=dtype, device=device) for (key, dtype), n in numels.items()}
        self.state_nbytes = sum(tensor.nbytes for tensor in memory.values())
        for tensors in slices:
            flat = {}
            for key, dtype in self._spec_for(tensors).elements.items():
                flat[key], memory[key, dtype] = memory[key, dtype].tensor_split([tensors.leaf.numel()])
            self._groups.append(tensors.option_group)
            self._of_slice.append(list(cut(tensors, self._spec_for(tensors), flat, self._chunk_numel)))
            self._pieces[tensors.option_group] += self._of_slice[-1]

    def _spec_for(self, tensors: SliceTensors) -> StateSpec:
        if not tensors.fragments:
            return StateSpec()
        group, dtype = tensors.option_group, tensors.leaf.dtype
        if (group, dtype) not in self._specs:
            self._specs[group, dtype] = self.kind.spec(self.options[group], tensors.leaf)
        return self._specs[group, dtype]

    def _spec_of(self, group: int) -> StateSpec | None:
        of_group = (spec for (number, _), spec in self._specs.items() if number == group)
        return next(of_group, None) if self._keeps_all else None

    def _begin(self, piece: Piece) -> None:
        """The state that is there before the first update, in the flat slices; for the rest, none."""
        made = self.optimizer.state.get(piece.leaf, {})
        if self.kind.declared is None:
            self.optimizer.state[piece.leaf] = piece.spec.initial(piece.elements)
        else:
            in_place = {key: view.copy_(made[key]) for key, view in piece.elements.items() if key in made}
            self.optimizer.state[piece.leaf] = {**made, **in_place}

    def _plan(self) -> list[list[Pass]]:
        """The pieces of each slice packed into passes of at most a chunk, which take turns in the scratch unless all
        fit; made again whenever a first update gave state to a piece."""
        passes: list[list[Pass]] = []
        begin = 0
        for group, pieces in zip(self._groups, self._of_slice, strict=True):
            passes.append([])
            for batch in packed(pieces, self._chunk_numel):
                passes[-1].append(self._pass(group, batch, begin))
                begin += sum(align(piece.leaf.numel()) for piece in batch) if self._all_fit else 0
        return passes

    def _pass(self, group: int, pieces: list[Piece], offset: int) -> Pass:
        leaves: list[Tensor] = []
        source: list[Tensor] = []
        target: list[Tensor] = []
        states: list[dict[str, Tensor]] = []
        for piece in pieces:
            leaves.append(self._scratch.room("/leaf", offset, piece.leaf))
            live = {key: value for key, value in self.optimizer.state[piece.leaf].items() if isinstance(value, Tensor)}
            # Scalars are a few bytes; each scratch leaf has its own, copied with the rest.
            states.append(
                {
                    k: self._scratch.room(k, offset, v) if k in piece.elements else torch.empty_like(v)
                    for k, v in live.items()
                }
            )
            source += [piece.leaf, *live.values()]
            target += [leaves[-1], *states[-1].values()]
            offset += align(piece.leaf.numel())
        groups: list[list[Tensor]] = [[] for _ in self.options]
        groups[group] = leaves
        optimizer = self._make(groups)
        for leaf, state in zip(leaves, states, strict=True):
            optimizer.state[leaf] = dict(state)
        return Pass(group, pieces, leaves, states, optimizer, source, target)

    # ---- the step ----------------------------------------------------------------------------------------------

    def propose(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Run what the commit cannot run again, and of the rest one pass of each param group; see `Stepper`.

        See [Note: propose and commit]. A world of one has nothing to stage and tries nothing.
        """
        self._require_same_state()
        fresh = {piece.path for piece in self._all_pieces if present[piece.path] and self._is_fresh(piece)}
        if self._alone and not (fresh or self._keeps_all):
            return
        if self._passes is None or fresh:
            self._passes = self._plan()
        tried: set[int] = set()
        for one in chain.from_iterable(self._passes):
            one.optimizer.param_groups[one.group].update(self._live_options(one.group), lr=rates[one.group])
            kept = [self._keeps_all or piece.path in fresh for piece in one.pieces]
            if any(kept) or ((self._all_fit or one.group not in tried) and not self._alone):
                tried.add(one.group)
                self._load(one)
                stepped = [present[piece.path] for piece in one.pieces]
                # Fused SGD takes no mixture of leaves with and without a momentum buffer.
                one.run([taken and piece.path not in fresh for taken, piece in zip(stepped, one.pieces, strict=True)])
                one.run([piece.path in fresh for piece in one.pieces])
                self._keep(one, [taken and keep for taken, keep in zip(stepped, kept, strict=True)])

    def stage(self, present: Mapping[str, bool]) -> None:
        """Write the new slices to every piece's `proposed`; see `Stepper`. Not called in a world of one."""
        for number in range(len(self._of_slice)):
            self.stage_slice(number, present)

    def stage_slice(self, number: int, present: Mapping[str, bool]) -> None:
        """The same for one slice, in the order in which they were given."""
        for one in self._passes[number] if self._passes else ():
            kept = [piece.kept if present[piece.path] else None for piece in one.pieces]
            if not self._all_fit:
                self._load(one)
                one.run([present[piece.path] and held is None for piece, held in zip(one.pieces, kept, strict=True)])
            new = [leaf if held is None else held.leaf for leaf, held in zip(one.leaves, kept, strict=True)]
            torch._foreach_copy_([piece.proposed for piece in one.pieces if piece.proposed is not None], new)

    def _is_fresh(self, piece: Piece) -> bool:
        """Whether torch has yet to make the state of the piece in its first update."""
        return not piece.spec.eager and not self.optimizer.state[piece.leaf]

    def _load(self, one: Pass) -> None:
        """Leaves and state as they are live, into the scratch of a pass."""
        torch._foreach_copy_(one.target, one.source)
        if not self._keeps_all:
            return
        # A user's code may have put other tensors into the scratch state; numbers are not copied with the tensors.
        for piece, leaf, state in zip(one.pieces, one.leaves, one.states, strict=True):
            one.optimizer.state.pop(leaf, None)
            if live := self.optimizer.state[piece.leaf]:
                one.optimizer.state[leaf] = {key: state.get(key, value) for key, value in live.items()}

    def _keep(self, one: Pass, wanted: Sequence[bool]) -> None:
        """Keep what an update left, in memory that nobody reads before the commit."""
        for piece, leaf, taken in zip(one.pieces, one.leaves, wanted, strict=True):
            if not taken:
                continue
            live, state = self.optimizer.state[piece.leaf], one.optimizer.state[leaf]
            if self._keeps_all and (misfit := piece.spec.misfit(state, leaf)):
                raise UsageError(
                    f"{self.kind.name}: after this update of {piece.path} {misfit}, which is not what a vector had at "
                    "set-up; all state is made in the first update, and keeps its shape and dtype"
                )
            kept = piece.kept = piece.kept or Kept(torch.empty_like(leaf))
            kept.leaf.copy_(leaf)
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    kept.state[key] = value
                elif key not in live and key in piece.elements:
                    kept.state[key] = piece.elements[key].copy_(value)
                elif key in kept.state:
                    kept.state[key].copy_(value)
                else:
                    kept.state[key] = value.clone()

    def commit(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Step the live slices in place: the same kernel, the same gradient, the same bits as the proposal.

        What was kept of the proposal is not computed again, because that would allocate: its results are taken over.
        """
        stepped: list[Piece] = []
        took_over = False
        for piece in self._all_pieces:
            if present[piece.path]:
                if piece.kept is None:
                    stepped.append(piece)
                else:
                    self._take_over(piece, piece.kept)
                    took_over = True
        for piece in stepped:
            piece.leaf.grad = piece.grad
        before = self.rates(None)
        self._set_rates(rates)
        if stepped:
            self.optimizer.step()
        self._set_rates(before)
        for piece in stepped:
            piece.leaf.grad = None
        if took_over:  # torch's own kernels write into the tensors that are there
            self._guard.note_state()
        self._mark_stepped()

    def _take_over(self, piece: Piece, kept: Kept) -> None:
        live = self.optimizer.state[piece.leaf]
        piece.leaf.copy_(kept.leaf)
        if self._is_fresh(piece):
            live.update(kept.state)
            piece.kept = self._passes = None  # the kept tensors are live now
            return
        for key, value in kept.state.items():
            if isinstance(value, Tensor):
                live[key].copy_(value)
            else:
                live[key] = value

    # ---- records -----------------------------------------------------------------------------------------------

    def state_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """ "<path>/<key>" -> this rank's fragment (1-D) or the parameter's scalar (0-dim); see `Stepper`."""
        self._require_own_state()
        parts: dict[str, list[Tensor]] = {}
        scalars: dict[str, Tensor] = {}
        for piece in self._all_pieces:
            for key, value in self.optimizer.state[piece.leaf].items():
                if key in piece.elements:
                    parts.setdefault(f"{piece.path}/{key}", []).append(value)
                    continue
                name, tensor = to_record(key, value)
                tensor = tensor.reshape(())
                held = scalars.setdefault(f"{piece.path}/{name}", tensor)
                assert torch.equal(held, tensor), f"{piece.path}: {key} differs between pieces"
        joined = {
            name: torch.cat(views) if copy or len(views) > 1 else views[0].detach() for name, views in parts.items()
        }
        return {**joined, **scalars}

    def listed_state(self) -> dict[str, list[str]] | None:
        """See `Stepper`."""
        listed = {}
        for piece in self._all_pieces:
            if not piece.spec.eager:
                names = piece.spec.recorded((0,)) if self.optimizer.state[piece.leaf] else ()
                listed[piece.path] = sorted(names)
        return listed if any(not spec.eager for spec in self._specs.values()) else None

    def expected_tensors(self, held: Mapping[str, Tensor]) -> Shapes:
        """As `Stepper` says; of a fragment (1-D), or of the parameter's scalar (0-dim)."""
        numels: dict[str, int] = {}
        specs: dict[str, StateSpec] = {}
        for piece in self._all_pieces:
            numels[piece.path] = numels.get(piece.path, 0) + piece.leaf.numel()
            specs[piece.path] = piece.spec
        expected: Shapes = {}
        for path, spec in specs.items():
            wanted = {f"{path}/{name}": shape for name, shape in spec.recorded((numels[path],)).items()}
            if spec.eager or any(name in held for name in wanted):
                expected |= wanted
        return expected

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`, as `state_tensors` gives them; the caller has checked names and shapes."""
        taken: dict[str, int] = {}
        for piece in self._all_pieces:
            state: dict[str, Any] = {}
            low = taken.get(piece.path, 0)
            taken[piece.path] = high = low + piece.leaf.numel()
            for name in piece.spec.recorded((0,)):
                held = tensors.get(f"{piece.path}/{name}")
                if held is None:
                    continue
                if name in piece.elements:
                    state[name] = piece.elements[name].copy_(held[low:high])
                    continue
                key, value = from_record(name, held)
                scalar = piece.spec.scalars.get(key)
                if isinstance(value, Tensor) and scalar is not None:
                    value = value.to(scalar.device).reshape(scalar.shape)
                state[key] = value
            self.optimizer.state[piece.leaf] = state
            piece.kept = None
        self._passes = None
        self._guard.note_state()
