"""torch.optim over whole tensors, for the rank that owns them: stepped in a shadow, then copied over.

[Note: shadow] A kernel that runs again at the commit would cost a Newton-Schulz iteration twice, and a user's own
optimizer could raise there. So the whole step happens in the proposal, on copies of leaf and state that stay allocated:
memory of the owned parameters and their state once more. The commit only copies, into memory that was there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.grouped import GroupedOptimizer
from shardrun.optim.kinds import OptionGroup
from shardrun.optim.state import MASTER, forms_of, from_record, require_recordable, to_record
from shardrun.optim.stepper import Shapes
from shardrun.optim.table import Kind


@dataclass(frozen=True)
class WholeTensor:
    """What the optimizer needs of one parameter that this rank owns; all of the parameter's shape."""

    path: str
    option_group: int
    leaf: Tensor
    """What is stepped: the FP32 master, or the live parameter itself."""
    grad: Tensor
    """The reduced gradient in the leaf's dtype; read only."""
    proposed: Tensor | None
    """In the parameter's dtype: where `stage` writes; None if nobody needs it before the commit."""


@dataclass
class _Shadow:
    """The proposed side of one tensor."""

    tensor: WholeTensor
    leaf: Tensor
    room: dict[str, Tensor] = field(default_factory=dict)
    """Memory for a copy of the live state, by key."""
    result: dict[str, Any] | None = None
    """The state after the proposed update: new tensors and numbers only; what lives on is copied by `targets`."""


class TensorOptimizer(GroupedOptimizer):
    """An ordinary torch.optim object over whole tensors, of any `Kind`; has the surface of `Stepper`. Local.

    See [Note: shadow]. Without leaves (a rank that owns nothing) it does nothing. State is what the optimizer makes of
    it: tensors of any shape and plain numbers.
    """

    def __init__(
        self,
        kind: Kind,
        options: Mapping[str, Any],
        option_groups: Sequence[OptionGroup],
        tensors: Sequence[WholeTensor],
    ) -> None:
        device = tensors[0].leaf.device if tensors else torch.device("cpu")
        # Other ranks own other tensors: an open `fused` is settled as if every rank had 16-bit leaves.
        dtypes = {tensor.leaf.dtype for tensor in tensors} | (
            {torch.bfloat16} if options.get("fused") is None else set()
        )
        super().__init__(kind, options, option_groups, device, dtypes)
        self._shadows = [_Shadow(tensor, torch.empty_like(tensor.leaf)) for tensor in tensors]
        self._start(self._by_group([shadow.tensor.leaf for shadow in self._shadows]))
        self._shadow_optimizer = self._make(self._by_group([shadow.leaf for shadow in self._shadows]))
        for tensor in tensors:
            self._reset(tensor)
        paths: list[list[str]] = [[] for _ in self.options]
        for tensor in tensors:
            paths[tensor.option_group].append(tensor.path)
        self._watch(paths)
        self._source: list[Tensor] = []
        self._target: list[Tensor] = []
        for shadow in self._shadows:  # all memory of a step is there from the beginning, and told by `shadow_nbytes`
            self._load(shadow)

    def _by_group(self, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
        groups: list[list[Tensor]] = [[] for _ in self.options]
        for shadow, leaf in zip(self._shadows, leaves, strict=True):
            groups[shadow.tensor.option_group].append(leaf)
        return groups

    def _reset(self, tensor: WholeTensor) -> None:
        """State as before the first update. Of a declared optimizer: what its constructor made, or nothing."""
        if self.kind.declared is None:
            spec = self.kind.spec(self.options[tensor.option_group], tensor.leaf)
            elements = {key: torch.empty_like(tensor.leaf, dtype=dtype) for key, dtype in spec.elements.items()}
            self.optimizer.state[tensor.leaf] = spec.initial(elements)
        else:
            self.optimizer.state[tensor.leaf] = dict(self.optimizer.state.get(tensor.leaf, {}))

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank; what a first update makes counts from then on."""
        held = [value for shadow in self._shadows for value in self._live(shadow).values() if isinstance(value, Tensor)]
        return sum(value.nbytes for value in held)

    @property
    def shadow_nbytes(self) -> int:
        """Bytes of the copies of leaves and state that proposals are made in."""
        return sum(shadow.leaf.nbytes + sum(room.nbytes for room in shadow.room.values()) for shadow in self._shadows)

    def _live(self, shadow: _Shadow) -> dict[str, Any]:
        live: dict[str, Any] = self.optimizer.state.get(shadow.tensor.leaf, {})
        return live

    # ---- the step ----------------------------------------------------------------------------------------------

    def propose(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Step the shadow; live leaves and state are only read. See `Stepper`."""
        self._require_same_state()
        self._source, self._target = [], []
        for group, rate in enumerate(rates):
            self._shadow_optimizer.param_groups[group].update(self._live_options(group), lr=rate)
        stepped = [shadow for shadow in self._shadows if present[shadow.tensor.path]]
        for shadow in self._shadows:  # absent ones as well: nothing of an earlier proposal may be seen in this one
            self._load(shadow)
        # torch's fused SGD takes no mixture of leaves with and without a momentum buffer.
        self._run([shadow for shadow in stepped if self._live(shadow)])
        self._run([shadow for shadow in stepped if not self._live(shadow)])
        for shadow in stepped:
            self._take(shadow)

    def stage(self, present: Mapping[str, bool]) -> None:
        """Write every `proposed` from the shadow, absent ones as they are. See `Stepper`."""
        for shadow in self._shadows:
            if shadow.tensor.proposed is not None:
                shadow.tensor.proposed.copy_(shadow.leaf)

    def _load(self, shadow: _Shadow) -> None:
        """Leaf and state as they are live, into the shadow; whatever was left there is gone."""
        shadow.result = None
        shadow.leaf.copy_(shadow.tensor.leaf)
        state: dict[str, Any] = {}
        for key, value in self._live(shadow).items():
            if isinstance(value, Tensor):
                room = shadow.room.get(key)
                if room is None or room.shape != value.shape or room.dtype != value.dtype:
                    room = shadow.room[key] = torch.empty_like(value)
                state[key] = room.copy_(value)
            else:
                state[key] = value
        self._shadow_optimizer.state.pop(shadow.leaf, None)
        if state:
            self._shadow_optimizer.state[shadow.leaf] = state

    def _run(self, shadows: Sequence[_Shadow]) -> None:
        if not shadows:
            return
        try:
            for shadow in shadows:
                shadow.leaf.grad = shadow.tensor.grad
            self._shadow_optimizer.step()
        finally:
            for shadow in shadows:
                shadow.leaf.grad = None

    def _take(self, shadow: _Shadow) -> None:
        """Line up what the commit copies; what the update made anew is copied out here, so that it can be linked."""
        made = self._shadow_optimizer.state.get(shadow.leaf, {})
        if self.kind.declared is not None:
            require_recordable(self.kind.name, shadow.tensor.path, made)
        live = self._live(shadow)
        self._source.append(shadow.leaf)
        self._target.append(shadow.tensor.leaf)
        shadow.result = {}
        for key, value in made.items():
            before = live.get(key)
            if not isinstance(value, Tensor):
                shadow.result[key] = value
            elif isinstance(before, Tensor) and before.shape == value.shape and before.dtype == value.dtype:
                shadow.result[key] = before
                self._source.append(value)
                self._target.append(before)
            else:
                shadow.result[key] = value.clone()
        if not live:
            self._shadow_optimizer.state.pop(shadow.leaf, None)  # its tensors were copied out: let them go

    def commit(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Copy the shadow over, and link state that is new; runs no kernel of the optimizer. See `Stepper`."""
        if self._target:
            torch._foreach_copy_(self._target, self._source)
        for shadow in self._shadows:
            if shadow.result is not None:
                self.optimizer.state[shadow.tensor.leaf] = shadow.result
                shadow.result = None
        self._source, self._target = [], []
        self._guard.note_state()
        self._mark_stepped()

    # ---- records -----------------------------------------------------------------------------------------------

    def state_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """ "<path>/<key>" -> the owned parameter's state, of its own shape; numbers and `copy` as in `Stepper`."""
        self._require_own_state()
        found = {}
        for shadow in self._shadows:
            for key, value in self._live(shadow).items():
                name, tensor = to_record(key, value, copy=copy)
                found[f"{shadow.tensor.path}/{name}"] = tensor
        return found

    def listed_state(self) -> dict[str, list[str]] | None:
        """See `Stepper`."""
        listed = {}
        for shadow in self._shadows:
            spec = None
            if self.kind.declared is None:
                spec = self.kind.spec(self.options[shadow.tensor.option_group], shadow.tensor.leaf)
            if spec is None or not spec.eager:
                listed[shadow.tensor.path] = sorted(forms_of(self._live(shadow)))
        return listed or None

    def expected_tensors(self, held: Mapping[str, Tensor]) -> Shapes:
        """As `Stepper` says. Of a declared optimizer: what `held` has for an owned path, and if that is anything, the
        state that is live now, in its form; an optimizer whose state changes its form loads into a new session."""
        expected: Shapes = {}
        for shadow in self._shadows:
            path, leaf = shadow.tensor.path, shadow.tensor.leaf
            if self.kind.declared is not None:
                own = _of_path(path, held)
                forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
                forms |= forms_of(self._live(shadow)) if own else {}
                expected |= {f"{path}/{name}": form for name, form in forms.items()}
                continue
            spec = self.kind.spec(self.options[shadow.tensor.option_group], leaf)
            wanted = spec.recorded(tuple(leaf.shape))
            if spec.eager or any(f"{path}/{key}" in held for key in wanted):
                expected |= {f"{path}/{key}": shape for key, shape in wanted.items()}
        return expected

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state; see `Stepper`."""
        for shadow in self._shadows:
            own = _of_path(shadow.tensor.path, tensors)
            state = dict(from_record(name, tensor) for name, tensor in own.items())
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(self._device_of(shadow, key, value))
            self.optimizer.state[shadow.tensor.leaf] = state
            shadow.result = None
        self._source, self._target = [], []
        self._guard.note_state()

    def _device_of(self, shadow: _Shadow, key: str, value: Tensor) -> torch.device:
        """Where the optimizer wants `key`. Of a declared one nobody knows before its first update: as torch does it."""
        leaf, live = shadow.tensor.leaf, self._live(shadow).get(key)
        if isinstance(live, Tensor):
            return live.device
        if self.kind.declared is None and key in (
            scalars := self.kind.spec(self.options[shadow.tensor.option_group], leaf).scalars
        ):
            return scalars[key].device
        return leaf.device if value.dim() else torch.device("cpu")


def _of_path(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name within the parameter's state -> tensor; masters left out."""
    prefix = f"{path}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in own.items() if name != MASTER and "/" not in name}
