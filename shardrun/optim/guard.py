"""Whether the torch.optim object that a user holds is still the one that the engine steps, and can take a step.

Everything is looked at before the ranks agree on a step, so that what a user did on one rank is refused by all of them
with nothing changed; found out later, in a proposal, it would close the communicator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardrun.optim.declared import PROBED_SHAPES
from shardrun.optim.state import StateSpec
from shardrun.optim.table import Kind

_SETTLED = ("fused", "foreach", "capturable", "differentiable")
_NOT_COMPARED = ("params", "lr")


class Guard:
    """What an engine's optimizer has to be like in its next step: param groups, leaves, step hooks, state. Local.

    `given`: constructor options per param group; `paths`: the parameters' names, in the order of the groups' leaves;
    `spec_of`: what the state of a group's leaves consists of, where an update may make no other.
    """

    def __init__(
        self,
        kind: Kind,
        optimizer: torch.optim.Optimizer,
        given: Sequence[Mapping[str, Any]],
        paths: Sequence[Sequence[str]],
        spec_of: Callable[[int], StateSpec | None],
    ) -> None:
        self._kind = kind
        self._optimizer = optimizer
        self._given = given
        self._paths = [path for group in paths for path in group]
        self._spec_of = spec_of
        self._leaves: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self._begun = [_compared(group) for group in optimizer.param_groups]
        self._fits = [repr(options) for options in self._begun]
        self._hooks = _step_hooks(optimizer)
        # Of a declared optimizer the state itself is looked at.
        self._keys = [set(kind.keys(one)) for one in self._begun] if kind.declared is None else []
        self._state: list[tuple[Tensor, dict[str, Any]]] = []
        self.note_state()

    def note_state(self) -> None:
        """Take the present state for the engine's own; after whatever the engine itself put there."""
        state = self._optimizer.state
        self._state = [(leaf, dict(state.get(leaf, {}))) for leaves in self._leaves for leaf in leaves]

    def problems(self) -> list[str]:
        """What a user did to the optimizer that the next step cannot go on with; empty if nothing. Raises nothing."""
        try:
            if moved := self._moved_leaves():
                return [moved]
            found = [self._new_hooks(), self.foreign_state(), *map(self._unfit_options, range(len(self._begun)))]
        except Exception as error:  # a user may have put anything there
            found = [f"{self._kind.name}: optimizer cannot be read any more ({type(error).__name__}: {error})"]
        return [problem for problem in found if problem is not None]

    def _moved_leaves(self) -> str | None:
        groups = self._optimizer.param_groups
        way = "its param groups and their params are made at set-up; make a new session for others"
        if len(groups) != len(self._leaves):
            return f"{self._kind.name}: optimizer has {len(groups)} param groups, at set-up {len(self._leaves)}; {way}"
        for number, (group, leaves) in enumerate(zip(groups, self._leaves, strict=True)):
            now = group["params"]
            if len(now) != len(leaves) or any(one is not other for one, other in zip(now, leaves, strict=True)):
                return (
                    f"{self._kind.name}: param group {number} of optimizer has {len(now)} params that are not the "
                    f"{len(leaves)} of set-up; {way}"
                )
        return None

    def _new_hooks(self) -> str | None:
        before = {id(hook) for hook in self._hooks}
        new = [hook for hook in _step_hooks(self._optimizer) if id(hook) not in before]
        if not new:
            return None
        named = getattr(new[0], "__qualname__", repr(new[0]))
        return (
            f"{self._kind.name}: a step hook ({named}) is registered on optimizer; it would run in the commit, where "
            "nothing may fail; remove it, and call what it does before or after the step"
        )

    def foreign_state(self) -> str | None:
        """Which parameter's state is not what the engine left there, or None; tensors are compared by identity."""
        state = self._optimizer.state
        for number, (leaf, own) in enumerate(self._state):
            live = state.get(leaf, {})
            if len(live) == len(own) and all(live.get(key) is value for key, value in own.items()):
                continue
            keys = sorted({*live, *own}, key=str)
            other = [str(key) for key in keys if key not in live or key not in own or live[key] is not own[key]]
            return (
                f"{self._kind.name}: the state of {self._paths[number]} was replaced or removed in optimizer.state "
                f"({', '.join(other)}), by optimizer.load_state_dict for example; a step goes on with the tensors that "
                "it made. Restore state with load_record, from a record of to_record"
            )
        return None

    def more_state(self, number: int) -> str | None:
        """The problem of an option that was switched on after set-up and would need other state, or None."""
        if not self._keys:
            return None
        more = sorted(set(self._kind.keys(self._optimizer.param_groups[number])) - self._keys[number])
        if not more:
            return None
        return (
            f"{self._kind.name}: param group {number} now needs the state {', '.join(more)}, which is made at set-up; "
            "switch it on there"
        )

    def _unfit_options(self, number: int) -> str | None:
        """An option that was changed in a param group to what cannot be; tried out once for each change."""
        before, live = self._begun[number], _compared(self._optimizer.param_groups[number])
        shown = repr(live)
        if shown == self._fits[number]:
            return None
        told = f"{self._kind.name}: param group {number} of optimizer"
        if lost := sorted(before.keys() - live.keys()):
            return f"{told} has no {', '.join(lost)} any more; put it back"
        for key in _SETTLED:
            if key in before and live[key] is not before[key]:
                return f"{told} has {key} = {live[key]!r}, at set-up {before[key]!r}; it is settled there"
        if more := self.more_state(number):
            return more
        changed = {key: value for key, value in live.items() if repr(before.get(key)) != repr(value)}
        try:
            misfit = self._try_out(number, live)
        except Exception as error:
            return f"{told} has {changed}, which it does not take ({type(error).__name__}: {error}); set it back"
        if misfit:
            return f"{told} has {changed}, with which {misfit}, other than at set-up; switch it on there"
        self._fits[number] = shown
        return None

    def _try_out(self, number: int, live: Mapping[str, Any]) -> str | None:
        """One update of a small tensor with these options; raises what the optimizer raises, returns odd state."""
        kind, leaves = self._kind, self._leaves[number]
        given = dict(self._given[number])
        names = given.keys() if kind.declared is not None else inspect.signature(kind.cls).parameters.keys()
        arguments = {**given, **{key: value for key, value in live.items() if key in names}}
        like = leaves[0] if leaves else torch.zeros(())
        shape: tuple[int, ...] | None = (1,) * (kind.ndim or 1)
        if kind.declared is not None and kind.declared.kind == "matrix":
            takes = kind.declared.takes or (lambda _: True)
            shape = next(filter(takes, PROBED_SHAPES), None)
        if shape is None:  # as at set-up: nobody knows a small tensor that it could step
            return None
        with torch.random.fork_rng(devices=[]):
            leaf = torch.ones(shape, dtype=like.dtype, device=like.device)
            trial = kind.cls([{"params": [leaf]}], **arguments)
            trial.param_groups[0].update(live)
            leaf.grad = torch.ones_like(leaf)
            trial.step()
        spec = self._spec_of(number)
        return None if spec is None else spec.misfit(trial.state.get(leaf, {}), leaf)


def _compared(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_COMPARED}


def _step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
