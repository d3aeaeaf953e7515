"""The one surface of both engines: a strategy steps through it and does not ask which of the two it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Stepper(Protocol):
    """An ordinary torch.optim object whose step is proposed before it is committed. Local: no method communicates."""

    optimizer: torch.optim.Optimizer
    """Over the live leaves. `param_groups[0]` holds what no option group names, the others follow in their order; their
    options count in every step as they are then, so torch's schedulers of lr or weight decay work on them."""
    options: list[dict[str, Any]]
    """Options per param group as they were at set-up, what was left open settled."""
    lr_scales: list[float]
    """Factor of the base rate per param group."""

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank, padding included."""

    def rates(self, lr: float | None) -> list[float]:
        """Learning rate per param group: `lr` times the group's `lr_scale`; None: as the param groups have it."""

    def terms(self) -> str:
        """The options that count in the next step, but for the rates; equal on all ranks, or the step is refused."""

    def problems(self) -> list[str]:
        """What was done to `optimizer` since set-up or the last step that the next step cannot go on with.

        Other leaves or param groups, other state than was left there (load_state_dict), options that the optimizer does
        not take or that need other state, step hooks, which would run in the commit. Hooks for all optimizers of a
        process (torch.optim.optimizer.register_optimizer_step_pre_hook) are torch's own and not looked for: they run in
        each pass of a proposal and in the commit, and must not raise. Local, raises nothing; any rank's problem is for
        all of them to refuse the step.
        """

    def propose(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Compute the step, or what shows that it can be computed; leaves and live state are only read.

        `present[path]` False: the gradient is absent, so no update, no decay, no step count. A proposal that is not
        committed leaves no trace, and may be made again. Raises whatever the optimizer raises.
        """

    def stage(self, present: Mapping[str, bool]) -> None:
        """Write what was proposed to every leaf's `proposed`, absent ones as they are; called where there are any.

        `proposed` may lie on the memory of pending gradients, so these are gone from here on, but not the `grad`s.
        """

    def commit(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Switch over to what the last `propose` computed, with the same arguments; nothing in it can fail."""

    def described(self) -> list[dict[str, Any]]:
        """Options per param group as plain JSON, the base rate left out: schedules change it."""

    def state_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """ "<path>/<key>" -> a copy of the state, for a record. Python numbers are 0-dim there: "<path>/<key>:int".

        Not `copy`: of tensors as few as can be, for whoever is done with them before the state changes.
        """

    def listed_state(self) -> dict[str, list[str]] | None:
        """Path -> names in a record of the state that first updates made; None if all state is there from the start.

        A record lists them, so that one which lost them is not taken for that of a parameter never updated.
        """

    def expected_tensors(self, held: Mapping[str, Tensor]) -> Shapes:
        """Name -> (shape, dtype) for `load_state_tensors`, of a record that holds `held`.

        State that a first update makes is expected of a parameter only if `held` has any of it.
        """

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`, as `state_tensors` gives them; the caller has checked names and shapes."""
