"""The optimizers of a ZeRO-1 rank: one for the parameters that the first takes, one for the rest, stepped as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from shardrun.optim.elementwise import SliceOptimizer, SliceTensors
from shardrun.optim.kinds import Elementwise, Kind, OptionGroup
from shardrun.optim.matrix import TensorOptimizer, WholeTensor
from shardrun.optim.stepper import Shapes, Stepper
from shardrun.step.slices import Slice


@dataclass(frozen=True)
class Share:
    """One optimizer and the parameters of the session that it steps, on whichever rank."""

    kind: Kind
    paths: set[str]
    options: Mapping[str, Any]
    option_groups: Sequence[OptionGroup]

    @property
    def groups(self) -> list[OptionGroup]:
        """The option groups with this share's paths only; options that none of them has may be the other's own."""
        return [
            replace(group, paths=group.paths & self.paths, options=group.options if group.paths & self.paths else {})
            for group in self.option_groups
        ]


class OwnedOptimizer:
    """A Stepper over what this rank owns. Its param groups are those of the first optimizer, then those of the second.

    A base rate given to a step is the first optimizer's; the second's follows in the proportion of their `lr` options.
    """

    def __init__(self, shares: Sequence[Share], slices: Sequence[Slice], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shares = [share for share in shares if share.paths] or list(shares[:1])
        self._steppers: list[Stepper] = []
        for number, share in enumerate(shares):
            if share in self._shares:
                base = number * (len(share.option_groups) + 1)
                own = [s for s in slices if base <= s.bucket.option_group <= base + len(share.option_groups)]
                self._steppers.append(_stepper(share, own, base, shapes))
        self.optimizers = [stepper.optimizer for stepper in self._steppers]
        """Both, or the one that has parameters."""
        self.optimizer = self.optimizers[0]
        self.options = [options for stepper in self._steppers for options in stepper.options]
        first = self._steppers[0] if self._shares[0] is shares[0] else _stepper(shares[0], [], 0, shapes)
        rate = first.rates(None)[0]
        factors = [1.0 if one is first else one.rates(None)[0] / rate if rate else 0.0 for one in self._steppers]
        self.lr_scales = [
            f * scale for f, stepper in zip(factors, self._steppers, strict=True) for scale in stepper.lr_scales
        ]
        self._ends = list(accumulate(len(stepper.options) for stepper in self._steppers))

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank, padding included."""
        return sum(stepper.state_nbytes for stepper in self._steppers)

    @property
    def shadow_nbytes(self) -> int:
        """Bytes of the copies in which matrix optimizers make their proposals."""
        return sum(stepper.shadow_nbytes for stepper in self._steppers if isinstance(stepper, TensorOptimizer))

    def rates(self, lr: float | None) -> list[float]:
        """Learning rate per param group."""
        if lr is None:
            return [rate for stepper in self._steppers for rate in stepper.rates(None)]
        return [lr * scale for scale in self.lr_scales]

    def terms(self) -> str:
        """The options that count in the next step, but for the rates."""
        return "; ".join(stepper.terms() for stepper in self._steppers)

    def problems(self) -> list[str]:
        """What was done to the optimizers that the next step cannot go on with; see Stepper."""
        return [problem for stepper in self._steppers for problem in stepper.problems()]

    def _each(self, rates: Sequence[float]) -> Iterator[tuple[Stepper, Sequence[float]]]:
        begins = [0, *self._ends]
        for stepper, begin, end in zip(self._steppers, begins, self._ends, strict=False):
            yield stepper, rates[begin:end]

    def propose(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Compute the step of every owned parameter; see Stepper."""
        for stepper, own in self._each(rates):
            stepper.propose(present, own)

    def stage(self, present: Mapping[str, bool]) -> None:
        """Write what was proposed where it is gathered from; see Stepper."""
        for stepper in self._steppers:
            stepper.stage(present)

    def commit(self, present: Mapping[str, bool], rates: Sequence[float]) -> None:
        """Switch over to what the last `propose` computed; see Stepper."""
        for stepper, own in self._each(rates):
            stepper.commit(present, own)

    def described(self) -> list[dict[str, Any]]:
        """Options per param group as plain JSON."""
        return [group for stepper in self._steppers for group in stepper.described()]

    def summary(self) -> dict[str, Any]:
        """Names and options of the optimizers, as plain JSON."""
        groups = [stepper.described() for stepper in self._steppers]
        names = [share.kind.name for share in self._shares]
        return {
            "name": names[0],
            "groups": groups[0],
            **({"rest": names[1], "rest_groups": groups[1]} if names[1:] else {}),
        }

    def state_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """See `Stepper`."""
        return {name: tensor for stepper in self._steppers for name, tensor in stepper.state_tensors(copy=copy).items()}

    def listed_state(self) -> dict[str, list[str]] | None:
        """Path -> names of the state that first updates made; see Stepper."""
        listed = [held for held in (stepper.listed_state() for stepper in self._steppers) if held is not None]
        return {path: names for held in listed for path, names in held.items()} if listed else None

    def expected_tensors(self, held: Mapping[str, Tensor]) -> Shapes:
        """Name -> (shape, dtype) for `load_state_tensors`, of a record that holds `held`."""
        return {name: form for stepper in self._steppers for name, form in stepper.expected_tensors(held).items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by `tensors`; the caller has checked names and shapes."""
        for stepper in self._steppers:
            stepper.load_state_tensors(tensors)


def _stepper(share: Share, slices: Sequence[Slice], base: int, shapes: Mapping[str, tuple[int, ...]]) -> Stepper:
    if isinstance(share.kind, Elementwise):
        tensors = [
            SliceTensors(s.bucket.option_group - base, s.leaf, s.grad, s.proposed, s.bucket.fragments) for s in slices
        ]
        return SliceOptimizer(share.kind, share.options, share.groups, tensors)
    whole = []
    for s in slices:
        for fragment in s.bucket.fragments:
            part = slice(fragment.offset, fragment.offset + fragment.stop)
            shape = shapes[fragment.path]
            proposed = None if s.proposed is None else s.proposed[part].view(shape)
            leaf, grad = s.leaf[part].view(shape), s.grad[part].view(shape)
            whole.append(WholeTensor(fragment.path, s.bucket.option_group - base, leaf, grad, proposed))
    return TensorOptimizer(share.kind, share.options, share.groups, whole)
